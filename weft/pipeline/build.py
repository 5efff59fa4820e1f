"""Cuts a model into a plan's stages (without values, for costs too) and builds the pipeline that runs them.

Plans and stages are refused whose ranks cannot keep a copy of the next rank's stage (`plan.pipe.shadow`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from weft.errors import PlanError
from weft.inspection.blocks import find_blocks, find_units
from weft.inspection.functional_call import in_mode
from weft.inspection.tensor_splits import IS_WHOLE
from weft.mesh import Mesh
from weft.pipeline.deferred_weight_grads import DeferredWeightGrads
from weft.pipeline.partition import Route, StageWeights, cut, partition, refuse_evaluation
from weft.pipeline.runtime import Pipeline, Stage
from weft.pipeline.shared_parameters import SharedBuffers, SharedParameters, running_statistics, tied_stages
from weft.pipeline.stage import StageRunner
from weft.pipeline.stand_in import skeleton, stage_model
from weft.pipeline.tracer import FIRST, TilePosition, Tracer, tile_at
from weft.plan import Plan
from weft.profiling import SHARED_BY_STAGES, Profile, stage_profile
from weft.schedule.actions import Edge, Schedule, with_messages
from weft.schedule.check import check
from weft.schedule.nccl_order import with_awaited_sends
from weft.schedule.schedules import make_schedule, refuse_schedule
from weft.schedule.shadow import SHADOWED_SCHEDULES, with_shadows
from weft.sharding.units import units_of
from weft.spatial.dry_run import localise_tile, mark_tiling, tiling_for
from weft.strategy import Strategy, Values

Example = Callable[[], Any]
Apply = Callable[[Plan, nn.Module, Values], nn.Module]
SHADOW_REPLICA = 1  # a shadow stage is stored as another replica of the stage
FULL_RECOMPUTE = 4 / 3  # the time of forward, backward and one more forward, divided by that without the last
ADAM_BYTES = 16  # state per parameter: weight, gradient and two moments in fp32


@dataclass(frozen=True)
class Staging:
    """A model in stages: the stage of each unit, tensors that cross stages, parameters that several stages hold."""

    plan: Plan
    whole: nn.Module  # on the meta device
    stage_of: Mapping[str, int]
    route: Route  # of the first tile, if images are in tiles
    tracer: Tracer
    example: Example

    @property
    def num_stages(self) -> int:
        return self.route.num_stages

    @cached_property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """placement[replica][stage] is an index on `pipe`."""
        pipe = self.plan.pipe
        return make_schedule(pipe.schedule, pipe.degree, pipe.batches or 2, **pipe.options).placement

    def held_by(self, index: int) -> list[tuple[int, int]]:
        """Return the (stage, replica) pairs of a rank."""
        return [(s, r) for r, ranks in enumerate(self.placement) for s, rank in enumerate(ranks) if rank == index]

    def shadow_of(self, index: int) -> int | None:
        """Return the stage that a rank keeps in addition to its own: the next rank's; None without shadows."""
        return index + 1 if self.plan.pipe.shadow and index + 1 < self.num_stages else None

    def units(self, stage: int) -> list[str]:
        """Return the names of a stage's units."""
        return [name for name, own in self.stage_of.items() if own == stage]

    @cached_property
    def _models(self) -> list[tuple[nn.Module, dict[str, str]]]:
        return [stage_model(self.whole, self.route, self.stage_of, stage) for stage in range(self.num_stages)]

    @cached_property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters of the whole model that several stages hold, with those stages."""
        return tied_stages([names for _, names in self._models])

    def model(self, stage: int) -> tuple[nn.Module, dict[str, str]]:
        """Return a new model of a stage, without values, and the names of its parameters in the whole model."""
        model, names = self._models[stage]
        model = skeleton(model)
        SHARED_BY_STAGES.set(model, {own: self.tied[name] for own, name in names.items() if name in self.tied})
        IS_WHOLE.set(model, self.tracer.over_y < self.plan.tensor.y)
        if self.tracer.tiling is not None:
            mark_tiling(model, self.tracer.tiling)
        return model, names

    @cached_property
    def _profiles(self) -> dict[tuple[int, TilePosition], Profile]:
        return {}

    def profile(self, whole: Profile, stage: int, coordinates: Mapping[str, int] | None = None) -> Profile:
        """Return the profile of a stage on one rank, from the profile of the whole model.

        Without `coordinates` it is that of the first rank.
        """
        key = stage, tile_at(coordinates)
        if key not in self._profiles:
            is_first, is_last = stage == 0, stage == self.num_stages - 1
            whole = localise_tile(whole, self.plan, {"rows": key[1][0], "columns": key[1][1]})
            made = stage_profile(whole, self.model(stage)[0], self.units(stage), is_first, is_last)
            calls = () if self.tracer.tiling is None else self.route_at(coordinates).calls_of(stage)
            self._profiles[key] = replace(made, whole=whole, tile_calls=calls)
        return self._profiles[key]

    @cached_property
    def _routes(self) -> dict[TilePosition, Route]:
        return {FIRST: self.route}

    def route_at(self, coordinates: Mapping[str, int] | None) -> Route:
        """Return the route of the example through the tile of a rank."""
        key = tile_at(coordinates) if self.tracer.tiling is not None else FIRST
        if key not in self._routes:
            found = self.tracer.example(self.example, torch.device("cpu"), key)
            self._routes[key] = cut(found, self.stage_of, self.num_stages)
        return self._routes[key]

    @cached_property
    def _evaluation_refusal(self) -> str | None:
        try:
            with in_mode(self.whole, training=False):
                found = self.tracer.example(self.example, torch.device("cpu"))
            return refuse_evaluation(self.route, cut(found, self.stage_of, self.num_stages))
        except PlanError as error:
            return str(error)

    def check_evaluation(self) -> None:
        """Raise a PlanError if the model's forward in evaluation does not fit its stages."""
        if self._evaluation_refusal is not None:
            raise PlanError(
                f"pipe = {self.plan.pipe.degree} cuts the model by its forward in training, and its forward in "
                f"evaluation does not fit: {self._evaluation_refusal}; or use pipe = 1"
            )

    def copies(self, stages: tuple[int, ...]) -> int:
        """Return how many ranks along `pipe` hold a parameter that these stages hold."""
        return len(self.placement) * max(1, len(stages))

    @cached_property
    def _schedules(self) -> dict[tuple[int, bool], Schedule]:
        return {}

    def schedule(self, num_micro_batches: int, with_backward: bool = True) -> Schedule:
        """Return the checked schedule of a step with its messages. Results are cached.

        Mirrored replicas have rules for the number of micro-batches; if only forwards run, one replica takes them all.
        """
        key = num_micro_batches, with_backward
        if key not in self._schedules:
            self._schedules[key] = self._schedule(*key)
        return self._schedules[key]

    def _schedule(self, num_micro_batches: int, with_backward: bool) -> Schedule:
        pipe = self.plan.pipe
        name, options = pipe.schedule, dict(pipe.options)
        if not with_backward:  # nothing is kept for backward, so no number of micro-batches is too many
            options.pop("in_flight", None)
            if len(self.placement) > 1:
                name, options = "gpipe", {}
        made = make_schedule(name, pipe.degree, num_micro_batches, **options)
        if pipe.shadow:
            made = with_shadows(made)
        made = with_messages(replace(made, placement=self.placement), self.route.edges)
        check(made)
        return with_awaited_sends(made)


def stage(whole: Profile, plan: Plan, device: torch.device | str = "cpu") -> Staging:
    """Cut a profiled model into the plan's stages. Results are cached in the profile."""
    made: dict[tuple[Plan, str], Staging] = vars(whole).setdefault("_stagings", {})
    key = plan, str(device)
    if key not in made:
        made[key] = _stage(whole, plan, torch.device(device))
    return made[key]


def _stage(whole: Profile, plan: Plan, device: torch.device) -> Staging:
    if whole.example is None:
        raise PlanError(
            f"pipe = {plan.pipe.degree} cuts the model where a forward goes through it; pass example=, which makes the "
            f"arguments of a forward of one micro-batch"
        )
    assert whole.model is not None
    bare, pipe = skeleton(whole.model), plan.pipe
    over_y = 1 if plan.tensor.y == 1 or whole.pairing.is_whole else plan.tensor.y
    tracer = Tracer(bare, plan, over_y, tiling_for(whole, plan))
    with in_mode(bare, training=True):
        found = tracer.example(whole.example, device)
    stage_of = partition(found, list(find_blocks(bare)), stage_weights(whole, plan), pipe)
    staging = Staging(plan, bare, stage_of, cut(found, stage_of, pipe.num_stages), tracer, whole.example)
    reason = refuse_stages(staging.route.edges, staging.tied) if pipe.shadow else None
    if reason is not None:
        raise PlanError(reason)
    return staging


class PipeAxis(Strategy):
    """What the `pipe` axis asks of a plan. `parallelize` applies the other strategies to each of a rank's stages."""

    name = "pipe"
    axes = ("pipe",)

    def needs_example(self, plan: Plan) -> bool:
        return plan.pipe.degree > 1

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        pipe = plan.pipe
        if pipe.degree == 1:
            return refuse_shadows(plan) if pipe.shadow else None
        reason = refuse_schedule(pipe.schedule, pipe.degree, pipe.batches or 2, **pipe.options)
        if reason is not None:
            return reason
        inside = {axis: degree for axis, degree in plan.degrees.items() if degree > 1 and axis not in ("data", "pipe")}
        given = ", ".join(f"{axis} = {degree}" for axis, degree in inside.items())
        if pipe.schedule == "message" and inside:
            return (
                f"pipe.schedule = 'message' lets each rank choose its own order, but the ranks of a stage ({given}) "
                f"must share one; use data beside it, or another schedule"
            )
        if pipe.schedule == "message" and plan.has_batch_statistics:
            return (
                f"pipe.schedule = 'message' lets each rank choose its own order, but statistics = 'batch' lets data = "
                f"{plan.data} ranks talk inside a stage; use statistics = 'rank', or another schedule"
            )
        if pipe.schedule == "zero-bubble" and plan.tensor.x * plan.tensor.y > 1:
            return (
                f"pipe.schedule = 'zero-bubble' puts weight gradients off, which the tensor axes ({given}) do in their "
                f"own way; use 1f1b or interleaved with them"
            )
        if plan.memory.accumulate == "slice":
            return "memory.accumulate = 'slice' reduces each micro-batch, which a pipeline does not; use 'whole'"
        return refuse_shadows(plan) if pipe.shadow else None


def stage_weights(whole: Profile, plan: Plan, num_samples: int = 1) -> StageWeights:
    """Return the weights of the units at each stage, if a micro-batch has `num_samples` times the profile's.

    They differ only if some stages recompute and others do not.
    """
    num_stages, count = plan.pipe.num_stages, plan.memory.recompute_stages
    if count is None:
        return [unit_weights(whole, plan, num_samples)] * num_stages
    again, others = (unit_weights(whole, plan.of_stage(stage), num_samples) for stage in (0, count))
    if plan.pipe.balance == "time" and plan.memory.recompute == "full":
        blocks = {block.name for block in whole.blocks}
        again = {name: weight * (FULL_RECOMPUTE if name in blocks else 1) for name, weight in again.items()}
    return [again] * count + [others] * (num_stages - count)


def unit_weights(whole: Profile, plan: Plan, num_samples: int = 1) -> dict[str, float]:
    """Return the weight of each unit for balancing stages, if all stages follow the plan.

    It is FLOPs or, with `balance` = "memory", the bytes of state and activations; if nothing was counted, the number of
    parameters.
    """
    if not whole.counted:
        return {block.name: float(block.numel) for block in whole.blocks}
    if plan.pipe.balance == "time":
        return {name: float(flops.all * num_samples) for name, flops in whole.units.items()}
    assert whole.model is not None
    kind, blocks = plan.memory.recompute, {block.name: block for block in whole.blocks}
    behind = whole.root.saved_by_layer.get(kind, {})
    weights = {}
    for name, module in find_units(whole.model).items():
        saved = (blocks[name].saved_bytes or {})[kind] if name in blocks else 0
        saved += sum(size for layer, size in behind.items() if layer == name or layer.startswith(f"{name}."))
        weights[name] = float(ADAM_BYTES * sum(p.numel() for p in module.parameters()) + saved * num_samples)
    return weights


def build(staging: Staging, mesh: Mesh, values: Values, apply: Apply) -> Pipeline:
    """Build this rank's part of the pipeline. `apply` splits a stage's model over the other axes of its plan."""
    routes = _RouteFinder(staging, mesh.device, tile_at(mesh.coordinates))
    stages = [
        _build_stage(staging, number, replica, mesh, values, apply, routes)
        for number, replica in sorted(staging.held_by(mesh["pipe"].index))
    ]
    beside = staging.shadow_of(mesh["pipe"].index)
    if beside is not None:
        stages.append(_build_stage(staging, beside, SHADOW_REPLICA, mesh, values, apply, routes))
    names = [name for name, _ in staging.whole.named_parameters()]
    copies = _copies(staging, stages, mesh)
    pipeline = Pipeline(stages, copies, staging.schedule, mesh, names, staging.check_evaluation)
    if staging.tracer.tiling is not None:
        mark_tiling(pipeline, staging.tracer.tiling)
    return pipeline


def _build_stage(
    staging: Staging,
    number: int,
    replica: int,
    mesh: Mesh,
    values: Values,
    apply: Apply,
    routes: _RouteFinder,
) -> Stage:
    model, names = staging.model(number)
    model = apply(staging.plan.of_stage(number), model, lambda name: values(names[name]))
    units = units_of(model)
    assert units is not None
    for flat in units.flats:
        flat.copies = staging.copies(flat.layout.stages)
    deferred = None
    if staging.plan.pipe.schedule == "zero-bubble":
        deferred = DeferredWeightGrads(model, units.add_late_gradient)
    walk = StageRunner(number, model, staging.units(number), routes.find, mesh.device)
    return Stage(number, replica, model, units, walk, names, deferred)


class _RouteFinder:
    """Finds the routes of a staging for inputs of any shape."""

    def __init__(self, staging: Staging, device: torch.device, at: TilePosition = FIRST) -> None:
        self.staging, self.device, self.at = staging, device, at

    def find(self, args: Any, kwargs: Mapping[str, Any], training: bool = True) -> Route:
        """Return the route of inputs, which a run keeps for others of the same shape."""
        staging = self.staging
        if not training:
            staging.check_evaluation()
        with in_mode(staging.whole, training):
            found = staging.tracer.own(args, kwargs, self.device, self.at)
        route = cut(found, staging.stage_of, staging.num_stages)
        if route.outline != staging.route.outline:
            raise PlanError(
                "the model's forward takes another way for inputs of another shape, so that other tensors cross its "
                "stages; use pipe = 1"
            )
        return route


def _copies(staging: Staging, stages: list[Stage], mesh: Mesh) -> SharedParameters:
    """Make the process groups of shared parameters.

    Every rank does this for all groups in one order, its own or not.
    """
    sharings: list[SharedBuffers] = []
    num_ranks = staging.plan.pipe.degree
    if len(staging.placement) > 1:
        for low in range(num_ranks // 2):
            axis = mesh.among("pipe", (low, num_ranks - 1 - low), "mirror")
            if axis is not None:
                for one in stages:  # ascending, and the same two stages on both ranks
                    trained = tuple((flat,) for unit in one.units.all for flat in unit.trained)
                    sharings.append(SharedBuffers(axis, trained, running_statistics(one.model)))
    for name, tied in staging.tied.items():
        for replica, ranks in enumerate(staging.placement):
            holders = sorted({ranks[number] for number in tied})
            axis = mesh.among("pipe", holders, "tied")
            own = tuple(
                flat
                for one in stages
                if one.replica == replica and one.index in tied
                for flat in one.units.flats
                if flat.trainable and one.names[flat.layout.parameters[0].name] == name
            )
            if axis is not None and own:
                sharings.append(SharedBuffers(axis, (own,)))
    return SharedParameters(sharings)


def refuse_shadows(plan: Plan) -> str | None:
    """Return why ranks cannot keep the next rank's stage under this plan; None if they can."""
    if plan.pipe.degree == 1:
        return "pipe.shadow = true keeps the next rank's stage, and pipe = 1 has none; leave it out"
    beside = ", ".join(f"{axis} = {degree}" for axis, degree in plan.degrees.items() if degree > 1 and axis != "pipe")
    if beside:
        return f"pipe.shadow = true works for pipe alone, and the plan has {beside}; use restarts with these axes"
    if plan.pipe.schedule not in SHADOWED_SCHEDULES:
        return (
            f"pipe.shadow = true works with pipe.schedule = {' or '.join(map(repr, SHADOWED_SCHEDULES))}, and it is "
            f"'{plan.pipe.schedule}'; use one of them"
        )
    if plan.precision == "bf16":
        return "pipe.shadow = true works in fp32 and fp64, and precision is 'bf16'; use one of them"
    if plan.memory.offload or plan.memory.state != "master":
        return (
            f"pipe.shadow = true keeps plain state, and memory.offload = {plan.memory.offload:g}, memory.state = "
            f"'{plan.memory.state}'; use offload = 0 and state = 'master'"
        )
    return None


def refuse_stages(edges: Sequence[Edge], tied: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return why these stages cannot be shadowed; None if they can.

    A rank can shadow a stage only if all the stage needs is what the rank itself computes.
    """
    for edge in edges:
        if edge.target != edge.source + 1:
            return (
                f"pipe.shadow = true, but stage {edge.target} takes a tensor from stage {edge.source}, which the rank "
                f"before it does not have; leave pipe.shadow out, or cut the model elsewhere (pipe.split)"
            )
    for name, stages in tied.items():
        return (
            f"pipe.shadow = true, but stages {' and '.join(map(str, stages))} share the parameter '{name}', whose "
            f"gradients they sum; leave pipe.shadow out, or untie it"
        )
    return None

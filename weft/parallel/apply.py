"""Applies a plan to a model. `STRATEGIES` is the table of axes, memory policies and what else is done to a model.

`parallelize` goes through the table in order, several times:

1. `prepare`: the whole model, before it is profiled; the profile has an example where a strategy `needs_example`;
2. `refuse`: the first reason why the plan does not fit ends it;
3. `examine`: what is only known of the whole model, before it is cut into stages or split;
4. `apply`: the model or, with `pipe`, each of this rank's stages.

docs/design.md has the steps to add an axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from weft.comm import Traffic
from weft.errors import PlanError
from weft.inspection.annotations import give_to_stage
from weft.memory.offload_activations import ActivationPolicy
from weft.memory.offload_weights import WeightPolicy
from weft.memory.recompute import RecomputePolicy
from weft.mesh import Mesh
from weft.parallel.any_model import AveragePools, FlatParameters, LossInHead
from weft.parallel.branch.axis import BranchAxis
from weft.parallel.context.axis import ContextAxis
from weft.parallel.data import DataAxis
from weft.parallel.expert.axis import ExpertAxis
from weft.parallel.expert.routing import RouterBalance
from weft.parallel.fp8.matmuls import Fp8Matmuls
from weft.parallel.shard import ShardAxis
from weft.parallel.tensor.axis import TensorAxes
from weft.parallel.tile import TileAxis, TileGradients
from weft.pipeline.build import PipeAxis, Staging, build, stage
from weft.pipeline.cost import pipeline_cost
from weft.plan import BatchSplit, Plan
from weft.profiling import PARAMETER_CUTS, Profile, profile
from weft.sharding.layout import COMPUTE_DTYPE
from weft.spatial.dry_run import localise_tile
from weft.strategy import Cost, Strategy, Values

# Recompute wraps the forwards that the tensor axes and tiles leave: a block may be a linear or a convolution itself.
# Average pools come last: their types change, by which other strategies recognise layers.
STRATEGIES: tuple[Strategy, ...] = (
    LossInHead(),
    FlatParameters(),
    PipeAxis(),
    TensorAxes(),
    ExpertAxis(),
    BranchAxis(),
    TileAxis(),
    Fp8Matmuls(),
    RecomputePolicy(),
    ActivationPolicy(),
    WeightPolicy(),
    ShardAxis(),
    DataAxis(),
    ContextAxis(),
    TileGradients(),
    RouterBalance(),
    AveragePools(),
)


def parallelize(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh | None = None,
    values: Values | None = None,
    example: Callable[[], tuple[Any, ...]] | None = None,
    finish: Callable[[Any], Any] | None = None,
) -> nn.Module:
    """Apply a plan to any model, in place, and return it. Modules and names stay; forwards are hooked or replaced.

    `torch.distributed` must be initialised with as many processes as the plan has ranks (not needed for one rank).
    Parameters of a model on the meta device come from `values(name)`, one at a time. Otherwise they come from the model
    itself, and every rank must hold the same values. Afterwards `model.parameters()` are this rank's pieces, for any
    element-wise optimizer.

    A plan with `pipe`, `branch`, `tile` or `statistics = "batch"` also needs `example()`. It returns the arguments of
    one forward of a micro-batch, with whole sequences and images for any plan, and is called only for shapes. With
    `pipe`, the result is a `Pipeline` of this rank's stages, which `train_step` runs. `finish(output)` computes the
    loss, as in `weft.profile`; its memory counts when stages are balanced by memory.
    """
    mesh = mesh or Mesh(plan)
    for strategy in STRATEGIES:
        strategy.prepare(model, plan)
    needs_example = any(strategy.needs_example(plan) for strategy in STRATEGIES)
    whole = profile(model, example if needs_example else None, finish, COMPUTE_DTYPE[plan.precision])
    refuse(whole, plan)
    if values is None:
        if any(parameter.is_meta for parameter in model.parameters()):
            raise PlanError("the model is on the meta device; pass values=, which gives a parameter's tensor by name")
        values = dict(model.named_parameters()).__getitem__
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise PlanError(
                f"buffer '{name}' is on the meta device, and its value is not among values=; build the model on a real "
                f"device, or set its buffers first"
            )
    for strategy in STRATEGIES:
        strategy.examine(whole, plan, mesh)
    if plan.pipe.degree == 1:
        return _apply_strategies(plan, model, values, mesh)

    def apply_to_stage(plan: Plan, stage_model: nn.Module, values: Values) -> nn.Module:
        give_to_stage(model, stage_model)
        return _apply_strategies(plan, stage_model, values, mesh)

    return build(stage(whole, plan, mesh.device), mesh, values, apply_to_stage)


def _apply_strategies(plan: Plan, model: nn.Module, values: Values, mesh: Mesh) -> nn.Module:
    """Apply the strategies to a model, or to the model of a pipeline stage, with the plan that the stage follows."""

    def local_value(name: str) -> Tensor:
        """Returns this rank's part of a parameter's value. Axes that cut parameters must be applied first."""
        cut = (PARAMETER_CUTS.get(model) or {}).get(name)
        return values(name) if cut is None else cut.take(values(name))

    applied = model
    for strategy in STRATEGIES:
        applied = strategy.apply(applied, plan, mesh, local_value)
    return applied


def refuse(model_profile: Profile, plan: Plan) -> None:
    """Raise a PlanError with the first reason why the plan does not fit the model, if there is one."""
    for strategy in STRATEGIES:
        reason = strategy.refuse(model_profile, plan)
        if reason is not None:
            raise PlanError(reason)


def cost(
    model_profile: Profile,
    plan: Plan,
    split: BatchSplit,
    coordinates: Mapping[str, int] | None = None,
    staging: Staging | None = None,
) -> Cost:
    """Returns the communication and memory of one step under the plan, on one rank.

    It is the rank at `coordinates` of the mesh, or else the first. To get the cost of many ranks of a plan with `pipe`,
    pass the result of `stage` as `staging`, so that the model is cut into stages only once.
    """
    at = coordinates or dict.fromkeys(plan.degrees, 0)
    here, own = partial(localise, coordinates=at), partial(local_cost, coordinates=at)
    if plan.pipe.degree > 1:
        staging = staging or stage(model_profile, plan)
        return pipeline_cost(model_profile, staging, plan, split, at, here, own)
    return own(here(localise_tile(model_profile, plan, at), plan), split, plan)


def assumptions(model_profile: Profile, plan: Plan) -> tuple[str, ...]:
    """Returns, as sentences, what the strategies' costs assume because it could not be measured."""
    return tuple(text for strategy in STRATEGIES for text in strategy.assumptions(model_profile, plan))


def localise(profile: Profile, plan: Plan, coordinates: Mapping[str, int]) -> Profile:
    """Returns the part of a profile that the rank at `coordinates` computes and holds. `pipe` and tiles come before.

    Axes that are applied last come first: each divides what the others leave.
    """
    for strategy in reversed(STRATEGIES):
        profile = strategy.localise(profile, plan, coordinates)
    return profile


def local_cost(local: Profile, split: BatchSplit, plan: Plan, coordinates: Mapping[str, int]) -> Cost:
    """Returns the sum of all strategies' costs for a rank's part of a model, or of a stage."""
    total = sum((strategy.cost(local, plan, split, coordinates) for strategy in STRATEGIES), Cost())
    return replace(total, saved_bytes=total.saved_bytes + _kept_bytes(local, split, plan, coordinates))


def _kept_bytes(local: Profile, split: BatchSplit, plan: Plan, coordinates: Mapping[str, int]) -> int:
    """Returns the bytes of results that `memory.keep_collectives` keeps of one micro-batch.

    These are the results of the collectives that recompute would repeat: what the plan communicates less than without.
    """
    if not plan.memory.keep_collectives:
        return 0
    one, repeating = replace(split, accumulation=1), replace(plan.memory, keep_collectives=False)
    kept = 0
    for strategy in (TensorAxes(), ExpertAxis(), BranchAxis(), ContextAxis()):
        fewer = strategy.cost(local, plan, one, coordinates).traffic
        for (axis, operation), more in strategy.cost(
            local, replace(plan, memory=repeating), one, coordinates
        ).traffic.items():
            num_bytes = more.num_bytes - fewer.get((axis, operation), Traffic()).num_bytes
            kept += num_bytes // (plan.degree(axis) if operation == "reduce_scatter" else 1)
    return kept

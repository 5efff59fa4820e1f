"""Axis `branch`: independent branches of a model on different ranks.

Branches are the arms of a cell of convolutions, towers, heads, members of an ensemble: any operations with parameters
that do not need each other's results (`owners.py`). They are found in a trace of the unedited model, and each is given
to one rank, which alone holds its parameters. All other parameters are on every rank, with equal gradients.

For results of v bytes that ranks exchange (v is that of the rank with the most), and a tensor of u bytes that branches
use, one micro-batch on D ranks has these collectives:

    forward    all-gather of D · v, for each exchange (where results of several ranks meet, or at the end)
    backward   all-reduce of u, for each tensor that all ranks have and branches use, if it needs a gradient

Running statistics of batch norms in a branch are part of the exchange, so every rank has all buffers.

With `branch.batch = "split"` the ranks have different samples. Whatever is outside of branches runs on a rank's own
samples, and branches run on those of all ranks. For a tensor that has u bytes on each rank, and results of v bytes for
one rank's samples, one micro-batch has:

    forward    all-gather of D · u at each fork         all-to-all of D · v at each exchange
    backward   reduce-scatter of D · u                  all-to-all of D · v

and an all-gather of buffers. Gradients of parameters outside of branches are summed over the axis once a step.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch import nn

from weft.errors import PlanError
from weft.inspection.annotations import Annotation
from weft.inspection.blocks import AbsentModule
from weft.inspection.parameter_cut import Cut
from weft.mesh import Mesh
from weft.parallel.branch.batch_dims import find_batch_dims
from weft.parallel.branch.beside import refuse_beside
from weft.parallel.branch.owners import Deal, ModelBranch, deal, find_branches, join_regions, total_work
from weft.parallel.branch.regions import (
    WHOLE,
    as_operations,
    common_parameters,
    is_in_blocks,
    region_names,
    region_trace,
    region_tracer,
    split_names,
    whole_of,
    within,
)
from weft.parallel.branch.runner import BranchRunner
from weft.parallel.branch.schedule import BranchSchedule, make_schedule
from weft.parallel.cut_parameters import cut_parameters, cut_profile, global_shapes, profiled_shapes
from weft.pipeline.tracer import Tracer
from weft.plan import BatchSplit, Branch, Plan
from weft.profiling import Block, LayerShape, Profile, ProfileCache
from weft.strategy import Cost, SearchSpace, Strategy, Values, divisors, refuse_batch_mixers, tally

logger = logging.getLogger("weft")
MOST_RANKS = 8  # of the axis, that a search tries
_DEALS = ProfileCache[tuple[Any, ...], Deal]()
_SCHEDULES = ProfileCache[tuple[Any, ...], dict[str, BranchSchedule]]()


@dataclass(frozen=True)
class RankBranches:
    """How one rank runs the branches of a model that is about to be split.

    `regions` has a tracer for each region with branches, and `layers` the modules that communicate over `x`.
    """

    deal: Deal
    regions: Mapping[str, Tracer]
    layers: tuple[str, ...]


_BRANCHES = Annotation[RankBranches]("branches", for_stages=True)


class BranchAxis(Strategy):
    """Gives the branches of a model to the ranks of `branch`."""

    name = "branch"
    axes = ("branch",)

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        if plan.branch.degree == 1:
            return None
        if (reason := refuse_beside(profile, plan)) is not None:
            return reason
        if profile.example is None:
            given = f"branch = {plan.branch.degree}"
            return f"{given} needs an example of the inputs; pass example=, the arguments of one forward"
        try:
            found = _deal(profile, plan)
            find_schedules(profile, plan)
        except PlanError as error:
            return str(error)
        num_parts = plan.branch.degree if plan.branch.splits_batch else 1
        return _refuse_number(profile, plan, found) or refuse_batch_mixers(profile, plan, "branch", num_parts)

    def localise(self, profile: Profile, plan: Plan, coordinates: Mapping[str, int]) -> Profile:
        if plan.branch.degree == 1:
            return profile
        found, index = _deal(profile, plan), coordinates["branch"]
        cuts = branch_cuts(profiled_shapes(profile), found, index, plan.branch.splits_batch)
        schedules = find_schedules(profile, plan, coordinates["x"])

        def local(block: Block) -> Block:
            schedule, saved = schedules.get(WHOLE) or schedules.get(block.name), block.saved_bytes
            share = 1.0 if schedule is None else schedule.result_share(index)
            if saved is not None and share > 1:
                saved = {kind: math.ceil(share * num_bytes) for kind, num_bytes in saved.items()}
            return replace(block, saved_bytes=saved)

        return replace(cut_profile(profile, cuts, local), layer_calls=_local_calls(profile, plan, found, index))

    def cost(self, profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int]) -> Cost:
        if plan.branch.degree == 1:
            return Cost()
        again = {block.name for block in profile.blocks if plan.memory.repeats_collectives and block.in_backward}
        here = {WHOLE, *(block.name for block in profile.blocks)}
        calls = [
            (("branch", operation), size)
            for region, schedule in find_schedules(profile, plan, coordinates["x"]).items()
            if region in here
            for operation, size in schedule.calls(plan.branch.degree, 1 + (region in again))
        ]
        return Cost(tally(calls * split.accumulation))

    def settings(self, space: SearchSpace) -> Iterable[Mapping[str, Any]]:
        if space.samples != "images":
            return ({},)
        degrees = [degree for degree in divisors(space.num_devices)[1:] if degree <= MOST_RANKS]
        batches: tuple[Literal["same", "split"], ...] = ("same", "split")
        return [{}, *({"branch": Branch(degree, batch)} for degree in degrees for batch in batches)]

    def needs_example(self, plan: Plan) -> bool:
        return plan.branch.degree > 1

    def examine(self, whole: Profile, plan: Plan, mesh: Mesh) -> None:
        """Find how this rank runs the model's branches."""
        if plan.branch.degree == 1:
            return
        assert whole.model is not None
        found, x = _deal(whole, plan), mesh["x"].index
        if mesh.is_first:
            logger.info(f"branch = {plan.branch.degree}: {found.describe()}")
        tracers = {region: region_tracer(whole, plan, region, x) for region in find_schedules(whole, plan, x)}
        _BRANCHES.set(whole.model, RankBranches(found, tracers, split_names(whole, plan)))

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        found = _BRANCHES.pop(model)
        if found is None:
            return model
        as_operations(model, (name for region in found.regions for name in within(region, found.layers).values()))
        index, splits_batch = mesh["branch"].index, plan.branch.splits_batch
        cut_parameters(model, branch_cuts(global_shapes(model), found.deal, index, splits_batch))
        modules = dict(model.named_modules())
        for region, tracer in found.regions.items():
            if region not in modules or isinstance(modules[region], AbsentModule):  # of another stage
                continue
            owners = {name: found.deal.owners[own] for name, own in within(region, found.deal.owners).items()}
            runner = BranchRunner(model, region, tracer, owners, mesh["branch"], mesh.device)
            setattr(modules[region], "forward", runner)  # noqa: B010 (a method to mypy)
        return model


def work_share(profile: Profile, plan: Plan) -> float:
    """Returns the time of a forward and backward under a plan divided by that on one rank, without communication.

    In each wave the rank with the most work decides. All ranks run what is outside of branches. One rank would run as
    many samples as each rank has of its own, and branches may run those of all.
    """
    if plan.branch.degree == 1:
        return 1.0
    whole = whole_of(profile)
    found, regions = _deal(profile, plan), region_names(whole, plan)
    total = sum(total_work(region_trace(whole, plan, region)) for region in regions)
    if is_in_blocks(plan):  # what is outside of regions, by its FLOPs
        inside = sum(block.flops for block in whole.blocks if block.name in regions)
        total *= whole.flops / max(1, inside)
    alone = sum(sum(one.work.values()) for one in found.branches)
    return 1.0 - (alone - found.makespan * (found.degree if plan.branch.splits_batch else 1)) / total


class BranchSizes(NamedTuple):
    """What the planner needs of a model's branches under a plan, for a profile of one micro-batch.

    `work_share` is as `work_share` returns it. `calls` are the collectives of one micro-batch, (operation, bytes).
    `largest_numel` is the number of parameters on the rank that holds most, and `shared_numel` that of the parameters
    that every rank holds. `result_share`: the bytes of results that the rank with the most makes or gathers, divided by
    those of all operations; at least 1.
    """

    work_share: float
    calls: tuple[tuple[str, int], ...]
    largest_numel: int
    shared_numel: int
    result_share: float


def branch_sizes(profile: Profile, plan: Plan) -> BranchSizes:
    """Returns the sizes of a model's branches. The plan must not be refused."""
    found, schedules, own = _deal(profile, plan), find_schedules(profile, plan).values(), Counter[int | None]()
    for block in profile.all:
        for parameter in block.parameters:
            own[found.owners.get(parameter.name)] += parameter.numel
    largest = own[None] + max(own[rank] for rank in range(found.degree))
    results = max(one.result_share(rank) for rank in range(found.degree) for one in schedules)
    forwards = 1 + plan.memory.repeats_collectives
    calls = tuple(call for one in schedules for call in one.calls(found.degree, forwards))
    return BranchSizes(work_share(profile, plan), calls, largest, own[None], max(1.0, results))


def describe_deal(profile: Profile, plan: Plan) -> str:
    """Returns the branches of each rank as text, with the imbalance."""
    return _deal(profile, plan).describe()


def branch_cuts(shapes: Mapping[str, tuple[int, ...]], found: Deal, index: int, splits_batch: bool) -> dict[str, Cut]:
    """Returns a rank's part of every parameter.

    A parameter of a branch is whole on the branch's rank and empty on the others. All other parameters are whole on
    every rank; if ranks have different samples (`splits_batch`), their gradients are partial sums.
    """
    owners, cuts, sums = found.owners, dict[str, Cut](), ("branch",) if splits_batch else ()
    for name, shape in shapes.items():
        owner, whole = owners.get(name), Cut.whole(shape)
        if owner is None:
            cuts[name] = replace(whole, replicas=found.degree, is_first=index == 0, sums=sums)
        else:
            cuts[name] = whole if owner == index else Cut.nothing(shape)
    return cuts


def _local_calls(profile: Profile, plan: Plan, found: Deal, index: int) -> Mapping[str, tuple[LayerShape, ...]]:
    """Returns the calls of layers on a rank, by name, without those of other ranks' branches.

    Calls in its own branches have the samples of all ranks, if ranks have different ones. None of them is the last of
    its block in a recompute, which runs up to the block's last exchange.
    """
    owners, times = found.owners, found.degree if plan.branch.splits_batch else 1

    def own(layer: LayerShape) -> LayerShape:
        return replace(layer, rows=times * layer.rows, in_rows=times * layer.in_rows, is_last=False)

    local: dict[str, tuple[LayerShape, ...]] = {}
    for name, calls in profile.layer_calls.items():
        owner = owners.get(f"{name}.weight")
        if owner in (None, index):
            local[name] = calls if owner is None else tuple(own(layer) for layer in calls)
    return local


def _deal(profile: Profile, plan: Plan) -> Deal:
    whole = whole_of(profile)
    key = plan.precision, plan.branch.degree, plan.branch.modules, plan.tensor, is_in_blocks(plan)
    return _DEALS.get(whole, key, lambda: deal(join_regions(_find(whole, plan)), plan.branch.degree))


def _find(whole: Profile, plan: Plan) -> dict[str, tuple[ModelBranch, ...]]:
    """Returns the branches of each region. All ranks of `x` find the same: in the trace of the first of them."""
    modules, regions = plan.branch.modules, region_names(whole, plan)
    for name in modules:
        if not any(name in within(region, [name]).values() for region in regions):
            raise PlanError(
                f"branch.modules names '{name}', which is not inside of a block of the model; beside "
                f"{_given_blocks(plan)} branches begin and end in one block; leave it out, or use {_no_blocks(plan)}"
            )
    named = {region: tuple(within(region, modules)) for region in regions}
    return {
        region: find_branches(region_trace(whole, plan, region), named[region], common_parameters(whole, region))
        for region in regions
        if named[region] or not modules
    }


def find_schedule(profile: Profile, plan: Plan) -> BranchSchedule:
    """Returns which ranks run each event of a model's example under a plan, if the whole model is one region."""
    return find_schedules(profile, plan)[WHOLE]


def find_schedules(profile: Profile, plan: Plan, x: int = 0) -> dict[str, BranchSchedule]:
    """Returns for each region with branches which ranks run each event, and where they communicate.

    The shapes are those of rank `x` of the axis.
    """
    whole = whole_of(profile)
    key = plan.precision, plan.branch, plan.tensor, x, is_in_blocks(plan)
    return dict(_SCHEDULES.get(whole, key, lambda: _make_schedules(whole, plan, x)))


def _make_schedules(whole: Profile, plan: Plan, x: int) -> dict[str, BranchSchedule]:
    owners, found = _deal(whole, plan).owners, dict[str, BranchSchedule]()
    for region in region_names(whole, plan):
        own = {name: owners[full] for name, full in within(region, owners).items()}
        if not own and region != WHOLE:
            continue
        trace, batch = region_trace(whole, plan, region, x), None
        if plan.branch.splits_batch:
            more = region_trace(whole, plan, region, x, plan.branch.degree)
            batch = find_batch_dims(trace, more, plan.branch.degree)
        found[region] = make_schedule(trace, own, batch)
    return found


def _refuse_number(profile: Profile, plan: Plan, found: Deal) -> str | None:
    """Returns why a model has too few branches; None if every rank has one."""
    name, num_used = type(profile.model).__name__, len(set(found.ranks))
    if num_used == found.degree:
        return None
    if num_used == 0 and is_in_blocks(plan):
        return (
            f"branch = {found.degree} beside {_given_blocks(plan)}, but no block of {name} has independent branches: "
            f"stages and recompute run block by block, so a fork and its join must lie in one block; use "
            f"{_no_blocks(plan)}, or branch = 1"
        )
    if num_used == 0:
        return (
            f"branch = {found.degree}, but {name} has no independent branches: every operation with parameters needs "
            f"the result of the one before it, or they share parameters; use branch = 1"
        )
    return (
        f"branch = {found.degree}, but {name} has branches for {num_used} ranks only ({found.describe()}); use "
        f"branch = {num_used}"
    )


def _given_blocks(plan: Plan) -> str:
    """Returns in words what makes each block of a model a region."""
    return f"pipe = {plan.pipe.degree}" if plan.pipe.degree > 1 else f"memory.recompute = '{plan.memory.recompute}'"


def _no_blocks(plan: Plan) -> str:
    return "pipe = 1" if plan.pipe.degree > 1 else "memory.recompute = 'none'"

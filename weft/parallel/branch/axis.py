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
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from weft.errors import PlanError
from weft.inspection.annotations import Annotation
from weft.inspection.parameter_cut import Cut
from weft.mesh import Mesh
from weft.parallel.branch.batch_dims import all_samples, find_batch_dims
from weft.parallel.branch.owners import Deal, deal, find_branches, total_work
from weft.parallel.branch.runner import BranchRunner
from weft.parallel.branch.schedule import BranchSchedule, make_schedule
from weft.parallel.cut_parameters import cut_parameters
from weft.pipeline.stand_in import skeleton
from weft.pipeline.trace import Trace
from weft.pipeline.trace_watch import FOR_BRANCHES
from weft.pipeline.tracer import Tracer
from weft.plan import BatchSplit, Branch, Plan
from weft.profiling import Block, Profile
from weft.strategy import Cost, SearchSpace, Strategy, Values, divisors, refuse_batch_mixers, tally

logger = logging.getLogger("weft")
_REASONS = {  # why an axis does not run beside `branch`
    "pipe": "a stage is traced block by block, and branches operation by operation",
    "expert": "which tokens go to which expert depends on values, and a trace has none",
    "rows": "operations on tiles communicate, also those that a rank of branch skips",
    "columns": "operations on tiles communicate, also those that a rank of branch skips",
    "context": "attention communicates inside of blocks, also where a rank of branch skips it",
    "x": "matmuls communicate inside of layers, also where a rank of branch skips them",
    "y": "matmuls communicate inside of layers, also where a rank of branch skips them",
}
MOST_RANKS = 8  # of the axis, that a search tries
_DEAL = Annotation[Deal]("branches")  # on a model that is about to be split


class BranchAxis(Strategy):
    """Gives the branches of a model to the ranks of `branch`."""

    name = "branch"
    axes = ("branch",)

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        if plan.branch.degree == 1:
            return None
        if (reason := _refuse_beside(plan)) is not None:
            return reason
        if profile.example is None:
            given = f"branch = {plan.branch.degree}"
            return f"{given} needs an example of the inputs; pass example=, the arguments of one forward"
        try:
            found = _deal(profile, plan)
            find_schedule(profile, plan)
        except PlanError as error:
            return str(error)
        return _refuse_number(profile, found) or _refuse_mixers(profile, plan)

    def localise(self, profile: Profile, plan: Plan, coordinates: Mapping[str, int]) -> Profile:
        if plan.branch.degree == 1:
            return profile
        shapes = {parameter.name: parameter.shape for block in profile.all for parameter in block.parameters}
        cuts = branch_cuts(shapes, _deal(profile, plan), coordinates["branch"], plan.branch.splits_batch)
        share = find_schedule(profile, plan).result_share(coordinates["branch"])

        def local(block: Block) -> Block:
            parameters = (replace(p, shape=cuts[p.name].local_shape, cut=cuts[p.name]) for p in block.parameters)
            saved = block.saved_bytes
            if saved is not None and share > 1:
                saved = {kind: math.ceil(share * num_bytes) for kind, num_bytes in saved.items()}
            return replace(block, parameters=tuple(parameters), saved_bytes=saved)

        return replace(profile, root=local(profile.root), blocks=tuple(local(block) for block in profile.blocks))

    def cost(self, profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int]) -> Cost:
        if plan.branch.degree == 1:
            return Cost()
        calls = find_schedule(profile, plan).calls(plan.branch.degree)
        return Cost(tally([(("branch", operation), size) for operation, size in calls] * split.accumulation))

    def settings(self, space: SearchSpace) -> Iterable[Mapping[str, Any]]:
        if space.samples != "images":
            return ({},)
        degrees = [degree for degree in divisors(space.num_devices)[1:] if degree <= MOST_RANKS]
        batches: tuple[Literal["same", "split"], ...] = ("same", "split")
        return [{}, *({"branch": Branch(degree, batch)} for degree in degrees for batch in batches)]

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        found = _DEAL.pop(model)
        if found is None:
            return model
        if mesh.is_first:
            logger.info(f"branch = {plan.branch.degree}: {found.describe()}")
        tracer = Tracer(skeleton(model), plan, 1, purpose=FOR_BRANCHES)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        cut_parameters(model, branch_cuts(shapes, found, mesh["branch"].index, plan.branch.splits_batch))
        runner = BranchRunner(model, tracer, found.owners, mesh["branch"], mesh.device)
        setattr(model, "forward", runner)  # noqa: B010 (a method to mypy)
        return model


def mark_branches(model: nn.Module, whole: Profile, plan: Plan) -> None:
    """Store with a model how a plan that was not refused deals out its branches."""
    if plan.branch.degree > 1:
        _DEAL.set(model, _deal(whole, plan))


def work_share(profile: Profile, plan: Plan) -> float:
    """Returns the time of a forward and backward under a plan over that on one rank, without communication.

    In each wave the rank with the most work decides. All ranks run what is outside of branches. One rank would run as
    many samples as each rank has of its own, and branches may run those of all.
    """
    if plan.branch.degree == 1:
        return 1.0
    found, total = _deal(profile, plan), total_work(_trace(profile, plan))
    alone = sum(sum(one.work.values()) for one in found.branches)
    return 1.0 - (alone - found.makespan * (found.degree if plan.branch.splits_batch else 1)) / total


class BranchSizes(NamedTuple):
    """What the planner needs of a model's branches under a plan, for a profile of one micro-batch.

    `work_share` is as `work_share` returns it. `calls` are the collectives of one micro-batch, (operation, bytes).
    `largest_numel` are the parameters of the rank that holds most, and `shared_numel` those of all ranks.
    `result_share`: results that the rank with the most makes or gathers, over those of all operations, at least 1.
    """

    work_share: float
    calls: tuple[tuple[str, int], ...]
    largest_numel: int
    shared_numel: int
    result_share: float


def branch_sizes(profile: Profile, plan: Plan) -> BranchSizes:
    """Returns the sizes of a model's branches. The plan must not be refused."""
    found, schedule, own = _deal(profile, plan), find_schedule(profile, plan), Counter[int | None]()
    for block in profile.all:
        for parameter in block.parameters:
            own[found.owners.get(parameter.name)] += parameter.numel
    largest = own[None] + max(own[rank] for rank in range(found.degree))
    results = max(schedule.result_share(rank) for rank in range(found.degree))
    calls = tuple(schedule.calls(found.degree))
    return BranchSizes(work_share(profile, plan), calls, largest, own[None], max(1.0, results))


def describe_deal(profile: Profile, plan: Plan) -> str:
    """Returns the branches of each rank as text, with the imbalance."""
    return _deal(profile, plan).describe()


def branch_cuts(shapes: Mapping[str, tuple[int, ...]], found: Deal, index: int, splits_batch: bool) -> dict[str, Cut]:
    """Returns a rank's part of every parameter: all or nothing of those of a branch, and all of the others.

    If ranks have different samples (`splits_batch`), gradients of the others are partial sums.
    """
    owners, cuts, sums = found.owners, dict[str, Cut](), ("branch",) if splits_batch else ()
    for name, shape in shapes.items():
        owner, whole = owners.get(name), Cut.whole(shape)
        if owner is None:
            cuts[name] = replace(whole, replicas=found.degree, is_first=index == 0, sums=sums)
        else:
            cuts[name] = whole if owner == index else Cut.nothing(shape)
    return cuts


def _trace(profile: Profile, plan: Plan, times: int = 1) -> Trace:
    """Returns the trace of a profile's example, or of one with so many times as many samples."""
    key = f"branch trace {plan.precision} {times}"
    if key not in profile.cache:
        assert profile.model is not None
        assert profile.example is not None
        tracer = Tracer(profile.model, plan, 1, purpose=FOR_BRANCHES)
        example = profile.example
        profile.cache[key] = tracer.example(lambda: all_samples(example(), times), torch.device("cpu"))
    found: Trace = profile.cache[key]
    return found


def _deal(profile: Profile, plan: Plan) -> Deal:
    key = f"branches {plan.precision} {plan.branch.degree} {plan.branch.modules}"
    if key not in profile.cache:
        profile.cache[key] = deal(find_branches(_trace(profile, plan), plan.branch.modules), plan.branch.degree)
    found: Deal = profile.cache[key]
    return found


def find_schedule(profile: Profile, plan: Plan) -> BranchSchedule:
    """Returns which ranks run each event of a profile's example under a plan, and where they communicate."""
    key = f"branch schedule {plan.precision} {plan.branch}"
    if key not in profile.cache:
        trace, batch = _trace(profile, plan), None
        if plan.branch.splits_batch:
            batch = find_batch_dims(trace, _trace(profile, plan, plan.branch.degree), plan.branch.degree)
        profile.cache[key] = make_schedule(trace, _deal(profile, plan).owners, batch)
    found: BranchSchedule = profile.cache[key]
    return found


def _refuse_beside(plan: Plan) -> str | None:
    """Returns which other axis or policy `branch` does not run beside; None if there is none."""
    given = f"branch = {plan.branch.degree}"
    for axis, reason in _REASONS.items():
        if (degree := plan.degree(axis)) > 1:
            return f"{given} beside {axis} = {degree}, which weft does not do: {reason}; use {axis} = 1, or branch = 1"
    if plan.has_batch_statistics:
        return f"{given} beside statistics = 'batch', which weft does not do; use statistics = 'rank', or branch = 1"
    if plan.memory.recompute != "none":
        return (
            f"{given} beside memory.recompute = '{plan.memory.recompute}': recompute would run a block alone, without "
            f"the exchanges that its branches need; use 'none', or branch = 1"
        )
    for field in ("activations", "weights"):
        if share := getattr(plan.memory, field):
            return f"{given} beside memory.{field} = {share:g}, which weft does not do; use 0, or branch = 1"
    if plan.matmul != "compute":
        return f"{given} beside matmul = '{plan.matmul}', which weft does not do; use 'compute', or branch = 1"
    return None


def _refuse_mixers(profile: Profile, plan: Plan) -> str | None:
    """Returns why layers that mix samples do not allow ranks with different samples; None if they do."""
    return refuse_batch_mixers(profile, plan, "branch", plan.branch.degree if plan.branch.splits_batch else 1)


def _refuse_number(profile: Profile, found: Deal) -> str | None:
    """Returns why a model has too few branches; None if every rank has one."""
    name, num_used = type(profile.model).__name__, len(set(found.ranks))
    if num_used == found.degree:
        return None
    if num_used == 0:
        return (
            f"branch = {found.degree}, but {name} has no independent branches: every operation with parameters needs "
            f"the result of the one before it, or they share parameters; use branch = 1"
        )
    return (
        f"branch = {found.degree}, but {name} has branches for {num_used} ranks only ({found.describe()}); use "
        f"branch = {num_used}"
    )

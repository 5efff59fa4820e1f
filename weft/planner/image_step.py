"""The time of a step and the memory of a rank for image models: blocks that differ, tiles, stages balanced by time.

Stages are contiguous sections, chosen so that the slowest stage is as fast as possible. A stage sends its rank's
output: a tile, a whole image, or its share of the batch. `StepModel` computes the time from there. Memory is the state
of a rank's stages, the saved bytes that the schedule keeps, and the largest transient memory of one section's backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from weft.errors import PlanError
from weft.parallel.branch.axis import BranchSizes, branch_sizes
from weft.plan import Plan
from weft.planner.closed_form_memory import NUM_MESSAGES, RankMemory, state
from weft.planner.image_chain import ImageSection
from weft.planner.image_sections import ImageSections
from weft.planner.in_flight import alive_at_once
from weft.planner.micro_batch import Seconds
from weft.planner.question import inner_settings
from weft.planner.step import FIXED_SECONDS, PlannedStage, PlannedStages, StepModel, StepTime, on_rank
from weft.profiling.workload import BlockWork
from weft.schedule.schedules import make_schedule
from weft.schedule.simulate import simulate
from weft.sharding.layout import COMPUTE_DTYPE, MASTER_DTYPE

GRADIENTS_AT_ONCE = 2  # largest tensors in a section's backward: the gradients of an output and of an input
STEADY_ROUNDS = 4  # with more micro-batches per pipeline rank, no schedule keeps more activations


@dataclass(frozen=True)
class ImageSteps(StepModel):
    """Step times of one image model on one cluster."""

    sections: ImageSections = field(kw_only=True)

    @cached_property
    def _seconds_of(self) -> dict[Any, list[Seconds]]:
        return {}

    @cached_property
    def _branches(self) -> dict[Any, BranchSizes]:
        return {}

    def branch_sizes(self, plan: Plan) -> BranchSizes | None:
        """The sizes of the model's branches under the plan, for one image; None if they are not split."""
        if plan.branch.degree == 1:
            return None
        key = plan.branch, plan.precision, plan.pipe.degree > 1, plan.memory
        if key not in self._branches:
            self._branches[key] = branch_sizes(self.sections.profile, plan)
        return self._branches[key]

    @cached_property
    def _uncompiled(self) -> ImageSteps:
        return replace(self, software=replace(self.software, fused=False, compiled=False))

    def _runs_uncompiled(self, plan: Plan) -> bool:
        """Tiles, statistics over the batch and branches run uncompiled, even if all else is compiled."""
        return self.software.compiled and (plan.is_viewed or plan.branch.degree > 1)

    def part(self, part: BlockWork, plan: Plan, micro_batch: float) -> Seconds:
        if self._runs_uncompiled(plan):
            return self._uncompiled.part(part, plan, micro_batch)
        return super().part(part, plan, micro_batch)

    def inside(self, part: BlockWork, plan: Plan, micro_batch: float) -> Seconds:
        if self._runs_uncompiled(plan):
            return self._uncompiled.inside(part, plan, micro_batch)
        return super().inside(part, plan, micro_batch)

    def _is_block(self, part: BlockWork) -> bool:
        return not self.sections.is_end(part)

    def section_seconds(self, plan: Plan) -> list[Seconds]:
        """Seconds of one micro-batch in each section."""
        assert plan.micro_batch is not None
        key = (inner_settings(plan), plan.memory.recompute, self._runs_uncompiled(plan))
        if key not in self._seconds_of:
            sections = self.sections.under(plan.tile)
            found = [self.inside(one.part, plan, plan.micro_batch * one.images) for one in sections]
            if (sizes := self.branch_sizes(plan)) is not None:
                found = [Seconds().plus(one, sizes.work_share) for one in found]
            self._seconds_of[key] = found
        return self._seconds_of[key]

    def chain(self, plan: Plan) -> Seconds:
        found = Seconds()
        for one in self.section_seconds(plan):
            found = found.plus(one)
        return found

    def kernel_seconds(self, plan: Plan) -> float:
        return sum(self.chain(plan))

    def bound(
        self,
        plan: Plan,
        num_micro_batches: int,
        planned: PlannedStages | None = None,
        makespan_seconds: float | None = None,
    ) -> float:
        return num_micro_batches * sum(self.chain(plan)) / plan.pipe.degree + FIXED_SECONDS

    def step(self, plan: Plan, num_micro_batches: int) -> StepTime:
        found, sent = super().step(plan, num_micro_batches), self._branch_seconds(plan, num_micro_batches)
        if not sent:
            return found
        exposed = {**found.exposed_seconds, "branch": sent}
        return replace(
            found, seconds=found.seconds + sent, exposed_seconds=exposed, where={**found.where, "branch": sent}
        )

    def step_seconds(self, plan: Plan, num_micro_batches: int, planned: PlannedStages | None = None) -> float:
        sent = self._branch_seconds(plan, num_micro_batches)
        return super().step_seconds(plan, num_micro_batches, planned) + sent

    def _branch_seconds(self, plan: Plan, num_micro_batches: int) -> float:
        """Seconds in which branches wait for what they communicate: nothing overlaps with it.

        A rank of a pipeline communicates for the branches of its own stages, also while others wait for its results.
        """
        sizes = self.branch_sizes(plan)
        if sizes is None:
            return 0.0
        assert plan.micro_batch is not None
        calls = [(name, float(num_bytes * plan.micro_batch)) for name, num_bytes in sizes.calls] * num_micro_batches
        if plan.branch.splits_batch:  # gradients of what all ranks hold
            calls.append(("all_reduce", sizes.shared_numel / plan.shard.degree * self.software.gradient_bytes))
        sent = sum(self.seconds("branch", operation, num_bytes, plan) for operation, num_bytes in calls)
        return sent * (num_micro_batches + plan.pipe.degree - 1) / (num_micro_batches * plan.pipe.degree)

    def groups(self, plan: Plan) -> list[tuple[int, int]]:
        """Returns the sections [begin, end) of each stage.

        They are those named by `pipe.split`, or those for which the slowest stage is fastest.
        """
        names = [section.name for section in self.sections.whole]
        if plan.pipe.split:
            bounds = [0, *(names.index(name) for name in plan.pipe.split), len(names)]
            return list(pairwise(bounds))
        return balanced([sum(one) for one in self.section_seconds(plan)], plan.pipe.num_stages)

    def split(self, plan: Plan) -> tuple[str, ...]:
        """Returns the names of the modules at which stages begin, for `pipe.split`."""
        return tuple(self.sections.whole[begin].name for begin, _ in self.groups(plan)[1:])

    def stages(self, plan: Plan) -> list[PlannedStage]:
        assert plan.micro_batch is not None
        sections, found, sizes = self.sections.under(plan.tile), [], self.branch_sizes(plan)
        for stage, (begin, end) in enumerate(self.groups(plan)):
            total = Seconds()
            for one in self.section_seconds(plan.of_stage(stage))[begin:end]:
                total = total.plus(one)
            own = sections[begin:end]
            parts = tuple((one.part, plan.micro_batch * one.images, 1) for one in own)
            message = own[-1].boundary_bytes * own[-1].images * plan.micro_batch
            numel = self._held_numel(own, sizes)
            found.append(PlannedStage(total, numel, len(own), message, parts))
        return found

    def _held_numel(self, own: Sequence[ImageSection], sizes: BranchSizes | None) -> float:
        """Parameters of these sections on a rank; of branches, the share of the rank that holds most of the model."""
        numel = sum(one.numel for one in own)
        return numel if sizes is None else numel * sizes.largest_numel / self.sections.profile.numel

    # --- memory

    def held(self, plan: Plan, num_micro_batches: int) -> RankMemory:
        """Memory of the pipeline rank that needs most."""
        is_compiled = self.software.compiled and not self._runs_uncompiled(plan)
        sections = self.sections.compiled if is_compiled else self.sections.under(plan.tile)
        stages = [sections[begin:end] for begin, end in self.groups(plan)]
        assert plan.micro_batch is not None
        plans = [plan.of_stage(stage) for stage in range(len(stages))]
        saved = [sum(_saved(one, own) for one in stage) for stage, own in zip(stages, plans, strict=True)]
        sizes = self.branch_sizes(plan)
        if sizes is not None:
            saved = [sizes.result_share * num_bytes for num_bytes in saved]
        alive = _alive_bytes(plan, saved, num_micro_batches)
        found = []
        for rank in range(plan.pipe.degree):
            own = [(section, plans[stage]) for stage, _ in on_rank(plan.pipe, rank) for section in stages[stage]]
            numel = self._held_numel([section for section, _ in own], sizes)
            held = state(plan, numel, num_micro_batches)
            found.append(RankMemory(*held, alive[rank], _transient(own, plan, numel, num_micro_batches)))
        return max(found, key=lambda memory: memory.total_bytes)


def _saved(section: ImageSection, plan: Plan) -> float:
    """Bytes that a section saves for one micro-batch."""
    return section.saved_bytes[plan.memory.recompute] * section.images * (plan.micro_batch or 1)


def _alive_bytes(plan: Plan, saved: Sequence[float], num_micro_batches: int) -> list[float]:
    """The peak of saved activations on each pipeline rank, in bytes."""
    pipe = plan.pipe
    if pipe.degree == 1:
        return list(saved)
    if pipe.schedule in ("1f1b", "gpipe"):
        alive = alive_at_once(pipe.schedule, pipe.degree, num_micro_batches, ())
        return [size * count for size, count in zip(saved, alive, strict=True)]
    most = num_micro_batches
    if most > STEADY_ROUNDS * pipe.degree and pipe.batches is None:
        most = STEADY_ROUNDS * pipe.degree
    schedule = make_schedule(pipe.schedule, pipe.degree, most, **pipe.options)
    return list(simulate(schedule, activation_bytes=saved).peak_activation_bytes)


def _transient(own: Sequence[tuple[ImageSection, Plan]], plan: Plan, numel: float, num_micro_batches: int) -> float:
    """Transient bytes of a rank with these sections, each with the plan that its stage follows."""
    compute, master = COMPUTE_DTYPE[plan.precision].itemsize, MASTER_DTYPE[plan.precision].itemsize
    micro_batch = plan.micro_batch or 1
    backward = gone = 0.0
    for one, its in reversed(own):  # later sections have freed their saved activations by then
        again = one.saved_bytes["none"] - one.saved_bytes[its.memory.recompute]
        over = (again + GRADIENTS_AT_ONCE * one.largest_bytes) * one.images * micro_batch
        backward, gone = max(backward, over - gone), gone + _saved(one, its)
    largest = max(one.numel for one, _ in own)
    if plan.pipe.degree > 1:
        backward += NUM_MESSAGES * max(one.boundary_bytes * one.images for one, _ in own) * micro_batch
    if plan.shard.degree > 1 and plan.shard.stage == 3:
        backward += 2 * largest * compute
    if plan.shard.degree > 1 and plan.shard.stage > 1:
        keeps_all = plan.pipe.degree > 1 or (num_micro_batches > 1 and plan.memory.accumulate == "whole")
        backward += (numel if keeps_all else 2 * largest) * master
    return backward


def balanced(seconds: Sequence[float], num_stages: int) -> list[tuple[int, int]]:
    """Returns contiguous groups [begin, end), each with at least one block, whose longest is as short as possible.

    The first and last element of `seconds` are the ends of the model. They stay with the block next to them.
    """
    blocks = [*seconds[1:-1]]
    if num_stages > len(blocks):
        raise PlanError(f"{num_stages} stages need as many blocks, and the model has {len(blocks)}; use fewer stages")
    blocks[0] += seconds[0]
    blocks[-1] += seconds[-1]
    low, high = max(max(blocks), sum(blocks) / num_stages), sum(blocks)
    for _ in range(50):
        middle = (low + high) / 2
        if _count(blocks, middle) <= num_stages:
            high = middle
        else:
            low = middle
    return _cut(blocks, high, num_stages)


def _count(blocks: Sequence[float], limit: float) -> int:
    """The number of groups that a greedy fill up to `limit` needs."""
    count, filled = 1, 0.0
    for one in blocks:
        if filled + one > limit:
            count, filled = count + 1, 0.0
        filled += one
    return count


def _cut(blocks: Sequence[float], limit: float, num_stages: int) -> list[tuple[int, int]]:
    """Fills groups greedily up to the limit, but leaves at least one block for every later stage."""
    bounds, filled = [0], 0.0
    for index, one in enumerate(blocks):
        missing = num_stages - len(bounds)
        is_full = filled + one > limit * (1 + 1e-12) or len(blocks) - index == missing
        if index > bounds[-1] and missing and is_full:
            bounds.append(index)
            filled = 0.0
        filled += one
    places = [0, *(index + 1 for index in bounds[1:]), len(blocks) + 2]
    return list(pairwise(places))

"""The time of one step under a plan: kernels, exposed collectives, and the pipeline's schedule.

The plan's stages are timed for one micro-batch (`micro_batch.py`), and the schedule is run with these times. The
reduction of gradients (without the part that backward hides) and the optimizer are added. The collectives over flat
buffers are those that the strategies of the axes state (`Strategy.buffer_calls`). Gathers of parameters overlap with a
micro-batch's compute, block by block. Their cost is the first block's gather, the part that is longer than the compute,
and the slow-down of the compute during the overlap.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

from weft.cluster.hardware import ring_seconds
from weft.parallel.apply import STRATEGIES
from weft.plan import Pipe, Plan
from weft.planner.closed_form_memory import spared_bytes, updated_bytes
from weft.planner.micro_batch import MicroBatchModel, Seconds, expert_replicas, place
from weft.planner.network_use import divide, seconds_of, waits
from weft.planner.schedule_time import ScheduleTime, run
from weft.planner.stage_units import ModelUnits, StageUnits, UnitSeconds, equal_stages
from weft.profiling.workload import BlockWork, Call
from weft.schedule.schedules import make_schedule
from weft.schedule.shadow import with_shadows
from weft.schedule.simulate import Timeline, simulate
from weft.sharding.layout import COMPUTE_DTYPE, evenly_spaced
from weft.strategy import Buffer, Strategy

BUFFER_AXES = [one for one in STRATEGIES if type(one).buffer_calls is not Strategy.buffer_calls]
ROUNDING = 1 - 1e-9  # bounds are so much lower, as quotients in another order are rounded differently
FIXED_SECONDS = 3e-3  # per step: the norm, the loss's copy to the host, the loop
# Parameters in a bucket of gradients where buckets grow: the minimum, and the number for each rank of data. This is
# Megatron-Core's rule (megatron/core/distributed/distributed_data_parallel.py). It keeps collectives of many ranks from
# being dominated by latency.
BUCKET_NUMEL, BUCKET_NUMEL_OF_RANK = 40_000_000, 1_000_000
HOST_LINK_SHARE = 0.86  # share of the printed bandwidth: 55 of 64 GB/s in each direction between an H200 and its host


@dataclass(frozen=True)
class StepTime:
    """The predicted seconds of a training step, and how they divide into computing, collectives, idling and the update.

    `exposed_seconds` are those of collectives that computing does not hide. `bubble_share` is the share of the schedule
    in which pipeline ranks are idle.
    """

    seconds: float
    compute_seconds: float  # of the busiest rank
    exposed_seconds: dict[str, float]  # by axis
    bubble_share: float
    optimizer_seconds: float
    where: dict[str, float] = field(default_factory=dict)  # the busiest rank's seconds: compute, axes, bubble, ...
    make_timeline: Callable[[], Timeline | None] = field(default=lambda: None, repr=False, compare=False)

    @cached_property
    def wait_share(self) -> float:
        """The share of the step in which the busiest pipeline rank waits."""
        return self.where.get("bubble", 0.0) / self.seconds

    @cached_property
    def timeline(self) -> Timeline | None:
        """The actions of each pipeline rank over time; None without a pipeline."""
        return self.make_timeline()


class PlannedStage(NamedTuple):
    """One pipeline stage on one of its ranks.

    `seconds` are those of one micro-batch, `message_bytes` the output that the rank sends on, and `parts` the stage's
    blocks with the micro-batch of each.
    """

    seconds: Seconds
    numel: float
    num_blocks: int
    message_bytes: float
    parts: tuple[tuple[BlockWork, float], ...]


class CommonTimes(NamedTuple):
    """What times of plans share that differ only in data and shard.

    Seconds of one micro-batch on the busiest pipeline rank and in the whole model, the blocks and the parameters of
    that rank, and the parameters of the largest rank.
    """

    busiest: Seconds
    total: Seconds
    num_blocks: int
    numel: float
    largest_numel: float


@dataclass(frozen=True)
class StepModel(MicroBatchModel):
    """Step times of one model on one cluster."""

    numel: tuple[int, int, int] = (0, 0, 0)  # parameters of the first end, one block, the last end
    tied_numel: int = 0  # parameters shared by both ends; a stage with both ends holds them once
    units: ModelUnits | None = field(default=None, repr=False, compare=False)  # None: stages have equal block counts
    expert_numel: int = 0  # the parameters of a block's experts

    def stage_units(self, plan: Plan) -> tuple[StageUnits, ...]:
        """The numbers of blocks and the ends of the plan's stages."""
        if plan.pipe.degree > 1 and self.units is not None:
            return self.units.stages(plan)
        num_stages = plan.pipe.num_stages if plan.pipe.degree > 1 else 1
        return equal_stages(len(self.workload.blocks), num_stages, plan.memory.recompute_stages)

    @cached_property
    def _rank_units(self) -> dict[tuple[int, int], tuple[tuple[StageUnits, ...], tuple[StageUnits, ...]]]:
        return {}

    def rank_units(self, plan: Plan) -> tuple[StageUnits, ...]:
        """The different sums of stages that the plan's pipeline ranks hold."""
        stages, degree = self.stage_units(plan), plan.pipe.degree
        key = id(stages), degree
        if key not in self._rank_units:
            ranks = (stages[rank::degree] for rank in range(degree))
            found = tuple(dict.fromkeys(_sum(own) for own in ranks))
            self._rank_units[key] = stages, found  # holds the stages: their id stays unique
        return self._rank_units[key][1]

    def common_times(self, plan: Plan) -> CommonTimes:
        """What `estimate` needs of a plan apart from its data and shard."""
        ranks = self.rank_units(plan)
        busiest, total, units = self._busiest(plan, ranks)
        largest = max(self._numel(one, plan) for one in ranks)
        return CommonTimes(busiest, total, max(1, units.num_blocks), self._numel(units, plan), largest)

    def estimate(self, plan: Plan, num_micro_batches: int, common: CommonTimes | None = None) -> float:
        """Seconds of a step in closed form, with 1f1b's waits. For the search; `step` simulates the schedule.

        `common` are the plan's common times, if they are known.
        """
        busiest, total, count, numel, largest = common or self.common_times(plan)
        ignored: dict[str, float] = {}
        both = self._beside_buffers(busiest, numel, count, plan, ignored)
        slower = [new / old if old else 1.0 for new, old in zip(both, busiest, strict=True)]
        total = Seconds(total.forward * slower[0], total.backward * slower[1])
        makespan = _makespan(both, total, plan.pipe, num_micro_batches)
        makespan += 2 * (plan.pipe.degree - 1) * self.seconds("pipe", "send", self._message_bytes(plan), plan)
        reduction = self._reduction(largest, plan, [busiest], count, ignored)
        return makespan + reduction + self._optimizer_seconds(largest, plan, num_micro_batches)

    def unit_seconds(self, plan: Plan) -> UnitSeconds:
        """Seconds of one micro-batch in each end of the model, in one block, and in a block of a stage that recomputes,
        if only some do.
        """
        count, each = plan.memory.recompute_stages, len(self.workload.blocks) or 1
        first, blocks, last = self._chain(plan if count is None else plan.of_stage(count))
        again = blocks if count is None else self._chain(plan.of_stage(0))[1]
        return UnitSeconds(sum(first), sum(blocks) / each, sum(last), sum(again) / each)

    def bound(self, plan: Plan, num_micro_batches: int, common: CommonTimes | None = None) -> float:
        """A lower bound of `estimate` for the plan, and for those with another `data` and `shard` of as many ranks.

        All of these ranks must be in `plan.shard`: the more of them it has, the less each updates. Collectives count as
        hidden. `common` are the plan's common times, if they are known.
        """
        busiest, total, _, _, largest = common or self.common_times(plan)
        makespan = _makespan(busiest, total, plan.pipe, num_micro_batches)
        return makespan + self._update_seconds(largest, plan, num_micro_batches) * ROUNDING

    def _busiest(self, plan: Plan, ranks: Sequence[StageUnits]) -> tuple[Seconds, Seconds, StageUnits]:
        """Seconds of one micro-batch on the busiest of these pipeline ranks and in the whole model; what that rank
        holds.
        """
        count = plan.memory.recompute_stages
        first, blocks, last = self._chain(plan if count is None else plan.of_stage(count))
        again = blocks if count is None else self._chain(plan.of_stage(0))[1]  # of recomputed blocks
        each = len(self.workload.blocks) or 1

        def load(one: StageUnits, way: int) -> float:
            own = (one.num_blocks - one.num_recomputed) / each * blocks[way]
            if one.num_recomputed:
                own += one.num_recomputed / each * again[way]
            return own + one.has_first * first[way] + one.has_last * last[way]

        loads = [Seconds(load(one, 0), load(one, 1)) for one in ranks]
        busiest, units = max(zip(loads, ranks, strict=True), key=lambda pair: pair[0][0] + pair[0][1])
        if count is None:
            return busiest, blocks.plus(first).plus(last), units
        every = _sum(self.stage_units(plan))
        return busiest, Seconds(load(every, 0), load(every, 1)), units

    def _numel(self, units: StageUnits, plan: Plan) -> float:
        """The number of parameters of a stage or rank, before `shard` splits them. x and y leave experts whole, unless
        the software splits them."""
        experts = units.num_blocks * self.expert_numel
        numel = units.num_blocks * self.numel[1] + units.has_first * self.numel[0] + units.has_last * self.numel[2]
        numel -= self.tied_numel if units.has_first and units.has_last else 0
        return (numel - experts) / (plan.tensor.x * plan.tensor.y) + experts / self._expert_parts(plan)

    def _expert_parts(self, plan: Plan) -> int:
        """The number of ranks that the experts of a block are split over."""
        return plan.num_expert_parts * (plan.tensor.x if self.software.splits_experts else 1)

    def _expert_share(self, plan: Plan) -> float:
        """The share of experts in the parameters that a rank holds of a block, before `shard` splits them."""
        own = self.expert_numel / self._expert_parts(plan)
        return own and own / (own + (self.numel[1] - self.expert_numel) / (plan.tensor.x * plan.tensor.y))

    def _optimizer_seconds(self, numel: float, plan: Plan, num_micro_batches: int) -> float:
        """Seconds of the update, and of adding up gradients of micro-batches."""
        updated = self._update_seconds(numel, plan, num_micro_batches)
        link = self.cluster.node.host_link_bytes_per_second
        if not plan.memory.keeps_state_on_host or link is None:
            return updated
        # Copies in both directions run at once, during the update of the state on the device.
        streamed = len(evenly_spaced(len(self.workload.blocks), plan.memory.weights)) * self.numel[1]
        return max(updated, updated_bytes(plan, numel, streamed) / (link * HOST_LINK_SHARE))

    def _update_seconds(self, numel: float, plan: Plan, num_micro_batches: int) -> float:
        """Seconds in which the device updates its state and adds up gradients of micro-batches."""
        own = self._updated_numel(numel, plan)
        is_alone = plan.num_ranks == num_micro_batches == 1
        num_bytes = own * (self.software.optimizer_bytes - spared_bytes(plan) - is_alone * self.software.alone_bytes)
        num_bytes += (num_micro_batches - 1) * numel * self.software.sum_bytes
        return num_bytes / self._kernels[plan.precision].bytes_per_second + FIXED_SECONDS

    def _updated_numel(self, numel: float, plan: Plan) -> float:
        """The number of parameters that a rank updates, of those that it holds before `shard` splits them."""
        if self.software.shards_over_expert:
            experts = numel * self._expert_share(plan)
            return (experts + (numel - experts) / plan.expert) / plan.shard.degree
        if not self.software.shards_optimizer:
            return numel / plan.shard.degree
        experts = numel * self._expert_share(plan)
        others = (numel - experts) / (plan.data * plan.expert * plan.context.degree)
        return (others + experts / expert_replicas(plan)) / plan.shard.degree

    def _message_bytes(self, plan: Plan) -> float:
        """Bytes of one micro-batch's message between two stages."""
        assert plan.micro_batch is not None
        element_bytes = COMPUTE_DTYPE[plan.precision].itemsize
        message = element_bytes * self.workload.stream_numel * plan.micro_batch / plan.num_parts("tokens")
        message /= plan.tensor.y
        return message / plan.tensor.x if self.software.splits_messages else message

    def stages(self, plan: Plan) -> list[PlannedStage]:
        """The plan's stages; the ends of the model belong to those with its first and its last unit."""
        assert plan.micro_batch is not None
        work, micro_batch = self.workload, plan.micro_batch
        distinct = {id(part): part for part in (work.first, *work.blocks, work.last)}  # most blocks are the same object
        message, found, begin, inside = self._message_bytes(plan), [], 0, dict[int, Seconds]()
        for stage, units in enumerate(self.stage_units(plan)):
            if stage in (0, plan.memory.recompute_stages):  # from here on, stages have another policy
                own_plan = plan.of_stage(stage)
                inside = {key: self.inside(part, own_plan, micro_batch) for key, part in distinct.items()}
            blocks = work.blocks[begin : begin + units.num_blocks]
            begin += units.num_blocks
            own = [*[work.first] * units.has_first, *blocks, *[work.last] * units.has_last]
            seconds = Seconds()
            for part in own:
                seconds = seconds.plus(inside[id(part)])
            numel, one = self._numel(units, plan), self._numel(StageUnits(1, False, False), plan)
            count = max(1, round(numel / one)) if one else 1
            found.append(PlannedStage(seconds, numel, count, message, tuple((part, micro_batch) for part in own)))
        return found

    def step(self, plan: Plan, num_micro_batches: int) -> StepTime:
        """Times a step under a plan, with the schedule simulated."""
        stages, exposed = self.stages(plan), dict[str, float]()
        alone = [stage.seconds for stage in stages]
        both = [self._beside_buffers(one.seconds, one.numel, one.num_blocks, plan, exposed) for one in stages]
        messages = [self.seconds("pipe", "send", stage.message_bytes, plan) for stage in stages[:-1]]
        makespan, bubble = self._run(plan, both, messages, num_micro_batches)
        timeline = partial(self._timeline, plan, both, messages, num_micro_batches)
        largest = max(sum(stages[stage].numel for stage, _ in on_rank(plan.pipe, r)) for r in range(plan.pipe.degree))
        own = self._where(plan, num_micro_batches, stages, both, exposed)
        reduction = self._reduction(largest, plan, alone, max(stage.num_blocks for stage in stages), exposed)
        optimizer = self._optimizer_seconds(largest, plan, num_micro_batches)
        compute = max(self._load(plan.pipe, rank, alone) for rank in range(plan.pipe.degree)) * num_micro_batches
        rest = {
            "bubble": makespan - sum(own.values()),
            "data": own.get("data", 0.0) + reduction,
            "optimizer": optimizer,
        }
        where = {**own, **rest}
        return StepTime(makespan + reduction + optimizer, compute, exposed, bubble, optimizer, where, timeline)

    def _load(self, pipe: Pipe, rank: int, stages: Sequence[Seconds]) -> float:
        """Seconds that a pipeline rank computes for each micro-batch."""
        return sum(share * sum(stages[stage]) for stage, share in on_rank(pipe, rank))

    def _where(
        self,
        plan: Plan,
        num_micro_batches: int,
        stages: list[PlannedStage],
        both: list[Seconds],
        exposed: Mapping[str, float],
    ) -> dict[str, float]:
        """Seconds of the busiest pipeline rank in a step: its kernels, and the time that each axis adds to them.

        `exposed` is the time that each axis adds to all stages by collectives over flat buffers.
        """
        rank = max(range(plan.pipe.degree), key=lambda rank: self._load(plan.pipe, rank, both))
        parts: Counter[tuple[BlockWork, float, str]] = Counter()
        plans: dict[str, Plan] = {}  # those of the rank's stages, by `recompute`
        for stage, share in on_rank(plan.pipe, rank):
            own_plan = plan.of_stage(stage)
            plans[own_plan.memory.recompute] = own_plan
            for part, micro_batch in stages[stage].parts:
                parts[part, micro_batch, own_plan.memory.recompute] += share  # type: ignore[assignment]
        found: defaultdict[str, float] = defaultdict(float)
        for (part, micro_batch, recompute), count in parts.items():
            for axis, seconds in self.exposed(part, plans[recompute], micro_batch).items():
                found[axis] += count * num_micro_batches * seconds
        alone = [stage.seconds for stage in stages]
        all_of_it = [num_micro_batches * self._load(plan.pipe, rank, each) for each in (alone, both)]
        added = {"shard": 0.0, **divide(all_of_it[1] - all_of_it[0], exposed)}
        return {"compute": all_of_it[0] - sum(found.values()), **found, **added}

    def _buffer_calls(self, numel: float, plan: Plan) -> list[Call]:
        """The collectives of all axes over a flat buffer of `numel` parameters."""
        width = COMPUTE_DTYPE[plan.precision].itemsize
        experts = numel * self._expert_share(plan)
        buffer = Buffer(numel, width, max(width, self.software.gradient_bytes), experts)
        return [call for strategy in BUFFER_AXES for call in strategy.buffer_calls(buffer, plan, self.software)]

    def _beside_buffers(
        self, stage: Seconds, size: float, count: int, plan: Plan, exposed: dict[str, float]
    ) -> Seconds:
        """Seconds of a stage with the collectives over its `count` flat buffers that overlap with each micro-batch.

        Parameters are gathered one block ahead. With `accumulate = "slice"` every backward also reduces gradients. They
        hide behind what a block computes, but not behind its own collectives between nodes. Adds the exposed seconds to
        `exposed`.
        """
        by_phase: defaultdict[str, list[Call]] = defaultdict(list)
        by_axis: dict[str, float] = {}
        for call in self._buffer_calls(size / count, plan):
            if call.phase == "reduce" and plan.memory.accumulate == "whole":
                continue
            by_phase[call.phase].append(call)
            seconds = count * self.seconds(call.axis, call.operation, call.num_bytes, plan)
            by_axis[call.axis] = by_axis.get(call.axis, 0.0) + seconds
        if not by_axis:
            return stage
        ahead = count * seconds_of(self, by_phase.pop("forward", []), plan)
        behind = count * sum(seconds_of(self, calls, plan) for calls in by_phase.values())
        num_blocks = min(count, len(self.workload.blocks) // (plan.pipe.num_stages if plan.pipe.degree > 1 else 1))
        busy = Seconds().plus(waits(self, plan, by_axis, self._known_waits), num_blocks)
        both = Seconds(
            busy.forward + self.beside(stage.forward - busy.forward, ahead, ahead / count),
            busy.backward + self.beside(stage.backward - busy.backward, behind, behind / count),
        )
        for axis, seconds in divide(both.forward + both.backward - sum(stage), by_axis).items():
            exposed[axis] = exposed.get(axis, 0.0) + seconds
        return both

    @cached_property
    def _known_waits(self) -> dict[object, Seconds]:
        return {}

    def _run(self, plan: Plan, stages: list[Seconds], messages: list[float], num_micro_batches: int) -> ScheduleTime:
        if plan.pipe.degree == 1:
            return ScheduleTime(sum(stages[0]) * num_micro_batches, 0.0)
        return run(plan.pipe, num_micro_batches, tuple(stages), tuple(messages))

    def _timeline(
        self, plan: Plan, stages: list[Seconds], messages: list[float], num_micro_batches: int
    ) -> Timeline | None:
        if plan.pipe.degree == 1:
            return None
        schedule = make_schedule(plan.pipe.schedule, plan.pipe.degree, num_micro_batches, **plan.pipe.options)
        if plan.pipe.shadow:
            schedule = with_shadows(schedule)
        halves = [stage.backward / 2 for stage in stages]
        return simulate(schedule, [stage.forward for stage in stages], halves, halves, messages)

    def _reduction(
        self, largest: float, plan: Plan, stages: list[Seconds], count: int, exposed: dict[str, float]
    ) -> float:
        """Seconds that a step takes longer for reducing gradients over all axes, and between mirrored replicas.

        The last backward hides as much of it as it can. `largest` is the number of parameters of the largest rank,
        `count` the number of buckets.
        """
        if self.software.grows_buckets:
            bucket = max(BUCKET_NUMEL, BUCKET_NUMEL_OF_RANK * plan.data * plan.expert * plan.context.degree)
            count = min(count, math.ceil(largest / bucket))
        reduce_seconds = before = 0.0
        for call in self._buffer_calls(largest / count, plan):
            if call.phase == "backward":
                before += count * self.seconds(call.axis, call.operation, call.num_bytes, plan)
            elif call.phase == "reduce" and plan.memory.accumulate == "whole":
                reduce_seconds += self.seconds(call.axis, call.operation, call.num_bytes, plan)
        if plan.pipe.is_mirrored:  # replicas are as far apart as the ends of the axis
            bandwidth, latency, start = self._link(*place(plan, "pipe"))
            num_bytes = largest / count / plan.shard.degree * self.software.gradient_bytes
            reduce_seconds += ring_seconds("all_reduce", num_bytes, 2, bandwidth, latency) + start
        reduce_seconds *= count
        if self.software.hides_gradients:
            # The first stage finishes last. Parameters gathered for backward use the same link.
            longest = max(stage.backward for stage in stages)
            without = self.beside(longest, before, before / count)
            chunks = plan.pipe.num_stages // plan.pipe.degree if self.software.reduces_by_stage else 1
            others = (chunks - 1) * plan.pipe.degree * longest  # backward of a rank's other stages, after the first
            ahead = reduce_seconds * (chunks - 1) / chunks
            last = before + reduce_seconds - ahead
            reduce_seconds = self.beside(longest, last, last / count) - without + self.beside(others, ahead) - others
        exposed["data"] = exposed.get("data", 0.0) + reduce_seconds
        return reduce_seconds


def _sum(stages: Sequence[StageUnits]) -> StageUnits:
    """What several stages hold together."""
    num_blocks, num_recomputed = sum(one.num_blocks for one in stages), sum(one.num_recomputed for one in stages)
    return StageUnits(num_blocks, stages[0].has_first, stages[-1].has_last, num_recomputed)


def on_rank(pipe: Pipe, rank: int) -> list[tuple[int, float]]:
    """Returns the stages of a pipeline rank, each with the share of the micro-batches that the rank computes in it."""
    if pipe.is_mirrored:
        return [(rank, 0.5), (pipe.degree - 1 - rank, 0.5)]
    return [(stage, 1.0) for stage in range(rank, pipe.num_stages, pipe.degree)]


def _makespan(busiest: Seconds, total: Seconds, pipe: Pipe, num_micro_batches: int) -> float:
    """The duration of a pipeline in closed form: the busiest rank's work, and the other ranks' work on one micro-batch.

    It is 1f1b's duration less the waits that other schedules avoid.
    """
    if pipe.degree == 1:
        return num_micro_batches * sum(total)
    # With fewer micro-batches than stages, a rank has no other chunk to compute while it waits.
    chunks = pipe.chunks or 2 if pipe.schedule == "interleaved" and num_micro_batches >= pipe.degree else 1
    wait = (sum(total) - sum(busiest)) / chunks
    wait -= (total.backward - busiest.backward) / 2 if pipe.schedule == "zero-bubble" else 0
    if pipe.in_flight is None:
        return num_micro_batches * sum(busiest) + wait
    # A rank that holds the cap waits until the oldest micro-batch has gone through all ranks and back.
    free = pipe.in_flight - (pipe.num_stages - pipe.degree)  # beside those of one group at all stages but the last
    return num_micro_batches * max(sum(busiest), sum(total) / free if free > 0 else 0.0) + wait

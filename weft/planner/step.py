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
from typing import Any, NamedTuple

from weft.cluster.hardware import ring_seconds
from weft.parallel.apply import STRATEGIES
from weft.plan import Pipe, Plan
from weft.planner.closed_form_memory import spared_bytes, updated_bytes
from weft.planner.micro_batch import MicroBatchModel, Seconds, expert_replicas, place
from weft.planner.network_use import divide, seconds_of, waits
from weft.planner.schedule_time import ScheduleTime, least_makespan, run
from weft.planner.stage_units import ModelUnits, StageUnits, UnitSeconds, equal_stages
from weft.profiling.workload import BlockWork, Call
from weft.schedule.schedules import make_schedule
from weft.schedule.shadow import with_shadows
from weft.schedule.simulate import Timeline, simulate
from weft.sharding.layout import COMPUTE_DTYPE, evenly_spaced
from weft.strategy import Buffer, Strategy, divisors

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
    blocks, each with its micro-batch and how many there are of it.
    """

    seconds: Seconds
    numel: float
    num_blocks: int
    message_bytes: float
    parts: tuple[tuple[BlockWork, float, int], ...]


class PlannedStages(NamedTuple):
    """A plan's stages. Plans that differ only in data, shard and state on the host have the same.

    Equal stages are one object.
    """

    stages: tuple[PlannedStage, ...]
    largest_numel: float  # parameters of the rank that has most

    @property
    def alone(self) -> tuple[Seconds, ...]:
        """Seconds of one micro-batch in each stage, without collectives over flat buffers."""
        return tuple(one.seconds for one in self.stages)


class _TimedStep(NamedTuple):
    """The parts of a step's time. `both` are the seconds of each stage with the collectives over its flat buffers."""

    both: tuple[Seconds, ...]
    messages: tuple[float, ...]
    schedule: ScheduleTime
    reduction: float
    optimizer: float

    @property
    def seconds(self) -> float:
        return self.schedule.makespan_seconds + self.reduction + self.optimizer


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

    def planned_stages(self, plan: Plan) -> PlannedStages:
        """The plan's stages, with what `seconds` and `step` need of them."""
        stages = tuple(self.stages(plan))
        ranks = ([stages[stage].numel for stage, _ in on_rank(plan.pipe, rank)] for rank in range(plan.pipe.degree))
        return PlannedStages(stages, max(map(sum, ranks)))

    def _messages(self, plan: Plan, planned: PlannedStages) -> tuple[float, ...]:
        """Seconds of a message behind each stage but the last."""
        return tuple(self.seconds("pipe", "send", stage.message_bytes, plan) for stage in planned.stages[:-1])

    def _least_messages(self, plan: Plan, planned: PlannedStages) -> tuple[float, ...]:
        """As `_messages`, the least under any division of `plan.shard` over data and shard.

        Ranks of shard lie between neighbours on pipe, so fewer of them may put these into one node.
        """
        inner, degree = plan.place("pipe")
        inners = [inner // plan.shard.degree * shard for shard in divisors(plan.shard.degree)]
        known: dict[float, float] = {}
        for num_bytes in {stage.message_bytes for stage in planned.stages[:-1]}:
            each = (self._call_seconds("send", num_bytes, one, degree) for one in inners)
            known[num_bytes] = min(each) if num_bytes else 0.0
        return tuple(known[stage.message_bytes] for stage in planned.stages[:-1])

    def unit_seconds(self, plan: Plan) -> UnitSeconds:
        """Seconds of one micro-batch in each end of the model, in one block, and in a block of a stage that recomputes,
        if only some do.
        """
        count, each = plan.memory.recompute_stages, len(self.workload.blocks) or 1
        first, blocks, last = self._chain(plan if count is None else plan.of_stage(count))
        again = blocks if count is None else self._chain(plan.of_stage(0))[1]
        return UnitSeconds(sum(first), sum(blocks) / each, sum(last), sum(again) / each)

    def bound(
        self,
        plan: Plan,
        num_micro_batches: int,
        planned: PlannedStages | None = None,
        makespan_seconds: float | None = None,
    ) -> float:
        """A lower bound of a step's seconds under the plan, and those with another `data` and `shard` of as many ranks.

        All of these ranks must be in `plan.shard`: the more of them it has, the less each updates. Collectives over
        flat buffers count as hidden. `planned` are the plan's stages, and `makespan_seconds` is the `least_makespan` of
        such a plan, if they are known: then it is a bound for this division alone.
        """
        planned = planned or self.planned_stages(plan)
        if makespan_seconds is None:
            makespan_seconds = self.least_makespan(plan, num_micro_batches, planned)
        return (makespan_seconds + self._update_seconds(planned.largest_numel, plan, num_micro_batches)) * ROUNDING

    def least_makespan(self, plan: Plan, num_micro_batches: int, planned: PlannedStages) -> float:
        """A lower bound of the seconds of the schedule, by formula, for any division of `plan.shard`."""
        messages = self._least_messages(plan, planned)
        return least_makespan(plan.pipe, num_micro_batches, planned.alone, messages)

    def closer_bound(self, plan: Plan, num_micro_batches: int, planned: PlannedStages) -> float:
        """A lower bound of a step's seconds under the plan, for which the schedule is run. `planned` are its stages."""
        schedule = self._run(plan, planned.alone, self._messages(plan, planned), num_micro_batches)
        return self.bound(plan, num_micro_batches, planned, schedule.makespan_seconds)

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
        work, micro_batch, message, begin = self.workload, plan.micro_batch, self._message_bytes(plan), 0
        one_numel = self._numel(StageUnits(1, False, False), plan)
        found: list[PlannedStage] = []
        known: dict[Any, PlannedStage] = {}
        for stage, units in enumerate(self.stage_units(plan)):
            end = begin + units.num_blocks
            key = units, stage < (plan.memory.recompute_stages or 0), None if len(self._kinds) == 1 else begin
            if key not in known:
                own_plan = plan.of_stage(stage)
                first, blocks, last = self._chain(own_plan)
                if len(self._kinds) == 1:  # as counting hashes each of them
                    kinds = [(work.blocks[0], units.num_blocks)]
                else:
                    kinds = [*Counter(work.blocks[begin:end]).items()]
                if len(self._kinds) > 1:
                    blocks = Seconds()
                    for part, count in kinds:
                        blocks = blocks.plus(self.inside(part, own_plan, micro_batch), count)
                elif self._kinds:
                    blocks = Seconds().plus(blocks, units.num_blocks / len(work.blocks))
                seconds = blocks.plus(first, units.has_first).plus(last, units.has_last)
                ends = [(work.first, int(units.has_first)), (work.last, int(units.has_last))]
                numel = self._numel(units, plan)
                num_buffers = max(1, round(numel / one_numel)) if one_numel else 1
                parts = tuple((part, micro_batch, count) for part, count in (*kinds, *ends) if count)
                known[key] = PlannedStage(seconds, numel, num_buffers, message, parts)
            begin = end
            found.append(known[key])
        return found

    def _timed(
        self, plan: Plan, num_micro_batches: int, planned: PlannedStages, exposed: dict[str, float]
    ) -> _TimedStep:
        """Times a step. Adds the seconds that collectives over flat buffers add to stages to `exposed`, by axis."""
        beside: dict[int, tuple[Seconds, dict[str, float]]] = {}
        for one in planned.stages:
            if id(one) not in beside:
                added: dict[str, float] = {}
                beside[id(one)] = self._beside_buffers(one.seconds, one.numel, one.num_blocks, plan, added), added
            for axis, seconds in beside[id(one)][1].items():
                exposed[axis] = exposed.get(axis, 0.0) + seconds
        both = tuple(beside[id(one)][0] for one in planned.stages)
        messages = self._messages(plan, planned)
        schedule = self._run(plan, both, messages, num_micro_batches)
        count = max(stage.num_blocks for stage in planned.stages)
        reduction = self._reduction(planned.largest_numel, plan, planned.alone, count)
        optimizer = self._optimizer_seconds(planned.largest_numel, plan, num_micro_batches)
        return _TimedStep(both, messages, schedule, reduction, optimizer)

    def step_seconds(self, plan: Plan, num_micro_batches: int, planned: PlannedStages | None = None) -> float:
        """The seconds of a step, as `step` returns them, in less time. `planned` are its stages, if they are known."""
        return self._timed(plan, num_micro_batches, planned or self.planned_stages(plan), {}).seconds

    def step(self, plan: Plan, num_micro_batches: int) -> StepTime:
        """Times a step under a plan, and divides its seconds."""
        planned, exposed = self.planned_stages(plan), dict[str, float]()
        timed, stages, alone = self._timed(plan, num_micro_batches, planned, exposed), planned.stages, planned.alone
        timeline = partial(self._timeline, plan, timed.both, timed.messages, num_micro_batches)
        own = self._where(plan, num_micro_batches, stages, timed.both, exposed)
        exposed["data"] = exposed.get("data", 0.0) + timed.reduction
        compute = max(self._load(plan.pipe, rank, alone) for rank in range(plan.pipe.degree)) * num_micro_batches
        where = {
            **own,
            "bubble": timed.schedule.makespan_seconds - sum(own.values()),
            "data": own.get("data", 0.0) + timed.reduction,
            "optimizer": timed.optimizer,
        }
        return StepTime(timed.seconds, compute, exposed, timed.schedule.bubble_share, timed.optimizer, where, timeline)

    def _load(self, pipe: Pipe, rank: int, stages: Sequence[Seconds]) -> float:
        """Seconds that a pipeline rank computes for each micro-batch."""
        return sum(share * sum(stages[stage]) for stage, share in on_rank(pipe, rank))

    def _where(
        self,
        plan: Plan,
        num_micro_batches: int,
        stages: Sequence[PlannedStage],
        both: Sequence[Seconds],
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
            for part, micro_batch, count in stages[stage].parts:
                parts[part, micro_batch, own_plan.memory.recompute] += share * count  # type: ignore[assignment]
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

    def _run(
        self, plan: Plan, stages: tuple[Seconds, ...], messages: tuple[float, ...], num_micro_batches: int
    ) -> ScheduleTime:
        if plan.pipe.degree == 1:
            return ScheduleTime(sum(stages[0]) * num_micro_batches, 0.0)
        return run(plan.pipe, num_micro_batches, stages, messages)

    def _timeline(
        self, plan: Plan, stages: Sequence[Seconds], messages: Sequence[float], num_micro_batches: int
    ) -> Timeline | None:
        if plan.pipe.degree == 1:
            return None
        schedule = make_schedule(plan.pipe.schedule, plan.pipe.degree, num_micro_batches, **plan.pipe.options)
        if plan.pipe.shadow:
            schedule = with_shadows(schedule)
        halves = [stage.backward / 2 for stage in stages]
        return simulate(schedule, [stage.forward for stage in stages], halves, halves, messages)

    def _reduction(self, largest: float, plan: Plan, stages: Sequence[Seconds], count: int) -> float:
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
        return reduce_seconds


def on_rank(pipe: Pipe, rank: int) -> list[tuple[int, float]]:
    """Returns the stages of a pipeline rank, each with the share of the micro-batches that the rank computes in it."""
    if pipe.is_mirrored:
        return [(rank, 0.5), (pipe.degree - 1 - rank, 0.5)]
    return [(stage, 1.0) for stage in range(rank, pipe.num_stages, pipe.degree)]

"""The time of one step under a plan: kernels, collectives, what hides behind what, and the schedule's own list.

A plan's stages are timed for one micro-batch (`micro_batch.py`); the schedule's list is run with these times; then come
the gradients' reduction, as far as backward does not hide it, and the optimizer. Gathers of `shard` run beside a
micro-batch's compute, block by block: they cost the first block's, what is longer than the compute, and what the
compute loses to them while both run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

from weft.pipeline.schedules import make_schedule
from weft.pipeline.simulate import Timeline, simulate
from weft.plan import Pipe, Plan
from weft.planner.lists import Run, run
from weft.planner.micro_batch import Call, MicroBatchModel, Seconds, beside

FIXED_SECONDS = 3e-3  # of a step: the norm, the loss's way to the host, the loop


@dataclass(frozen=True)
class StepTime:
    """Where the time of a step goes."""

    seconds: float
    compute_seconds: float  # of the busiest rank
    exposed_seconds: dict[str, float]  # by axis
    bubble_share: float
    optimizer_seconds: float
    where: dict[str, float] = field(default_factory=dict)  # all seconds of the busiest rank: compute, axes, bubble, ...
    make_timeline: Callable[[], Timeline | None] = field(default=lambda: None, repr=False, compare=False)

    @cached_property
    def timeline(self) -> Timeline | None:
        """What each rank of pipe does when; None without a pipeline."""
        return self.make_timeline()


@dataclass(frozen=True)
class StepModel(MicroBatchModel):
    """Times of one model on one cluster."""

    numel: tuple[int, int, int] = (0, 0, 0)  # parameters of the first end, one block, the last end

    def estimate(self, plan: Plan, num_micro_batches: int) -> float:
        """The time of a step in closed form: equal stages, 1f1b's waits. For search; `step` simulates."""
        first, blocks, last = self._chain(plan)
        degree, work = plan.pipe.degree, self.workload
        share = Seconds(blocks.forward / degree, blocks.backward / degree)
        split = plan.tensor.x * plan.tensor.y
        held = len(work.blocks) * self.numel[1] / degree / split
        largest = held + max(self.numel[0], self.numel[2]) / split
        ignored: dict[str, float] = {}
        count = max(1, len(work.blocks) // degree)
        alone, share = share, self._beside_shards(share, held, count, plan, ignored)
        makespan = _makespan(first, share, last, plan.pipe, num_micro_batches)
        makespan += 2 * (degree - 1) * self._message_seconds(plan)
        reduction = self._reduction(largest, plan, [alone], count, ignored)
        return makespan + reduction + self._optimizer_seconds(largest, plan)

    def bound(self, plan: Plan, pipe: Pipe, num_micro_batches: int) -> float:
        """No more than `estimate` gives for the plan with this pipe, whatever its shard and data are."""
        first, blocks, last = self._chain(plan)
        share = Seconds(blocks.forward / pipe.degree, blocks.backward / pipe.degree)
        return _makespan(first, share, last, pipe, num_micro_batches) + FIXED_SECONDS

    def _optimizer_seconds(self, numel: float, plan: Plan) -> float:
        own = numel / plan.shard.degree / (plan.data if self.software.shards_optimizer else 1)
        return own * self.software.optimizer_bytes / self._kernels[plan.precision].bytes_per_second + FIXED_SECONDS

    def _message_seconds(self, plan: Plan) -> float:
        assert plan.micro_batch is not None
        message = 2 * self.workload.stream_numel * plan.micro_batch / plan.context.degree / plan.tensor.y
        if self.software.splits_messages:
            message /= plan.tensor.x
        return self.seconds("pipe", "send", message, plan)

    def step(self, plan: Plan, num_micro_batches: int) -> StepTime:
        """All of it."""
        assert plan.micro_batch is not None
        work, micro_batch, pipe = self.workload, plan.micro_batch, plan.pipe
        num_stages = pipe.degree * (pipe.chunks or 2 if pipe.schedule == "interleaved" else 1)
        distinct = {id(part): part for part in work.blocks}  # most blocks of a model are one value
        inside = {key: self.inside(part, plan, micro_batch) for key, part in distinct.items()}
        stages = [Seconds() for _ in range(num_stages)]
        sizes = [0] * num_stages
        for index, part in enumerate(work.blocks):
            place = index * num_stages // len(work.blocks)
            stages[place] = stages[place].plus(inside[id(part)])
            sizes[place] += self.numel[1]
        stages[0] = stages[0].plus(self.inside(work.first, plan, micro_batch))
        stages[-1] = stages[-1].plus(self.inside(work.last, plan, micro_batch))
        sizes[0], sizes[-1] = sizes[0] + self.numel[0], sizes[-1] + self.numel[2]
        split = plan.tensor.x * plan.tensor.y
        held = [size / split for size in sizes]
        exposed: dict[str, float] = {}
        counts = [max(1, round(size / self.numel[1])) if self.numel[1] else 1 for size in sizes]
        alone = stages
        stages = [self._beside_shards(*one, plan, exposed) for one in zip(stages, held, counts, strict=True)]
        makespan, bubble = self._run(plan, stages, num_micro_batches)
        timeline = partial(self._timeline, plan, stages, num_micro_batches)
        largest = max(self._on_rank(held, plan))
        reduction = self._reduction(largest, plan, alone, max(counts), exposed)
        optimizer = self._optimizer_seconds(largest, plan)
        compute = max(stage.forward + stage.backward for stage in alone) * num_micro_batches
        own = self._where(plan, num_micro_batches, alone, stages)
        where = {**own, "bubble": makespan - sum(own.values()), "data": reduction, "optimizer": optimizer}
        return StepTime(makespan + reduction + optimizer, compute, exposed, bubble, optimizer, where, timeline)

    def _where(
        self, plan: Plan, num_micro_batches: int, alone: list[Seconds], stages: list[Seconds]
    ) -> dict[str, float]:
        """What the busiest rank of pipe does all step: its kernels, and what each axis adds to them."""
        work, degree, num_stages = self.workload, plan.pipe.degree, len(stages)
        rank = max(range(degree), key=lambda rank: sum(sum(stage) for stage in stages[rank::degree]))
        parts = Counter({work.first: rank == 0, work.last: (num_stages - 1) % degree == rank})
        parts.update(part for i, part in enumerate(work.blocks) if i * num_stages // len(work.blocks) % degree == rank)
        found: defaultdict[str, float] = defaultdict(float)
        for part, count in parts.items():
            for axis, seconds in self.exposed(part, plan, plan.micro_batch or 1).items():
                found[axis] += count * num_micro_batches * seconds
        both = [num_micro_batches * sum(sum(stage) for stage in each[rank::degree]) for each in (alone, stages)]
        return {"compute": both[0] - sum(found.values()), **found, "shard": both[1] - both[0]}

    def _on_rank(self, held: list[float], plan: Plan) -> list[float]:
        """Parameters of each rank of pipe, over its stages."""
        return [sum(held[rank :: plan.pipe.degree]) for rank in range(plan.pipe.degree)]

    def _beside_shards(self, stage: Seconds, size: float, count: int, plan: Plan, exposed: dict[str, float]) -> Seconds:
        """Stage 3 gathers parameters before forward and backward, one block ahead; with `accumulate = "slice"` every
        backward also scatters gradients.
        """
        if plan.shard.degree == 1:
            return stage
        gather = scatter = 0.0
        if plan.shard.stage == 3:
            gather = count * self.seconds("shard", "all_gather", 2 * size / count, plan)
        if plan.memory.accumulate == "slice":
            gradients = self.software.gradient_bytes * size / count
            scatter = count * self.seconds("shard", "reduce_scatter", gradients, plan)
        forward = beside(stage.forward, gather, gather / count)
        behind = scatter + gather * (2 if self.software.gathers_again and plan.memory.recompute == "full" else 1)
        backward = beside(stage.backward, behind, behind / count)
        exposed["shard"] = exposed.get("shard", 0.0) + forward + backward - sum(stage)
        return Seconds(forward, backward)

    def _run(self, plan: Plan, stages: list[Seconds], num_micro_batches: int) -> Run:
        if plan.pipe.degree == 1:
            return Run(sum(stages[0]) * num_micro_batches, 0.0)
        return run(plan.pipe, num_micro_batches, stages, self._message_seconds(plan))

    def _timeline(self, plan: Plan, stages: list[Seconds], num_micro_batches: int) -> Timeline | None:
        if plan.pipe.degree == 1:
            return None
        schedule = make_schedule(plan.pipe.schedule, plan.pipe.degree, num_micro_batches, **plan.pipe.options)
        halves = [stage.backward / 2 for stage in stages]
        return simulate(schedule, [stage.forward for stage in stages], halves, halves, self._message_seconds(plan))

    def _reduction(
        self, largest: float, plan: Plan, stages: list[Seconds], count: int, exposed: dict[str, float]
    ) -> float:
        """What a step takes longer for gradients over shard, data and context; the last backward hides what it can."""
        size, width = largest / count, self.software.gradient_bytes  # of a block; of a parameter's gradient
        own = size / plan.shard.degree
        told = before = 0.0
        if plan.shard.degree > 1:
            gather = self.seconds("shard", "all_gather", 2 * size, plan)
            if plan.memory.accumulate == "whole":
                told += self.seconds("shard", "reduce_scatter", size * width, plan)
            if plan.shard.stage == 3:
                before = count * gather
            else:
                told += gather
        if plan.data > 1 and self.software.shards_optimizer:
            told += self.seconds("data", "reduce_scatter", own * width, plan)
            told += self.seconds("data", "all_gather", 2 * own, plan)
        elif plan.data > 1:
            told += self.seconds("data", "all_reduce", own * width, plan)
        if plan.context.degree > 1:
            told += self.seconds("context", "all_reduce", own * width, plan)
        told *= count
        if self.software.hides_gradients:
            # The last stage to finish is the first; parameters gathered for backward run on the same link.
            longest = max(stage.backward for stage in stages)
            without = beside(longest, before, before / count)
            told = beside(longest, before + told, (before + told) / count) - without
        exposed["data"] = exposed.get("data", 0.0) + told
        return told


def _makespan(first: Seconds, share: Seconds, last: Seconds, pipe: Pipe, num_micro_batches: int) -> float:
    """Of equal stages with these ends, by 1f1b's waits and what other schedules take off them."""
    if pipe.degree == 1:
        return num_micro_batches * (sum(first) + sum(share) + sum(last))
    chunks = pipe.chunks or 2 if pipe.schedule == "interleaved" else 1
    wait = sum(share) / chunks - (share.backward / 2 if pipe.schedule == "zero-bubble" else 0)
    return num_micro_batches * (sum(share) + max(sum(first), sum(last))) + (pipe.degree - 1) * wait


__all__ = ["Call", "Seconds", "StepModel", "StepTime"]

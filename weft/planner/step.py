"""The time of one step under a plan: kernels, collectives, what hides behind what, and the schedule's own list.

A plan's stages are timed for one micro-batch (compute, then the collectives of x, y and context that nothing hides);
the schedule's list is simulated with these times; then come the gradients' reduction, as far as backward does not hide
it, and the optimizer. Gathers of `shard` run beside a micro-batch's compute and cost what is longer than it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from weft.cluster import Cluster, ring_seconds
from weft.moved import Moved
from weft.pipeline.schedules import make_schedule
from weft.pipeline.simulate import Timeline, simulate
from weft.plan import Plan
from weft.planner.kernels import Kernels, Software
from weft.planner.workload import Part, Workload

# What collectives reach of a link's printed bandwidth.
LINK_SHARE = {"intra": 0.78, "inter": 0.85}
OPTIMIZER_BYTES = 30  # read and written for each parameter by Adam with 16-bit weights and fp32 state
FIXED_SECONDS = 3e-3  # of a step: the norm, the loss's way to the host, the loop


class Seconds(NamedTuple):
    """Forward and backward of one micro-batch."""

    forward: float = 0.0
    backward: float = 0.0

    def plus(self, other: Seconds, times: float = 1) -> Seconds:
        return Seconds(self.forward + times * other.forward, self.backward + times * other.backward)


@dataclass(frozen=True)
class Call:
    """A collective of one micro-batch in one block: `phase` is forward or backward."""

    axis: str
    operation: str
    num_bytes: float
    phase: str


@dataclass(frozen=True)
class StepTime:
    """Where the time of a step goes."""

    seconds: float
    compute_seconds: float  # of the busiest rank
    exposed_seconds: dict[str, float]  # by axis
    bubble_share: float
    optimizer_seconds: float
    timeline: Timeline | None = field(default=None, repr=False)


@dataclass(frozen=True)
class StepModel:
    """Times of one model on one cluster; `workload` is of one sequence."""

    workload: Workload
    cluster: Cluster
    software: Software
    numel: tuple[int, int, int] = (0, 0, 0)  # parameters of the first end, one block, the last end

    @cached_property
    def _chains(self) -> dict[Any, tuple[Seconds, Seconds, Seconds]]:
        return {}

    @cached_property
    def _kernels(self) -> dict[str, Kernels]:
        return {p: Kernels(self.cluster.node.device, self.software, p) for p in self.cluster.node.device.peak_flops}

    # --- one micro-batch of one block

    def part(self, part: Part, plan: Plan, micro_batch: int) -> Seconds:
        """A part's kernels on one rank, recompute included, or what the host takes to issue them."""
        kernels = self._kernels[plan.precision]
        x, y, context = plan.tensor.x, plan.tensor.y, plan.context.degree
        scale = micro_batch / context
        forward = backward = 0.0
        for product in part.products:
            rows, inputs, outputs = product.local(x, y)
            rows = math.ceil(rows * scale)
            forward += kernels.product(rows, inputs, outputs)
            backward += kernels.product(rows, outputs, inputs) + kernels.product(inputs, rows, outputs)
        others = part.other_flops * scale / (x * y) / (kernels.flops_per_second * 0.6)
        attention = kernels.attention(part.attention_flops * scale / x, 2 * part.score_numel * scale / x)
        over = y * (x if plan.tensor.sequence else 1)
        moved = kernels.moved(_scaled(part.inner, scale / x)) + kernels.moved(_scaled(part.outer, scale / over))
        forward += others + attention[0] + moved
        backward += 2 * others + attention[1] + 2 * moved
        again = {"none": 0.0, "full": forward, "selective": self._selective(attention[0], moved)}[plan.memory.recompute]
        host = self.software.host_seconds * _num_operations(part)
        host_backward = 2 * host + (host if plan.memory.recompute == "full" else 0)
        return Seconds(max(forward, host), max(backward + again, host_backward))

    def _selective(self, attention: float, moved: float) -> float:
        return attention if self.software.selective == "attention" else moved

    def calls(self, part: Part, plan: Plan, micro_batch: int) -> Iterator[Call]:
        """The collectives of x and y around a part's matmuls, by AxoNN's terms: a matmul's outputs are summed over the
        axis of its inputs, and the gradient of its input over the axis of its outputs.
        """
        x, y = plan.tensor.x, plan.tensor.y
        scale = 2 * micro_batch / plan.context.degree
        again = 2 if plan.memory.recompute == "full" else 1
        for product in part.products:
            over_out, over_in = (y, x) if product.kind == "row" else (x, y)
            out_axis, in_axis = ("y", "x") if product.kind == "row" else ("x", "y")
            if product.kind == "whole":
                continue
            if over_in > 1:
                yield Call(in_axis, "all_reduce", again * scale * product.rows * product.outputs / over_out, "forward")
            if over_out > 1 and product.enters:
                yield Call(out_axis, "all_reduce", scale * product.rows * product.inputs / over_in, "backward")

    def inside(self, part: Part, plan: Plan, micro_batch: int) -> Seconds:
        """A part's kernels and the collectives that nothing hides."""
        own = self.part(part, plan, micro_batch)
        told = {"forward": 0.0, "backward": 0.0}
        for call in self.calls(part, plan, micro_batch):
            told[call.phase] += self.seconds(call.axis, call.operation, call.num_bytes, plan)
        if self.software.hides_input:
            told["backward"] = max(0.0, told["backward"] - own.backward / 2)  # dW is half of backward's matmuls
        return own.plus(Seconds(told["forward"], told["backward"]))

    def chain(self, plan: Plan) -> Seconds:
        """One micro-batch through the whole model, split over x, y and context only."""
        first, blocks, last = self._chain(plan)
        return blocks.plus(first).plus(last)

    def _chain(self, plan: Plan) -> tuple[Seconds, Seconds, Seconds]:
        key = (plan.tensor, plan.context.degree, plan.micro_batch, plan.memory.recompute, plan.precision)
        if key not in self._chains:
            assert plan.micro_batch is not None
            work, kinds = self.workload, Counter(self.workload.blocks)
            blocks = Seconds()
            for part, count in kinds.items():
                blocks = blocks.plus(self.inside(part, plan, plan.micro_batch), count)
            ends = (self.inside(part, plan, plan.micro_batch) for part in (work.first, work.last))
            first, last = ends
            self._chains[key] = (first, blocks, last)
        return self._chains[key]

    # --- a step

    def estimate(self, plan: Plan, num_micro_batches: int) -> float:
        """The time of a step in closed form: equal stages, 1f1b's waits. For search; `step` simulates."""
        first, blocks, last = self._chain(plan)
        degree, work = plan.pipe.degree, self.workload
        chunks = plan.pipe.chunks or 2 if plan.pipe.schedule == "interleaved" else 1
        share = Seconds(blocks.forward / degree, blocks.backward / degree)
        split = plan.tensor.x * plan.tensor.y
        held = len(work.blocks) * self.numel[1] / degree / split
        largest = held + max(self.numel[0], self.numel[2]) / split
        ignored: dict[str, float] = {}
        share = self._beside_gathers(share, held, plan, ignored)
        slowest = share.plus(
            last if degree > 1 and sum(last) > sum(first) else first if degree > 1 else first.plus(last)
        )
        makespan = num_micro_batches * sum(slowest)
        if degree > 1:
            wait = sum(share) / chunks - (share.backward / 2 if plan.pipe.schedule == "zero-bubble" else 0)
            makespan += (degree - 1) * (wait + 2 * self._message_seconds(plan))
        reduction = self._reduction(largest, plan, [slowest], ignored)
        return makespan + reduction + self._optimizer_seconds(largest, plan)

    def _optimizer_seconds(self, numel: float, plan: Plan) -> float:
        own = numel / plan.shard.degree / (plan.data if self.software.shards_optimizer else 1)
        return own * OPTIMIZER_BYTES / self._kernels[plan.precision].bytes_per_second + FIXED_SECONDS

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
        times = {part: self.inside(part, plan, micro_batch) for part in set(work.blocks)}
        stages = [Seconds() for _ in range(num_stages)]
        sizes = [0] * num_stages
        for index, part in enumerate(work.blocks):
            place = index * num_stages // len(work.blocks)
            stages[place] = stages[place].plus(times[part])
            sizes[place] += self.numel[1]
        stages[0] = stages[0].plus(self.inside(work.first, plan, micro_batch))
        stages[-1] = stages[-1].plus(self.inside(work.last, plan, micro_batch))
        sizes[0], sizes[-1] = sizes[0] + self.numel[0], sizes[-1] + self.numel[2]
        split = plan.tensor.x * plan.tensor.y
        held = [size / split for size in sizes]
        exposed: dict[str, float] = {}
        stages = [self._beside_gathers(stage, size, plan, exposed) for stage, size in zip(stages, held, strict=True)]
        makespan, bubble, timeline = self._run(plan, stages, num_micro_batches)
        largest = max(self._on_rank(held, plan))
        reduction = self._reduction(largest, plan, stages, exposed)
        optimizer = self._optimizer_seconds(largest, plan)
        compute = max(stage.forward + stage.backward for stage in stages) * num_micro_batches
        return StepTime(makespan + reduction + optimizer, compute, exposed, bubble, optimizer, timeline)

    def _on_rank(self, held: list[float], plan: Plan) -> list[float]:
        """Parameters of each rank of pipe, over its stages."""
        return [sum(held[rank :: plan.pipe.degree]) for rank in range(plan.pipe.degree)]

    def _beside_gathers(self, stage: Seconds, size: float, plan: Plan, exposed: dict[str, float]) -> Seconds:
        """Stage 3 gathers parameters before forward and backward, one block ahead."""
        if plan.shard.degree == 1 or plan.shard.stage < 3:
            return stage
        gather = self.seconds("shard", "all_gather", 2 * size, plan)
        longer = Seconds(max(stage.forward, gather), max(stage.backward, gather))
        exposed["shard"] = exposed.get("shard", 0.0) + sum(longer) - sum(stage)
        return longer

    def _run(self, plan: Plan, stages: list[Seconds], num_micro_batches: int) -> tuple[float, float, Timeline | None]:
        if plan.pipe.degree == 1:
            return sum(stages[0]) * num_micro_batches, 0.0, None
        schedule = make_schedule(plan.pipe.schedule, plan.pipe.degree, num_micro_batches, **plan.pipe.options)
        timeline = simulate(
            schedule,
            [stage.forward for stage in stages],
            [stage.backward / 2 for stage in stages],
            [stage.backward / 2 for stage in stages],
            self._message_seconds(plan),
        )
        return timeline.makespan_seconds, timeline.bubble_share, timeline

    def _reduction(self, largest: float, plan: Plan, stages: list[Seconds], exposed: dict[str, float]) -> float:
        """Gradients over shard, then data; the last backward hides what it can."""
        num_bytes = largest * self.software.gradient_bytes
        shard = self.seconds("shard", "reduce_scatter", num_bytes, plan)
        if plan.shard.degree > 1 and plan.shard.stage < 3:
            shard += self.seconds("shard", "all_gather", 2 * largest, plan)
        operation = "all_reduce"
        data = self.seconds("data", operation, num_bytes / plan.shard.degree, plan)
        told = shard + data
        if self.software.hides_gradients:
            told = max(0.0, told - max(stage.backward for stage in stages))
        exposed["data"] = exposed.get("data", 0.0) + told
        return told

    def seconds(self, axis: str, operation: str, num_bytes: float, plan: Plan) -> float:
        """One collective over an axis of the plan."""
        degree = plan.degree(axis)
        if degree == 1 or not num_bytes:
            return 0.0
        link = self.cluster.axis_link(plan.inner(axis), degree)
        bandwidth = link.bandwidth_bytes_per_second * LINK_SHARE["inter" if link.crosses_nodes else "intra"]
        return ring_seconds(operation, num_bytes, degree, bandwidth, link.latency_seconds)


def _scaled(moved: Moved, scale: float) -> Moved:
    return Moved(int(moved[0] * scale), moved[1], int(moved[2] * scale), moved[3])


def _num_operations(part: Part) -> int:
    """What the host issues in one forward."""
    return len(part.products) + bool(part.attention_flops) + part.inner.num_kernels + part.outer.num_kernels


__all__ = ["Call", "Seconds", "StepModel", "StepTime", "simulate"]

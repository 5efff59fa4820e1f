"""The time of one step under a plan: kernels, collectives, what hides behind what, and the schedule's own list.

A plan's stages are timed for one micro-batch (compute, then the collectives of x, y and context that nothing hides);
the schedule's list is simulated with these times; then come the gradients' reduction, as far as backward does not hide
it, and the optimizer. Gathers of `shard` run beside a micro-batch's compute, block by block: they cost the first
block's, what is longer than the compute, and what the compute loses to them while both run.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from weft.cluster import DTYPES, Cluster, ring_seconds
from weft.moved import Moved
from weft.pipeline.schedules import make_schedule
from weft.pipeline.simulate import Timeline, simulate
from weft.plan import Plan
from weft.planner.kernels import Kernels, Software
from weft.planner.workload import Part, Workload

# What collectives reach of a link's printed bandwidth: about 235 of 300 GB/s inside a DGX A100, 360 of 450 inside a DGX
# H100, and 85 to 95 % of the NICs between nodes, as nccl-tests are commonly reported (not re-checked).
LINK_SHARE = {"intra": 0.78, "inter": 0.85}
# While a collective runs beside them, matmuls lose processors and memory bandwidth. Chosen, not measured: Galvatron
# (arXiv 2211.13878, not re-checked) takes 0.3.
OVERLAP_LOSS = 0.2
OTHER_PRODUCTS = 0.6  # of the best matmul, for convolutions and products of a block's own
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
    where: dict[str, float] = field(default_factory=dict)  # all seconds of the busiest rank: compute, axes, bubble, ...
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
        return {name: Kernels(self.cluster.node.device, self.software, name) for name in DTYPES}

    # --- one micro-batch of one block

    def part(self, part: Part, plan: Plan, micro_batch: int) -> Seconds:
        """A part's kernels on one rank, recompute included, or what the host takes to issue them."""
        kernels = self._kernels[plan.precision]
        x, y, context = plan.tensor.x, plan.tensor.y, plan.context.degree
        scale = micro_batch / context
        forward = backward = 0.0
        for product in part.products:
            rows, inputs, outputs = product.local(x, y)
            times = kernels.linear(math.ceil(rows * scale), inputs, outputs)
            forward, backward = forward + times[0], backward + times[1]
        others = part.other_flops * scale / (x * y) / (kernels.flops_per_second * OTHER_PRODUCTS)
        over = scale / x
        attention = kernels.attention(part.attention_flops * over, part.score_numel * over, part.sequence)
        outside = y * (x if plan.tensor.sequence else 1)
        places = (_scaled(part.inner, scale / x), _scaled(part.outer, scale / outside))
        moved, products = sum(map(kernels.moved, places)), forward
        loss = kernels.loss(part.num_logits * scale / (x * y))
        forward += others + attention[0] + moved + loss / 2
        backward += 2 * others + attention[1] + sum(map(kernels.moved_backward, places)) + loss / 2
        recompute = plan.memory.recompute if self._is_block(part) else "none"
        again = {"none": 0.0, "full": forward, "selective": self._selective(attention[0], moved, products)}[recompute]
        host = self.software.host_seconds * _num_operations(part)
        host_backward = 2 * host + (host if recompute == "full" else 0)
        return Seconds(max(forward, host), max(backward + again, host_backward))

    def _is_block(self, part: Part) -> bool:
        return part is not self.workload.first and part is not self.workload.last

    def _selective(self, attention: float, moved: float, products: float) -> float:
        return {"attention": attention, "cheap": moved, "other": moved + products / 2}[self.software.selective]

    def calls(self, part: Part, plan: Plan, micro_batch: int) -> Iterator[Call]:
        """The collectives of x and y around a part's matmuls, by AxoNN's terms: a matmul's outputs are summed over the
        axis of its inputs, and the gradient of its input over the axis of its outputs.
        """
        x, y = plan.tensor.x, plan.tensor.y
        scale = 2 * micro_batch / plan.context.degree
        is_recomputed = plan.memory.recompute == "full" and self._is_block(part)
        for product in part.products:
            over_out, over_in = (y, x) if product.kind == "row" else (x, y)
            out_axis, in_axis = ("y", "x") if product.kind == "row" else ("x", "y")
            if product.kind == "whole":
                continue
            if over_in > 1:
                num_bytes = scale * product.rows * product.outputs / over_out
                yield Call(in_axis, "all_reduce", num_bytes, "forward")
                if is_recomputed:
                    yield Call(in_axis, "all_reduce", num_bytes, "backward")
            if over_out > 1 and product.enters:
                num_bytes = scale * product.rows * product.inputs / over_in
                yield Call(out_axis, "all_reduce", num_bytes, "backward")
                if plan.memory.recompute == "selective" and self.software.selective == "other" and plan.tensor.sequence:
                    yield Call(out_axis, "all_gather", num_bytes, "backward")

    def inside(self, part: Part, plan: Plan, micro_batch: int) -> Seconds:
        """A part's kernels, and its collectives as far as nothing hides them."""
        own = self.part(part, plan, micro_batch)
        told = {"forward": 0.0, "backward": 0.0}
        copied = 0.0
        for call in self.calls(part, plan, micro_batch):
            told[call.phase] += self.seconds(call.axis, call.operation, call.num_bytes, plan)
            if self.software.copies_sequence and plan.tensor.sequence:  # read and written, of a gather and a scatter
                copied += 4 * call.num_bytes / self._kernels[plan.precision].bytes_per_second / 2
        own = own.plus(Seconds(copied, copied))
        if self.software.hides_tensor:
            first = 1 / plan.tensor.x  # of the pieces, which nothing hides
            hidden = (_beside(own[i], told[phase], first * told[phase]) for i, phase in enumerate(told))
            return Seconds(*hidden)
        if self.software.hides_input:
            hidden_backward = _beside(own.backward / 2, told["backward"]) + own.backward / 2  # dW is half of backward
            return Seconds(own.forward + told["forward"], hidden_backward)
        return own.plus(Seconds(told["forward"], told["backward"]))

    def exposed(self, part: Part, plan: Plan, micro_batch: int) -> dict[str, float]:
        """What its collectives add to a part, by axis."""
        told: defaultdict[str, float] = defaultdict(float)
        for call in self.calls(part, plan, micro_batch):
            told[call.axis] += self.seconds(call.axis, call.operation, call.num_bytes, plan)
        added = sum(self.inside(part, plan, micro_batch)) - sum(self.part(part, plan, micro_batch))
        return {axis: added * seconds / sum(told.values()) for axis, seconds in told.items() if seconds}

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
        count = max(1, len(work.blocks) // degree)
        alone, share = share, self._beside_shards(share, held, count, plan, ignored)
        slowest = share.plus(
            last if degree > 1 and sum(last) > sum(first) else first if degree > 1 else first.plus(last)
        )
        makespan = num_micro_batches * sum(slowest)
        if degree > 1:
            wait = sum(share) / chunks - (share.backward / 2 if plan.pipe.schedule == "zero-bubble" else 0)
            makespan += (degree - 1) * (wait + 2 * self._message_seconds(plan))
        reduction = self._reduction(largest, plan, [alone], count, ignored)
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
        makespan, bubble, timeline = self._run(plan, stages, num_micro_batches)
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
        gather = count * self.seconds("shard", "all_gather", 2 * size / count, plan) if plan.shard.stage == 3 else 0.0
        gradients = self.software.gradient_bytes * size / count
        scatter = count * self.seconds("shard", "reduce_scatter", gradients, plan)
        scatter = scatter if plan.memory.accumulate == "slice" else 0.0
        forward = _beside(stage.forward, gather, gather / count)
        backward = _beside(stage.backward, gather + scatter, (gather + scatter) / count)
        exposed["shard"] = exposed.get("shard", 0.0) + forward + backward - sum(stage)
        return Seconds(forward, backward)

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

    def _reduction(
        self, largest: float, plan: Plan, stages: list[Seconds], count: int, exposed: dict[str, float]
    ) -> float:
        """What a step takes longer for gradients over shard, then data; the last backward hides what it can."""
        num_bytes = largest * self.software.gradient_bytes
        told = 0.0
        if plan.memory.accumulate == "whole":
            told += count * self.seconds("shard", "reduce_scatter", num_bytes / count, plan)
        if plan.shard.degree > 1 and plan.shard.stage < 3:
            told += count * self.seconds("shard", "all_gather", 2 * largest / count, plan)
        rest = largest / plan.shard.degree
        if self.software.shards_optimizer:
            told += count * self.seconds("data", "reduce_scatter", rest * self.software.gradient_bytes / count, plan)
            told += count * self.seconds("data", "all_gather", 2 * rest / count, plan)
        else:
            told += count * self.seconds("data", "all_reduce", rest * self.software.gradient_bytes / count, plan)
        if self.software.hides_gradients:
            # The last stage to finish is the first; parameters gathered for backward run on the same link.
            longest = max(stage.backward for stage in stages)
            gather = 2 * largest if plan.shard.stage == 3 else 0.0
            before = count * self.seconds("shard", "all_gather", gather / count, plan)
            without = _beside(longest, before, before / count)
            told = _beside(longest, before + told, (before + told) / count) - without
        exposed["data"] = exposed.get("data", 0.0) + told
        return told

    def seconds(self, axis: str, operation: str, num_bytes: float, plan: Plan) -> float:
        """One collective over an axis of the plan."""
        degree = plan.degree(axis)
        if degree == 1 or not num_bytes:
            return 0.0
        link = self.cluster.axis_link(plan.inner(axis), degree)
        wire, kind = (self.cluster.node.inter, "inter") if link.crosses_nodes else (self.cluster.node.intra, "intra")
        bandwidth = link.bandwidth_bytes_per_second * (wire.share or LINK_SHARE[kind])
        return ring_seconds(operation, num_bytes, degree, bandwidth, link.latency_seconds)


def _beside(compute: float, told: float, floor: float = 0.0) -> float:
    """Compute with a collective that runs beside it; at least `floor` of the collective is exposed."""
    return compute + OVERLAP_LOSS * min(compute, told) + max(floor, told - compute)


def _scaled(moved: Moved, scale: float) -> Moved:
    return Moved(int(moved[0] * scale), moved[1], int(moved[2] * scale), moved[3])


def _num_operations(part: Part) -> int:
    """What the host issues in one forward."""
    return len(part.products) + bool(part.attention_flops) + part.inner.num_kernels + part.outer.num_kernels


__all__ = ["Call", "Seconds", "StepModel", "StepTime", "simulate"]

"""The time of one step under a plan: kernels, collectives, what hides behind what, and the schedule's own list.

A plan's stages are timed for one micro-batch (compute, then the collectives of x, y and context that nothing hides);
the schedule's list is simulated with these times; then come the gradients' reduction, as far as backward does not hide
it, and the optimizer. Gathers of `shard` run beside a micro-batch's compute and cost what is longer than it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

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
    software: Software = Software()
    numel: tuple[int, int, int] = (0, 0, 0)  # parameters of the first end, one block, the last end

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
        host = self.software.host_seconds * _num_kernels(part, self.software.fused)
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


def _num_kernels(part: Part, fused: bool) -> int:
    between = part.inner.plus(part.outer)
    attention = bool(part.attention_flops) * 2
    return len(part.products) + attention + (between.fused_kernels if fused else between.num_kernels)


@lru_cache(maxsize=4096)
def schedule_of(name: str, degree: int, num_micro_batches: int, options: tuple[tuple[str, int], ...]) -> object:
    return make_schedule(name, degree, num_micro_batches, **dict(options))


__all__ = ["Call", "Seconds", "StepModel", "StepTime", "simulate"]

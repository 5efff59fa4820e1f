"""The time of one micro-batch in one block on one rank: kernels, and the collectives that are not hidden.

The collectives are those that the strategies of the axes state (`Strategy.block_calls`). Each says which work may run
at the same time: matmuls, attention or the gradients of inputs. A block takes at least the host's time to issue its
operations.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self, get_args

from weft.cluster.collective_choice import Levels, between_sizes, calls_of
from weft.cluster.hardware import DTYPES, Cluster, ring_seconds
from weft.inspection.memory_traffic import MemoryTraffic
from weft.mesh import level_degrees
from weft.parallel.apply import STRATEGIES
from weft.parallel.context.closed_form import attends_again, key_numel
from weft.parallel.fp8.matmuls import MULTIPLE
from weft.parallel.tensor.closed_form import gathers_again, gathers_fp8
from weft.plan import Plan
from weft.planner.expert_time import expert_seconds
from weft.planner.kernels import ALIGNED_ELEMENTS, BACKWARD_PASSES, Kernels
from weft.planner.overlap import beside
from weft.planner.question import inner_settings
from weft.profiling.software import BlockPass, Software
from weft.profiling.workload import Beside, BlockWork, Call, Product, Workload
from weft.strategy import Strategy

BLOCK_AXES = [one for one in STRATEGIES if type(one).block_calls is not Strategy.block_calls]
BESIDE = get_args(Beside)
# The share of a link's printed bandwidth that collectives reach: about 235 of 300 GB/s inside a DGX A100, 360 of 450
# inside a DGX H100, and 85 to 95 % of the NICs between nodes, as nccl-tests are commonly reported (not re-checked).
LINK_SHARE = {"intra": 0.78, "inter": 0.85}
OTHER_PRODUCTS = 0.6  # speed of other products and of convolutions in language models, relative to the best matmul
# The host's time for backward divided by that for forward: backward has twice the kernels, but autograd issues them
# without Python.
HOST_BACKWARD = 0.5
LOSS_OPERATION_BYTES = 5  # bytes per logit that one operation of the loss moves
# Ring attention adds up partial results in float32 (`parallel/context/block_attention.py`). Bytes, eager or fused: per
# query element in forward (scale, weigh, add), per query element in backward (add), and per key element in backward
# (clear, add, add what arrives).
RING_BYTES = {False: (26, 10, 26), True: (10, 10, 10)}
EXCHANGE_COPIES = 2  # copies of tensors in an all-to-all: one before and one after


class Seconds(NamedTuple):
    """Seconds of forward and backward of one micro-batch."""

    forward: float = 0.0
    backward: float = 0.0

    def plus(self, other: Seconds, times: float = 1) -> Seconds:
        return Seconds(self.forward + times * other.forward, self.backward + times * other.backward)


class _KernelSeconds(NamedTuple):
    """Kernel times of one micro-batch in one block on one rank, without recompute."""

    whole: Seconds
    attention: Seconds
    products: float  # matmuls and convolutions, forward
    last: float  # the part of `products` in last layers, which full recompute may skip
    moved: float  # operations that only move bytes, forward
    again: float  # the time that selective recompute of cheap operations adds


@dataclass(frozen=True)
class _KnownTimes:
    """Times that were computed before. They are the same on any number of nodes above one."""

    runs: dict[Any, tuple[BlockWork, _KernelSeconds]] = field(default_factory=dict)
    chains: dict[Any, tuple[Seconds, Seconds, Seconds]] = field(default_factory=dict)
    ends: dict[Any, list[Seconds]] = field(default_factory=dict)
    links: dict[tuple[int, int, str], tuple[float, float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class MicroBatchModel:
    """Times of one model's blocks on one cluster. `workload` is for one sequence."""

    workload: Workload
    cluster: Cluster
    software: Software

    def on(self, cluster: Cluster) -> Self:
        """Returns the same model on another cluster."""
        found, same = replace(self, cluster=cluster), replace(self.cluster, num_nodes=cluster.num_nodes)
        if cluster == same and min(cluster.num_nodes, self.cluster.num_nodes) > 1:
            vars(found)["_known"] = self._known
        return found

    @cached_property
    def _known(self) -> _KnownTimes:
        return _KnownTimes()

    @cached_property
    def _levels(self) -> dict[tuple[tuple[int, ...], str], dict[str, Levels]]:
        return {}

    @cached_property
    def _kernels(self) -> dict[str, Kernels]:
        return {name: Kernels(self.cluster.node.device, self.software, name) for name in DTYPES}

    @cached_property
    def _fp8_kernels(self) -> Kernels:
        return Kernels(self.cluster.node.device, replace(self.software, fp8="row"))

    @cached_property
    def _head_kernels(self) -> dict[str, Kernels]:
        """Kernels of the head's product, which is never fp8 because its results are the logits."""
        software = replace(self.software, fp8="")
        return {name: Kernels(self.cluster.node.device, software, name) for name in DTYPES}

    # --- kernels

    def part(self, part: BlockWork, plan: Plan, micro_batch: float) -> Seconds:
        """Seconds of a block's kernels on one rank, with recompute; at least the host's time to issue them."""
        return _longer(self._kernels_of(part, plan, micro_batch)[0], self._host(part, plan, 0))

    def _kernels_of(self, part: BlockWork, plan: Plan, micro_batch: float) -> tuple[Seconds, Seconds]:
        """Returns the seconds of (all kernels, attention kernels), with recompute."""
        key = (id(part), inner_settings(plan), micro_batch, plan.matmul)
        known = self._known.runs.get(key)
        if known is None:  # holds the part: its id stays unique
            known = self._known.runs[key] = part, self._run_once(part, plan, micro_batch)
        once = known[1]
        recompute = plan.memory.recompute if self._is_block(part) else "none"
        attention = once.attention
        if recompute == "none":
            return once.whole, attention
        if recompute == "full":
            again, attends = once.whole.forward - self.software.stops_early * once.last, True
        else:
            kind, attends = self.software.selective, attends_again(plan, self.software)
            again = {"attention": 0.0, "cheap": once.again, "other": once.moved + once.products / 2}[kind]
            again += attends * attention.forward
        forward, backward = once.whole
        attention = Seconds(attention.forward, attention.backward + attends * attention.forward)
        return Seconds(forward, backward + again), attention

    def _run_once(self, part: BlockWork, plan: Plan, micro_batch: float) -> _KernelSeconds:
        kernels = self._kernels[plan.precision]
        x, y = plan.tensor.x, plan.tensor.y
        scale = micro_batch / plan.num_parts("tokens")
        forward = backward = last = heads = 0.0
        for product in part.products:
            rows, inputs, outputs = product.local(x, y)
            heads += inputs * outputs if product.kind == "head" else 0
            if product.kind == "head" and self.software.pads_head and x * y == 1:
                outputs = -(-outputs // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS
            gathered = x if gathers_fp8(plan, self.software) and product.kind != "row" else 1
            own = self._head_kernels[plan.precision] if product.kind == "head" else kernels
            own = self._fp8_kernels if self._is_fp8(part, product, plan) else own
            times = own.linear(math.ceil(rows * scale), inputs, outputs, 1 / gathered)
            forward, backward, last = forward + times[0], backward + times[1], last + product.is_last * times[0]
        for one in part.filters:
            times = kernels.convolution(one, scale)
            forward, backward = forward + times[0], backward + times[1]
        products = forward
        others = (part.other_flops - part.expert_flops) / (x * y) / OTHER_PRODUCTS
        others *= scale / kernels.flops_per_second
        experts = self._experts(part, plan, scale, kernels)
        attention = self._attention(part, plan, scale)
        outside = y * (x if plan.tensor.sequence else 1)
        places = (_scaled(part.inner, scale / x), _scaled(part.outer, scale / outside))
        moved, moved_backward, again = self._moved(part, places, kernels)
        loss = kernels.loss(part.num_logits * scale / (x * y))
        forward += others + experts.forward + attention.forward + moved + loss / 2
        backward += 2 * others + experts.backward + attention.backward + moved_backward + loss / 2
        backward += self.software.head_bytes * heads / kernels.bytes_per_second
        return _KernelSeconds(Seconds(forward, backward), attention, products, last, moved, again)

    def _experts(self, part: BlockWork, plan: Plan, scale: float, kernels: Kernels) -> Seconds:
        return Seconds(*expert_seconds(part, plan, scale, kernels))

    def _moved(self, part: BlockWork, places: Sequence[MemoryTraffic], kernels: Kernels) -> tuple[float, float, float]:
        """Seconds of operations that only move bytes: (forward, backward, repeated by selective recompute).

        Only blocks are compiled. Layers outside of blocks run eagerly.
        """
        if self.software.compiled and not self._is_block(part):
            eager = [one._replace(fused_bytes=one.num_bytes, fused_kernels=one.num_kernels) for one in places]
            moved = sum(map(kernels.moved, eager))
            return moved, BACKWARD_PASSES[False] * moved, moved
        if not self.software.compiled or part.compiled is None:
            moved = sum(map(kernels.moved, places))
            return moved, sum(map(kernels.moved_backward, places)), moved
        whole = part.inner.fused_bytes + part.outer.fused_bytes
        share, found = sum(one.fused_bytes for one in places) / whole if whole else 0.0, part.compiled
        return (
            kernels.streamed(found.forward_bytes * share, found.forward_kernels),
            kernels.streamed(found.backward_bytes * share, found.backward_kernels),
            kernels.streamed(found.again_bytes * share, found.again_kernels),
        )

    def _attention(self, part: BlockWork, plan: Plan, scale: float) -> Seconds:
        """Attention of `scale` sequences; a ring adds up the results of blocks of the rank's own length."""
        kernels, degree = self._kernels[plan.precision], plan.context.degree
        share = scale / plan.tensor.x
        is_ring = degree > 1 and plan.context.kind == "ring"
        sequence = part.sequence // degree if is_ring else part.sequence
        is_grouped = part.key_numel < part.query_numel
        flops, scores = part.attention_flops * share, part.score_numel * share
        forward, backward = kernels.attention(flops, scores, sequence, is_grouped=is_grouped)
        if is_ring:
            queries, keys = part.query_numel * share, key_numel(part, plan, self.software) * scale
            moved = RING_BYTES[self.software.fuses_ring]
            adding = [degree * num_bytes / kernels.bytes_per_second for num_bytes in moved]
            forward, backward = forward + adding[0] * queries, backward + adding[1] * queries + adding[2] * keys
        elif degree > 1:
            copied = EXCHANGE_COPIES * 4 * (2 * part.query_numel * share + key_numel(part, plan, self.software) * scale)
            forward += copied / kernels.bytes_per_second
            backward += copied / kernels.bytes_per_second
        return Seconds(forward, backward)

    def _is_fp8(self, part: BlockWork, product: Product, plan: Plan) -> bool:
        """Does the plan run this linear layer in fp8, and has the device an fp8 rate?"""
        takes_part = self._is_block(part) and product.inputs % MULTIPLE == product.outputs % MULTIPLE == 0
        return plan.matmul == "fp8" and takes_part and "fp8" in self.cluster.node.device.peak_flops

    def _is_block(self, part: BlockWork) -> bool:
        return part is not self.workload.first and part is not self.workload.last

    def _host(self, part: BlockWork, plan: Plan, num_calls: float) -> Seconds:
        """Seconds that the host needs to issue a block's kernels and collectives."""
        is_recomputed = plan.memory.recompute == "full" and self._is_block(part)
        if self.software.compiled and part.compiled is not None:
            num_kernels = len(part.products) + bool(part.attention_flops)
            launches = self.software.host_seconds * (num_kernels + part.compiled.forward_kernels + num_calls)
            behind = self.software.host_seconds * (2 * num_kernels + part.compiled.backward_kernels + num_calls)
            behind += is_recomputed * launches + self.software.gradient_seconds * part.num_parameters
            return Seconds(self.software.call_seconds + launches, self.software.call_seconds + behind)
        num_operations = len(part.products) + len(part.filters) + bool(part.attention_flops) + num_calls
        num_operations += part.inner.num_kernels + part.outer.num_kernels
        of_loss = self.software.loss_bytes / LOSS_OPERATION_BYTES if part.num_logits else 0.0
        forward = self.software.host_seconds * (num_operations + of_loss)
        return Seconds(forward, (HOST_BACKWARD + is_recomputed) * forward)

    # --- collectives

    def calls(self, part: BlockWork, plan: Plan, micro_batch: float) -> Iterator[Call]:
        """Yields the collectives of a block for one micro-batch, as the strategies of the axes state them."""
        block = BlockPass(part, micro_batch, self.software, self._is_block(part))
        for strategy in BLOCK_AXES:
            yield from strategy.block_calls(block, plan)

    def kept_bytes(self, plan: Plan) -> float:
        """Bytes that `memory.keep_collectives` keeps of a block and a micro-batch: results that recompute would get
        by communicating again.
        """
        if not plan.memory.keep_collectives:
            return 0.0
        repeating = replace(plan, memory=replace(plan.memory, keep_collectives=False))
        fewer, more = (
            sum(
                call.num_bytes * call.times for call in self.calls(self.workload.blocks[-1], one, plan.micro_batch or 1)
            )
            for one in (plan, repeating)
        )
        return more - fewer

    def inside(self, part: BlockWork, plan: Plan, micro_batch: float) -> Seconds:
        """Seconds of a block's kernels and of the collectives not hidden; at least the host's time to issue them."""
        calls = list(self.calls(part, plan, micro_batch))
        host = self._host(part, plan, sum(call.times for call in calls if call.phase == "forward"))
        return _longer(self._on_device(part, calls, plan, micro_batch), host)

    def exposed(self, part: BlockWork, plan: Plan, micro_batch: float) -> dict[str, float]:
        """Seconds that collectives add to a block, by axis."""
        communication: defaultdict[str, float] = defaultdict(float)
        for call in self.calls(part, plan, micro_batch):
            communication[call.axis] += call.times * self.seconds(call.axis, call.operation, call.num_bytes, plan)
        added = sum(self.inside(part, plan, micro_batch)) - sum(self.part(part, plan, micro_batch))
        return {
            axis: added * seconds / sum(communication.values()) for axis, seconds in communication.items() if seconds
        }

    def _on_device(self, part: BlockWork, calls: list[Call], plan: Plan, micro_batch: float) -> Seconds:
        own, attention = self._kernels_of(part, plan, micro_batch)
        if not calls:
            return own
        piles = {work: [0.0, 0.0] for work in BESIDE}
        copied, ring = 0.0, 1
        for call in calls:
            seconds = call.times * self.seconds(call.axis, call.operation, call.num_bytes, plan)
            piles[call.beside][call.phase == "backward"] += seconds
            copied += call.copies * call.num_bytes / self._kernels[plan.precision].bytes_per_second
            if call.beside == "attention":
                ring = max(ring, plan.degree(call.axis))
        own = own.plus(Seconds(copied, copied)).plus(Seconds(*piles["nothing"]))
        own = own.plus(self._beside_attention(attention, piles["attention"], ring))
        communication, again = piles["matmuls"], piles["input gradients"][True]
        if self.software.hides_tensor:
            first = 1 / plan.tensor.x  # share of the first piece, which nothing hides
            return Seconds(
                *(self.beside(mine, other, first * other) for mine, other in zip(own, communication, strict=True))
            )
        if self.software.hides_input:
            # dW is half of backward and hides the sums of dI. dI hides the repeated gathers for dW.
            halves = (self.beside(own.backward / 2, mine) for mine in (communication[1], again))
            return Seconds(own.forward + communication[0], sum(halves))
        return own.plus(Seconds(communication[0], communication[1] + again))

    def beside(self, compute: float, communication: float, floor: float = 0.0) -> float:
        """Seconds of compute with a collective that runs at the same time, if the software overlaps them."""
        return beside(compute, communication, floor, self.software.overlaps)

    def _beside_attention(self, attention: Seconds, communication: list[float], degree: int) -> Seconds:
        """Seconds that collectives add which run during all of the `degree` blocks of attention but the last."""
        if not any(communication):
            return Seconds()
        shares = [seconds * (1 - 1 / degree) for seconds in attention]
        return Seconds(*(self.beside(share, mine) - share for share, mine in zip(shares, communication, strict=True)))

    def seconds(self, axis: str, operation: str, num_bytes: float, plan: Plan) -> float:
        """Seconds of one collective over an axis of the plan."""
        inner, degree = place(plan, axis, self.software.pipe_outside)
        if degree == 1 or not num_bytes:
            return 0.0
        levels = self._levels_of(plan).get(axis) if plan.hierarchical else None
        if levels is not None:
            return self._two_level_seconds(levels, operation, num_bytes, inner)
        return self._call_seconds(operation, num_bytes, inner, degree)

    def _two_level_seconds(self, levels: Levels, operation: str, num_bytes: float, inner: int) -> float:
        """Seconds of one collective over an axis with two levels, by the algorithm that the plan uses for it."""
        algorithm = levels.algorithm(operation, int(num_bytes))
        if levels.is_measured(operation):
            return levels.seconds(algorithm, operation, num_bytes)
        num_nodes, num_local, per_node = levels.num_nodes, levels.num_local, self.cluster.node.num_devices
        spans = {"": (inner, num_nodes * num_local), "node": (per_node, num_nodes), "local": (inner, num_local)}
        calls = calls_of(algorithm, operation, int(num_bytes), num_nodes, num_local)
        return sum(self._call_seconds(name, size, *spans[level]) for level, name, size in calls)

    def _levels_of(self, plan: Plan) -> dict[str, Levels]:
        key = (tuple(plan.degrees.values()), plan.communication.between)
        if key not in self._levels:
            self._levels[key] = level_degrees(plan, self.cluster.node.num_devices, self.cluster)
        return self._levels[key]

    def _call_seconds(self, operation: str, num_bytes: float, inner: int, degree: int) -> float:
        """Seconds of one call of the library over `degree` ranks that are `inner` apart: as measured, if it was."""
        measured = self.cluster.measured(operation, inner, degree)
        if measured is not None:
            return between_sizes(measured, num_bytes)
        kind = operation if operation in ("send", "all_to_all") else "ring"
        link = self._known.links.get((inner, degree, kind))
        if link is None:
            link = self._known.links[inner, degree, kind] = self._link(inner, degree, kind)
        bandwidth, latency, start = link
        return ring_seconds(operation, num_bytes, degree, bandwidth, latency) + start * (kind != "send")

    def _link(self, inner: int, degree: int, kind: str = "ring") -> tuple[float, float, float]:
        """Returns (bandwidth of collectives, latency of a hop, fixed time of a collective) of a link.

        Rings of a node share its NICs. In an all-to-all, every device sends to all other nodes what is not for its own.
        """
        link, node = self.cluster.axis_link(inner, degree, kind == "send"), self.cluster.node
        wire, place = (node.inter, "inter") if link.crosses_nodes else (node.intra, "intra")
        bandwidth = link.bandwidth_bytes_per_second
        if link.crosses_nodes and kind == "all_to_all":
            num_local = min(degree - 1, max(1, node.num_devices // inner))  # members in a node
            own = wire.bandwidth_bytes_per_second / node.num_devices
            bandwidth = min(bandwidth, own * (degree - 1) / (degree - num_local))
        return bandwidth * (wire.share or LINK_SHARE[place]), link.latency_seconds, wire.start_seconds

    # --- all blocks

    def chain(self, plan: Plan) -> Seconds:
        """Seconds of one micro-batch in the whole model, split only by the settings that shape a rank's own work."""
        first, blocks, last = self._chain(plan)
        return blocks.plus(first).plus(last)

    def kernel_seconds(self, plan: Plan) -> float:
        """A lower bound of `chain`: the kernels alone."""
        assert plan.micro_batch is not None
        parts = [(self.workload.first, 1), *self._kinds.items(), (self.workload.last, 1)]
        kernels = sum(count * sum(self._kernels_of(part, plan, plan.micro_batch)[0]) for part, count in parts)
        return kernels * (1 - 1e-9)  # sums in another order differ in their last digits

    @cached_property
    def _kinds(self) -> Counter[BlockWork]:
        return Counter(self.workload.blocks)

    def _chain(self, plan: Plan) -> tuple[Seconds, Seconds, Seconds]:
        """Seconds of one micro-batch in (the first end, all blocks, the last end)."""
        inner = (inner_settings(plan), plan.matmul)
        policy = plan.memory.recompute, plan.memory.keep_collectives
        found = self._known.chains.get((inner, policy))
        if found is None:
            assert plan.micro_batch is not None
            blocks = Seconds()
            for part, count in self._kinds.items():
                blocks = blocks.plus(self.inside(part, plan, plan.micro_batch), count)
            of_ends = (inner, gathers_again(plan, self.software))  # recompute does not apply to the ends
            if of_ends not in self._known.ends:
                ends = (self.workload.first, self.workload.last)
                self._known.ends[of_ends] = [self.inside(end, plan, plan.micro_batch) for end in ends]
            first, last = self._known.ends[of_ends]
            found = self._known.chains[inner, policy] = (first, blocks, last)
        return found


def place(plan: Plan, axis: str, pipe_outside: bool = False) -> tuple[int, int]:
    """Returns (the distance in ranks between neighbours on an axis, the axis' degree).

    "tile", "expert and shard", "replicas" and "expert replicas" are joint axes. Replicas are the ranks over which
    software may shard the optimizer state: data and expert directly outside context, and for experts those ranks that
    hold the same.
    """
    if axis == "tile":
        return plan.inner("columns"), plan.tile.degree
    if axis == "experts":  # as if its axes were neighbours
        return plan.inner(plan.expert_axes[-1]), plan.num_expert_parts
    if axis == "expert and shard":
        return plan.inner("expert"), plan.expert * plan.shard.degree
    if axis == "replicas":
        return plan.inner("context"), plan.data * plan.expert * plan.context.degree
    if axis == "expert replicas":  # as if context were outside of expert
        replicas = expert_replicas(plan)
        return plan.inner("pipe") * plan.data // replicas, replicas
    if pipe_outside and axis in ("data", "pipe"):
        inner, pipe = plan.place("pipe")
        return (inner, plan.data) if axis == "data" else (inner * plan.data, pipe)
    return plan.place(axis)


def expert_replicas(plan: Plan) -> int:
    """The number of ranks of data and context that hold the same experts."""
    return plan.data * (1 if "context" in plan.expert_over else plan.context.degree)


def _longer(one: Seconds, other: Seconds) -> Seconds:
    return Seconds(max(one[0], other[0]), max(one[1], other[1]))


def _scaled(moved: MemoryTraffic, scale: float) -> MemoryTraffic:
    return MemoryTraffic(int(moved[0] * scale), moved[1], int(moved[2] * scale), moved[3])

"""Collectives over an axis that crosses nodes, in two levels: between nodes and inside the node (PCCL).

Rank r of the axis is on node r // L with local index r % L, for N nodes with L ranks each. W is the bytes of the whole
tensor:

    all_gather:      between nodes among equal local indices (W/L), inside the node (W), permute [L, N] to [N, L]
    reduce_scatter:  permute [N, L] to [L, N], inside the node (W), between nodes (W/L)
    all_reduce:      reduce-scatter inside (W), all-reduce between (W/L), all-gather inside (W); no order, no permute
    all_to_all:      inside the node by the receiver's local index (W), then between nodes by its node (W)

All ranks of a node communicate with other nodes at the same time, so all NICs are used and each carries 1/L of the
bytes. The latency is that of N ranks plus that of L ranks instead of N·L. Between nodes, the library's collective or
messages are used (`node_messages.py`), as `cluster/collective_choice.py` says for each operation and size. The permute
needs a second buffer of W bytes while an operation runs, and what follows the first operation starts when the caller
waits. See PCCL (arXiv 2504.18658).

An axis has `levels` if its mesh found such nodes. Other axes, and small all-reduces, use the flat collective. If ranks
share devices, the levels are the leaders of devices and the ranks of a device (`device_sum.py`): all-reduces of any
size use them, other operations are flat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from weft.cluster.collective_choice import Levels, padded_bytes
from weft.cluster.rounds import MESSAGES, Algorithm
from weft.cluster.small_choice import SYMMETRIC
from weft.comm import collectives, node_messages
from weft.comm.collectives import Axis, Pending, Reduction
from weft.comm.device_sum import DeviceSum
from weft.comm.ledger import Key, Traffic, Traffics, add_traffic
from weft.comm.small_sums import small_steps, symmetric_sum


class Chain(Pending):
    """A sequence of operations, each of which needs the result of the one before. The first has started."""

    def __init__(self, steps: Iterator[Pending]) -> None:
        self._steps = steps
        self._current = next(steps, None)

    def wait(self) -> None:
        """Run the remaining operations. May be called again."""
        while self._current is not None:
            self._current.wait()
            self._current = next(self._steps, None)


def all_gather(whole: Tensor, part: Tensor, axis: Axis) -> Pending:
    """Fill `whole` with the parts of all ranks in order. `part` may be this rank's slice of `whole`."""
    algorithm = _algorithm(axis, "all_gather", whole)
    if axis.levels is None or algorithm == "flat":
        return collectives.all_gather(whole, part, axis)
    assert whole.numel() == part.numel() * axis.degree
    return Chain(_all_gather(whole, part, *axis.levels, algorithm))


def reduce_scatter(part: Tensor, whole: Tensor, axis: Axis) -> Pending:
    """Sum `whole` over the axis and write this rank's part of the result to `part`."""
    algorithm = _algorithm(axis, "reduce_scatter", whole)
    if axis.levels is None or algorithm == "flat":
        return collectives.reduce_scatter(part, whole, axis)
    assert whole.numel() == part.numel() * axis.degree
    return Chain(_reduce_scatter(part, whole, *axis.levels, algorithm))


def all_reduce(tensor: Tensor, axis: Axis, reduction: Reduction = "sum") -> Pending:
    """Reduce `tensor` in place over the axis."""
    if axis.small is not None and axis.degree > 1 and reduction == "sum":
        strategy = axis.small.strategy(tensor.numel() * tensor.element_size())
        if strategy in SYMMETRIC and axis.symmetric is not None and axis.symmetric.takes(tensor):
            return symmetric_sum(tensor, axis, strategy)
        if strategy not in ("library", *SYMMETRIC):
            return Chain(small_steps(tensor, axis, strategy))
    if axis.levels is not None and (ranks := axis.levels[1].device_ranks) is not None and ranks.takes(tensor):
        return DeviceSum(tensor, axis.levels, reduction)
    algorithm = _algorithm(axis, "all_reduce", tensor)
    if axis.levels is None or algorithm == "flat":
        return collectives.all_reduce(tensor, axis, reduction)
    return Chain(_all_reduce(tensor, *axis.levels, reduction, algorithm))


def all_to_all(
    received: Tensor, sent: Tensor, axis: Axis, rows: tuple[Sequence[int], Sequence[int]] | None = None
) -> Pending:
    """Send the i-th part of `sent` (along its first dim) to rank i of the axis, and receive its part for this rank.

    Parts are equal, or have as many rows as `rows` says: (those received from each rank, those sent to each rank). Only
    equal parts go in two levels.
    """
    algorithm = _algorithm(axis, "all_to_all", sent)
    if axis.levels is None or algorithm == "flat" or rows is not None:
        return collectives.all_to_all(received, sent, axis, rows)
    assert received.shape == sent.shape
    assert sent.shape[0] % axis.degree == 0
    return Chain(_all_to_all(received, sent, *axis.levels, algorithm))


def _algorithm(axis: Axis, operation: str, whole: Tensor) -> Algorithm:
    if axis.levels is None:
        return "flat"
    between, inside = axis.levels
    choice = axis.choice or Levels(between.degree, inside.degree)
    return choice.algorithm(operation, whole.numel() * whole.element_size())


def _all_gather(
    whole: Tensor, part: Tensor, between: Axis, inside: Axis, algorithm: Algorithm = "library"
) -> Iterator[Pending]:
    size = part.numel()
    of_nodes = part.new_empty(between.degree * size)  # [nodes, size]
    if algorithm in MESSAGES:
        yield from node_messages.gather(of_nodes, part, between, algorithm)
    else:
        yield collectives.all_gather(of_nodes, part.view(-1), between)
    of_all = part.new_empty(whole.numel())  # [local, nodes, size]
    yield collectives.all_gather(of_all, of_nodes, inside)
    ordered = of_all.view(inside.degree, between.degree, size).transpose(0, 1)
    whole.view(between.degree, inside.degree, size).copy_(ordered)


def _reduce_scatter(
    part: Tensor, whole: Tensor, between: Axis, inside: Axis, algorithm: Algorithm = "library"
) -> Iterator[Pending]:
    size = part.numel()
    by_local = whole.view(between.degree, inside.degree, size).transpose(0, 1).contiguous()  # [local, nodes, size]
    of_nodes = part.new_empty(between.degree * size)  # [nodes, size]
    yield collectives.reduce_scatter(of_nodes, by_local.view(-1), inside)
    if algorithm in MESSAGES:
        yield from node_messages.reduce_scatter(part, of_nodes, between, algorithm)
    else:
        yield collectives.reduce_scatter(part.view(-1), of_nodes, between)


def _all_reduce(
    tensor: Tensor, between: Axis, inside: Axis, reduction: Reduction, algorithm: Algorithm = "library"
) -> Iterator[Pending]:
    flat, itemsize = tensor.view(-1), tensor.element_size()
    num_blocks = between.degree if algorithm in MESSAGES else 1
    num_elements = padded_bytes(flat.numel() * itemsize, num_blocks, inside.degree) // itemsize
    whole = flat
    if num_elements > flat.numel():
        whole = flat.new_zeros(num_elements)
        whole[: flat.numel()].copy_(flat)
    part = flat.new_empty(num_elements // inside.degree)
    yield collectives.reduce_scatter(part, whole, inside, reduction)
    if algorithm in MESSAGES:
        yield from node_messages.all_reduce(part, between, algorithm, reduction)
    else:
        yield collectives.all_reduce(part, between, reduction)
    yield collectives.all_gather(whole, part, inside)
    if whole is not flat:
        flat.copy_(whole[: flat.numel()])


def _all_to_all(
    received: Tensor, sent: Tensor, between: Axis, inside: Axis, algorithm: Algorithm = "library"
) -> Iterator[Pending]:
    size = sent.numel() // (between.degree * inside.degree)
    by_local = sent.reshape(between.degree, inside.degree, size).transpose(0, 1).contiguous()  # to [local, nodes]
    from_locals = sent.new_empty(inside.degree, between.degree, size)  # from [local], to [nodes]
    yield collectives.all_to_all(from_locals, by_local, inside)
    by_node = from_locals.transpose(0, 1).contiguous()  # to [nodes], from [local]
    result = received.view(between.degree, inside.degree, size)  # from [nodes, local]
    if algorithm in MESSAGES:
        yield from node_messages.all_to_all(result, by_node, between, algorithm)
    else:
        yield collectives.all_to_all(result, by_node, between)


# --- predicted traffic


def expand(traffic: Traffics, levels: Mapping[str, Levels], is_leader: bool = True) -> dict[Key, Traffic]:
    """Convert traffic of flat collectives to that of two levels, as the ledger counts it. `levels` has the axes whose
    collectives have two levels. `is_leader`: is the rank the first of those that share its device?
    """
    expanded: list[Traffics] = []
    for (axis, operation), value in traffic.items():
        own = levels.get(axis)
        if own is None:
            expanded.append({(axis, operation): value})
            continue
        for num_bytes, calls in value.sizes.items():
            for level, name, each in own.calls(operation, num_bytes):
                if level == "leaders" and not is_leader:
                    continue
                key = (f"{axis}/{level}" if level else axis, name)
                expanded.append({key: Traffic(calls, calls * each)})
    return add_traffic(*expanded)

"""Collectives over an axis that crosses nodes, in two levels: between nodes and inside the node (PCCL).

Rank r of the axis is on node r // L with local index r % L, for N nodes with L ranks each. W is the bytes of the whole
tensor:

    all_gather:      between nodes among equal local indices (W/L), inside the node (W), permute [L, N] to [N, L]
    reduce_scatter:  permute [N, L] to [L, N], inside the node (W), between nodes (W/L)
    all_reduce:      reduce-scatter inside (W), all-reduce between (W/L), all-gather inside (W); no order, no permute

All ranks of a node communicate with other nodes at the same time, so all NICs are used and each carries 1/L of the
bytes. The latency is that of N ranks plus that of L ranks instead of N·L. The permute needs a second buffer of W bytes
while an operation runs, and the second level starts when the caller waits for the first. See PCCL (arXiv 2504.18658).

An axis has `levels` if its mesh found such nodes. Other axes, and small all-reduces, use the flat collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from weft.comm import collectives
from weft.comm.collectives import Axis, Pending, Reduction
from weft.comm.ledger import Key, Traffic, Traffics, add_traffic

# Parts of an all-reduce start at multiples of this, as GPU links prefer. The padding depends on the bytes only.
ALIGNMENT_BYTES = 16


class _Chain(Pending):
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
    if axis.levels is None:
        return collectives.all_gather(whole, part, axis)
    assert whole.numel() == part.numel() * axis.degree
    return _Chain(_all_gather(whole, part, *axis.levels))


def reduce_scatter(part: Tensor, whole: Tensor, axis: Axis) -> Pending:
    """Sum `whole` over the axis and write this rank's part of the result to `part`."""
    if axis.levels is None:
        return collectives.reduce_scatter(part, whole, axis)
    assert whole.numel() == part.numel() * axis.degree
    return _Chain(_reduce_scatter(part, whole, *axis.levels))


def all_reduce(tensor: Tensor, axis: Axis, reduction: Reduction = "sum") -> Pending:
    """Reduce `tensor` in place over the axis."""
    if axis.levels is None or _is_small(tensor.numel() * tensor.element_size(), axis.degree):
        return collectives.all_reduce(tensor, axis, reduction)
    return _Chain(_all_reduce(tensor, *axis.levels, reduction))


def _all_gather(whole: Tensor, part: Tensor, between: Axis, inside: Axis) -> Iterator[Pending]:
    size = part.numel()
    of_nodes = part.new_empty(between.degree * size)  # [nodes, size]
    yield collectives.all_gather(of_nodes, part.view(-1), between)
    of_all = part.new_empty(whole.numel())  # [local, nodes, size]
    yield collectives.all_gather(of_all, of_nodes, inside)
    ordered = of_all.view(inside.degree, between.degree, size).transpose(0, 1)
    whole.view(between.degree, inside.degree, size).copy_(ordered)


def _reduce_scatter(part: Tensor, whole: Tensor, between: Axis, inside: Axis) -> Iterator[Pending]:
    size = part.numel()
    by_local = whole.view(between.degree, inside.degree, size).transpose(0, 1).contiguous()  # [local, nodes, size]
    of_nodes = part.new_empty(between.degree * size)  # [nodes, size]
    yield collectives.reduce_scatter(of_nodes, by_local.view(-1), inside)
    yield collectives.reduce_scatter(part.view(-1), of_nodes, between)


def _all_reduce(tensor: Tensor, between: Axis, inside: Axis, reduction: Reduction) -> Iterator[Pending]:
    flat, itemsize = tensor.view(-1), tensor.element_size()
    num_elements = _padded_bytes(flat.numel() * itemsize, inside.degree) // itemsize
    whole = flat
    if num_elements > flat.numel():
        whole = flat.new_zeros(num_elements)
        whole[: flat.numel()].copy_(flat)
    part = flat.new_empty(num_elements // inside.degree)
    yield collectives.reduce_scatter(part, whole, inside, reduction)
    yield collectives.all_reduce(part, between, reduction)
    yield collectives.all_gather(whole, part, inside)
    if whole is not flat:
        flat.copy_(whole[: flat.numel()])


# --- predicted traffic


def expand(traffic: Traffics, levels: Mapping[str, tuple[int, int]]) -> dict[Key, Traffic]:
    """Convert traffic of flat collectives to that of two levels, as the ledger counts it. `levels` maps the names of
    axes to (number of nodes, ranks per node).
    """
    expanded: list[Traffics] = []
    for (axis, operation), value in traffic.items():
        for num_bytes, calls in value.sizes.items():
            for key, each in _calls(axis, operation, num_bytes, levels.get(axis)):
                expanded.append({key: Traffic(calls, calls * each)})
    return add_traffic(*expanded)


def _calls(axis: str, operation: str, num_bytes: int, levels: tuple[int, int] | None) -> list[tuple[Key, int]]:
    """The calls, with their bytes, that replace one call of a flat operation."""
    if levels is None or (operation == "all_reduce" and _is_small(num_bytes, levels[0] * levels[1])):
        return [((axis, operation), num_bytes)]
    between, inside, num_local = f"{axis}/node", f"{axis}/local", levels[1]
    if operation in ("all_gather", "reduce_scatter"):
        return [((between, operation), num_bytes // num_local), ((inside, operation), num_bytes)]
    if operation == "all_reduce":
        padded = _padded_bytes(num_bytes, num_local)
        return [
            ((inside, "reduce_scatter"), padded),
            ((between, "all_reduce"), padded // num_local),
            ((inside, "all_gather"), padded),
        ]
    return [((axis, operation), num_bytes)]


def _is_small(num_bytes: int, degree: int) -> bool:
    """Whether an all-reduce has so few bytes per rank that three operations would only add latency."""
    return num_bytes < ALIGNMENT_BYTES * degree


def _padded_bytes(num_bytes: int, num_local: int) -> int:
    """The bytes of a tensor padded to equal, aligned parts for all ranks of a node."""
    unit = ALIGNMENT_BYTES * num_local
    return -(-num_bytes // unit) * unit

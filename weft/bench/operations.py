"""The operations of `weft bench links`: messages (`messages.py`) and collectives, by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.bench.checked_operation import STALE, BenchOperation, Buffers, pattern
from weft.bench.messages import MESSAGES
from weft.comm import Axis, all_gather, all_reduce, all_to_all, barrier, broadcast, exchange, reduce_scatter


def _equal_parts(size: int, degree: int) -> int:
    return -(-size // degree) * degree


def _sum(degree: int, size: int, iteration: int) -> Tensor:
    return torch.stack([pattern(rank, size, iteration) for rank in range(degree)]).sum(0, dtype=torch.int32)


def _parts_for(rank: int, parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.chunk(len(parts))[rank] for part in parts])


def _uneven_counts(size: int, degree: int) -> list[int]:
    """Elements for each receiver: in proportion to 1, 2, 3, ..., so that ranks receive different amounts."""
    total = degree * (degree + 1) // 2
    return [max(1, size * (index + 1) // total) for index in range(degree)]


def _uneven_all_to_all(buffers: Buffers, axis: Axis) -> None:
    """Every rank sends part i, whose size grows with i, to rank i."""
    parts = buffers.given.split(_uneven_counts_of(buffers.given.numel(), axis.degree))
    size = parts[axis.index].numel()
    received = buffers.taken[: size * axis.degree].split(size)
    received[axis.index].copy_(parts[axis.index])
    others = [index for index in range(axis.degree) if index != axis.index]
    exchange([(index, received[index]) for index in others], [(index, parts[index]) for index in others], axis).wait()


def _uneven_counts_of(total: int, degree: int) -> list[int]:
    """The counts whose sum is `total`: the last receiver gets what is left."""
    counts = _uneven_counts(total, degree)
    return [*counts[:-1], total - sum(counts[:-1])]


def _uneven_expected(rank: int, degree: int, size: int, iteration: int) -> Tensor:
    counts = _uneven_counts_of(size, degree)
    parts = [pattern(sender, size, iteration).split(counts)[rank] for sender in range(degree)]
    rest = torch.full((degree * (max(counts) - counts[rank]),), STALE, dtype=torch.int32)
    return torch.cat([*parts, rest])


def _uneven_sizes(size: int, degree: int) -> tuple[int, int]:
    total = sum(_uneven_counts(size, degree))
    return total, degree * max(_uneven_counts_of(total, degree))


OPERATIONS = {
    one.name: one
    for one in (
        *MESSAGES,
        BenchOperation(
            "all_reduce",
            lambda n, p: (n, n),
            lambda b, axis: all_reduce(b.given, axis).wait(),
            lambda r, p, n, i: _sum(p, n, i),
            "all_reduce",
            in_place=True,
        ),
        BenchOperation(
            "all_gather",
            lambda n, p: (_equal_parts(n, p) // p, _equal_parts(n, p)),
            lambda b, axis: all_gather(b.taken, b.given, axis).wait(),
            lambda r, p, n, i: torch.cat([pattern(rank, n, i) for rank in range(p)]),
            "all_gather",
        ),
        BenchOperation(
            "reduce_scatter",
            lambda n, p: (_equal_parts(n, p), _equal_parts(n, p) // p),
            lambda b, axis: reduce_scatter(b.taken, b.given, axis).wait(),
            lambda r, p, n, i: _sum(p, n, i).chunk(p)[r],
            "reduce_scatter",
        ),
        BenchOperation(
            "all_to_all",
            lambda n, p: (_equal_parts(n, p), _equal_parts(n, p)),
            lambda b, axis: all_to_all(b.taken, b.given, axis).wait(),
            lambda r, p, n, i: _parts_for(r, [pattern(rank, n, i) for rank in range(p)]),
            "all_to_all",
        ),
        BenchOperation("all_to_all_uneven", _uneven_sizes, _uneven_all_to_all, _uneven_expected),
        BenchOperation(
            "broadcast",
            lambda n, p: (n, n),
            lambda b, axis: broadcast(b.given, axis).wait(),
            lambda r, p, n, i: pattern(0, n, i),
            "broadcast",
            in_place=True,
        ),
        BenchOperation("barrier", lambda n, p: (1, 1), lambda b, axis: barrier(), lambda r, p, n, i: None),
    )
}

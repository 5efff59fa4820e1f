"""The operations of `weft bench links`: what each sends, and what every rank must have received.

Payloads are whole numbers that follow from (rank, place, iteration), and receive buffers are overwritten before a
checked iteration, so a flipped bit, ranks in the wrong order and a buffer that was not written are all found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import (
    Axis,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    exchange,
    receive,
    reduce_scatter,
    send,
)
from weft.errors import CorruptionError

ITEM_BYTES = 4  # int32
STALE = -1  # no payload has it
WINDOW = 64  # messages in flight of the bandwidth tests
_MODULUS = 65_521  # sums over 32,000 ranks still fit int32


def pattern(rank: int, size: int, iteration: int) -> Tensor:
    """The payload of a rank: [size] int32."""
    return ((torch.arange(size) * 7 + rank * 1009 + iteration * 31) % _MODULUS).to(torch.int32)


@dataclass
class Buffers:
    """What a rank gives to an operation and what it gets. In-place operations have one tensor for both."""

    given: Tensor
    taken: Tensor


@dataclass(frozen=True)
class BenchOperation:
    """An operation of one size. `formula` is its name in the ring formulas, None if the planner does not time it.

    `expected(rank, degree, size, iteration)` is what `taken` must hold, None on a rank that receives nothing.
    """

    name: str
    make: Callable[[int, int], tuple[int, int]]  # (elements, degree) -> sizes of `given` and `taken`
    run: Callable[[Buffers, Axis], None]
    expected: Callable[[int, int, int, int], Tensor | None]
    formula: str | None = None
    in_place: bool = False
    only_pairs: bool = False  # uses the first two ranks

    def buffers(self, num_bytes: int, degree: int, device: torch.device) -> Buffers:
        """Buffers for a call of about `num_bytes`, rounded up to whole parts for each rank."""
        given, taken = self.make(max(1, num_bytes // ITEM_BYTES), degree)
        first = torch.zeros(given, dtype=torch.int32, device=device)
        return Buffers(first, first if self.in_place else torch.zeros(taken, dtype=torch.int32, device=device))

    def check(self, buffers: Buffers, axis: Axis, iteration: int) -> None:
        """Run once with a new payload, and raise CorruptionError if the result is wrong."""
        buffers.taken.fill_(STALE)
        buffers.given.copy_(pattern(axis.index, buffers.given.numel(), iteration))
        self.run(buffers, axis)
        wanted = self.expected(axis.index, axis.degree, buffers.given.numel(), iteration)
        if wanted is not None:
            compare(self.name, axis.index, buffers.taken.cpu(), wanted)


def compare(name: str, rank: int, found: Tensor, wanted: Tensor) -> None:
    """Raise CorruptionError at the first element that differs."""
    wrong = (found != wanted).nonzero().flatten().tolist()
    if wrong:
        place = wrong[0]
        stale = "; it was never written" if int(found[place]) == STALE else ""
        raise CorruptionError(
            f"{name}: rank {rank} received {int(found[place])} instead of {int(wanted[place])} at element {place} of "
            f"{found.numel()} ({len(wrong)} are wrong{stale}); the transport corrupts data: check drivers and cables"
        )


def _equal_parts(size: int, degree: int) -> int:
    return -(-size // degree) * degree


def _ping_pong(buffers: Buffers, axis: Axis) -> None:
    if axis.index == 0:
        send(buffers.given, axis, 1, "ping").wait()
        receive(buffers.taken, axis, 1, "pong").wait()
    elif axis.index == 1:
        receive(buffers.taken, axis, 0, "ping").wait()
        send(buffers.given, axis, 0, "pong").wait()


def _stream(buffers: Buffers, axis: Axis) -> None:
    """Rank 0 sends a window of messages, and rank 1 answers when it has all of them."""
    answer = buffers.given.new_zeros(1)
    if axis.index == 0:
        for pending in [send(buffers.given, axis, 1, "window") for _ in range(WINDOW)]:
            pending.wait()
        receive(answer, axis, 1, "answer").wait()
    elif axis.index == 1:
        for pending in [receive(buffers.taken, axis, 0, "window") for _ in range(WINDOW)]:
            pending.wait()
        send(answer, axis, 0, "answer").wait()


def _both_ways(buffers: Buffers, axis: Axis) -> None:
    if axis.index < 2:
        peer = 1 - axis.index
        waiting = [receive(buffers.taken, axis, peer, "window") for _ in range(WINDOW)]
        waiting += [send(buffers.given, axis, peer, "window") for _ in range(WINDOW)]
        for pending in waiting:
            pending.wait()


def _other_of_pair(rank: int, degree: int, size: int, iteration: int) -> Tensor | None:
    return pattern(1 - rank, size, iteration) if rank < 2 else None


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
        BenchOperation("latency", lambda n, p: (n, n), _ping_pong, _other_of_pair, "send", only_pairs=True),
        BenchOperation(
            "bandwidth",
            lambda n, p: (n, n),
            _stream,
            lambda r, p, n, i: pattern(0, n, i) if r == 1 else None,
            only_pairs=True,
        ),
        BenchOperation("bidirectional", lambda n, p: (n, n), _both_ways, _other_of_pair, only_pairs=True),
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

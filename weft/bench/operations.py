"""The operations of `weft bench links`, messages and collectives, and how what they deliver is checked.

Payloads are whole numbers that follow from (rank, place, iteration), and receive buffers are overwritten before a
checked iteration, so a flipped bit, ranks in the wrong order and a buffer that was not written are all found.
"""

from __future__ import annotations

from collections.abc import Callable
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
    num_messages: int = 1  # that a rank sends in one direction in a repeat
    is_round_trip: bool = False  # a repeat is a message there and one back

    def buffers(self, num_bytes: int, degree: int, device: torch.device, pinned: bool = False) -> Buffers:
        """Buffers for a call of about `num_bytes`, rounded up to whole parts for each rank."""

        def zeros(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device, pin_memory=pinned)

        given, taken = self.make(max(1, num_bytes // ITEM_BYTES), degree)
        first = zeros(given)
        return Buffers(first, first if self.in_place else zeros(taken))

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


WINDOW = 64  # messages in flight of the bandwidth tests


def _ping_pong(buffers: Buffers, axis: Axis) -> None:
    """The first two ranks send a message there and one back."""
    if axis.index < 2:
        _there_and_back(buffers, axis, 1 - axis.index)


def _ping_pong_of_pairs(buffers: Buffers, axis: Axis) -> None:
    """Ranks 0 and 1, 2 and 3, ... all do so at the same time. Without a partner, the last rank does nothing."""
    partner = axis.index ^ 1
    if partner < axis.degree:
        _there_and_back(buffers, axis, partner)


def _there_and_back(buffers: Buffers, axis: Axis, partner: int) -> None:
    if axis.index < partner:
        send(buffers.given, axis, partner, "ping").wait()
        receive(buffers.taken, axis, partner, "pong").wait()
    else:
        receive(buffers.taken, axis, partner, "ping").wait()
        send(buffers.given, axis, partner, "pong").wait()


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
    """The first two ranks send each other a window of messages. Each goes in a batch with the one that comes back: NCCL
    runs the operations of a group in order, so two ranks that receive first would wait for each other.
    """
    if axis.index < 2:
        peer = 1 - axis.index
        for pending in [exchange([(peer, buffers.taken)], [(peer, buffers.given)], axis) for _ in range(WINDOW)]:
            pending.wait()


def _halo(buffers: Buffers, axis: Axis) -> None:
    """Every rank exchanges borders with both neighbours in a line, as tiles of an image do."""
    lower, upper = buffers.given.chunk(2)
    from_before, from_after = buffers.taken.chunk(2)
    sent, received = [], []
    if axis.index > 0:
        sent.append((axis.index - 1, lower))
        received.append((axis.index - 1, from_before))
    if axis.index + 1 < axis.degree:
        sent.append((axis.index + 1, upper))
        received.append((axis.index + 1, from_after))
    exchange(received, sent, axis).wait()


def _halo_expected(rank: int, degree: int, size: int, iteration: int) -> Tensor:
    none = torch.full((size // 2,), STALE, dtype=torch.int32)
    before = pattern(rank - 1, size, iteration).chunk(2)[1] if rank > 0 else none
    after = pattern(rank + 1, size, iteration).chunk(2)[0] if rank + 1 < degree else none
    return torch.cat([before, after])


def _pair_exchange(buffers: Buffers, axis: Axis) -> None:
    """Rank i and rank p - 1 - i exchange tensors, as replicas of a mirrored pipeline do."""
    partner = axis.degree - 1 - axis.index
    if partner != axis.index:
        exchange([(partner, buffers.taken)], [(partner, buffers.given)], axis).wait()


def _other_of_pair(rank: int, degree: int, size: int, iteration: int) -> Tensor | None:
    return pattern(1 - rank, size, iteration) if rank < 2 else None


def _neighbour(rank: int, degree: int, size: int, iteration: int) -> Tensor | None:
    return pattern(rank ^ 1, size, iteration) if rank ^ 1 < degree else None


def _mirrored(rank: int, degree: int, size: int, iteration: int) -> Tensor | None:
    partner = degree - 1 - rank
    return pattern(partner, size, iteration) if partner != rank else None


def _equal(size: int, degree: int) -> tuple[int, int]:
    return size, size


def _borders(size: int, degree: int) -> tuple[int, int]:
    even = size + size % 2
    return even, even


MESSAGES = (
    BenchOperation("latency", _equal, _ping_pong, _other_of_pair, "send", only_pairs=True, is_round_trip=True),
    BenchOperation(
        "bandwidth",
        _equal,
        _stream,
        lambda r, p, n, i: pattern(0, n, i) if r == 1 else None,
        only_pairs=True,
        num_messages=WINDOW,
    ),
    BenchOperation("bidirectional", _equal, _both_ways, _other_of_pair, only_pairs=True, num_messages=WINDOW),
    BenchOperation("multi_pair", _equal, _ping_pong_of_pairs, _neighbour, is_round_trip=True),
    BenchOperation("halo", _borders, _halo, _halo_expected),
    BenchOperation("pair_exchange", _equal, _pair_exchange, _mirrored),
)


def _equal_parts(size: int, degree: int) -> int:
    return -(-size // degree) * degree


def _sum(degree: int, size: int, iteration: int) -> Tensor:
    return torch.stack([pattern(rank, size, iteration) for rank in range(degree)]).sum(0, dtype=torch.int32)


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
            lambda r, p, n, i: torch.cat([pattern(rank, n, i).chunk(p)[r] for rank in range(p)]),
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

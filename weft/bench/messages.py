"""Messages between ranks, alone and all at once, as `weft bench links` times them."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.bench.checked_operation import STALE, BenchOperation, Buffers, pattern
from weft.comm import Axis, exchange, receive, send

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

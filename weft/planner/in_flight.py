"""What a pipeline rank holds between forward and backward at its peak, in closed form, for each schedule."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from weft.plan import Pipe
from weft.schedule.schedules import make_schedule
from weft.schedule.simulate import simulate


class HeldAtOnce(NamedTuple):
    """What a pipeline rank holds at its peak: blocks with saved activations, and blocks with deferred weight gradients,
    each times its micro-batches; stages' results; and micro-batches between forward and backward of the last stage.
    """

    alive_blocks: float
    late_blocks: float
    results: float
    roots: float


@lru_cache(maxsize=1 << 14)
def held_at_once(
    pipe: Pipe, rank: int, num_micro_batches: int, counts: tuple[float, ...], late: float = 0.0
) -> HeldAtOnce:
    """What a rank holds at its peak, if its stages have so many blocks.

    `late` is what a block's deferred weight gradients need, divided by what the block saves.
    """
    alive = alive_at_once(pipe.schedule, pipe.degree, num_micro_batches, tuple(pipe.options.items()))[rank]
    if pipe.schedule == "zero-bubble" and pipe.degree > 1:
        # In the backward of micro-batch i, forwards up to i + ahead - 1 are done, and the weight gradients of the
        # `behind` micro-batches before i are not.
        cap, last = pipe.in_flight or pipe.degree, num_micro_batches - 1
        ahead = min(pipe.degree - rank, cap)
        behind = min(rank, cap - ahead)
        turns = {0, min(behind, last), max(0, num_micro_batches - ahead), last}
        pairs = [(min(num_micro_batches, turn + ahead) - turn, min(turn, behind)) for turn in sorted(turns)]
        now, waiting = max(pairs, key=lambda pair: pair[0] + late * pair[1])
        return HeldAtOnce(now * counts[0], waiting * counts[0], now, now)
    if len(counts) == 1:
        return HeldAtOnce(alive * counts[0], 0.0, alive, alive)
    groups = max(1, num_micro_batches // pipe.degree)
    roots = 1.0 + (len(counts) - 1) * (num_micro_batches % groups > 0)  # the largest group runs ahead of smaller ones
    if len(set(counts)) == 1:
        return HeldAtOnce(alive * counts[0], 0.0, alive, roots)
    return HeldAtOnce(_most_blocks(pipe.degree, num_micro_batches, counts, int(alive)), 0.0, alive, roots)


def _most_blocks(degree: int, num_micro_batches: int, counts: tuple[float, ...], alive: int) -> float:
    """The largest sum of blocks of all live activations of an interleaved rank whose stages have so many blocks.

    Micro-batches go through the stages in groups, first to last forward and last to first backward; `alive` forwards
    come before the first backward, and then they alternate.
    """
    groups = max(1, num_micro_batches // degree)
    size = -(-num_micro_batches // groups)
    rounds = min(groups, 2 + -(-alive // (size * len(counts))))
    forwards = [count for count in counts for _ in range(size)] * rounds
    backwards = [count for count in reversed(counts) for _ in range(size)] * rounds
    held = most = sum(forwards[:alive])
    for forward, backward in zip(forwards[alive:], backwards, strict=False):
        held += forward - backward
        most = max(most, held)
    return float(most)


@lru_cache(maxsize=1 << 14)
def alive_at_once(
    schedule: str, degree: int, num_micro_batches: int, options: tuple[tuple[str, int], ...]
) -> tuple[float, ...]:
    """The largest number of micro-batches whose activations each rank holds at once, by rank.

    A steady schedule holds no more with more micro-batches.
    """
    if degree == 1:
        return (1.0,)
    if cap := dict(options).get("in_flight"):
        rest = tuple(pair for pair in options if pair[0] != "in_flight")
        if schedule != "bidirectional":  # which has two replicas, and other orders under a cap
            return tuple(min(alive, cap) for alive in alive_at_once(schedule, degree, num_micro_batches, rest))
    if schedule in ("1f1b", "message"):
        return tuple(float(min(num_micro_batches, degree - rank)) for rank in range(degree))
    if schedule == "zero-bubble":
        return (float(min(num_micro_batches, degree)),) * degree
    if schedule == "gpipe":
        return (float(num_micro_batches),) * degree
    if schedule == "interleaved":  # the forwards before the first backward, and the one between
        chunks, groups = dict(options).get("chunks", 2), max(1, num_micro_batches // degree)
        largest = -(-num_micro_batches // groups)
        ahead = [(chunks - 1) * largest + 2 * (degree - rank - 1) + 1 for rank in range(degree)]
        return tuple(float(min(num_micro_batches * chunks, count)) for count in ahead)
    most = min(num_micro_batches, 4 * degree)
    timeline = simulate(make_schedule(schedule, degree, most, **dict(options)))
    return tuple(map(float, timeline.peak_activations))

"""Stages by memory as well as by time: stages of a chain of equal blocks with which every pipeline rank fits.

Early ranks of 1f1b and interleaved hold more micro-batches than late ones, and the last rank holds the head. So ranks
for which an equal share of the blocks is too large get as many as fit, and the others share the rest by time. With 1f1b
these are the fastest stages that fit. With interleaved, the blocks of a rank are divided evenly over its stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heapify, heapreplace

from weft.plan import Plan
from weft.planner.closed_form_memory import Sizes, rank_memory
from weft.planner.stage_units import ModelUnits, StageUnits

SCHEDULES = ("1f1b", "interleaved")  # whose early ranks hold more micro-batches than late ones


def with_stages_that_fit(
    plan: Plan,
    sizes: Sizes,
    units: ModelUnits,
    seconds: tuple[float, float, float],
    num_micro_batches: int,
    limit_bytes: float,
) -> Plan | None:
    """Returns the plan with `pipe.split` such that each rank needs at most `limit_bytes`; None without such stages.

    `seconds` are those of one micro-batch in the first end of the model, in one block, and in the last end.
    """
    pipe, num_blocks = plan.pipe, units.num_blocks
    degree, chunks = pipe.degree, pipe.num_stages // pipe.degree
    if degree == 1 or pipe.schedule not in SCHEDULES or pipe.split or pipe.num_stages > num_blocks:
        return None

    def most(rank: int, has_last: bool) -> int:
        def of(count: int) -> float:
            own = _spread(count, chunks, rank == 0, has_last)
            return rank_memory(sizes, plan, own, rank, num_micro_batches).total_bytes

        return _most_blocks(of, chunks, limit_bytes)

    # No rank holds more than the first, and less than the last without the head.
    if most(0, False) < chunks or most(degree - 1, False) * degree < num_blocks:
        return None
    limits = [most(rank, rank == degree - 1) for rank in range(degree)]
    ends = [seconds[0] * (rank == 0) + seconds[2] * (rank == degree - 1) for rank in range(degree)]
    shares = _shares(limits, ends, seconds[1], num_blocks, chunks)
    if shares is None:
        return None
    own = [_spread(share, chunks, rank == 0, rank == degree - 1) for rank, share in enumerate(shares)]
    counts = [own[stage % degree][stage // degree].num_blocks for stage in range(pipe.num_stages)]
    return replace(plan, pipe=replace(pipe, split=units.split(counts)))


def _spread(num_blocks: int, chunks: int, has_first: bool, has_last: bool) -> tuple[StageUnits, ...]:
    """Divides a rank's blocks over its stages. Those at the ends of the model have fewer; else later ones have more."""
    each, more = divmod(num_blocks, chunks)
    larger = range(more) if has_last else range(chunks - more, chunks)
    return tuple(
        StageUnits(each + (stage in larger), has_first and stage == 0, has_last and stage == chunks - 1)
        for stage in range(chunks)
    )


def _most_blocks(num_bytes: Callable[[int], float], least: int, limit_bytes: float) -> int:
    """Returns the most blocks with which a rank fits, if its memory grows by the same amount with each; 0 for none."""
    small = num_bytes(least)
    if small > limit_bytes:
        return 0
    return least + int((limit_bytes - small) / (num_bytes(2 * least) - small) * least)


def _shares(
    limits: Sequence[int], ends: Sequence[float], block_seconds: float, num_blocks: int, least: int
) -> list[int] | None:
    """Divides blocks over ranks such that the slowest is fastest, and none has more than its limit.

    Of ranks that are equally fast, the later one gets a block, as it holds fewer micro-batches.
    """
    if min(limits) < least or sum(limits) < num_blocks:
        return None
    shares = [least] * len(limits)
    queue = [(end + (least + 1) * block_seconds, -rank) for rank, end in enumerate(ends) if limits[rank] > least]
    heapify(queue)
    for _ in range(num_blocks - sum(shares)):
        while True:
            seconds, rank = queue[0]
            if shares[-rank] < limits[-rank]:
                break
            heapreplace(queue, (float("inf"), rank))
        shares[-rank] += 1
        heapreplace(queue, (seconds + block_seconds, rank))
    return shares

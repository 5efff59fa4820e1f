"""Stages by memory as well as by time: stages of a chain of equal blocks with which every pipeline rank fits.

Early ranks of 1f1b and interleaved hold more micro-batches than late ones, and the last rank holds the head. So ranks
for which an equal share of the blocks is too large get as many as fit, and the others share the rest by time. With 1f1b
these are the fastest stages that fit. With interleaved, the blocks of a rank are divided evenly over its stages.

Where no such stages fit, the first stages may recompute (`memory.recompute_stages`): their ranks hold more blocks, and
take longer for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heapreplace
from typing import NamedTuple

from weft.plan import Plan, Recompute
from weft.planner.closed_form_memory import Sizes, WorkingMemory, rank_memory, rank_working
from weft.planner.in_flight import alive_at_once
from weft.planner.stage_units import ModelUnits, StageUnits, UnitSeconds, with_recompute

MAX_MORE = 5  # numbers of stages that recompute that are compared, from the smallest that fits on
SCHEDULES = ("1f1b", "interleaved")  # whose early ranks hold more micro-batches than late ones


class _Line(NamedTuple):
    """The bytes of a rank, if they grow by the same amount with each block."""

    fixed_bytes: float
    block_bytes: float

    def most_blocks(self, limit_bytes: float) -> int:
        """The most blocks with which the rank fits; negative for none."""
        return int((limit_bytes - self.fixed_bytes) // self.block_bytes)


@dataclass(frozen=True)
class StageChoice:
    """Chooses the stages of a plan that recomputes nothing such that each rank needs at most `limit_bytes`.

    The first stages may follow the policy `recompute`, if it is not "none"; `sizes` then have `again`. `working` is a
    cache that plans share which differ only in shard and data.
    """

    plan: Plan
    sizes: Sizes
    seconds: UnitSeconds
    working: dict[tuple[int, int, bool, int], WorkingMemory]
    units: ModelUnits
    num_micro_batches: int
    limit_bytes: float
    recompute: Recompute = "none"

    @property
    def saved_share(self) -> float:
        """The share of its activations that a recomputed block saves; 1 if it saves as many or more."""
        again, saved = self.sizes.again, self.sizes.block_saved
        return min(1.0, again.block_saved / saved) if again is not None and saved else 1.0

    def with_stages(self) -> Plan | None:
        """Returns the plan with `pipe.split` such that it fits; None without such stages."""
        shares = self._shares(0) if self._may_fit(0) else None
        return None if shares is None else self._split(shares)

    def with_recompute(self, limit_seconds: float = math.inf) -> Plan | None:
        """Returns the plan with the stages and the number of recomputed ones for which the slowest rank is fastest.

        Of equally fast ones, fewer stages recompute. Returns None if it does not fit, if all stages must recompute, or
        if the slowest rank takes `limit_seconds` or more for a step.
        """
        num_stages = self.plan.pipe.num_stages
        if self._least_seconds(1) >= limit_seconds or not self._may_fit(num_stages):
            return None
        low, high = 1, num_stages  # more stages that recompute need less memory
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(middle) else (middle + 1, high)
        found: list[tuple[float, int, list[int]]] = []
        for count in range(low, min(low + MAX_MORE, num_stages)):  # with more, stages may be closer in time
            shares = self._shares(count) if self._least_seconds(count) < limit_seconds else None
            if shares is not None and self._is_exact(count, shares):
                found.append((max(self._rank_seconds(count, shares)), count, shares))
        if not found or min(found)[0] * self.num_micro_batches >= limit_seconds:
            return None
        _, count, shares = min(found)
        policy = replace(self.plan.memory, recompute=self.recompute, recompute_stages=count)
        return replace(self._split(shares), memory=policy)

    @property
    def _chunks(self) -> int:
        return self.plan.pipe.num_stages // self.plan.pipe.degree

    def _may_fit(self, count: int) -> bool:
        """Can the plan's stages be chosen, and may they fit if the first `count` stages recompute?

        No rank holds more than the first, and less than the last without the head.
        """
        pipe, num_blocks = self.plan.pipe, self.units.num_blocks
        is_free = pipe.degree > 1 and not pipe.split and pipe.num_stages <= num_blocks
        if not is_free or pipe.schedule not in SCHEDULES:
            return False
        last, again = pipe.degree - 1, [self._num_recomputed(rank, count) for rank in (0, pipe.degree - 1)]
        if self._line(0, again[0], False).most_blocks(self.limit_bytes) < self._chunks:
            return False
        return self._line(last, again[1], False).most_blocks(self.limit_bytes) * pipe.degree >= num_blocks

    # --- memory

    def _num_recomputed(self, rank: int, count: int) -> int:
        """How many stages of a rank recompute, if the first `count` stages of the model do."""
        return -(-max(0, count - rank) // self.plan.pipe.degree)

    @cached_property
    def _lines(self) -> dict[tuple[int, int, bool], _Line]:
        return {}

    def _line(self, rank: int, num_recomputed: int, has_last: bool) -> _Line:
        """The bytes of a rank of which so many stages recompute."""
        key = rank, num_recomputed, has_last
        if key not in self._lines:
            small, large = (self._bytes(rank, num_recomputed, has_last, self._chunks * times) for times in (1, 2))
            each = (large - small) / self._chunks
            self._lines[key] = _Line(small - each * self._chunks, each)
        return self._lines[key]

    def _bytes(self, rank: int, num_recomputed: int, has_last: bool, num_blocks: int) -> float:
        key = rank, num_recomputed, has_last, num_blocks
        if key not in self.working:
            own = with_recompute(_spread(num_blocks, self._chunks, rank == 0, has_last), num_recomputed)
            self.working[key] = rank_working(self.sizes, self.plan, own, rank, self.num_micro_batches)
        return rank_memory(self.working[key], self.sizes, self.plan, self.num_micro_batches).total_bytes

    @cached_property
    def _alive(self) -> tuple[float, ...]:
        pipe = self.plan.pipe
        return alive_at_once(pipe.schedule, pipe.degree, self.num_micro_batches, tuple(pipe.options.items()))

    def _inner_line(self, rank: int, num_recomputed: int) -> _Line:
        """The bytes of a rank without an end of the model.

        Such ranks differ only by the micro-batches that they hold, so two of them tell those of all others.
        """
        early, late = 1, self.plan.pipe.degree - 2
        alive, first = self._alive, self._line(early, num_recomputed, False)
        if alive[rank] == alive[early]:
            return first
        last = self._line(late, num_recomputed, False)
        share = (alive[rank] - alive[early]) / (alive[late] - alive[early])
        return _Line(*(one + share * (other - one) for one, other in zip(first, last, strict=True)))

    def _rank_limits(self, count: int) -> list[int]:
        """The most blocks of each rank, if the first `count` stages recompute."""
        last = self.plan.pipe.degree - 1
        found = []
        for rank in range(last + 1):
            again = self._num_recomputed(rank, count)
            is_end = rank in (0, last)
            line = self._line(rank, again, rank == last) if is_end else self._inner_line(rank, again)
            found.append(line.most_blocks(self.limit_bytes))
        return found

    def _fits(self, count: int) -> bool:
        limits = self._rank_limits(count)
        return min(limits) >= self._chunks and sum(limits) >= self.units.num_blocks

    def _is_exact(self, count: int, shares: Sequence[int]) -> bool:
        """Does each rank fit with its share? If it has several stages, these need different memory for a block."""
        last = self.plan.pipe.degree - 1
        return self._chunks == 1 or all(
            self._bytes(rank, self._num_recomputed(rank, count), rank == last, share) <= self.limit_bytes
            for rank, share in enumerate(shares)
        )

    # --- time

    def _block_seconds(self, rank: int, count: int) -> float:
        share = self._num_recomputed(rank, count) / self._chunks
        return self.seconds.block + share * (self.seconds.recomputed - self.seconds.block)

    def _least_seconds(self, count: int) -> float:
        """A lower bound of a step if the first `count` stages recompute, each of at least one block."""
        blocks, own = self.units.num_blocks, self.seconds
        total = own.first + own.last + blocks * own.block + count * (own.recomputed - own.block)
        return self.num_micro_batches * total / self.plan.pipe.degree

    @cached_property
    def _ends(self) -> list[float]:
        last = self.plan.pipe.degree - 1
        return [self.seconds.first * (rank == 0) + self.seconds.last * (rank == last) for rank in range(last + 1)]

    def _rank_seconds(self, count: int, shares: Sequence[int]) -> list[float]:
        each = zip(self._ends, shares, strict=True)
        return [end + share * self._block_seconds(rank, count) for rank, (end, share) in enumerate(each)]

    def _shares(self, count: int) -> list[int] | None:
        """The blocks of each rank if the first `count` stages recompute; None if they do not fit."""
        seconds = [self._block_seconds(rank, count) for rank in range(self.plan.pipe.degree)]
        return _shares(self._rank_limits(count), self._ends, seconds, self.units.num_blocks, self._chunks)

    def _split(self, shares: Sequence[int]) -> Plan:
        """The plan with stages in which each rank has its share of the blocks."""
        pipe, last = self.plan.pipe, len(shares) - 1
        own = [_spread(share, self._chunks, rank == 0, rank == last) for rank, share in enumerate(shares)]
        counts = [own[stage % pipe.degree][stage // pipe.degree].num_blocks for stage in range(pipe.num_stages)]
        return replace(self.plan, pipe=replace(pipe, split=self.units.split(counts)))


def _spread(num_blocks: int, chunks: int, has_first: bool, has_last: bool) -> tuple[StageUnits, ...]:
    """Divides a rank's blocks over its stages. Those at the ends of the model have fewer; else later ones have more."""
    each, more = divmod(num_blocks, chunks)
    larger = range(more) if has_last else range(chunks - more, chunks)
    return tuple(
        StageUnits(each + (stage in larger), has_first and stage == 0, has_last and stage == chunks - 1)
        for stage in range(chunks)
    )


def _shares(
    limits: Sequence[int], ends: Sequence[float], block_seconds: Sequence[float], num_blocks: int, least: int
) -> list[int] | None:
    """Divides blocks over ranks such that the slowest is fastest, and none has more than its limit.

    Of ranks that are equally fast, the later one gets a block, as it holds fewer micro-batches.
    """
    if min(limits) < least or sum(limits) < num_blocks:
        return None
    shares = [least] * len(limits)
    queue = [(end + (least + 1) * block_seconds[rank], -rank) for rank, end in enumerate(ends) if limits[rank] > least]
    heapify(queue)
    for _ in range(num_blocks - sum(shares)):
        while True:
            seconds, rank = queue[0]
            if shares[-rank] < limits[-rank]:
                break
            heapreplace(queue, (float("inf"), rank))
        shares[-rank] += 1
        heapreplace(queue, (seconds + block_seconds[-rank], rank))
    return shares

"""Stages by memory as well as by time: stages of a chain of equal blocks with which every pipeline rank fits.

Early ranks of 1f1b and interleaved hold more micro-batches than late ones, and the last rank holds the head. So ranks
for which an equal share of the blocks is too large get as many as fit, and the others share the rest by time. With 1f1b
these are the fastest stages that fit. With interleaved, the blocks of a rank are divided evenly over its stages.

Where no such stages fit, the first stages may recompute (`memory.recompute_stages`): their ranks hold more blocks, and
take longer for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heapreplace

from weft.plan import Plan
from weft.planner.closed_form_memory import Sizes, WorkingMemory, bytes_of_rank, least_bytes, rank_working
from weft.planner.schedule_time import least_with_any_stages
from weft.planner.stage_units import ModelUnits, StageUnits, UnitSeconds, with_recompute

SCHEDULES = ("1f1b", "interleaved")  # whose early ranks hold more micro-batches than late ones
ROUNDING = 1 - 1e-9  # bounds of times are so much lower, as sums in another order are rounded differently


@dataclass(frozen=True)
class StageCosts:
    """Memory and seconds of a plan's pipeline ranks for any number of blocks, without the state of their parameters.

    Plans that differ only in data, shard and offloaded state share them. `sizes` are those of `plan`. If it recomputes,
    these have `again`, and only the first stages recompute.
    """

    plan: Plan
    sizes: Sizes
    units: ModelUnits
    seconds: UnitSeconds
    num_micro_batches: int

    @cached_property
    def _working(self) -> dict[tuple[int, int, bool, int], WorkingMemory]:
        return {}

    @cached_property
    def chunks(self) -> int:
        """The number of stages of each rank."""
        return self.plan.pipe.num_stages // self.plan.pipe.degree

    def working(self, rank: int, num_recomputed: int, has_last: bool, num_blocks: int) -> WorkingMemory:
        """The working memory of a rank with so many blocks, if so many of its stages recompute."""
        key = rank, num_recomputed, has_last, num_blocks
        if key not in self._working:
            own = with_recompute(_spread(num_blocks, self.chunks, rank == 0, has_last), num_recomputed)
            self._working[key] = rank_working(self.sizes, self.plan, own, rank, self.num_micro_batches)
        return self._working[key]

    @cached_property
    def _may_fit(self) -> dict[float, bool]:
        return {}

    def may_fit(self, limit_bytes: float) -> bool:
        """May any of the plans fit, if all of its stages recompute and its state takes no memory?"""
        if limit_bytes not in self._may_fit:
            choice = StageChoice(self, self.plan, limit_bytes, least_bytes)
            self._may_fit[limit_bytes] = choice.may_fit(self.plan.pipe.num_stages)
        return self._may_fit[limit_bytes]


@dataclass(frozen=True)
class StageChoice:
    """Chooses the stages of a plan such that each rank needs at most `limit_bytes`.

    `rank_bytes` is the memory of a rank under the plan, from its working memory.
    """

    costs: StageCosts
    plan: Plan
    limit_bytes: float
    rank_bytes: Callable[[WorkingMemory], float]

    @classmethod
    def of(cls, costs: StageCosts, plan: Plan, limit_bytes: float) -> StageChoice:
        """Returns the choice for a plan that has these costs."""
        return cls(costs, plan, limit_bytes, bytes_of_rank(costs.sizes, plan, costs.num_micro_batches))

    def shares(self) -> list[int] | None:
        """The blocks of each rank with which the plan fits; None without such."""
        return self._shares(0) if self.may_fit(0) else None

    def recompute(self, is_slow: Callable[[float], bool] = lambda seconds: False) -> tuple[int, list[int]] | None:
        """The number of recomputed stages, and the blocks of each rank, for which the slowest rank is fastest.

        Of equally fast ones, fewer stages recompute. Returns None if it does not fit, if all stages must recompute, or
        if `is_slow` is true of the seconds of every step that fits.
        """
        # With more stages that recompute, a step takes longer and needs less memory.
        num_stages = self.plan.pipe.num_stages
        if is_slow(self.least_seconds(1)) or not self.costs.may_fit(self.limit_bytes):
            return None
        most = _first(lambda count: is_slow(self.least_seconds(count)), 1, num_stages) - 1
        if most < 1 or not self.may_fit(num_stages) or not self._fits(most):
            return None
        low = _first(self._fits, 1, most)
        found: tuple[float, int, list[int]] | None = None
        for count in range(low, min(low + self.plan.pipe.degree, most + 1)):
            if found is not None and self._least_rank_seconds(count) * ROUNDING > found[0]:
                break
            shares = self._shares(count)
            seconds = max(self._rank_seconds(count, shares)) if shares is not None else float("inf")
            if shares is not None and (found is None or seconds < found[0]):
                found = seconds, count, shares
        return None if found is None else found[1:]

    def with_stages(self) -> Plan | None:
        """Returns the plan with `pipe.split` such that it fits; None without such stages."""
        shares = self.shares()
        return None if shares is None else self.plan_of(0, shares)

    def with_recompute(self) -> Plan | None:
        """Returns the plan with the stages of `recompute`; None without such."""
        found = self.recompute()
        return None if found is None else self.plan_of(*found)

    def bound(self, count: int, shares: Sequence[int]) -> float:
        """A lower bound of the seconds of a step with these stages, of which the first `count` recompute.

        A rank computes all micro-batches, and the first and the last go through the stages before its own.
        """
        least = before = 0.0
        for rank, seconds in enumerate(self._rank_seconds(count, shares)):
            least = max(least, before + self.costs.num_micro_batches * seconds)
            before += shares[rank] // self._chunks * self.costs.seconds.block
        return least * ROUNDING

    def least_seconds(self, count: int) -> float:
        """A lower bound of the seconds of a step with any stages, of which the first `count` recompute."""
        degree, chunks, num_micro_batches = self.plan.pipe.degree, self._chunks, self.costs.num_micro_batches
        block = self._block_seconds(degree - 1, count)  # the least
        total = sum(self._ends) + self.costs.units.num_blocks * block
        # A rank waits for the first stages of others. Each has its share of the rank's blocks, rounded down.
        waiting = least_with_any_stages(total, degree, num_micro_batches, 1 / chunks)
        waiting -= degree * block * (chunks - 1) / chunks
        return max(num_micro_batches * self._least_rank_seconds(count), waiting) * ROUNDING

    def _least_rank_seconds(self, count: int) -> float:
        """The seconds of the slowest rank, if the first `count` stages recompute and blocks could be cut anywhere."""
        degree, last = self.plan.pipe.degree, self.plan.pipe.degree - 1
        more = count % degree  # ranks of which one stage more recomputes
        rates = [1 / self._block_seconds(rank, count) for rank in (0, last)]
        ends = self._ends[0] * rates[0] + self._ends[last] * rates[1]
        return (self.costs.units.num_blocks + ends) / (more * rates[0] + (degree - more) * rates[1])

    @property
    def _chunks(self) -> int:
        return self.costs.chunks

    def may_fit(self, count: int) -> bool:
        """Can the plan's stages be chosen, and may they fit if the first `count` stages recompute?

        No rank holds more than the first, and less than the last without the head.
        """
        pipe, num_blocks = self.plan.pipe, self.costs.units.num_blocks
        is_free = pipe.degree > 1 and not pipe.split and pipe.num_stages <= num_blocks
        if not is_free or pipe.schedule not in SCHEDULES:
            return False
        last, again = pipe.degree - 1, [self._num_recomputed(rank, count) for rank in (0, pipe.degree - 1)]
        if self._most(0, again[0], False) < self._chunks:
            return False
        return self._most(last, again[1], False) * pipe.degree >= num_blocks

    def _num_recomputed(self, rank: int, count: int) -> int:
        """How many stages of a rank recompute, if the first `count` stages of the model do."""
        return -(-max(0, count - rank) // self.plan.pipe.degree)

    @cached_property
    def _limits(self) -> dict[tuple[int, int, bool], int]:
        return {}

    def _most(self, rank: int, num_recomputed: int, has_last: bool) -> int:
        """The most blocks with which a rank fits, if so many of its stages recompute."""
        key = rank, num_recomputed, has_last
        if key not in self._limits:

            def num_bytes(count: int) -> float:
                return self.rank_bytes(self.costs.working(rank, num_recomputed, has_last, count))

            self._limits[key] = _most_blocks(num_bytes, self._chunks, self.limit_bytes)
        return self._limits[key]

    def _rank_limits(self, count: int) -> list[int]:
        degree = self.plan.pipe.degree
        return [self._most(rank, self._num_recomputed(rank, count), rank == degree - 1) for rank in range(degree)]

    def _fits(self, count: int) -> bool:
        degree, total = self.plan.pipe.degree, 0
        for rank in range(degree):
            limit = self._most(rank, self._num_recomputed(rank, count), rank == degree - 1)
            if limit < self._chunks:
                return False
            total += limit
        return total >= self.costs.units.num_blocks

    def _block_seconds(self, rank: int, count: int) -> float:
        share = self._num_recomputed(rank, count) / self._chunks
        seconds = self.costs.seconds
        return seconds.block + share * (seconds.recomputed - seconds.block)

    @cached_property
    def _ends(self) -> list[float]:
        last, seconds = self.plan.pipe.degree - 1, self.costs.seconds
        return [seconds.first * (rank == 0) + seconds.last * (rank == last) for rank in range(last + 1)]

    def _rank_seconds(self, count: int, shares: Sequence[int]) -> list[float]:
        each = zip(self._ends, shares, strict=True)
        return [end + share * self._block_seconds(rank, count) for rank, (end, share) in enumerate(each)]

    def _shares(self, count: int) -> list[int] | None:
        """The blocks of each rank if the first `count` stages recompute; None if they do not fit."""
        seconds = [self._block_seconds(rank, count) for rank in range(self.plan.pipe.degree)]
        return _shares(self._rank_limits(count), self._ends, seconds, self.costs.units.num_blocks, self._chunks)

    def plan_of(self, count: int, shares: Sequence[int]) -> Plan:
        """The plan with stages in which each rank has its share of the blocks, and the first `count` recompute."""
        pipe, memory, last = self.plan.pipe, self.plan.memory, len(shares) - 1
        own = [_spread(share, self._chunks, rank == 0, rank == last) for rank, share in enumerate(shares)]
        counts = [own[stage % pipe.degree][stage // pipe.degree].num_blocks for stage in range(pipe.num_stages)]
        if count:
            memory = replace(memory, recompute=self.costs.plan.memory.recompute, recompute_stages=count)
        return replace(self.plan, pipe=replace(pipe, split=self.costs.units.split(counts)), memory=memory)


def _spread(num_blocks: int, chunks: int, has_first: bool, has_last: bool) -> tuple[StageUnits, ...]:
    """Divides a rank's blocks over its stages. Those at the ends of the model have fewer; else later ones have more."""
    each, more = divmod(num_blocks, chunks)
    larger = range(more) if has_last else range(chunks - more, chunks)
    return tuple(
        StageUnits(each + (stage in larger), has_first and stage == 0, has_last and stage == chunks - 1)
        for stage in range(chunks)
    )


def _most_blocks(num_bytes: Callable[[int], float], least: int, limit_bytes: float) -> int:
    """Returns the most blocks with which a rank fits, if its memory grows by about as much with each; 0 for none."""
    small = num_bytes(least)
    if small > limit_bytes:
        return 0
    found = least + int((limit_bytes - small) / (num_bytes(2 * least) - small) * least)
    if least > 1:  # of several stages, some may recompute and others not
        while num_bytes(found) > limit_bytes:
            found -= 1
    return found


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Returns the first number from `low` on for which `holds` is true; `high` if there is none below it.

    If `holds` is true of a number, it must be true of all larger ones.
    """
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


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

"""Runs the engine's scheduler without a model: steps take the time that they are said to take.

Requests arrive at given times. Between two events (a request arrives, ends, or gets no block), steps of decodes repeat
themselves with one more token in each request. Their times are piecewise linear in the number of tokens, so the sum
over all steps of such a stretch is found from a few of them. Without torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from weft.serve.scheduling.blocks import PagedBlocks
from weft.serve.scheduling.request import Request
from weft.serve.scheduling.scheduler import ActiveRequest, ScheduledChunk, Scheduler

LEAST_STRETCH = 4  # steps for which it pays to look for a sum
LINEAR = 1e-9  # relative difference between a linear function and its middle value


class RequestArrival(NamedTuple):
    """A request: tokens of its prompt and its answer, when it comes, and with how many tokens all prompts begin."""

    prompt: int
    output: int
    seconds: float = 0.0
    num_shared: int = 0


class StepShape(NamedTuple):
    """What a step computes. Decodes have the lengths `decodes` and are `shift` tokens longer than that; a prompt is
    (tokens computed, tokens up to their end).
    """

    decodes: tuple[int, ...]
    shift: int
    prompts: tuple[tuple[int, int], ...]
    num_sampled: int


class StepPrice(NamedTuple):
    """Seconds of a step on one stage, in all and by cause, and the least that the device allows."""

    seconds: float
    floor_seconds: float
    by_cause: tuple[float, ...]


Prices = Callable[[StepShape, int], StepPrice]  # of a step on a stage


@dataclass
class RunTimes:
    """When requests got their first token and their last one, in the order of arrivals, and what the time was for."""

    seconds: float = 0.0
    floor_seconds: float = 0.0
    by_cause: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    num_steps: int = 0


class _StepUnderWay(NamedTuple):
    """A step that is under way, and when its tokens are there."""

    chunks: list[ScheduledChunk]
    ready: float


class SchedulerRun:
    """One replica that serves requests with `num_stages` stages and a cache of so many blocks."""

    def __init__(
        self,
        arrivals: Sequence[RequestArrival],
        prices: Prices,
        num_blocks: int,
        block_size: int,
        token_budget: int,
        max_running: int,
        num_stages: int = 1,
        has_stretches: bool = True,
    ) -> None:
        """`has_stretches` is False where each step is to be run, as tests do."""
        self._policy = PagedBlocks(num_blocks, block_size, prefix_cache=any(one.num_shared for one in arrivals))
        self._scheduler = Scheduler(self._policy, token_budget, max_running, num_stages)
        self._prices, self._num_stages, self._has_stretches = prices, num_stages, has_stretches
        order = sorted(range(len(arrivals)), key=lambda index: arrivals[index].seconds)
        self._coming = deque((arrivals[index], index) for index in order)
        self._now, self._free = 0.0, [0.0] * num_stages  # free: when each stage has ended its steps
        self._begun: deque[_StepUnderWay] = deque()
        self._was_tried = True  # the last schedule had no room for the first request that waits
        self._times = RunTimes(first=[0.0] * len(arrivals), last=[0.0] * len(arrivals))

    def run(self) -> RunTimes | None:
        """Serve all requests. Returns None if the cache does not hold one of them."""
        scheduler = self._scheduler
        while scheduler.running or scheduler.waiting or self._coming:
            self._take_arrivals()
            had_waiting, num_preempted = bool(scheduler.waiting), scheduler.num_preempted
            chunks = scheduler.schedule()
            has_budget = had_waiting and sum(one.end - one.start for one in chunks) < scheduler.token_budget
            self._was_tried = has_budget and scheduler.num_preempted == num_preempted
            if chunks:
                self._begin(chunks)
            elif not self._begun:
                if not scheduler.waiting and self._coming:
                    self._now = self._coming[0][0].seconds
                    continue
                return None
            if len(self._begun) == self._num_stages or not chunks:
                ended = self._read(self._begun.popleft())
                if not ended and self._has_stretches:
                    self._skip_stretch()
        self._times.seconds = self._now
        return self._times

    def _take_arrivals(self) -> None:
        while self._coming and self._coming[0][0].seconds <= self._now:
            one, index = self._coming.popleft()
            active = ActiveRequest(Request(str(index), (0,), one.output), index, one.prompt + one.output, 0)
            active.tokens = [0] * one.num_shared + [index + 1] * (one.prompt - one.num_shared)
            self._scheduler.add(active)

    def _begin(self, chunks: list[ScheduledChunk]) -> None:
        shape = step_shape(chunks)
        steps, ready = [self._prices(shape, stage) for stage in range(self._num_stages)], self._now
        for stage, step in enumerate(steps):
            ready = self._free[stage] = max(ready, self._free[stage]) + step.seconds
        self._count(max(steps, key=attrgetter("seconds")).by_cause, max(step.floor_seconds for step in steps), 1)
        self._begun.append(_StepUnderWay(chunks, ready))

    def _count(self, by_cause: Sequence[float], floor_seconds: float, number: int) -> None:
        """Add causes of the slowest stage, the floor, and so many steps."""
        times = self._times
        times.by_cause = [sum(pair) for pair in zip(times.by_cause or [0.0] * len(by_cause), by_cause, strict=True)]
        times.floor_seconds += floor_seconds
        times.num_steps += number

    def _read(self, step: _StepUnderWay) -> bool:
        """Give requests their tokens. Returns whether one has ended."""
        self._now, has_ended = max(self._now, step.ready), False
        for chunk in step.chunks:
            active = chunk.active
            if active.held is not None and chunk.end - chunk.start > 1:
                self._policy.record(active.held, active.tokens, chunk.end)
            if not chunk.samples:
                continue
            active.tokens.append(active.arrival + 1)
            active.num_unread -= 1
            index = active.arrival
            self._times.first[index] = self._times.first[index] or self._now
            if len(active.tokens) == active.max_length:
                self._times.last[index] = self._now
                self._scheduler.end(active)
                has_ended = True
        return has_ended

    # --- steps that repeat themselves

    def _skip_stretch(self) -> None:
        """Run all steps that repeat those under way, up to the next event, if there are many."""
        groups = self._groups()
        if not groups:
            return
        number = self._fitting(min(one.active.max_length - one.active.length for group in groups for one in group) - 1)
        while number >= LEAST_STRETCH and not self._run_rounds(groups, number):
            number //= 2

    def _groups(self) -> list[list[ScheduledChunk]]:
        """Return the chunks of steps that follow each other again and again: those of the next step, and those under
        way. None if there is anything but decodes, or a first token, or a request that waits might be admitted.
        """
        running = self._scheduler.running
        if not all(self._times.first[one.arrival] for one in running):
            return []  # its first token comes
        under_way = [step.chunks for step in self._begun]
        at_work = {id(chunk.active) for chunks in under_way for chunk in chunks}
        if any(chunk.end - chunk.start > 1 or not chunk.samples for chunks in under_way for chunk in chunks):
            return []
        following = [one for one in running if id(one) not in at_work]
        most = -(-len(running) // self._num_stages)
        sizes = [len(following), *(len(chunks) for chunks in under_way)]
        if not following or max(sizes) > most or any(one.length - one.num_computed != 1 for one in following):
            return []
        if self._scheduler.waiting and not self._was_tried:
            return []
        next_one = [ScheduledChunk(one, one.length - 1, one.length, True) for one in following]
        return [next_one, *under_way]

    def _fitting(self, number: int) -> int:
        """At most so many rounds, for whose tokens blocks are free."""
        size, running = self._policy.block_size, self._scheduler.running

        def fits(more: int) -> bool:
            missing = (-(-(one.length + more - 1) // size) - len(one.held.blocks) for one in running if one.held)
            return sum(max(0, one) for one in missing) <= self._policy.num_free

        while number >= LEAST_STRETCH and not fits(number):
            number //= 2
        return number

    def _run_rounds(self, groups: list[list[ScheduledChunk]], number: int) -> bool:
        """Run each group `number` times. Returns False, with nothing done, if prices are not linear over these rounds.
        Stops when a request arrives that can be admitted.
        """
        lines = [self._lines(group, number, index > 0) for index, group in enumerate(groups)]
        if any(line is None for line in lines):
            return False
        scheduler = self._scheduler
        may_admit = len(scheduler.running) < scheduler.max_running and not scheduler.waiting
        until = self._coming[0][0].seconds if self._coming and may_admit else float("inf")
        done = 0
        while done < number and self._now < until:
            before = self._now, list(self._free), deque(self._begun)
            is_early = False  # a request arrives before the last step of the round
            for line in lines:
                assert line is not None
                is_early = is_early or self._now >= until
                ready = self._now
                for stage, (first, slope) in enumerate(line.seconds):
                    ready = self._free[stage] = max(ready, self._free[stage]) + first + slope * done
                self._begun.append(_StepUnderWay([], ready))
                self._now = max(self._now, self._begun.popleft().ready)
            if is_early:
                self._now, self._free, self._begun = before
                break
            done += 1
        if not done:
            return True
        for line in lines:
            assert line is not None
            by_cause = [done * (first + slope * (done - 1) / 2) for first, slope in line.by_cause]
            self._count(by_cause, done * (line.floor[0] + line.floor[1] * (done - 1) / 2), done)
        self._move_on(groups, done)
        return True

    def _lines(self, group: list[ScheduledChunk], number: int, is_under_way: bool) -> _Lines | None:
        """The prices of a group's rounds as linear functions of their number; None if they are not linear."""
        shape = step_shape(group)
        places = (0, (number - 1) // 2, number - 1)
        found = [
            [self._prices(shape._replace(shift=place + is_under_way), stage) for stage in range(self._num_stages)]
            for place in places
        ]
        slowest = [max(range(len(steps)), key=lambda stage: steps[stage].seconds) for steps in found]
        lowest = [max(range(len(steps)), key=lambda stage: steps[stage].floor_seconds) for steps in found]
        if len(set(slowest)) > 1 or len(set(lowest)) > 1:
            return None
        seconds = [_line(places, [steps[stage].seconds for steps in found]) for stage in range(self._num_stages)]
        causes = zip(*(steps[one].by_cause for steps, one in zip(found, slowest, strict=True)), strict=True)
        by_cause = [_line(places, values) for values in causes]
        floor = _line(places, [steps[one].floor_seconds for steps, one in zip(found, lowest, strict=True)])
        if floor is None or None in seconds or None in by_cause:
            return None
        return _Lines([one for one in seconds if one], [one for one in by_cause if one], floor)

    def _move_on(self, groups: list[list[ScheduledChunk]], number: int) -> None:
        """Give each request so many more tokens, and the steps under way their chunks."""
        under_way = list[_StepUnderWay]()
        for group in groups:
            for active in (chunk.active for chunk in group):
                assert active.held is not None
                active.tokens += [active.arrival + 1] * number
                active.num_computed += number
                has_room = self._policy.append(active.held, active.length - 1)
                assert has_room, "`_fitting` has counted the blocks"
        for step, group in zip(self._begun, groups[1:], strict=True):
            chunks = [one._replace(start=one.start + number, end=one.end + number) for one in group]
            under_way.append(_StepUnderWay(chunks, step.ready))
        self._begun = deque(under_way)


class _Lines(NamedTuple):
    """The prices of rounds: (that of the first one, and what each later one takes more)."""

    seconds: list[tuple[float, float]]  # of each stage
    by_cause: list[tuple[float, float]]
    floor: tuple[float, float]


def _line(places: Sequence[int], values: Sequence[float]) -> tuple[float, float] | None:
    """The line through the first and last value; None if the one between is not on it."""
    slope = (values[-1] - values[0]) / max(1, places[-1] - places[0])
    middle = values[0] + slope * (places[1] - places[0])
    return (values[0], slope) if abs(middle - values[1]) <= LINEAR * abs(values[1]) else None


def step_shape(chunks: Sequence[ScheduledChunk]) -> StepShape:
    """What a step of these chunks computes."""
    decodes = tuple(chunk.end for chunk in chunks if chunk.end - chunk.start == 1)
    prompts = tuple((chunk.end - chunk.start, chunk.end) for chunk in chunks if chunk.end - chunk.start > 1)
    return StepShape(decodes, 0, prompts, sum(chunk.samples for chunk in chunks))

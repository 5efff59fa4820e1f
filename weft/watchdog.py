"""The watch over ranks that live but do not get on: it finds who keeps the others waiting, and who is slow.

A rank that hangs takes the others with it: they wait in a collective that it does not enter. So a hang is silence of
all ranks (none writes to its page, see status.py) for longer than ten usual steps, and never less than a floor. Whoever
does not wait is named; where all wait, whoever has entered the fewest collectives. A rank that in each of ten steps
computes twice as long as the median rank is a straggler, and named once.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from weft.status import WAITING, Seen, last_seen, stack_path

_STEPS_OF_SILENCE = 10
_NUM_STEPS = 10  # that a straggler is judged by
_SLOW = 2.0
_MIN_SLOW_SECONDS = 0.1  # a step; below, differences are mostly those of a busy machine
_STACK_SECONDS = 0.5
_SAVING = "saving"  # may be silent for as long as a file system takes


class Watchdog:
    """The agent's eyes on one attempt of a job."""

    def __init__(self, folder: Path, num_ranks: int, floor_seconds: float) -> None:
        self._folder, self._num_ranks, self._floor_seconds = folder, num_ranks, floor_seconds
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._busy: list[deque[float]] = [deque(maxlen=_NUM_STEPS) for _ in range(num_ranks)]
        self._steps = [-1] * num_ranks
        self._step = -1
        self._named: set[int] = set()
        self.lost: int | None = None  # a rank that the others do without

    def look(self) -> tuple[str | None, str | None]:
        """(who hangs, who is slow), in words; None where there is nothing to say."""
        seen = [last_seen(self._folder, rank) for rank in range(self._num_ranks)]
        if any(one is None for one in seen):
            return None, None  # still starting: what they wait for then has its own deadline
        ranks = [one for one in seen if one is not None]
        if self.lost is not None:  # it is as silent as the others may be, and never late
            newest = max(ranks, key=lambda one: (one.step, one.num_calls))
            ranks[self.lost] = replace(newest, at=min(one.at for one in ranks), doing=f"{WAITING}nothing: it is lost")
        self._measure(ranks)
        return self._find_hang(ranks), self._find_straggler()

    @property
    def deadline_seconds(self) -> float | None:
        """How long all may be silent; None before a step has been measured."""
        if not self._step_seconds:
            return None
        return max(self._floor_seconds, _STEPS_OF_SILENCE * statistics.median(self._step_seconds))

    def _measure(self, ranks: Sequence[Seen]) -> None:
        newest = max(ranks, key=lambda rank: rank.step)
        if newest.step > self._step and newest.step_seconds > 0:
            self._step = newest.step
            self._step_seconds.append(newest.step_seconds)
        for rank, one in enumerate(ranks):
            if one.step > self._steps[rank] and one.step_seconds > 0:
                self._steps[rank] = one.step
                self._busy[rank].append(one.busy_seconds)

    def _find_hang(self, ranks: Sequence[Seen]) -> str | None:
        silent_seconds = time.monotonic() - max(rank.at for rank in ranks)
        deadline_seconds = self.deadline_seconds
        if deadline_seconds is None or silent_seconds < deadline_seconds:
            return None
        busy = [rank for rank, one in enumerate(ranks) if not one.is_waiting]
        if any(ranks[rank].doing == _SAVING for rank in busy):
            return None
        return describe_hang(ranks, silent_seconds)

    def _find_straggler(self) -> str | None:
        if any(len(busy) < _NUM_STEPS for busy in self._busy):
            return None
        usual = statistics.median_low([statistics.median(busy) for busy in self._busy])
        for rank, busy in enumerate(self._busy):
            own = min(busy)  # slow in every step: on a busy machine anybody is, now and then
            if own > _SLOW * usual and own > _MIN_SLOW_SECONDS and rank not in self._named:
                self._named.add(rank)
                return (
                    f"rank {rank} is slow: it computes {own:.2f} s a step or more, the median rank {usual:.2f} s "
                    f"(last {_NUM_STEPS} steps); the others wait for it"
                )
        return None


def describe_hang(ranks: Sequence[Seen], silent_seconds: float) -> str:
    """Who did not come, to what, and where it was last seen."""
    absent = [rank for rank, one in enumerate(ranks) if not one.is_waiting]
    if not absent:  # all wait: whoever is behind
        behind = min((one.step, one.num_calls) for one in ranks)
        absent = [rank for rank, one in enumerate(ranks) if (one.step, one.num_calls) == behind]
    waiting: dict[str, list[int]] = {}
    for rank, one in enumerate(ranks):
        if one.is_waiting and rank not in absent:
            waiting.setdefault(one.doing, []).append(rank)
    now = time.monotonic()
    words = [
        f"{_names([rank])} {_missed(waiting)}; last seen in {_place(ranks[rank])}, {now - ranks[rank].at:.0f} s ago"
        for rank in absent[:4]
    ]
    others = "; ".join(f"{_names(who)} {'is' if len(who) == 1 else 'are'} {what}" for what, who in waiting.items())
    return f"no sign of life for {silent_seconds:.0f} s: {'; '.join(words)}" + (f" ({others})" if others else "")


def _missed(waiting: dict[str, list[int]]) -> str:
    """What most of the others wait in."""
    if not waiting:
        return "does not get on"
    what = max(waiting, key=lambda doing: len(waiting[doing]))
    return f"did not enter {what.removeprefix('waiting in ').partition(' (#')[0]}"


def _place(seen: Seen) -> str:
    return f"{seen.doing.removeprefix('waiting in ')} of step {seen.step + 1} (after {seen.num_calls} collectives)"


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def ask_for_stacks(pids: Sequence[int]) -> None:
    """Ask every rank where its threads are, and leave it a moment to say so."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(_STACK_SECONDS)


def keep_stacks(folder: Path, num_ranks: int, target: Path) -> Path:
    """Put the answers of all ranks into one file."""
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    paths = [stack_path(folder, rank) for rank in range(num_ranks)]
    path.write_text("\n".join(f"rank {rank}:\n{one.read_text()}" for rank, one in enumerate(paths) if one.exists()))
    return path

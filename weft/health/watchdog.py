"""The watch over ranks that live but do not get on: it finds who keeps the others waiting, and who is slow.

A rank that hangs takes the others with it: they wait in a collective or a receive that it does not serve. So a hang is
a wait that passes its deadline, or silence of all ranks (none writes to its page, see status.py) for as long. The
deadline is ten usual steps, and never less than a floor; before a step was measured, ten predicted ones and never less
than five floors, for what a first step has to make. Whoever does not wait is named; where all wait, whoever has entered
the fewest collectives. A rank that in each of ten steps computes twice as long as the median rank is a straggler, and
named once.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from weft.health.rank_status import FILES, WAITING, Seen, last_seen, stack_path, wait_for_stacks

_STEPS_OF_SILENCE = 10
_FIRST_FLOORS = 5  # compiling, connecting and first allocations take longer than any later step
_NUM_STEPS = 10  # that a straggler is judged by
_SLOW = 2.0
_MIN_SLOW_SECONDS = 0.1  # a step; below, differences are mostly those of a busy machine
_STACK_SECONDS = 0.5  # at most: a rank that is stopped says nothing
_MAX_NAMED = 4


class Deadline:
    """How long a wait, or silence, may last: from the steps that were measured, or at first from the predicted one."""

    def __init__(self, floor_seconds: float, predicted_seconds: float | None = None) -> None:
        self._floor_seconds, self._predicted_seconds = floor_seconds, predicted_seconds or 0.0
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._step = -1

    def measure(self, seen: Seen) -> None:
        """Learn from a page."""
        if seen.step > self._step and seen.step_seconds > 0:
            self._step = seen.step
            self._step_seconds.append(seen.step_seconds)

    @property
    def seconds(self) -> float:
        if not self._step_seconds:
            return max(_FIRST_FLOORS * self._floor_seconds, _STEPS_OF_SILENCE * self._predicted_seconds)
        return max(self._floor_seconds, _STEPS_OF_SILENCE * statistics.median(self._step_seconds))


class Watchdog:
    """The agent's eyes on one attempt of a job."""

    def __init__(self, folder: Path, num_ranks: int, deadline: Deadline) -> None:
        self.folder, self._num_ranks, self.deadline = folder, num_ranks, deadline
        self._busy: list[deque[float]] = [deque(maxlen=_NUM_STEPS) for _ in range(num_ranks)]
        self._steps = [-1] * num_ranks
        self._named: set[int] = set()
        self.lost: int | None = None  # a rank that the others do without
        self._overdue_since: float | None = None  # at the last look

    def look(self) -> tuple[str | None, str | None]:
        """(who hangs, who is slow), in words; None where there is nothing to say."""
        seen = {rank: last_seen(self.folder, rank) for rank in range(self._num_ranks) if rank != self.lost}
        ranks = {rank: one for rank, one in seen.items() if one is not None}
        if len(ranks) < len(seen):
            return None, None  # still starting: what they wait for then has its own deadline
        self._measure(ranks)
        return self._find_hang(ranks), self._find_straggler()

    def _measure(self, ranks: Mapping[int, Seen]) -> None:
        self.deadline.measure(max(ranks.values(), key=lambda rank: rank.step))
        for rank, one in ranks.items():
            if one.step > self._steps[rank] and one.step_seconds > 0:
                self._steps[rank] = one.step
                self._busy[rank].append(one.busy_seconds)

    def _find_hang(self, ranks: Mapping[int, Seen]) -> str | None:
        seconds = overdue_seconds(ranks.values())
        since = overdue_since(ranks.values()) if seconds >= self.deadline.seconds else None
        before, self._overdue_since = self._overdue_since, since
        if since is None or since != before:  # all may just have been stopped for a while: look twice
            return None
        return describe_hang(ranks, {}, seconds)

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


def overdue_seconds(ranks: Collection[Seen]) -> float:
    """How long the longest wait has lasted, or the silence of all; 0 while a rank is at its files."""
    since = overdue_since(ranks)
    return 0.0 if since is None else time.monotonic() - since


def overdue_since(ranks: Collection[Seen]) -> float | None:
    """When that began (time.monotonic)."""
    if any(one.doing in FILES for one in ranks):
        return None
    waiting = [one.at for one in ranks if one.is_waiting]
    return min([*waiting, max(one.at for one in ranks)])


def describe_hang(seen: Mapping[int, Seen], silent: Mapping[int, str], seconds: float) -> str:
    """Who did not come, to what, and where it was last seen; `silent` are the places of ranks that do not answer."""
    seen = dict(sorted(seen.items()))
    absent = [rank for rank, one in seen.items() if not one.is_waiting]
    words = []
    for place in dict.fromkeys(silent.values()):
        ranks = [rank for rank, there in silent.items() if there == place]
        where = f" ({place})" if place else ""
        words.append(f"{names(ranks)}{where} {'does' if len(ranks) == 1 else 'do'} not answer")
    if silent:
        words[-1] += ": that host, or the link to it, may be down"
    elif not absent:  # all wait: whoever is behind
        behind = min((one.step, one.num_calls) for one in seen.values())
        absent = [rank for rank, one in seen.items() if (one.step, one.num_calls) == behind]
        if len(absent) == len(seen):
            absent = []
            words.append("every rank waits for another, and none is behind: a link between them may be down")
    now = time.monotonic()
    waiting = {rank: one for rank, one in seen.items() if one.is_waiting and rank not in absent}
    for rank in absent[:_MAX_NAMED]:
        one, missed = seen[rank], _missed(rank, seen[rank], waiting)
        words.append(f"{_name(rank, one)} {missed}; last seen in {_place(one)}, {now - one.at:.0f} s ago")
    others: dict[str, list[int]] = {}
    for rank, one in waiting.items():
        others.setdefault(one.doing, []).append(rank)
    rest = [f"{names(who)} {'is' if len(who) == 1 else 'are'} {what}" for what, who in others.items()]
    if len(rest) > _MAX_NAMED:
        rest = [*rest[:_MAX_NAMED], f"{len(rest) - _MAX_NAMED} other waits"]
    return f"no sign of life for {seconds:.0f} s: {'; '.join(words)}" + (f" ({'; '.join(rest)})" if rest else "")


def _missed(rank: int, seen: Seen, waiting: Mapping[int, Seen]) -> str:
    """What the others wait for: what waits for this rank itself before all, and of that the first."""
    if not waiting:
        return "does not get on"
    first = min(waiting.values(), key=lambda one: (rank not in one.peers, one.step, _number(one), one.at))
    what = first.doing.removeprefix(WAITING)
    message = re.match(r"(recv|send)_(\w+ of micro-batch \d+) at (stage \d+( of replica \d+)?)", what)
    if message is not None:
        did, to = ("send", "to") if message[1] == "recv" else ("receive", "from")
        return f"did not {did} the {message[2]} {to} {message[3]}"
    if " over " not in what:
        return f"keeps the others waiting for {what}"
    has_entered = rank in first.peers and first.step == seen.step and 0 < _number(first) <= seen.num_calls
    return f"has entered {what} and does not serve it" if has_entered else f"did not enter {what}"


def _number(seen: Seen) -> int:
    """Of the call that a rank waits in; 0 for a message."""
    found = re.search(r" \(#(\d+)", seen.doing)
    return int(found[1]) if found is not None else 0


def _place(seen: Seen) -> str:
    doing = seen.doing.removeprefix(WAITING)
    if not seen.is_waiting and seen.inside:
        doing = seen.inside
    return f"{doing} of step {seen.step + 1} (after {seen.num_calls} collectives)"


def _name(rank: int, seen: Seen) -> str:
    return f"rank {rank} ({seen.place})" if seen.place else f"rank {rank}"


def names(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def ask_for_stacks(folder: Path, pids: Sequence[int]) -> None:
    """Ask every rank where its threads are, and leave it a moment to say so."""
    asked = []
    for rank, pid in enumerate(pids):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
            asked.append(stack_path(folder, rank))
    wait_for_stacks(asked, _STACK_SECONDS)


def keep_stacks(folder: Path, num_ranks: int, target: Path) -> Path:
    """Put the answers of all ranks into one file."""
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    paths = [stack_path(folder, rank) for rank in range(num_ranks)]
    path.write_text("\n".join(f"rank {rank}:\n{one.read_text()}" for rank, one in enumerate(paths) if one.exists()))
    return path

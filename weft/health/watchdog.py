"""The watchdog: finds ranks that hang, and ranks that are slow.

When a rank hangs, the others wait in a collective or a receive that it does not serve. So a hang is a wait that is
longer than the deadline, or a time as long in which no rank writes its status page (rank_status.py). The deadline is
ten times the median step, and at least a floor. Before a step was measured it is ten predicted steps, and at least five
floors, because a first step also compiles, connects and allocates. The report names the ranks that do not wait; if all
wait, those that have started the fewest collectives. A rank that in each of ten steps computes twice as long as the
median rank is a straggler and is reported once.
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

from weft.health.rank_status import FILE_PHASES, WAITING, StatusPage, read_page, stack_path, wait_for_stacks

_STEPS_OF_SILENCE = 10
_FIRST_FLOORS = 5  # compiling, connecting and first allocations take longer than any later step
_NUM_STEPS = 10  # the number of steps in which a straggler must be slow
_SLOW = 2.0
_MIN_SLOW_SECONDS = 0.1  # per step; shorter steps differ mostly because the machine is busy
_STACK_SECONDS = 0.5  # the longest wait for stacks: a stopped rank writes none
_MAX_NAMED = 4


class Deadline:
    """The time that ranks may wait or write no page, from measured steps; before the first, from the predicted one."""

    def __init__(self, floor_seconds: float, predicted_seconds: float | None = None) -> None:
        self._floor_seconds, self._predicted_seconds = floor_seconds, predicted_seconds or 0.0
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._step = -1

    def measure(self, page: StatusPage) -> None:
        """Add the step time of a page."""
        if page.step > self._step and page.step_seconds > 0:
            self._step = page.step
            self.add(page.step_seconds)

    def add(self, step_seconds: float) -> None:
        """Add the time of a step."""
        self._step_seconds.append(step_seconds)

    @property
    def seconds(self) -> float:
        if not self._step_seconds:
            return max(_FIRST_FLOORS * self._floor_seconds, _STEPS_OF_SILENCE * self._predicted_seconds)
        return max(self._floor_seconds, _STEPS_OF_SILENCE * statistics.median(self._step_seconds))


class Watchdog:
    """Watches the ranks of one attempt of a job through their status pages."""

    def __init__(self, folder: Path, num_ranks: int, deadline: Deadline) -> None:
        self.folder, self._num_ranks, self.deadline = folder, num_ranks, deadline
        self._busy: list[deque[float]] = [deque(maxlen=_NUM_STEPS) for _ in range(num_ranks)]
        self._steps = [-1] * num_ranks
        self._named: set[int] = set()
        self.lost: int | None = None  # a lost rank without which the others continue
        self._overdue_since: float | None = None  # as found by the last check

    def check(self) -> tuple[str | None, str | None]:
        """Returns a description of a hang and one of a straggler; None for each that was not found."""
        pages = {rank: read_page(self.folder, rank) for rank in range(self._num_ranks) if rank != self.lost}
        ranks = {rank: page for rank, page in pages.items() if page is not None}
        if len(ranks) < len(pages):
            return None, None  # ranks are still starting; the operations they wait for then have their own timeouts
        self._measure(ranks)
        return self._find_hang(ranks), self._find_straggler()

    def _measure(self, ranks: Mapping[int, StatusPage]) -> None:
        self.deadline.measure(max(ranks.values(), key=lambda rank: rank.step))
        for rank, page in ranks.items():
            if page.step > self._steps[rank] and page.step_seconds > 0:
                self._steps[rank] = page.step
                self._busy[rank].append(page.busy_seconds)

    def _find_hang(self, ranks: Mapping[int, StatusPage]) -> str | None:
        seconds = overdue_seconds(ranks.values())
        since = overdue_since(ranks.values()) if seconds >= self.deadline.seconds else None
        before, self._overdue_since = self._overdue_since, since
        if since is None or since != before:  # all processes may have been stopped for a while, so check twice
            return None
        return describe_hang(ranks, {}, seconds)

    def _find_straggler(self) -> str | None:
        if any(len(busy) < _NUM_STEPS for busy in self._busy):
            return None
        usual = statistics.median_low([statistics.median(busy) for busy in self._busy])
        for rank, busy in enumerate(self._busy):
            own = min(busy)  # slow in every step: on a busy machine any rank is slow now and then
            if own > _SLOW * usual and own > _MIN_SLOW_SECONDS and rank not in self._named:
                self._named.add(rank)
                return (
                    f"rank {rank} is slow: it computes {own:.2f} s a step or more, the median rank {usual:.2f} s "
                    f"(last {_NUM_STEPS} steps); the others wait for it"
                )
        return None


def overdue_seconds(ranks: Collection[StatusPage]) -> float:
    """The time that the longest wait has lasted, or in which no rank has written its page. 0 while a rank reads or
    writes files, which may take long without a hang.
    """
    since = overdue_since(ranks)
    return 0.0 if since is None else time.monotonic() - since


def overdue_since(ranks: Collection[StatusPage]) -> float | None:
    """When the longest wait began, or when the last page was written (time.monotonic). None while a rank reads or
    writes files.
    """
    if any(page.doing in FILE_PHASES for page in ranks):
        return None
    waiting = [page.at for page in ranks if page.is_waiting]
    return min([*waiting, max(page.at for page in ranks)])


def describe_hang(pages: Mapping[int, StatusPage], silent: Mapping[int, str], seconds: float) -> str:
    """Describe a hang: which ranks are missing, in which operation, and what they did last.

    `pages` has the pages of ranks that answer, `silent` the places of those that do not, `seconds` how long it lasts.
    """
    pages = dict(sorted(pages.items()))
    absent = [rank for rank, page in pages.items() if not page.is_waiting]
    words = []
    for place in dict.fromkeys(silent.values()):
        ranks = [rank for rank, there in silent.items() if there == place]
        where = f" ({place})" if place else ""
        words.append(f"{rank_names(ranks)}{where} {'does' if len(ranks) == 1 else 'do'} not answer")
    if silent:
        words[-1] += ": that host, or the link to it, may be down"
    elif not absent and (different := _different_ways(pages)) is not None:
        words.append(different)
    elif not absent:  # all ranks wait: name those that are behind
        behind = min((page.step, page.num_calls) for page in pages.values())
        absent = [rank for rank, page in pages.items() if (page.step, page.num_calls) == behind]
        if len(absent) == len(pages):
            absent = []
            words.append("every rank waits for another, and none is behind: a link between them may be down")
    now = time.monotonic()
    waiting = {rank: page for rank, page in pages.items() if page.is_waiting and rank not in absent}
    for rank in absent[:_MAX_NAMED]:
        page, missed = pages[rank], _missed_call(rank, pages[rank], waiting)
        words.append(f"{_rank_name(rank, page)} {missed}; last seen in {_position(page)}, {now - page.at:.0f} s ago")
    others: dict[str, list[int]] = {}
    for rank, page in waiting.items():
        others.setdefault(page.doing, []).append(rank)
    rest = [f"{rank_names(who)} {'is' if len(who) == 1 else 'are'} {what}" for what, who in others.items()]
    if len(rest) > _MAX_NAMED:
        rest = [*rest[:_MAX_NAMED], f"{len(rest) - _MAX_NAMED} other waits"]
    return f"no sign of life for {seconds:.0f} s: {'; '.join(words)}" + (f" ({'; '.join(rest)})" if rest else "")


def _different_ways(pages: Mapping[int, StatusPage]) -> str | None:
    """Describe two ranks that wait for each other in collectives of the same number, made in different blocks."""
    for rank, page in pages.items():
        for other, theirs in pages.items():
            numbers = {(one.step, _call_number(one)) for one in (page, theirs)}
            waits = [one.doing.removeprefix(WAITING) for one in (page, theirs)]
            if rank < other and other in page.peers and rank in theirs.peers and len(numbers) == 1 < len(set(waits)):
                return (
                    f"{rank_names([rank])} waits in {waits[0]} and {rank_names([other])} in {waits[1]}: they take "
                    f"different ways through the model, and must call the same blocks in the same order"
                )
    return None


def _missed_call(rank: int, page: StatusPage, waiting: Mapping[int, StatusPage]) -> str:
    """Describe the operation that others wait for: preferably one that waits for this rank itself, and the earliest."""
    if not waiting:
        return "does not get on"
    first = min(waiting.values(), key=lambda page: (rank not in page.peers, page.step, _call_number(page), page.at))
    what = first.doing.removeprefix(WAITING)
    message = re.match(r"(recv|send)_(\w+ of micro-batch \d+) at (stage \d+( of replica \d+)?)", what)
    if message is not None:
        did, to = ("send", "to") if message[1] == "recv" else ("receive", "from")
        return f"did not {did} the {message[2]} {to} {message[3]}"
    if " over " not in what:
        return f"keeps the others waiting for {what}"
    has_entered = rank in first.peers and first.step == page.step and 0 < _call_number(first) <= page.num_calls
    return f"has entered {what} and does not serve it" if has_entered else f"did not enter {what}"


def _call_number(page: StatusPage) -> int:
    """The number of the collective that a rank waits in; 0 for a message."""
    found = re.search(r" \(#(\d+)", page.doing)
    return int(found[1]) if found is not None else 0


def _position(page: StatusPage) -> str:
    doing = page.doing.removeprefix(WAITING)
    if not page.is_waiting and page.inside:
        doing = page.inside
    return f"{doing} of step {page.step + 1} (after {page.num_calls} collectives)"


def _rank_name(rank: int, page: StatusPage) -> str:
    return f"rank {rank} ({page.place})" if page.place else f"rank {rank}"


def rank_names(ranks: Sequence[int]) -> str:
    """Ranks as text: "rank 3" or "ranks 1, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def ask_for_stacks(folder: Path, pids: Sequence[int]) -> None:
    """Make every rank write the stacks of its threads, and wait briefly for them."""
    asked = []
    for rank, pid in enumerate(pids):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
            asked.append(stack_path(folder, rank))
    wait_for_stacks(asked, _STACK_SECONDS)


def collect_stacks(folder: Path, num_ranks: int, target: Path) -> Path:
    """Collect the stacks of all ranks in one file of the folder `target`, and return its path."""
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    paths = [stack_path(folder, rank) for rank in range(num_ranks)]
    path.write_text("\n".join(f"rank {rank}:\n{one.read_text()}" for rank, one in enumerate(paths) if one.exists()))
    return path

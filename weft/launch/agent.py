"""The local agent: starts the ranks of one machine, watches them, and starts them again when one dies.

A rank that is killed or fails takes the others with it: all are ended and started anew, and load the newest complete
checkpoint. One paragraph says who died, how, in which step, from where the run goes on and what was lost. Errors that
would come again are not tried again: what a user must change (status 2), and what came before a single step was done.

Where ranks shadow each other (plan.pipe.shadow), the first that is killed, unless it is rank 0, ends nobody: the others
are told, and go on without it (resilience/takeover.py). Should they fail to, all start again.

    start_local(nursery, num_ranks, arguments, ..) -> the exit status of the whole
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from weft.health.lost_ranks import Losses, describe_failures
from weft.health.rank_status import FOLDER_VARIABLE, Failure, clear, failures, last_seen
from weft.health.watchdog import Deadline, Watchdog, ask_for_stacks, keep_stacks
from weft.launch.environment import LOCAL_RUN_ID_PREFIX
from weft.launch.fork_server import SAVE_SECONDS, Nursery

_POLL_SECONDS = 0.1
_CAUSE_SECONDS = 0.5  # for the cause of an error to show
_END_SECONDS = 30.0  # for ranks that were asked to end, once one of them has failed
_HUNG = 124  # the exit status of a job that was given up, as timeout(1) has it
_SAME_PRESS_SECONDS = 0.5  # wrappers pass on a Ctrl-C that the terminal sends as well: copies are one request


@dataclass(frozen=True)
class Restarts:
    """How often to start again: at most `limit` times within `window_seconds`. Ranks hang that show no sign of life for
    `hang_seconds` (and ten of their steps; at first, ten of the predicted `step_seconds`).
    """

    limit: int = 0
    window_seconds: float = 3600.0
    hang_seconds: float = 60.0
    step_seconds: float | None = None


@dataclass(frozen=True)
class Source:
    """Where ranks that start now go on: the step of the newest complete checkpoint, and where it is."""

    step: int = 0
    where: str = "the beginning: there is no checkpoint yet"


def start_local(
    nursery: Nursery,
    num_ranks: int,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    restarts: Restarts = Restarts(),  # noqa: B008 (frozen)
    newest: Callable[[], Source] = Source,
    stacks: Path | None = None,
    shadowed: bool = False,
) -> int:
    """Run the nursery's program as `num_ranks` local ranks with `environ` added to theirs; the exit status.

    0 when all ranks left with 0. When one fails, hangs or is killed, the others are killed and all start again, as
    `restarts` allows; else one line says which rank it was, and the status is that rank's, or 128 + the number of its
    signal. Stacks of ranks that hang go to a file in the folder `stacks`. With `shadowed` ranks, one may be lost.
    The first SIGTERM, SIGHUP, SIGQUIT or Ctrl-C here asks the ranks to stop with SIGTERM and leaves them 10 minutes
    to save; a second Ctrl-C kills them.
    """
    run_id = LOCAL_RUN_ID_PREFIX + uuid.uuid4().hex
    threads = {"OMP_NUM_THREADS": str(max(1, _num_cores() // num_ranks))}
    ended_at: list[float] = []
    with tempfile.TemporaryDirectory(prefix="weft-") as name, _Stop.watching() as stop:
        own = {"TORCHELASTIC_RUN_ID": run_id, FOLDER_VARIABLE: name}
        while True:
            clear(Path(name))
            began_at = newest().step
            count = {"TORCHELASTIC_RESTART_COUNT": str(len(ended_at))}
            pids = nursery.start(num_ranks, arguments, {**threads, **os.environ, **own, **count, **environ})
            watchdog = Watchdog(Path(name), num_ranks, Deadline(restarts.hang_seconds, restarts.step_seconds))
            losses = Losses(Path(name), num_ranks, watchdog, shadowed)
            codes, hang = _watch(nursery, pids, stop, watchdog, losses)
            if hang is None and not any(codes.values()):
                return 0
            if hang is not None and stacks is not None:
                hang += f"; their stacks are in {keep_stacks(Path(name), num_ranks, stacks)}"
            loss = _Loss.of(Path(name), codes, num_ranks, began_at, hang)
            now = time.monotonic()
            recent = [at for at in ended_at if at > now - restarts.window_seconds]
            if stop.order is not None or not loss.may_come_right or len(recent) >= restarts.limit:
                _say(loss.last_words(restarts if recent and stop.order is None else None))
                return loss.status
            ended_at.append(now)
            _say(loss.paragraph(newest(), len(recent) + 1, restarts))


def _watch(
    nursery: Nursery, pids: Sequence[int], stop: _Stop, watchdog: Watchdog, losses: Losses
) -> tuple[dict[int, int], str | None]:
    """Wait until all ranks have ended; what each left with, up to the first that failed and those that died with it.

    Or until none gets on any more: then who it was, in words.
    """
    codes: dict[int, int] = {}
    hang: str | None = None
    stop.watch(pids)
    try:
        while len(codes) + losses.num_lost < len(pids) and not any(codes.values()) and hang is None:
            stop.look_at_the_clock()
            _collect(nursery, codes)
            if stop.order is None:
                losses.absorb(codes)
                made_good = losses.look(codes)
                if made_good is not None:
                    _say(f"weft: {made_good}")
            if not codes:
                hang, slow = watchdog.look()
                if slow is not None:
                    _say(f"weft: {slow}")
        deadline = time.monotonic() + _END_SECONDS
        while stop.order is not None and len(codes) + losses.num_lost < len(pids) and time.monotonic() < deadline:
            _collect(nursery, codes)  # all were asked to end: the others may still be at it
        if hang is not None or any(codes.values()):
            losses.give_back(codes)
        if hang is not None:
            ask_for_stacks(watchdog.folder, pids)
    finally:
        stop.watch([])
        for pid in pids:  # the living, those that lead no session yet, and what the dead have left running
            for kill in (os.kill, os.killpg):
                with suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
    for _ in range(len(pids) - len(codes) - losses.num_lost):
        while nursery.death(_POLL_SECONDS) is None:
            pass
    return codes, hang


def _collect(nursery: Nursery, codes: dict[int, int]) -> None:
    """Wait a moment for a death; where an error is all that is known, a little longer for what caused it."""
    death = nursery.death(_POLL_SECONDS)
    while death is not None:
        codes[death.rank] = death.status
        is_explained = not any(codes.values()) or min(codes.values()) < 0  # of a killed rank its peers know first
        death = nursery.death(0 if is_explained else _CAUSE_SECONDS)


@dataclass(frozen=True)
class _Loss:
    """Ranks that ended the job: their exit codes, the error that one of them left, and how far they had come."""

    codes: Mapping[int, int]
    culprit: int | None
    failure: Failure | None
    step: int | None  # that the rank at fault had finished
    done: int  # that any rank had finished
    began_at: int
    hang: str | None = None

    @staticmethod
    def of(folder: Path, codes: Mapping[int, int], num_ranks: int, began_at: int, hang: str | None) -> _Loss:
        codes = {rank: code for rank, code in codes.items() if code}
        seen = {rank: found.step for rank in range(num_ranks) if (found := last_seen(folder, rank)) is not None}
        done = max(seen.values(), default=began_at)
        if hang is not None:
            return _Loss({}, None, None, done, done, began_at, hang)
        killed = [rank for rank, code in codes.items() if code < 0]
        left = failures(folder, num_ranks)
        if killed or not left:  # a killed rank explains the others' errors
            return _Loss(codes, None, None, seen.get(min(killed or codes)), done, began_at)
        culprit = next(iter(left))
        return _Loss(codes, culprit, left[culprit], seen.get(culprit), done, began_at)

    @property
    def may_come_right(self) -> bool:
        """Whether another attempt may end better. Kills and flipped bits may; an error must have let some step pass."""
        if self.hang is not None or any(code < 0 for code in self.codes.values()):
            return True
        if self.failure is None or self.failure.final:
            return False
        return self.failure.chance or self.done > self.began_at

    @property
    def status(self) -> int:
        if self.hang is not None:
            return _HUNG
        return self.failure.status if self.failure is not None else describe_failures(self.codes)[1]

    def _who(self) -> str:
        if self.hang is not None:
            return self.hang
        if self.failure is None:
            return describe_failures(self.codes)[0]
        return f"rank {self.culprit} failed: {self.failure.message}"

    def last_words(self, restarts: Restarts | None) -> str:
        """Why the job ends."""
        if self.failure is not None and self.failure.final:
            return f"weft: {self.failure.message}"
        trace = f"{self.failure.trace}\n" if self.failure is not None else ""
        often = ""
        if restarts is not None:
            often = (
                f"; that was after {restarts.limit} restarts within {restarts.window_seconds:.0f} s, the most that "
                f"[restart] allows: look for the cause, then run the same command to go on"
            )
        return f"{trace}weft: {self._who()}{often}"

    def paragraph(self, source: Source, number: int, restarts: Restarts) -> str:
        """Who died, how, when, from where it goes on, and what was lost."""
        trace = f"{self.failure.trace}\n" if self.failure is not None else ""
        when = "before the first step" if self.step is None else f"in step {self.step + 1}"
        again = max(0, self.done - source.step)
        lost = "no finished step is lost" if not again else f"{again} finished step{'s' * (again > 1)} to do again"
        return (
            f"{trace}weft: {self._who()}, {when}. All ranks start again (restart {number} of at most {restarts.limit} "
            f"within {restarts.window_seconds:.0f} s) and go on after step {source.step}, from {source.where}; {lost}."
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Stop:
    """The order given to the ranks: none, then SIGTERM, then SIGKILL."""

    def __init__(self) -> None:
        self.order: signal.Signals | None = None
        self._pids: list[int] = []
        self._asked_at = 0.0

    @staticmethod
    @contextmanager
    def watching() -> Iterator[_Stop]:
        """Turn signals at this process into signals at the ranks, which live in sessions of their own."""
        stop = _Stop()
        before = {}
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and background jobs ask for
                before[number] = signal.signal(number, stop._handle)
        try:
            yield stop
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def watch(self, pids: Sequence[int]) -> None:
        """These are the ranks from now on; an order that came before them is for them too."""
        self._pids = list(pids)
        self._send()

    def look_at_the_clock(self) -> None:
        """Ranks that were asked to save and do not come to an end are killed."""
        if self.order is signal.SIGTERM and time.monotonic() - self._asked_at > SAVE_SECONDS:
            self._give(signal.SIGKILL, f"weft: not saved within {SAVE_SECONDS:.0f} s; killing the ranks")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.order is None:
            self._asked_at = now
            name = signal.Signals(number).name
            self._give(signal.SIGTERM, f"weft: {name}: the ranks save and stop; Ctrl-C once more kills them")
        elif number == signal.SIGINT and now - self._asked_at > _SAME_PRESS_SECONDS:
            self._give(signal.SIGKILL, "weft: killing the ranks")

    def _give(self, order: signal.Signals, message: str) -> None:
        self.order = order
        _say(message)
        self._send()

    def _send(self) -> None:
        if self.order is None:
            return
        for pid in self._pids:
            with suppress(ProcessLookupError):
                if self.order is signal.SIGTERM:
                    os.kill(pid, self.order)  # the rank alone: it may need its data workers to save
                else:
                    os.killpg(pid, self.order)

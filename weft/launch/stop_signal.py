"""The stop signal of a local job: Ctrl-C and SIGTERM of the command, passed on to its ranks."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from weft.errors import UNFINISHED
from weft.launch.fork_server import SAVE_SECONDS

ENDS_SECONDS = 1.0  # SIGTERM ends a rank that has not begun a step, and cannot save, within this time
SAME_PRESS_SECONDS = 0.5  # a wrapper may forward a Ctrl-C that the terminal also sends: both count as one request


def say(text: str) -> None:
    """Print a line about the job on stderr."""
    print(text, file=sys.stderr, flush=True)


class StopSignal:
    """The stop signal that was sent to the ranks: none, then SIGTERM, then SIGKILL.

    `is_training` returns whether a rank has begun a step. SIGTERM ends ranks that have not: they have nothing to save,
    unless they are to load a step that is only in memory (`hold_back`). `doing` says what the others do.
    """

    def __init__(self, is_training: Callable[[], bool], doing: str = "save and stop") -> None:
        self._doing = doing
        self.order: signal.Signals | None = None
        self._is_training = is_training
        self._asked_by = signal.SIGTERM
        self._pids: list[int] = []
        self._asked_at: float | None = None
        self._is_announced = False
        self._may_send: Callable[[], bool] | None = None
        self._held_step: int | None = None

    @staticmethod
    @contextmanager
    def watching(is_training: Callable[[], bool], doing: str = "save and stop") -> Iterator[StopSignal]:
        """Forward stop signals of this process to the ranks, which have their own sessions and do not receive them."""
        stop = StopSignal(is_training, doing)
        before = {}
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and background jobs ignore some signals
                before[number] = signal.signal(number, stop._handle)
        try:
            yield stop
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def watch(self, pids: Sequence[int]) -> None:
        """Send signals to these ranks from now on. A signal that came before they started is sent to them now."""
        self._pids = list(pids)
        self._send()

    def hold_back(self, step: int | None, may_send: Callable[[], bool]) -> None:
        """Hold SIGTERM back until `may_send()`, because `step`, which the next ranks load, is only in memory and would
        be lost. Until then `order` is None, also if a signal came before this call. No step: nothing is held back.
        """
        self._may_send, self._held_step = None if step is None else may_send, step
        if self._is_held() and self.order is signal.SIGTERM:
            self.order = None
            self._announce_held()

    def poll(self) -> None:
        """Call often while all ranks run. Kills ranks that were asked to stop and did not save in `SAVE_SECONDS`."""
        if self._asked_at is not None and self.order is None and not self._is_held():
            self._asked_at = time.monotonic()
            self._set_order(signal.SIGTERM)
        if self.order is not signal.SIGTERM or self._asked_at is None:
            return
        passed = time.monotonic() - self._asked_at
        if passed > ENDS_SECONDS:
            self._announce()
        if passed > SAVE_SECONDS:
            self._set_order(signal.SIGKILL, f"weft: not saved within {SAVE_SECONDS:.0f} s; killing the ranks")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at, self._asked_by = now, signal.Signals(number)
            if self._is_held():
                self._announce_held()
                return
            self._set_order(signal.SIGTERM)
            if self._is_training():
                self._announce()
        elif number == signal.SIGINT and now - self._asked_at > SAME_PRESS_SECONDS:
            self._set_order(signal.SIGKILL, "weft: killing the ranks")

    def end_before_first_step(self, saved_step: int) -> int:
        """Say that ranks were stopped before they had begun a step. Returns the exit status of the job."""
        if saved_step:
            say(f"weft: stopped by {self._asked_by.name}; step {saved_step} is saved: run the same command to go on")
            return UNFINISHED
        say(f"weft: stopped by {self._asked_by.name}; there was nothing to save")
        return 128 + self._asked_by

    def _is_held(self) -> bool:
        return self._may_send is not None and not self._may_send()

    def _announce_held(self) -> None:
        self._is_announced = True
        say(
            f"weft: {self._asked_by.name}: step {self._held_step} is only in memory, so the ranks load it, go on, save "
            f"and stop; Ctrl-C once more kills them"
        )

    def _announce(self) -> None:
        if not self._is_announced:
            self._is_announced = True
            say(f"weft: {self._asked_by.name}: the ranks {self._doing}; Ctrl-C once more kills them")

    def _set_order(self, order: signal.Signals, message: str | None = None) -> None:
        self.order = order
        if message is not None:
            say(message)
        self._send()

    def _send(self) -> None:
        if self.order is None:
            return
        for pid in self._pids:
            with suppress(ProcessLookupError):
                if self.order is signal.SIGTERM:
                    os.kill(pid, self.order)  # only the rank, not its group: it may need its data workers to save
                else:
                    os.killpg(pid, self.order)

"""The stop signal of a local job: Ctrl-C and SIGTERM of the command, passed on to its ranks."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from weft.launch.fork_server import SAVE_SECONDS

SAME_PRESS_SECONDS = 0.5  # a wrapper may forward a Ctrl-C that the terminal also sends: both count as one request


def say(text: str) -> None:
    """Print a line about the job on stderr."""
    print(text, file=sys.stderr, flush=True)


class StopSignal:
    """The stop signal that was sent to the ranks: none, then SIGTERM, then SIGKILL."""

    def __init__(self) -> None:
        self.order: signal.Signals | None = None
        self._pids: list[int] = []
        self._asked_at = 0.0

    @staticmethod
    @contextmanager
    def watching() -> Iterator[StopSignal]:
        """Forward stop signals of this process to the ranks, which have their own sessions and do not receive them."""
        stop = StopSignal()
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

    def kill_if_overdue(self) -> None:
        """Kill the ranks if they were asked to stop and did not save within `SAVE_SECONDS`."""
        if self.order is signal.SIGTERM and time.monotonic() - self._asked_at > SAVE_SECONDS:
            self._set_order(signal.SIGKILL, f"weft: not saved within {SAVE_SECONDS:.0f} s; killing the ranks")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.order is None:
            self._asked_at = now
            name = signal.Signals(number).name
            self._set_order(signal.SIGTERM, f"weft: {name}: the ranks save and stop; Ctrl-C once more kills them")
        elif number == signal.SIGINT and now - self._asked_at > SAME_PRESS_SECONDS:
            self._set_order(signal.SIGKILL, "weft: killing the ranks")

    def _set_order(self, order: signal.Signals, message: str) -> None:
        self.order = order
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

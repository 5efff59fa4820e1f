"""Ctrl-C, SIGTERM or SIGHUP at a command that has nothing to save yet: one line, and status 130, 143 or 129."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_IMPORT_SYSTEM = "<frozen importlib"  # how file names of its frames begin


@contextmanager
def stopping_early() -> Iterator[None]:
    """End this process at a stop signal that it does not ignore, as nohup sets. Training replaces the handlers."""
    heeded = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _stop) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    for other in STOP_SIGNALS:  # one that comes while this process ends: it has been said
        signal.signal(other, lambda again, frame: os._exit(128 + again))
    with suppress(OSError):  # the terminal may be gone
        print(f"weft: stopped by {signal.Signals(number).name}; there was nothing to save", file=sys.stderr, flush=True)
    if _is_importing(frame):  # modules that try an import may catch SystemExit, and the command would go on
        os._exit(128 + number)
    raise SystemExit(128 + number)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORT_SYSTEM):
            return True
        frame = frame.f_back
    return False

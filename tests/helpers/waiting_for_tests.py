"""Waits for a state and not for a time, with a generous limit that says what did not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_SECONDS = 300


def wait_until(condition: Callable[[], object], what: object) -> None:
    """Return when the condition holds. `what` names it where it does not come; a function is called then."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what() if callable(what) else what} did not come within {DEADLINE_SECONDS} s")
        time.sleep(0.01)


def wait_for(path: Path) -> str:
    """The text of a file, as soon as it is there."""
    wait_until(path.exists, path)
    return path.read_text()


def publish(path: Path, text: object = "") -> None:
    """Write a file that appears whole."""
    path.with_suffix(".part").write_text(str(text))
    path.with_suffix(".part").rename(path)

"""How far long work is: a bar with a title for each of its steps, which the caller shows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Progress = Callable[[int, int], None]  # told how much is done, and of how much
Bar = Callable[[str], AbstractContextManager[Progress]]  # there while its context lasts


def no_bar(title: str) -> AbstractContextManager[Progress]:
    """For callers that show none."""
    return nullcontext(lambda done, total: None)

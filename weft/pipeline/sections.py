"""Sections: the parts of a run between two points at which all ranks agree and nothing is half done.

A section (a training step up to its update, an evaluation, a vote) ends with numbers that all ranks know, and it ends
on a rank only when all ranks have begun it. So when a rank is lost, the others are in the same section or in two
consecutive ones. A rank that is behind takes the numbers from those ahead. A section that no rank has ended is run
again, or continues where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weft.errors import LostRankError

Numbers = list[float]


class Sections:
    """Counts and runs the sections of this rank.

    `recover(why)` forms new groups without the lost rank. It returns the numbers of this section if other ranks have
    ended it, else None, and raises if the run cannot continue.
    """

    def __init__(self, recover: Callable[[str], Numbers | None]) -> None:
        self._recover = recover
        self.number = 0
        self.last: Numbers = []  # the numbers with which the last section ended

    def run(self, work: Callable[[], Numbers]) -> Numbers:
        """Run `work` and return its numbers. If the loss of a rank interrupts it, recover and run it again."""
        while True:
            try:
                numbers: Numbers | None = work()
            except LostRankError as error:
                numbers, why = None, str(error)
            else:
                why = ""
            if numbers is None:  # outside of the handler: the exception refers to frames that hold connections
                numbers = self._recover(why)
            if numbers is not None:
                self.number, self.last = self.number + 1, numbers
                return numbers


@contextmanager
def raising_lost_rank(what: str) -> Iterator[None]:
    """Turn the error of a failed collective into a LostRankError."""
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(f"{what} failed: {str(error).strip().splitlines()[0]}") from error

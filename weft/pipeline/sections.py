"""Sections: what ranks do together between two points at which nothing is half done.

A section (a training step up to its update, an evaluation, a vote) ends with numbers that all ranks know, and it ends
on one rank only when all have begun it. So when a rank is lost, the others are in the same section or in two that
follow each other; whoever is behind takes the numbers from those ahead, and the section that is not ended anywhere is
done again, or goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weft.errors import LostRankError

Numbers = list[float]


class Sections:
    """Counts the sections of this rank. `recover(why)` forms the ranks anew without the one that was lost; it gives the
    numbers of this section if others have ended it, and raises where the loss cannot be made good.
    """

    def __init__(self, recover: Callable[[str], Numbers | None]) -> None:
        self._recover = recover
        self.number = 0
        self.last: Numbers = []  # what the section before this one ended with

    def run(self, work: Callable[[], Numbers]) -> Numbers:
        """Do `work`, again where the loss of a rank cuts it short."""
        while True:
            try:
                numbers: Numbers | None = work()
            except LostRankError as error:
                numbers, why = None, str(error)
            else:
                why = ""
            if numbers is None:  # behind the handler: what was raised holds what held the connections
                numbers = self._recover(why)
            if numbers is not None:
                self.number, self.last = self.number + 1, numbers
                return numbers


@contextmanager
def losing(what: str) -> Iterator[None]:
    """A collective that fails has lost a rank."""
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(f"{what} failed: {str(error).strip().splitlines()[0]}") from error

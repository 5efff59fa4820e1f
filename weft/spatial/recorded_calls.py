"""What a rank says in a forward and its backward: calls taken down in a dry run, each with where it is made."""

from __future__ import annotations

from dataclasses import dataclass

from weft.comm import Ledger
from weft.spatial.tile_layout import Call


@dataclass
class Said:
    """One call: of forward, or (`is_backward`) of backward. `again` is whether recompute makes it once more."""

    block: str
    call: Call
    is_backward: bool = False
    again: bool = False
    event: int | None = None  # of a trace, in which it is said; None for what every stage says
    place: int = 0  # how many events there were before


class Recorder(Ledger):
    """Takes down the calls of a dry run with the block that makes them, and where in a trace that is."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Said] = []
        self.block = ""
        self.event: int | None = None
        self.place = 0

    def record(self, axis: str, operation: str, num_bytes: int) -> None:
        self._take((axis, operation, num_bytes), is_backward=False)

    def note(self, calls: list[Call]) -> None:
        """What backward will say."""
        for call in calls:
            self._take(call, is_backward=True)

    def saved(self) -> None:
        """The block under way has saved something: recompute comes as far as here."""
        for one in reversed(self.said):
            if one.block != self.block or one.again:
                break
            one.again = not one.is_backward

    def _take(self, call: Call, is_backward: bool) -> None:
        self.said.append(Said(self.block, call, is_backward, event=self.event, place=self.place))

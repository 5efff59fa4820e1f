"""Records the collectives and messages of a dry run, of forward and of backward, with the block that makes them."""

from __future__ import annotations

from weft.comm import Ledger
from weft.profiling import RecordedCall
from weft.spatial.tile_layout import CollectiveCall


class CallRecorder(Ledger):
    """A ledger that records the calls of a dry run with their block and their position in a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        self.block = ""
        self.event: int | None = None
        self.events_before = 0

    def record(self, axis: str, operation: str, num_bytes: int) -> None:
        self._take((axis, operation, num_bytes), is_backward=False)

    def note(self, calls: list[CollectiveCall]) -> None:
        """Record calls that backward will make."""
        for call in calls:
            self._take(call, is_backward=True)

    def saved(self) -> None:
        """Mark the block's earlier calls as recomputed: it has saved a tensor, so recompute runs up to here."""
        for one in reversed(self.calls):
            if one.block != self.block or one.recomputed:
                break
            one.recomputed = not one.is_backward

    def _take(self, call: CollectiveCall, is_backward: bool) -> None:
        self.calls.append(
            RecordedCall(self.block, call, is_backward, event=self.event, events_before=self.events_before)
        )

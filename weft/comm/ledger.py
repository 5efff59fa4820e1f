"""The ledger: how many calls and bytes a run really made, per (axis, operation).

Bytes are those of the whole tensor that the operation works on: the tensor of an all-reduce or broadcast, the gathered
result of an all-gather, the input of a reduce-scatter, what a rank holds for an all-to-all, the message of a send.
What travels on a wire follows from it by the algorithm (ring: all-reduce 2(p-1)/p, all-gather (p-1)/p, ...), so the
ledger can be held to a prediction to the byte on any back-end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Calls and bytes of one (axis, operation)."""

    calls: int = 0
    num_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.num_bytes + other.num_bytes)

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.calls * times, self.num_bytes * times)


Key = tuple[str, str]
Traffics = Mapping[Key, Traffic]


def add_traffic(*parts: Traffics) -> dict[Key, Traffic]:
    """The sum of several counts, key by key."""
    total: dict[Key, Traffic] = {}
    for part in parts:
        for key, traffic in part.items():
            total[key] = total.get(key, Traffic()) + traffic
    return {key: total[key] for key in sorted(total)}


class Ledger:
    """Counts every collective of one rank; `doing` names the one that the rank waits in, for the watch over hangs."""

    def __init__(self) -> None:
        self._entries: dict[Key, Traffic] = {}
        self.doing = ""

    def record(self, axis: str, operation: str, num_bytes: int) -> None:
        """Enter one call."""
        key = (axis, operation)
        self._entries[key] = self._entries.get(key, Traffic()) + Traffic(1, num_bytes)

    def entries(self) -> dict[Key, Traffic]:
        """What has been counted so far, sorted by axis and operation."""
        return add_traffic(self._entries)

    def clear(self) -> None:
        """Start counting anew."""
        self._entries.clear()

    def __iter__(self) -> Iterator[tuple[Key, Traffic]]:
        return iter(self.entries().items())

"""The ledger: how many calls and bytes a run really made, per (axis, operation).

Bytes are those of the whole tensor that the operation works on: the tensor of an all-reduce or broadcast, the gathered
result of an all-gather, the input of a reduce-scatter, what a rank holds for an all-to-all, the message of a send.
What travels on a wire follows from it by the algorithm (ring: all-reduce 2(p-1)/p, all-gather (p-1)/p, ...), so the
ledger can be held to a prediction to the byte on any back-end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weft.health.rank_status import Status


@dataclass(frozen=True)
class Traffic:
    """Calls and bytes of one (axis, operation). `sizes` counts calls by the bytes of each; not given, all are alike."""

    calls: int = 0
    num_bytes: int = 0
    sizes: Mapping[int, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.calls and not self.sizes:
            object.__setattr__(self, "sizes", {self.num_bytes // self.calls: self.calls})
        assert self.calls == sum(self.sizes.values())
        assert self.num_bytes == sum(size * calls for size, calls in self.sizes.items())

    def __add__(self, other: Traffic) -> Traffic:
        sizes = Counter(self.sizes) + Counter(other.sizes)
        return Traffic(self.calls + other.calls, self.num_bytes + other.num_bytes, sizes)

    def __mul__(self, times: int) -> Traffic:
        sizes = {size: calls * times for size, calls in self.sizes.items()}
        return Traffic(self.calls * times, self.num_bytes * times, sizes)


Key = tuple[str, str]
Entry = tuple[int, str]  # a call's number on its rank, and the block's forward or backward that made it
Traffics = Mapping[Key, Traffic]


def add_traffic(*parts: Traffics) -> dict[Key, Traffic]:
    """The sum of several counts, key by key."""
    total: dict[Key, Traffic] = {}
    for part in parts:
        for key, traffic in part.items():
            total[key] = total.get(key, Traffic()) + traffic
    return {key: total[key] for key in sorted(total)}


class Ledger:
    """Counts every collective of one rank; `doing` names the one that the rank waits in, for the watch over hangs.

    Where somebody watches, `status` is told of calls and waits.
    """

    def __init__(self) -> None:
        self._entries: defaultdict[Key, Counter[int]] = defaultdict(Counter)  # calls by their bytes
        self.doing = ""
        self.status: Status | None = None

    def record(self, axis: str, operation: str, num_bytes: int) -> None:
        """Enter one call."""
        self._entries[axis, operation][num_bytes] += 1
        if self.status is not None:
            self.status.num_calls += 1

    def phase(self, doing: str) -> None:
        """What the rank does from here on."""
        if self.status is not None:
            self.status.phase(doing)

    def entered(self) -> Entry | None:
        """What a call that enters now is known by, where somebody watches."""
        return None if self.status is None else (self.status.num_calls, self.status.inside)

    def wait_begins(self, axis: str, operation: str, entry: Entry | None = None, peers: Sequence[int] = ()) -> None:
        """The rank waits in an operation, entered as the call `entry`, for these other ranks (if they are few)."""
        self.doing = f"{operation} over {axis}"
        if self.status is None:
            return
        if entry is None:
            self.status.wait_begins(self.doing, peers)
        else:
            number, inside = entry
            self.status.wait_begins(f"{self.doing} (#{number}{', ' if inside else ''}{inside})", peers)

    def wait_ends(self) -> None:
        """It has waited; not said of a wait that fails."""
        self.doing = ""
        if self.status is not None:
            self.status.wait_ends()

    def entries(self) -> dict[Key, Traffic]:
        """What has been counted so far, sorted by axis and operation."""
        return {
            key: Traffic(sizes.total(), sum(size * calls for size, calls in sizes.items()), dict(sizes))
            for key, sizes in sorted(self._entries.items())
        }

    def clear(self) -> None:
        """Start counting anew."""
        self._entries.clear()

    def __iter__(self) -> Iterator[tuple[Key, Traffic]]:
        return iter(self.entries().items())

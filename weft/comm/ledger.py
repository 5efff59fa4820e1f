"""The ledger: counts the calls and bytes of a run's collectives per (axis, operation).

Bytes are those of the whole tensor of an operation: the tensor of an all-reduce or broadcast, the result of an
all-gather, the input of a reduce-scatter, one rank's input of an all-to-all, the message of a send. The bytes on the
wire follow from these by the algorithm (ring: all-reduce 2(p-1)/p, all-gather (p-1)/p, ...), so the ledger can be
compared with a prediction to the byte on any back-end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weft.comm.kept_results import KeptBytes, KeptResults
from weft.comm.recorder import Recorder
from weft.health.call_order import CallOrder
from weft.health.rank_status import Status


@dataclass(frozen=True)
class Traffic:
    """Calls and bytes of one (axis, operation). `sizes` maps the bytes of a call to the number of such calls; if it is
    not given, all calls have the same size.
    """

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
CallId = tuple[int, str]  # the number of a call on its rank, and the block's forward or backward that made it
Traffics = Mapping[Key, Traffic]


def add_traffic(*parts: Traffics) -> dict[Key, Traffic]:
    """Returns the sum of several counts, key by key."""
    total: dict[Key, Traffic] = {}
    for part in parts:
        for key, traffic in part.items():
            total[key] = total.get(key, Traffic()) + traffic
    return {key: total[key] for key in sorted(total)}


class Ledger:
    """Counts every collective of one rank. `doing` names the operation that the rank waits in, for reports of hangs.

    If `status` is set, calls and waits are also written to the rank's status page. If `order` is given, it writes every
    collective, and a private status page says inside which block. If `recorder` is set, it records every call. `kept`
    has the results of collectives of the forward that runs now, if its recompute is not to communicate.
    """

    def __init__(self, order: CallOrder | None = None) -> None:
        self._entries: defaultdict[Key, Counter[int]] = defaultdict(Counter)  # calls by their bytes
        self.doing = ""
        self.order = order
        self.status: Status | None = None if order is None else Status({}, order.rank)
        self.recorder: Recorder | None = None
        self.kept: KeptResults | None = None
        self.kept_bytes = KeptBytes()

    def record(self, axis: str, operation: str, num_bytes: int) -> None:
        """Count one call."""
        self._entries[axis, operation][num_bytes] += 1
        if self.status is not None:
            self.status.num_calls += 1

    def phase(self, doing: str) -> None:
        """Record on the status page what the rank does from now on."""
        if self.status is not None:
            self.status.phase(doing)

    def call_id(self) -> CallId | None:
        """Returns the number and block of the call that starts now; None without a status page."""
        return None if self.status is None else (self.status.num_calls, self.status.inside)

    def wait_begins(self, axis: str, operation: str, call: CallId | None = None, peers: Sequence[int] = ()) -> None:
        """Record that the rank waits in an operation, whose id is `call`, for the ranks `peers` (if they are few)."""
        self.doing = f"{operation} over {axis}"
        if self.status is None:
            return
        if call is None:
            self.status.wait_begins(self.doing, peers)
        else:
            number, inside = call
            self.status.wait_begins(f"{self.doing} (#{number}{', ' if inside else ''}{inside})", peers)

    def wait_ends(self) -> None:
        """Record that the wait has ended. Not called after a wait that failed."""
        self.doing = ""
        if self.status is not None:
            self.status.wait_ends()

    def entries(self) -> dict[Key, Traffic]:
        """Returns the calls and bytes so far, sorted by axis and operation."""
        return {
            key: Traffic(sizes.total(), sum(size * calls for size, calls in sizes.items()), dict(sizes))
            for key, sizes in sorted(self._entries.items())
        }

    def clear(self) -> None:
        """Reset all counts."""
        self._entries.clear()

    def __iter__(self) -> Iterator[tuple[Key, Traffic]]:
        return iter(self.entries().items())

"""Records the communication of one rank, call by call: what was sent, when, and how long the rank waited for it.

    ledger.recorder = Recorder()       from here on every call is recorded
    recorder.finish()                  the calls with their times in seconds of this host's clock

A ledger has no recorder unless a run is profiled; a call then costs one comparison more. On a GPU times are those of
CUDA events on the stream that computes, so a wait is the time in which that stream stood still. A call that another
thread waits for (`Pending.block`) has the wait of its own thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from weft.health.rank_status import Status

RECEIVE = "receive"  # the operation of a message that arrives; the ledger counts it at its sender


class Timer(Protocol):
    """Marks moments, and converts marks to seconds of the host's clock later."""

    def mark(self) -> Any: ...

    def seconds(self, mark: Any) -> float: ...


class HostTimer:
    """Moments of the host's monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.mark = clock

    def seconds(self, mark: float) -> float:
        return mark


class DeviceTimer:
    """Moments at which the current CUDA stream has done all that was queued before the mark."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._first, self._first_seconds = self.mark(), time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        return self._first_seconds + float(self._first.elapsed_time(mark)) / 1e3


@dataclass(slots=True)
class CommunicationCall:
    """One call of a rank: a collective, or a message to or from `peer`. Times are seconds of the host's clock.

    `start` is when the rank made the call, `end` when its result could be used. `exposed` are the seconds in which the
    rank waited for it; of calls that it waits for together, the last one has them. `ranks` are the global ranks of the
    group, and `number` counts the calls of the same axis, operation and ranks (and peer), so that it is equal on all
    ranks of a collective.
    """

    step: int
    phase: str
    block: str
    axis: str
    operation: str
    num_bytes: int
    ranks: tuple[int, ...]
    peer: int | None
    number: int
    start: float
    wait_start: float = 0.0
    end: float = 0.0
    exposed: float = 0.0


@dataclass
class PhaseSpan:
    """A phase of a step on the host: loading data, forward and backward, the update."""

    step: int
    name: str
    start: float
    end: float


class CallSite:
    """What calls of the same axis, operation, ranks and peer share. It is made once, so that a call costs little."""

    __slots__ = ("axis", "num_calls", "operation", "peer", "ranks")

    def __init__(self, axis: str, operation: str, ranks: tuple[int, ...], peer: int | None) -> None:
        self.axis, self.operation, self.ranks, self.peer = axis, operation, ranks, peer
        self.num_calls = 0


# A call while it is recorded: [site, number, bytes, step, phase, block, start, start of the wait, end, is it the last
# of its wait?]. Times are marks. A list is the cheapest thing to make; `Recorder.finish` makes the calls of it.
OpenCall = list[Any]
_START, _WAIT, _END, _LAST = 6, 7, 8, 9


class Recorder:
    """Records the calls of one rank. `step` is the number of the step that runs, counted from 1. `calls` has the calls
    after `finish`.
    """

    def __init__(self, status: Status | None = None, timer: Timer | None = None) -> None:
        self.step = 0
        self.calls: list[CommunicationCall] = []
        self.phases: list[PhaseSpan] = []
        self._status, self._timer, self._host = status, timer or HostTimer(), time.perf_counter
        self._mark = self._timer.mark
        self._open: list[OpenCall] = []
        self._started: list[OpenCall] = []
        self._sites: dict[tuple[Any, ...], CallSite] = {}
        self.site_by_group: dict[tuple[Any, ...], CallSite] = {}  # the same sites by what callers have at hand
        if status is not None:
            status.on_phase = self.phase_begins

    def site(self, axis: str, operation: str, ranks: Sequence[int], peer: int | None = None) -> CallSite:
        """Returns the site of calls of an operation over `ranks`, or of messages to or from the global rank `peer`."""
        key = (axis, operation, tuple(ranks), peer)
        found = self._sites.get(key)
        if found is None:
            found = self._sites[key] = CallSite(*key)
        return found

    def begin(self, site: CallSite, num_bytes: int) -> None:
        """Record a call that starts now."""
        site.num_calls = number = site.num_calls + 1
        status = self._status
        phase, block = ("", "") if status is None else (status.current_phase, status.inside)
        call = [site, number, num_bytes, self.step, phase, block, self._mark(), None, None, False]
        self._open.append(call)
        self._started.append(call)

    def take_started(self) -> list[OpenCall]:
        """Returns the calls since the last `take_started`: those that one `Pending` waits for together."""
        started, self._started = self._started, []
        return started

    def wait_begins(self, calls: Sequence[OpenCall]) -> None:
        """Record that the rank waits for these calls from now on."""
        mark = self._mark()
        for call in calls:
            call[_WAIT] = mark
        calls[-1][_LAST] = True

    def wait_ends(self, calls: Sequence[OpenCall]) -> None:
        """Record that the results of these calls may be used."""
        mark = self._mark()
        for call in calls:
            call[_END] = mark

    def phase_begins(self, name: str) -> None:
        """Record that another phase of the step begins."""
        now = self._host()
        if self.phases:
            self.phases[-1].end = now
        self.phases.append(PhaseSpan(self.step, name, now, now))

    def finish(self) -> None:
        """Stop recording phases, and convert all marks to seconds."""
        if self._status is not None:
            self._status.on_phase = None
        if self.phases:
            self.phases[-1].end = self._host()
        self.convert()

    def convert(self) -> None:
        """Make `calls` of what was recorded so far. Call it when no operation is under way."""
        self.calls += [self._closed(call) for call in self._open]
        self._open = []

    def _closed(self, call: OpenCall) -> CommunicationCall:
        site, number, num_bytes, step, phase, block = call[:_START]
        seconds = self._timer.seconds
        start = seconds(call[_START])
        wait_start = start if call[_WAIT] is None else seconds(call[_WAIT])
        end = wait_start if call[_END] is None else seconds(call[_END])
        exposed = end - wait_start if call[_LAST] else 0.0
        what = (site.axis, site.operation, num_bytes, site.ranks, site.peer, number)
        return CommunicationCall(step, phase, block, *what, start, wait_start, end, exposed)

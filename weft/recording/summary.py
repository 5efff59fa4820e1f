"""Sums of a recording over calls, steps and ranks: per axis and operation, per rank, and between ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.cluster.hardware import OPS, ring_seconds
from weft.comm.recorder import RECEIVE, CommunicationCall
from weft.recording.rank_file import MeasuredLink, NicTraffic, RankRecording


@dataclass(frozen=True)
class Arrival:
    """A collective or a message, seen from all its ranks.

    `spread_seconds` is the time from the first rank that came to the last (for a message: from the receiver's wait to
    the send, if that is later), `late_rank` the last one, `waited_seconds` the longest time that another rank waited
    for it, and `seconds` the time from its arrival until a rank had the result. A rank that asks for its result late,
    because it computes meanwhile, does not lengthen it if another asks earlier.
    """

    step: int
    axis: str
    operation: str
    block: str
    num_bytes: int
    degree: int
    spread_seconds: float
    late_rank: int
    waited_seconds: float
    seconds: float


def arrivals(ranks: Sequence[RankRecording]) -> list[Arrival]:
    """All collectives and messages that every one of their ranks has recorded, in the order of steps."""
    together: dict[tuple[Any, ...], dict[int, CommunicationCall]] = {}
    for one in ranks:
        for call in one.calls:
            together.setdefault(_key(one.rank, call), {})[one.rank] = call
    return sorted(_complete(together), key=lambda arrival: arrival.step)


def _key(rank: int, call: CommunicationCall) -> tuple[Any, ...]:
    """Equal for the calls of all ranks of a collective, and for the send and the receive of a message."""
    ends = (call.peer, rank) if call.operation == RECEIVE else (rank, call.peer) if call.peer is not None else ()
    operation = "send" if ends else call.operation
    return (call.axis, operation, call.ranks, ends, call.number)


def _complete(together: dict[tuple[Any, ...], dict[int, CommunicationCall]]) -> Iterator[Arrival]:
    for (axis, operation, group, ends, _), calls in together.items():
        if len(calls) < (2 if ends else len(group)):
            continue
        any_call = next(iter(calls.values()))
        if ends:
            sent, received = calls[ends[0]], calls[ends[1]]
            late = ends[0]
            spread = waited = max(0.0, sent.start - received.wait_start)
            seconds = received.end - max(sent.start, received.start)
        else:
            late = max(calls, key=lambda rank: calls[rank].start)
            spread = calls[late].start - min(call.start for call in calls.values())
            waited = max(max(0.0, calls[late].start - call.wait_start) for call in calls.values())
            seconds = min(call.end for call in calls.values()) - calls[late].start
        yield Arrival(
            any_call.step,
            axis,
            operation,
            any_call.block,
            any_call.num_bytes,
            len(group),
            spread,
            late,
            waited,
            max(0.0, seconds),
        )


NUM_LATE = 10  # the longest waits for a late rank that are listed
LATE_SHARE = 0.05  # a rank is called late if others waited for it longer than this share of the time


@dataclass(frozen=True)
class OperationSummary:
    """One operation over one axis, in a step of one rank (the mean over steps and ranks).

    `seconds` is the measured time of its calls from the last rank's arrival on, `predicted_seconds` that of the ring
    formulas on the planner's link; None if it is not known. `late_rank` is the rank that others waited for longest.
    """

    axis: str
    operation: str
    calls: float
    num_bytes: float
    exposed_seconds: float
    exposed_by_rank: list[float]
    seconds: float | None
    predicted_seconds: float | None
    spread_seconds: float | None
    late_rank: int | None


@dataclass(frozen=True)
class LateRank:
    """A rank that others waited for, with the operation in which they waited longest."""

    rank: int
    late_seconds: float
    axis: str
    operation: str
    longest_seconds: float
    longest_step: int
    longest_block: str


@dataclass(frozen=True)
class RecordingSummary:
    """All sums of a recording. `matrix_bytes[i][j]` are the bytes that rank i sent to rank j: counted for messages,
    and for collectives as rings send them.
    """

    plan: str
    device: str
    num_ranks: int
    first_step: int
    last_step: int
    step_seconds: float
    exposed_share: float
    operations: list[OperationSummary]
    late_ranks: list[LateRank]
    longest: list[Arrival]
    matrix_bytes: list[list[float]]
    phase_seconds: dict[str, float]
    nics: dict[str, dict[str, NicTraffic]]  # by host and interface

    def to_json(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def summarise(ranks: Sequence[RankRecording]) -> RecordingSummary:
    """Sum up the recordings of all ranks."""
    one, found = ranks[0], arrivals(ranks)
    seconds = recorded_seconds(ranks)
    exposed = sum(call.exposed for rank in ranks for call in rank.calls) / len(ranks)
    phases: defaultdict[str, float] = defaultdict(float)
    for rank in ranks:
        for span in rank.phases:
            phases[span.name] += (span.end - span.start) / len(ranks) / one.num_steps
    return RecordingSummary(
        one.plan,
        one.device,
        one.num_ranks,
        one.first_step,
        one.last_step,
        seconds / one.num_steps,
        exposed / seconds if seconds else 0.0,
        _operations(ranks, found),
        _late_ranks(found, seconds),
        sorted(found, key=lambda arrival: -arrival.waited_seconds)[:NUM_LATE],
        matrix_bytes(ranks),
        dict(sorted(phases.items(), key=lambda item: -item[1])),
        {rank.host: dict(rank.nics) for rank in reversed(ranks) if rank.nics},  # of the first rank of each host
    )


def recorded_seconds(ranks: Sequence[RankRecording]) -> float:
    """The time from the first event of all ranks, which is 0, to the last."""
    ends = [call.end for rank in ranks for call in rank.calls] + [span.end for rank in ranks for span in rank.phases]
    return float(max(ends, default=0.0))


def _operations(ranks: Sequence[RankRecording], found: Iterable[Arrival]) -> list[OperationSummary]:
    num_steps, links = ranks[0].num_steps, ranks[0].links
    by_key: defaultdict[tuple[str, str], list[Arrival]] = defaultdict(list)
    for arrival in found:
        by_key[arrival.axis, arrival.operation].append(arrival)
    keys = sorted({(call.axis, call.operation) for rank in ranks for call in rank.calls})
    rows = []
    for axis, operation in keys:
        own = [[c for c in rank.calls if (c.axis, c.operation) == (axis, operation)] for rank in ranks]
        exposed = [sum(call.exposed for call in calls) / num_steps for calls in own]
        calls = sum(map(len, own)) / num_steps / len(ranks)
        num_bytes = sum(call.num_bytes for calls in own for call in calls) / num_steps / len(ranks)
        matched = by_key[axis, operation]
        rows.append(
            OperationSummary(
                axis,
                operation,
                calls,
                num_bytes,
                sum(exposed) / len(ranks),
                exposed,
                _mean(arrival.seconds * calls for arrival in matched),
                _mean(_predicted(arrival, links[axis]) * calls for arrival in matched) if axis in links else None,
                _mean(arrival.spread_seconds for arrival in matched),
                _latest(matched),
            )
        )
    return sorted(rows, key=lambda row: -row.exposed_seconds)


def _predicted(arrival: Arrival, link: MeasuredLink) -> float:
    operation = arrival.operation if arrival.operation in OPS else "send"
    return ring_seconds(
        operation, arrival.num_bytes, arrival.degree, link.bandwidth_bytes_per_second, link.latency_seconds
    )


def _latest(found: Iterable[Arrival]) -> int | None:
    """The rank for which others waited longest in all; None if nobody waited."""
    late: defaultdict[int, float] = defaultdict(float)
    for arrival in found:
        late[arrival.late_rank] += arrival.waited_seconds
    return max(late, key=late.__getitem__) if late else None


def _late_ranks(found: Iterable[Arrival], seconds: float) -> list[LateRank]:
    by_rank: defaultdict[int, list[Arrival]] = defaultdict(list)
    for arrival in found:
        by_rank[arrival.late_rank].append(arrival)
    rows = []
    for rank, own in by_rank.items():
        worst = max(own, key=lambda arrival: arrival.waited_seconds)
        total = sum(arrival.waited_seconds for arrival in own)
        rows.append(LateRank(rank, total, worst.axis, worst.operation, worst.waited_seconds, worst.step, worst.block))
    return sorted((row for row in rows if row.late_seconds > LATE_SHARE * seconds), key=lambda row: -row.late_seconds)


def matrix_bytes(ranks: Sequence[RankRecording]) -> list[list[float]]:
    """The bytes that each rank sent to each other one, in all recorded steps."""
    matrix = [[0.0] * ranks[0].num_ranks for _ in range(ranks[0].num_ranks)]
    for one in ranks:
        row = matrix[one.rank]
        for call in one.calls:
            if call.operation == RECEIVE:
                continue
            if call.peer is not None:
                row[call.peer] += call.num_bytes
                continue
            degree, index = len(call.ranks), call.ranks.index(one.rank)
            if call.operation == "all_to_all":
                for peer in call.ranks:
                    row[peer] += call.num_bytes / degree if peer != one.rank else 0.0
            elif call.operation != "broadcast" or index < degree - 1:
                row[call.ranks[(index + 1) % degree]] += _ring_share(call.operation, degree) * call.num_bytes
    return matrix


def _ring_share(operation: str, degree: int) -> float:
    """The part of a collective's bytes that a rank sends to the next one of a ring."""
    if operation == "broadcast":
        return 1.0
    return (2 if operation == "all_reduce" else 1) * (degree - 1) / degree


def _mean(values: Iterable[float]) -> float | None:
    given = list(values)
    return sum(given) / len(given) if given else None

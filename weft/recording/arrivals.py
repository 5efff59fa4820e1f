"""The calls of all ranks that belong together: who came last to a collective, and how long it took from then on.

A collective cannot end before its last rank has called it; a message cannot before it is sent. A receiver that waits
before the message is sent waits for the sender.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from weft.comm.recorder import RECEIVE, CommunicationCall
from weft.recording.rank_file import RankRecording


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

"""A recording in the Trace Event Format, which chrome://tracing and Perfetto open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from weft.recording.rank_file import RankRecording

_PHASES, _CALLS, _WAITS = 0, 1, 2  # the threads of a rank's process


def chrome_trace(ranks: Sequence[RankRecording]) -> str:
    """The recording as JSON: a process for each rank, with threads for its phases, its calls and its waits."""
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": [event for one in ranks for event in _events(one)]})


def _events(one: RankRecording) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": one.rank, "name": "process_name", "args": {"name": f"rank {one.rank}"}}
    for thread, name in ((_PHASES, "phases"), (_CALLS, "calls"), (_WAITS, "exposed waits")):
        yield {"ph": "M", "pid": one.rank, "tid": thread, "name": "thread_name", "args": {"name": name}}
    for span in one.phases:
        yield _span(one.rank, _PHASES, span.name, span.start, span.end, {"step": span.step})
    for number, call in enumerate(one.calls):
        what = f"{call.operation} over {call.axis}"
        args = {"step": call.step, "phase": call.phase, "block": call.block, "bytes": call.num_bytes}
        args |= {"ranks": list(call.ranks), "peer": call.peer}
        # Calls overlap, so each is an asynchronous event with an id of its own.
        shared = {"pid": one.rank, "tid": _CALLS, "name": what, "cat": call.axis, "id": f"{one.rank}.{number}"}
        yield {**shared, "ph": "b", "ts": call.start * 1e6, "args": args}
        yield {**shared, "ph": "e", "ts": call.end * 1e6}
        if call.exposed > 0:
            yield _span(one.rank, _WAITS, what, call.wait_start, call.end, args)


def _span(rank: int, thread: int, name: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "pid": rank, "tid": thread, "name": name, **times, "args": args}

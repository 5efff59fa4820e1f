"""The files of a recording: one per rank in the folder `profile` of a run, as JSON lines.

The first line describes the rank: steps, plan, links, the offset of its clock, the ledger's sums, phases. Each further
line is one call. Times are seconds of the rank's own clock; `read_recording` converts them to the clock of rank 0 and
begins at 0. `chrome_trace` writes a recording in the Trace Event Format, which chrome://tracing and Perfetto open.

`read_counters` reads this host's network interfaces, where the system lets everybody read them. They count what all
processes of the host send and receive, so they are an upper bound of what a run sends over them, and errors on a link
show there first. Messages inside a host go over the interface `lo`, or over none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from weft.comm import Key, Traffic, Traffics, add_traffic
from weft.comm.recorder import RECEIVE, CommunicationCall, PhaseSpan
from weft.errors import CheckpointError, ConfigError

_WORD_BYTES = 4  # InfiniBand counts data in words
_INFINIBAND_ERRORS = ("symbol_error", "link_downed", "port_rcv_errors", "port_xmit_discards")


@dataclass(frozen=True)
class NicTraffic:
    """What an interface has sent and received, and how often it failed to."""

    sent_bytes: int
    received_bytes: int
    errors: int


def read_counters(root: Path = Path("/")) -> dict[str, NicTraffic]:
    """The counters of all interfaces by name; empty where they cannot be read."""
    found: dict[str, NicTraffic] = {}
    with suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/net/dev").read_text().splitlines()[2:]:
            name, _, rest = line.partition(":")
            numbers = [int(word) for word in rest.split()]
            # Received: bytes, packets, errors, drops, 4 others; then the same of what was sent.
            found[name.strip()] = NicTraffic(
                numbers[8], numbers[0], numbers[2] + numbers[3] + numbers[10] + numbers[11]
            )
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        with suppress(OSError, ValueError):
            counters = port / "counters"
            sent, received = (int((counters / f"port_{way}_data").read_text()) for way in ("xmit", "rcv"))
            paths = [counters / name for name in _INFINIBAND_ERRORS]
            errors = sum(int(path.read_text()) for path in paths if path.exists())
            name = f"{port.parents[1].name} port {port.name}"
            found[name] = NicTraffic(_WORD_BYTES * sent, _WORD_BYTES * received, errors)
    return found


def since(before: Mapping[str, NicTraffic], now: Mapping[str, NicTraffic]) -> dict[str, NicTraffic]:
    """What was counted between two readings, of the interfaces that counted something."""
    found = {}
    for name, last in now.items():
        first = before.get(name)
        if first is not None and last != first:
            found[name] = NicTraffic(
                last.sent_bytes - first.sent_bytes,
                last.received_bytes - first.received_bytes,
                last.errors - first.errors,
            )
    return found


FOLDER = "profile"
FORMAT = 1
_CALL_FIELDS = [one.name for one in fields(CommunicationCall)]


@dataclass(frozen=True)
class MeasuredLink:
    """The degree of an axis and the bandwidth and latency that the planner assumes for it."""

    degree: int
    bandwidth_bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class RankRecording:
    """What one rank recorded. `links` are by axis; axes that the planner does not time are missing. `nics` has what the
    network interfaces of its host counted meanwhile, for all processes of the host.
    """

    rank: int
    num_ranks: int
    device: str
    plan: str
    first_step: int  # the steps are numbered from 1
    last_step: int
    clock_offset_seconds: float
    links: Mapping[str, MeasuredLink]
    calls: Sequence[CommunicationCall]
    phases: Sequence[PhaseSpan]
    host: str = ""
    nics: Mapping[str, NicTraffic] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        return self.last_step - self.first_step + 1


def recorded_traffic(calls: Iterable[CommunicationCall]) -> dict[Key, Traffic]:
    """The recorded calls and bytes as the ledger counts them."""
    parts: list[Traffics] = [
        {(call.axis, call.operation): Traffic(1, call.num_bytes)} for call in calls if call.operation != RECEIVE
    ]
    return add_traffic(*parts)


def write_rank(folder: Path, found: RankRecording) -> None:
    """Write a rank's file. Its name appears when the file is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{found.rank:05d}.jsonl"
    head = {key: value for key, value in asdict(replace(found, calls=())).items() if key != "calls"}
    with open(path.with_suffix(".tmp"), "w", encoding="utf-8") as file:
        file.write(json.dumps({"format": FORMAT, **head}) + "\n")
        for call in found.calls:
            file.write(json.dumps([getattr(call, name) for name in _CALL_FIELDS]) + "\n")
    path.with_suffix(".tmp").rename(path)


def read_recording(run_folder: Path) -> list[RankRecording]:
    """Read the files of all ranks, in the order of ranks, with times in seconds from the first of all calls."""
    folder = run_folder / FOLDER if (run_folder / FOLDER).is_dir() else run_folder
    paths = sorted(folder.glob("rank-*.jsonl"))
    if not paths:
        raise ConfigError(
            f"{run_folder} has no recording of its communication; train it with weft train RUN_FILE --profile 10:20"
        )
    ranks = [_read(path) for path in paths]
    missing = sorted(set(range(ranks[0].num_ranks)) - {one.rank for one in ranks})
    if missing:
        raise CheckpointError(
            f"{folder} has the recordings of {len(ranks)} of {ranks[0].num_ranks} ranks; missing: rank {missing[0]}. "
            f"Copy the files of all hosts into this folder"
        )
    return _on_one_clock(ranks)


def _read(path: Path) -> RankRecording:
    try:
        first, *lines = path.read_text(encoding="utf-8").splitlines()
        head = json.loads(first)
        if head.pop("format") != FORMAT:
            raise CheckpointError(f"{path} has another format than {FORMAT}; use the weft that wrote it")
        head["links"] = {axis: MeasuredLink(**link) for axis, link in head["links"].items()}
        head["phases"] = [PhaseSpan(**one) for one in head["phases"]]
        head["nics"] = {name: NicTraffic(**one) for name, one in head.get("nics", {}).items()}
        calls = [CommunicationCall(**dict(zip(_CALL_FIELDS, json.loads(line), strict=True))) for line in lines]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a recording of weft ({error}); record the run again") from error
    for call in calls:
        call.ranks = tuple(call.ranks)
    return RankRecording(calls=calls, **head)


def _on_one_clock(ranks: Sequence[RankRecording]) -> list[RankRecording]:
    """Subtract each rank's clock offset, and the time of the first event of all."""
    starts = [
        time - one.clock_offset_seconds
        for one in ranks
        for time in [call.start for call in one.calls] + [span.start for span in one.phases]
    ]
    first = min(starts, default=0.0)
    moved = []
    for one in ranks:
        back = one.clock_offset_seconds + first
        calls = [
            replace(call, start=call.start - back, wait_start=call.wait_start - back, end=call.end - back)
            for call in one.calls
        ]
        phases = [replace(span, start=span.start - back, end=span.end - back) for span in one.phases]
        moved.append(replace(one, calls=calls, phases=phases))
    return moved


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

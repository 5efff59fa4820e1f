"""The files of a recording: one per rank in the folder `profile` of a run, as JSON lines.

The first line describes the rank: steps, plan, links, the offset of its clock, the ledger's sums, phases. Each further
line is one call. Times are seconds of the rank's own clock; `read_recording` converts them to the clock of rank 0 and
begins at 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from weft.comm import Key, Traffic, Traffics, add_traffic
from weft.comm.recorder import RECEIVE, CommunicationCall, PhaseSpan, Recorder
from weft.errors import CheckpointError, ConfigError
from weft.recording.nic_counters import NicTraffic

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
    path = _path(folder, found.rank)
    head = {key: value for key, value in asdict(replace(found, calls=())).items() if key != "calls"}
    with open(path.with_suffix(".tmp"), "w", encoding="utf-8") as file:
        file.write(json.dumps({"format": FORMAT, **head}) + "\n")
        for call in found.calls:
            file.write(json.dumps([getattr(call, name) for name in _CALL_FIELDS]) + "\n")
    path.with_suffix(".tmp").rename(path)


def recording_of(recorder: Recorder, **head: Any) -> RankRecording:
    """The recording of a recorder that has finished; `head` has the other fields."""
    return RankRecording(calls=recorder.calls, phases=recorder.phases, **head)


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


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.jsonl"

"""Compares settings across ranks before the first step; a difference ends the run with an error.

    agree(settings, world)          raises LaunchError with the values that differ, and the ranks that have them
    agree_on_run(run, data, mesh)   returns the run's id, if all ranks have the same run, code, folder, data and weights
    text_of_rank_0(text, world)     returns rank 0's text on every rank

Each rank reads the run file, lists the folder and opens the data by itself. No collective would notice a difference
there: training would go on with it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weft.comm import Axis, Ledger, all_gather, all_reduce, broadcast
from weft.errors import LaunchError
from weft.health.watchdog import rank_names
from weft.mesh import Mesh
from weft.run_file import Run
from weft.saved_run import WHOLE_HASH, weights_fingerprint
from weft.schema import to_table
from weft.train.batches import TrainingData
from weft.train.run_identity import known_run_id, make_run_id
from weft.version import VERSION

SEEN_SECONDS = 60.0  # time for a new file to become visible on every host
_POLL_SECONDS = 0.1
_MAX_NAMED = 8  # most differences in an error, and most ranks named for one value
_MAX_VALUE = 100  # characters of a value in an error
_TABLES = ("model", "data", "train", "plan", "checkpoint", "restart", "numbers", "log", "roles", "lora")
# Paths may differ from host to host: the data at these paths is compared instead.
_PLACES = ("data.source", "data.cache")


def agree_on_run(run: Run, data: TrainingData, mesh: Mesh) -> str:
    """Compares all settings that ranks must share. Returns the run's id, which rank 0 makes if the run has none."""
    world = _unrecorded(mesh["world"])
    run_id = text_of_rank_0(make_run_id(run.folder) if mesh.is_first else "", world)
    agree({"run id": _seen_id(run.folder, run_id), **run_settings(run), **data_settings(run, data)}, world)
    return run_id


def run_settings(run: Run) -> dict[str, str]:
    """Returns the run by key, with overrides and defaults, and the versions of weft and torch."""
    tables = {key: to_table(getattr(run, key)) for key in _TABLES}
    found = {"weft": VERSION, "torch": str(torch.__version__), "cluster": run.cluster, **flat(tables)}
    if run.plan.communication.between == "fastest" and (path := Path(run.cluster.partition(":")[0])).suffix == ".toml":
        found["a hash of the cluster file"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return {key: value for key, value in found.items() if key not in _PLACES}


def data_settings(run: Run, data: TrainingData) -> dict[str, str]:
    """Returns the data's fingerprint and sizes, and a hash of the initial weights, by name."""
    found = {
        "data.fingerprint": data.fingerprint,
        "a hash of the images": data.contents,
        "the number of samples to train on": str(len(data.train)),
        "the number of held-out samples": str(0 if data.held_out is None else len(data.held_out)),
        "samples that are left out": json.dumps(sorted(data.skipped)),
    }
    weights = weights_fingerprint(run.source, run.tuning.adapter, run.folder)
    found["a hash of the weights to start from"] = weights.removeprefix(WHOLE_HASH)
    return found


def agree(settings: Mapping[str, str], world: Axis) -> None:
    """Raises LaunchError if ranks have different values; every rank raises the same error.

    `settings` are this rank's values by name. If all are equal, 32 bytes a rank are exchanged.
    """
    world = _unrecorded(world)
    text = json.dumps(settings, sort_keys=True).encode()
    own = torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.uint8)
    digests = torch.empty(world.degree * len(own), dtype=torch.uint8)
    all_gather(digests, own, world).wait()
    rows = digests.view(world.degree, -1)
    if not bool((rows == rows[0]).all()):  # the same on every rank
        raise LaunchError(_describe([json.loads(one) for one in _gather(text, world)]))


def text_of_rank_0(text: str, world: Axis) -> str:
    """Returns rank 0's text on every rank."""
    world = _unrecorded(world)
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    size = torch.tensor([len(data)])
    broadcast(size, world).wait()
    if not size:
        return ""
    if world.index:
        data = torch.empty(int(size), dtype=torch.uint8)
    broadcast(data, world).wait()
    return data.numpy().tobytes().decode()


def texts_of_ranks(text: str, world: Axis) -> list[str]:
    """Returns the texts of all ranks, in order of rank."""
    return [one.decode() for one in _gather(text.encode(), _unrecorded(world))]


def _gather(text: bytes, world: Axis) -> list[bytes]:
    """Returns the bytes of all ranks, in order of rank."""
    longest = torch.tensor([len(text)])
    all_reduce(longest, world, "max").wait()
    part = torch.zeros(int(longest) + 1, dtype=torch.uint8)  # never empty
    part[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    whole = torch.empty(world.degree * len(part), dtype=torch.uint8)
    all_gather(whole, part, world).wait()
    return [row.numpy().tobytes().rstrip(b"\0") for row in whole.view(world.degree, -1)]


def _describe(settings: Sequence[Mapping[str, str]]) -> str:
    """Describes each value that differs, in order of rank, and the ranks that have it."""
    keys = list(dict.fromkeys(key for one in settings for key in one))
    phrases = []
    for key in keys:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, one in enumerate(settings):
            ranks_by_value.setdefault(one.get(key, "not given"), []).append(rank)
        if len(ranks_by_value) > 1:
            values = list(ranks_by_value.items())
            words = [f"{_shown(value)} on {_named(ranks)}" for value, ranks in values[:_MAX_NAMED]]
            phrases.append(f"{key} is {', '.join(words)}")
    more = f"; and {len(phrases) - _MAX_NAMED} more" if len(phrases) > _MAX_NAMED else ""
    return (
        f"the ranks do not agree on what they train: {'; '.join(phrases[:_MAX_NAMED])}{more}. Start all ranks with the "
        f"same run file, code and data, in a folder that all of them share"
    )


def _shown(value: str) -> str:
    value = value if len(value) <= _MAX_VALUE else f"{value[:_MAX_VALUE]}..."
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in value)


def _named(ranks: Sequence[int]) -> str:
    few = rank_names(ranks[:_MAX_NAMED])
    return few if len(ranks) <= _MAX_NAMED else f"{few} and {len(ranks) - _MAX_NAMED} more"


def _seen_id(folder: Path, run_id: str) -> str:
    """The run's id in this rank's folder. A new file may become visible late on another host, so this waits for it."""
    deadline = time.monotonic() + SEEN_SECONDS
    while (found := known_run_id(folder)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return run_id if found == run_id else f"{found or 'none'} in {folder.resolve() / 'checkpoints'}"


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flattens nested tables into one with dotted keys."""
    found: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value)
    return found


def _unrecorded(world: Axis) -> Axis:
    """Returns the axis without the run's ledger: comparisons are not part of a step's traffic."""
    return replace(world, ledger=Ledger(), levels=None)

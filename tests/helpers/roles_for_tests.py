"""Runs with ranks of several roles under the local agent, whose ranks may kill themselves at a given moment."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from runs_for_tests import Silent, write_text
from waiting_for_tests import wait_for

from weft.checkpoint import Checkpoint, steps
from weft.checkpoint.folder import step_name
from weft.launch.environment import detect
from weft.launch.fork_server import REJOIN_VARIABLE, ForkServer
from weft.roles import curvature, links
from weft.run_file import Run, load_run
from weft.train import loop, role_rank
from weft.train.batches import TrainingData
from weft.train.local_job import start_ranks
from weft.train.role_rank import Validator

# Few sequences, so that 12 steps of 16 are more than two epochs.
RUN_FILE = """
[model]
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 1
num_attention_heads = 2

[data]
source = "{source}"
sequence = 24
cache = "{cache}"

[train]
steps = 12
batch = 16
learning_rate = 1e-2
evaluate_every = 4
evaluate_sequences = 5
device = "cpu"

[plan]
precision = "fp32"

[restart]
limit = 1
hang_seconds = 30
"""


def write_roles_run(folder: Path) -> Path:
    """A run file in a folder, with a text of fewer than 96 sequences."""
    source, path = write_text(folder / "text.txt", 400), folder / "tiny.toml"
    path.write_text(RUN_FILE.format(source=source, cache=folder / "cache"))
    return path


class Messages(Silent):
    """A reporter that writes what it is to say to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def say(self, message: str) -> None:
        _note(self._path, message)


def _note(path: Path, line: str) -> None:
    with open(path, "a") as file:
        file.write(line + "\n")


def rank_main(arguments: list[str]) -> None:
    """What each rank does: train or serve, and note which batches it makes; die once if it is to."""
    spec = json.loads(arguments[0])
    run = load_run(Path(spec["run_file"]), spec["overrides"])
    rank = detect(os.environ)
    assert rank is not None
    notes = Path(spec["notes"])
    made = TrainingData.host_batches
    dies = spec["kill"] is not None and spec["kill"]["rank"] == rank.rank and REJOIN_VARIABLE not in os.environ
    count = 0

    def host_batches(data: TrainingData, run: Run, step: int, axis: Any) -> Any:
        nonlocal count
        count += 1
        if dies and count > spec["kill"]["after"]:
            os.kill(os.getpid(), signal.SIGKILL)
        _note(notes / "made", f"{rank.rank} {step} {axis.index}")
        batches = made(data, run, step, axis)
        if spec["keyed_by_rank"]:
            return [(inputs.roll(rank.rank, 1), *rest) for inputs, *rest in batches]
        return batches

    def train_step(model: Any, optimizer: Any, given: Any, *rest: Any) -> Any:
        used = [hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for batch in given for tensor in batch]
        _note(notes / f"used-{rank.rank}", " ".join(used))
        if spec["waits_for_return"] and len((notes / f"used-{rank.rank}").read_text().splitlines()) == 8:
            wait_for(notes / "back")
        return stepped(model, optimizer, given, *rest)

    def measure(validator: Validator, step: int, tensors: Any) -> Any:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return measured(validator, step, tensors)

    def announce_and_note(*arguments: Any) -> Any:
        found = announce(*arguments)
        if REJOIN_VARIABLE in os.environ:
            (notes / "back").touch()
        return found

    def invert(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if dies and count > spec["kill"]["after"]:
            os.kill(os.getpid(), signal.SIGKILL)
        _note(notes / "inverted", str(rank.rank))
        return inverted(*arguments)

    stepped, measured, announce = loop.train_step, Validator.measure, links.announce
    inverted = curvature.invert_message
    with (
        patch.object(TrainingData, "host_batches", host_batches),
        patch.object(loop, "train_step", train_step),
        patch.object(Validator, "measure", measure),
        patch.object(curvature, "invert_message", invert),
        patch.object(links, "announce", announce_and_note),
        patch.object(role_rank, "announce", announce_and_note),
    ):
        loop.train(run, rank, Messages(notes / "said") if rank.rank == 0 else Silent())


def train_with_roles(
    run_file: Path,
    name: str,
    *overrides: str,
    kill: dict[str, int] | None = None,
    keyed_by_rank: bool = False,
    waits_for_return: bool = False,
) -> Run:
    """Trains a run under the local agent.

    `kill` = {rank, after}: that rank dies after so many batches, snapshots or inversions, once. With `keyed_by_rank`,
    each rank changes the batches that it makes by its own rank, which a rank must never do. With `waits_for_return`,
    the training ranks wait in step 8 until a killed rank is back.
    """
    own = [f"folder={run_file.parent / name}", *overrides]
    run = load_run(run_file, own)
    notes = notes_of(run)
    notes.mkdir()
    spec = {"run_file": str(run_file), "overrides": own, "notes": str(notes), "kill": kill}
    spec |= {"keyed_by_rank": keyed_by_rank, "waits_for_return": waits_for_return}
    with patch.dict(os.environ, OMP_NUM_THREADS="1"), ForkServer(rank_main) as fork_server:
        assert start_ranks(fork_server, run, [json.dumps(spec)]) == 0
    return run


def notes_of(run: Run) -> Path:
    """The folder with what the ranks of a run noted."""
    return run.folder.with_name(run.folder.name + ".notes")


def batches_made(run: Run) -> list[tuple[int, int, int]]:
    """(rank, number of the batch, index on the axis `batch`) of every batch that a rank made."""
    lines = (notes_of(run) / "made").read_text().splitlines()
    return [tuple(map(int, line.split())) for line in lines]  # type: ignore[misc]


def batches_used(run: Run) -> list[str]:
    """Digests of the batches that the training ranks trained on, by rank and step."""
    return [(notes_of(run) / f"used-{rank}").read_text() for rank in range(run.plan.num_ranks)]


def inversions(run: Run) -> list[int]:
    """The rank of each message of factors that a rank has inverted, in order."""
    return [int(line) for line in (notes_of(run) / "inverted").read_text().splitlines()]


def said(run: Run) -> str:
    """What rank 0 said."""
    path = notes_of(run) / "said"
    return path.read_text() if path.exists() else ""


def last_state(run: Run) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor of the last checkpoint of a run."""
    folder = run.folder / "checkpoints"
    checkpoint = Checkpoint(folder / step_name(steps(folder)[-1]))
    assert checkpoint.step == run.train.steps
    return {(entry.name, entry.kind): checkpoint.read(entry.name, entry.kind) for entry in checkpoint.entries()}


def assert_bit_equal(run: Run, other: Run) -> None:
    """Parameters and optimizer state after the last step are the same bits."""
    ours, theirs = last_state(run), last_state(other)
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert torch.equal(tensor, theirs[key]), key

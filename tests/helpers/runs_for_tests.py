"""Small runs for tests: a text to learn, a run file for it, the layouts to compare, and `train` on forked ranks."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from weft.launch.environment import RankInfo
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.run_file import Run, load_run
from weft.step.examples import micro_batch_profile
from weft.train import loop

# What the issue of resuming and of equal curves is tried on: every axis, every stage, both together.
LAYOUTS = {
    "1 process": [],
    "2 data": ["plan.data=2"],
    "4 shard-3": ["plan.shard=4"],
    "2 data x 2 shard-1": ["plan.data=2", "plan.shard={degree=2, stage=1}"],
    "8 shard-2": ["plan.shard={degree=8, stage=2}"],
}

# And the axes that split the model itself.
MODEL_LAYOUTS = {
    "2 x": ["plan.tensor.x=2"],
    "4 x (sequence)": ["plan.tensor={x=4, sequence=true}"],
    "2 x 2 y x 2 shard-3": ["plan.tensor={x=2, y=2}", "plan.shard=2"],
    "2 data x 2 y": ["plan.data=2", "plan.tensor.y=2"],
    "2 context x 2 x x 2 shard-2": ["plan.context=2", "plan.tensor.x=2", "plan.shard={degree=2, stage=2}"],
}

# And the model in stages, over four layers (see DEEP): copies of stages, and stages that share the tied embedding.
PIPE_LAYOUTS = {
    "2 pipe": ["plan.pipe=2", "plan.micro_batch=4"],
    "4 pipe (gems)": ['plan.pipe={degree=4, schedule="gems"}', "plan.micro_batch=4"],
    "2 pipe (interleaved) x 2 shard-3": [
        'plan.pipe={degree=2, schedule="interleaved"}',
        "plan.shard=2",
        "plan.micro_batch=2",
    ],
}

# Odd sizes, so that few tensors divide by a degree of shard; a tied head, so that one tensor has two names.
RUN_FILE = """
[model]
hidden_size = 40
intermediate_size = 52
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 1
tie_word_embeddings = true

[data]
source = "{source}"
sequence = 24
cache = "{cache}"

[train]
steps = 15
batch = 16
learning_rate = 1e-2
warmup_steps = 3
evaluate_sequences = 11

[checkpoint]
every = 3
keep_last = 100
"""


DEEP = RUN_FILE.replace("num_hidden_layers = 2", "num_hidden_layers = 4")


def write_text(path: Path, num_words: int = 20_000) -> Path:
    """A text with something to learn: words drawn from few, unevenly."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(60)]
    path.write_text(" ".join(draw.choices(words, weights=range(1, 61), k=num_words)))
    return path


def write_run_file(folder: Path, text: str = RUN_FILE) -> Path:
    """A run file in a folder, with its data beside it."""
    source = write_text(folder / "text.txt")
    path = folder / "tiny.toml"
    path.write_text(text.format(source=source, cache=folder / "cache"))
    return path


def make_run(run_file: Path, name: str, *overrides: str) -> Run:
    """The run of a file, in a folder of its own beside the file."""
    return load_run(run_file, [f"folder={run_file.parent / name}", *overrides])


def train_on_ranks(run: Run, timeout_seconds: float = 120.0) -> dict[str, Any]:
    """`train` on forked ranks, which are in a process group already; the outcome, which all must agree on."""

    micro_batch_profile(run)  # cached here, once for all ranks

    def rank(index: int) -> dict[str, Any]:
        place = RankInfo(index, run.plan.num_ranks, index, run.plan.num_ranks)
        with patch.object(loop, "world", lambda run, place, store: nullcontext(Mesh(run.plan))):
            return asdict(loop.train(run, place, Silent()))

    outcomes = run_local(rank, run.plan.num_ranks, timeout_seconds)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    outcome: dict[str, Any] = outcomes[0]
    return outcome


class Silent:
    """A reporter that says nothing."""

    def step(self, metrics: object) -> None: ...

    def say(self, message: str) -> None: ...


def events(folder: Path, kind: str = "step") -> list[dict[str, Any]]:
    """What a run wrote to its metrics, of one kind."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def losses(folder: Path) -> list[float]:
    """The loss curve of a run that logged every step, in order and once."""
    steps = events(folder)
    assert [event["step"] for event in steps] == list(range(1, len(steps) + 1))
    return [event["loss"] for event in steps]


def train_with_a_small_host(folder: Path, override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train where the host has 2 GiB free; data is not to be looked at."""
    run = make_run(write_run_file(folder), "small", override)
    monkeypatch.setattr("weft.sharding.host_memory.available_host_bytes", lambda: 2 << 30)
    monkeypatch.setattr("weft.train.loop.prepare_data", lambda _: pytest.fail("too late"))
    loop.train(run, RankInfo(), Silent())


def copy_run(run: Run, step: int, target: Run) -> None:
    """The folder of a run as it was when it had just saved `step`."""
    target.folder.mkdir()
    for folder in (run.folder / "checkpoints").glob("step-*"):
        if folder.name <= f"step-{step:08d}":
            shutil.copytree(folder, target.folder / "checkpoints" / folder.name)
    lines = (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (target.folder / "metrics.jsonl").write_text("".join(lines[:step]))

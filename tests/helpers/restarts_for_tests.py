"""Runs of four ranks under the local agent, one of which kills itself in the middle of a step."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from runs_for_tests import Silent

from weft.checkpoint import Checkpoint
from weft.comm import Ledger
from weft.launch.environment import detect
from weft.launch.fork_server import ForkServer
from weft.resilience import shared_memory
from weft.run_file import Run, load_run
from weft.train import loop
from weft.train.batches import TrainingData
from weft.train.local_job import start_ranks

NUM_STEPS = 12
OVERRIDES = [f"train.steps={NUM_STEPS}", "checkpoint.every=5", "checkpoint.memory_every=1"]
OVERRIDES += ["restart.limit=1", "restart.hang_seconds=10"]
RESTARTED_LAYOUTS = {
    "data 2 x shard 2": ["plan.data=2", "plan.shard=2"],
    "pipe 4": ["plan.pipe=4", "plan.micro_batch=4"],
    "data 4, 2 per device": ["plan.data=4", "plan.ranks_per_device=2"],
}


@dataclass(frozen=True)
class Kill:
    """Which rank dies in which step (from 1), at which of its calls in it; at the step's end if there are fewer."""

    rank: int
    step: int
    call: int
    how: str = "kill"  # or "hang": it sleeps at that call; "stop": by SIGSTOP; or "hang in loading", before the step

    @staticmethod
    def drawn(rank: int, step: int) -> Kill:
        return Kill(rank, step, random.Random(100 * rank + step).randrange(20))


def rank_main(arguments: list[str]) -> None:
    """What each rank does: train, and die once if it is the one."""
    spec = json.loads(arguments[0])
    run = load_run(Path(spec["run_file"]), spec["overrides"])
    place = detect(os.environ)
    assert place is not None
    is_first = os.environ.setdefault("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    kill = Kill(**spec["kill"]) if spec["kill"] and is_first else None
    dying = _Dying(kill if kill is not None and kill.rank == place.rank else None, Path(spec["folder"]))

    def record(ledger: Ledger, *arguments: Any) -> None:
        dying.record(ledger, *arguments)

    with (
        patch.object(loop, "train_step", dying.train_step),
        patch.object(Ledger, "record", record),
        patch.object(TrainingData, "batches", lambda data, *arguments: dying.batches(data, *arguments)),
    ):
        loop.train(run, place, Silent())


class _Dying:
    """Counts steps and calls, and kills its process at the one that is due."""

    def __init__(self, kill: Kill | None, folder: Path) -> None:
        self._kill, self._folder = kill, folder
        self._record, self._train_step, self._batches = Ledger.record, loop.train_step, TrainingData.batches
        self._step = self._calls = 0

    def train_step(self, *arguments: Any, **named: Any) -> Any:
        self._step, self._calls = self._step + 1, 0
        result = self._train_step(*arguments, **named)
        if self._kill is not None and self._kill.step == self._step:
            self._die()  # it had fewer calls
        stepped = self._folder / "stepped"
        if not stepped.exists() and os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
            stepped.write_text(str(time.time()))
        return result

    def batches(self, data: TrainingData, *arguments: Any) -> Any:
        if self._kill is not None and self._kill.how == "hang in loading" and self._kill.step == self._step + 1:
            self._die()
        return self._batches(data, *arguments)

    def record(self, ledger: Ledger, *arguments: Any) -> None:
        self._record(ledger, *arguments)
        if self._kill is not None and self._kill.step == self._step:
            self._calls += 1
            if self._calls > self._kill.call:
                assert ledger.status is not None
                axis, operation, _ = arguments
                call = f"{operation} over {axis} (#{ledger.status.num_calls}, {ledger.status.inside})"
                (self._folder / "call").write_text(call)
                self._die()

    def _die(self) -> None:
        (self._folder / "killed").write_text(str(time.time()))
        if self._kill is not None and self._kill.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._kill is not None and self._kill.how != "kill":
            time.sleep(1000)
        os.kill(os.getpid(), signal.SIGKILL)


def train_under_agent(run_file: Path, run: Run, overrides: list[str], kill: Kill | None) -> float | None:
    """Train under the agent; the seconds from the kill to the next finished step, where there was a restart."""
    folder = run.folder.with_name(run.folder.name + ".times")
    folder.mkdir()
    spec = {
        "run_file": str(run_file),
        "overrides": [*overrides, f"folder={run.folder}"],
        "kill": vars(kill) if kill is not None else None,
        "folder": str(folder),
    }
    memory = Path(tempfile.mkdtemp(prefix="weft-test-", dir=shared_memory.SHARED_MEMORY))
    try:
        with (
            patch.object(shared_memory, "SHARED_MEMORY", memory),
            patch.dict(os.environ, OMP_NUM_THREADS="1"),
            ForkServer(rank_main) as fork_server,
        ):
            assert start_ranks(fork_server, run, [json.dumps(spec)]) == 0
        assert os.listdir(memory) == []
    finally:
        shutil.rmtree(memory)
    assert (folder / "killed").exists() == (kill is not None)
    if kill is None or not (folder / "stepped").exists():
        return None
    return float((folder / "stepped").read_text()) - float((folder / "killed").read_text())


def assert_same_end(run: Run, whole: Run) -> None:
    """Every tensor of the last checkpoint, bit for bit."""
    name = f"checkpoints/step-{NUM_STEPS:08d}"
    ours, theirs = Checkpoint(run.folder / name), Checkpoint(whole.folder / name)
    assert {(e.kind, e.name) for e in ours.entries()} == {(e.kind, e.name) for e in theirs.entries()}
    for entry in ours.entries():
        assert torch.equal(ours.read(entry.name, entry.kind), theirs.read(entry.name, entry.kind)), entry.name


def table(seconds: dict[str, list[float]]) -> str:
    """The distribution of recovery times, one layout a line."""
    lines = [f"{'layout':20} {'kills':>5} {'median':>8} {'90 %':>8} {'longest':>8}"]
    for name, values in seconds.items():
        ninth = statistics.quantiles(values, n=10)[-1] if len(values) > 1 else values[0]
        lines.append(
            f"{name:20} {len(values):5} {statistics.median(values):6.2f} s {ninth:6.2f} s {max(values):6.2f} s"
        )
    return "\n".join(lines)

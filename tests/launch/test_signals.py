"""SIGTERM and Ctrl-C at a real `weft train` of two ranks: it saves, leaves with status 0, and goes on as before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from runs_for_tests import events, losses, make_run, train_on_ranks, write_run_file
from waiting_for_tests import DEADLINE_SECONDS, wait_until

from weft.checkpoint import Checkpoint, Saver, latest, steps
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.plan import Plan
from weft.run_file import Run
from weft.train.stop import Stop

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
NUM_STEPS = 200
OVERRIDES = ["plan.data=2", f"train.steps={NUM_STEPS}", "checkpoint.every=60", "train.evaluate_every=75"]


class Command:
    """A `weft train` that runs."""

    def __init__(self, run_file: Path, run: Run, *options: str) -> None:
        self.run = run
        environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "weft", "train", str(run_file), *OVERRIDES, f"folder={run.folder}"]
        self.process = subprocess.Popen(
            [*command, *options], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait_for_step(self, step: int) -> None:
        """Return when the metrics have got to a step."""
        wait_until(lambda: self._last_step() >= step or self.process.poll() is not None, f"step {step}")
        assert self.process.poll() is None, self.process.communicate()

    def _last_step(self) -> int:
        path = self.run.folder / "metrics.jsonl"
        if not path.exists():
            return 0
        return sum('"kind": "step"' in line for line in path.read_text().splitlines())

    def end(self) -> tuple[int, str, str]:
        """Status, standard output and standard error."""
        out, err = self.process.communicate(timeout=DEADLINE_SECONDS)
        return self.process.returncode, out, err


@pytest.fixture
def started() -> Iterator[list[Command]]:
    """Commands to end, whatever happens: the starter passes a SIGTERM on to its ranks."""
    commands: list[Command] = []
    yield commands
    for command in commands:
        if command.process.poll() is None:
            command.process.terminate()
            command.process.communicate()


@pytest.mark.soak
def test_a_run_that_is_stopped_twice_ends_like_one_that_is_not(tmp_path: Path, started: list[Command]) -> None:
    run_file = write_run_file(tmp_path)
    run = make_run(run_file, "stopped", *OVERRIDES)
    stopped = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        command = Command(run_file, run, "--no-verify")
        started.append(command)
        command.wait_for_step(stopped + 5)
        command.process.send_signal(number)
        status, out, err = command.end()
        assert status == 75, err
        assert f"weft: {number.name}: the ranks save and stop" in err
        if stopped:
            assert f"resumed at step {stopped}" in out
        before, stopped = stopped, steps(run.folder / "checkpoints")[-1]
        assert before + 5 <= stopped < NUM_STEPS
        assert f"stopped at step {stopped} and saved; run the same command to go on" in err
        assert len(losses(run.folder)) == stopped
        assert "the model continues" not in out  # who asks to stop does not wait for a sample
        newest = latest(run.folder / "checkpoints")
        assert newest is not None
        assert Checkpoint(newest).state["data"]["samples"] == stopped * 16

    command = Command(run_file, run)
    started.append(command)
    status, out, err = command.end()
    assert (status, err) == (0, "")
    assert "verified in float64 against the sequential model: data 2" in out
    assert f"resumed at step {stopped}" in out
    assert f"step {NUM_STEPS}/{NUM_STEPS}  loss" in out
    assert "the model continues" in out

    whole = make_run(run_file, "whole", *OVERRIDES)
    train_on_ranks(whole)
    assert losses(run.folder) == losses(whole.folder)
    kinds = [[(e["step"], e["loss"]) for e in events(r.folder, "evaluation")] for r in (run, whole)]
    assert kinds[0] == kinds[1]
    assert [step for step, _ in kinds[0]] == [75, 150, 200]


def test_a_signal_while_the_last_checkpoint_is_written_does_not_end_the_rank(tmp_path: Path) -> None:
    run = make_run(write_run_file(tmp_path), "late", "train.steps=3")
    wait = Saver.wait

    def interrupted(self: Saver, published: bool = False) -> None:
        if published:
            os.kill(os.getpid(), signal.SIGTERM)
        wait(self, published)

    with patch.object(Saver, "wait", interrupted):
        assert train_on_ranks(run)["finished"]
    assert steps(run.folder / "checkpoints") == [3]


def test_one_signal_at_one_rank_stops_all_after_the_same_step() -> None:
    def rank(index: int) -> list[int]:
        mesh = Mesh(Plan(data=4))
        stop = Stop(mesh)
        agreed_at = []
        for step in range(6):
            if index == 2 and step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            stop.ask()
            if stop.agreed:
                agreed_at.append(step)
        stop.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        return agreed_at

    assert run_local(rank, 4) == [[2, 3, 4, 5]] * 4


def test_nobody_stops_without_a_signal() -> None:
    def rank(index: int) -> bool:
        stop = Stop(Mesh(Plan(data=2)))
        for _ in range(5):
            stop.ask()
        stop.close()
        return stop.agreed

    assert run_local(rank, 2) == [False, False]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.soak
def test_a_killed_rank_does_not_end_the_command(tmp_path: Path, started: list[Command]) -> None:
    """The whole way: the fork server's ranks are the grandchildren of the command."""
    run_file = write_run_file(tmp_path)
    run = make_run(run_file, "killed", *OVERRIDES)
    command = Command(run_file, run, "--no-verify", "checkpoint.memory_every=2")
    started.append(command)
    command.wait_for_step(8)
    (fork_server,) = children(command.process.pid)
    os.kill(children(fork_server)[1], signal.SIGKILL)
    status, out, err = command.end()
    assert status == 0, err
    assert err.startswith("weft: rank 1 was killed by SIGKILL")
    assert "All ranks start again (restart 1 of at most 5 within 3600 s) and go on after step" in err
    assert "from memory" in out
    assert f"step {NUM_STEPS}/{NUM_STEPS}  loss" in out
    whole = make_run(run_file, "whole", *OVERRIDES)
    train_on_ranks(whole)
    assert losses(run.folder) == losses(whole.folder)


@pytest.mark.soak
def test_a_second_command_in_the_same_folder_is_locked_out(tmp_path: Path, started: list[Command]) -> None:
    run_file = write_run_file(tmp_path)
    run = make_run(run_file, "shared", *OVERRIDES, "train.steps=2000")
    started.append(Command(run_file, run, "--no-verify", "train.steps=2000"))
    started[0].wait_for_step(2)
    second = Command(run_file, run, "--no-verify", "train.steps=2000")
    started.append(second)
    status, _, err = second.end()
    assert status == 2
    assert f"weft: {run.folder} is in use by process" in err
    assert err.count("\n") == 1
    assert started[0].process.poll() is None

"""Ranks on the GPU that are killed, stopped or hang: the run goes on, and ends with the same numbers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_for_tests import TEXT, environment, losses, succeeded, weft, write_run
from waiting_for_tests import wait_until

SHARED = TEXT.replace("compile = false", "compile = false\nshare_gpus = true") + "\n[plan]\nprecision = 'fp32'\n"
FOUR = "data = 2\nshard = 2\nmicro_batch = 2\n"


def write_shared(folder: Path, plan: str = FOUR, more: str = "") -> Path:
    return write_run(folder, SHARED + plan + more)


@pytest.mark.parametrize(
    "overrides",
    [
        ["plan.data=2", "plan.shard=2"],
        ["plan.data=1", "plan.shard=1", "plan.tensor={x=2, sequence=true}", "plan.context=2"],
        ["plan.data=2", "plan.shard=1", "plan.pipe={degree=2, schedule='interleaved'}"],
    ],
)
def test_four_ranks_train_as_one(overrides: list[str], tmp_path: Path) -> None:
    """On the one GPU, in fp32: the same losses as one rank."""
    (tmp_path / "one").mkdir()
    (tmp_path / "four").mkdir()
    one, four = write_shared(tmp_path / "one", "micro_batch = 2\n"), write_shared(tmp_path / "four")
    succeeded(weft("train", one, "--no-verify"))
    succeeded(weft("train", four, *overrides))
    found, expected = (losses(tmp_path / name / "text") for name in ("four", "one"))
    assert found == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("kinds", ["kill", "hang", "nan"])
def test_chaos_changes_nothing(kinds: str, tmp_path: Path) -> None:
    run = write_shared(tmp_path)
    overrides = ["train.steps=40", "train.deterministic=true", "restart.hang_seconds=20", "train.evaluate_every=40"]
    found = weft(
        "chaos", run, *overrides, "--kinds", kinds, "--mtbf", "3s", "--faults", 1, "--seed", 1, "--json", seconds=420
    )
    assert found.status == 0, found.out[-2000:] + found.err[-3000:]
    assert found.json["equal"]
    assert found.json["faults"]


def test_a_killed_run_resumes(tmp_path: Path) -> None:
    """SIGKILL of the whole job, then the same command."""
    run = write_shared(tmp_path, more="\n")
    command = [sys.executable, "-m", "weft", "train", str(run), "--no-verify", "train.steps=60"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: list((tmp_path / "text").glob("checkpoints/step-*")) or process.poll() is not None, "a save")
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    left = succeeded(weft("train", run, "--no-verify", "train.steps=60"))
    assert "resumed" in left.out
    assert len(losses(tmp_path / "text")) == 60


def test_shadows_are_refused_by_name(tmp_path: Path) -> None:
    run = write_shared(tmp_path, "pipe = {degree = 4, shadow = true}\nmicro_batch = 2\n")
    left = weft("train", run, "--no-verify")
    assert left.status == 2
    assert "plan.pipe.shadow = true works on CPUs" in left.err

"""The validator: its measures are those of inline evaluation of the same snapshot, and its loss loses measures only."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from roles_for_tests import assert_bit_equal, said, train_with_roles
from runs_for_tests import events

from weft.checkpoint import Checkpoint, Saver, steps
from weft.checkpoint.folder import step_name
from weft.run_file import Run, load_run
from weft.saved_run import open_checkpoint
from weft.train.batches import prepare_data
from weft.train.role_rank import BEST, BestSnapshot

pytestmark = pytest.mark.processes


def test_a_validator_measures_what_inline_evaluation_does(run_file: Path) -> None:
    alone = train_with_roles(run_file, "alone")
    run = train_with_roles(run_file, "validator", "roles.validator=1", "roles.loader=1")
    assert_bit_equal(run, alone)
    inline = {event["step"]: event["loss"] for event in events(alone.folder, "evaluation")}
    found = {event["step"]: event["loss"] for event in events(run.folder, "evaluation")}
    assert 12 in found
    assert found == {step: inline[step] for step in found}
    assert len(set(inline.values())) == len(inline)  # so that the weights of another step would be found
    best = run.folder / "best" / "checkpoints"
    kept = Checkpoint(best / step_name(steps(best)[-1]))
    assert steps(best) == [min(found, key=lambda step: found[step])]
    assert kept.stated("held_out", dict)["loss"] == min(found.values())
    assert open_checkpoint(run.folder / "best").step == kept.step


def test_the_best_snapshot_may_be_of_a_lower_step(run_file: Path, tmp_path: Path) -> None:
    """A run that has gone back measures lower steps, and the same step, again."""
    run = load_run(run_file, [f"folder={tmp_path / 'run'}"])
    data = prepare_data(run)
    best, folder = BestSnapshot(run, data), run.folder / BEST / "checkpoints"

    def consider(best: BestSnapshot, step: int, loss: float) -> None:
        best.consider(step, {"loss": loss}, {("weight", "parameter"): torch.full((2,), loss)})

    consider(best, 4, math.nan)  # no number is better than any
    assert steps(folder) == []
    losses = [(8, 3.0, (8, 3.0)), (12, 2.0, (12, 2.0)), (8, 2.5, (12, 2.0)), (10, 1.9, (10, 1.9)), (10, 1.8, (10, 1.8))]
    losses.append((12, 1.8, (10, 1.8)))  # no better
    for step, loss, (kept, lowest) in losses:
        consider(best, step, loss)
        assert steps(folder) == [kept]
        assert open_checkpoint(run.folder / BEST).read("weight", "parameter").tolist() == pytest.approx([lowest] * 2)
    with patch.object(Saver, "delete"):  # the process dies between the save and the removal
        consider(best, 6, 1.7)
    assert steps(folder) == [6, 10]
    again = BestSnapshot(run, data)
    assert steps(folder) == [6]
    consider(again, 14, 1.75)
    assert steps(folder) == [6]


def test_a_full_disk_loses_the_best_snapshot_only(
    run_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = load_run(run_file, [f"folder={tmp_path / 'run'}"])
    data, folder = prepare_data(run), run.folder / BEST / "checkpoints"
    make, tensors = Path.mkdir, {("weight", "parameter"): torch.ones(2)}

    def full(self: Path, *arguments: Any, **options: Any) -> None:
        if self.name.startswith(".saving-step-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        make(self, *arguments, **options)

    with patch.object(Path, "mkdir", full):
        best = BestSnapshot(run, data)
        best.consider(8, {"loss": 3.0}, tensors)
    assert steps(folder) == []
    assert "the best snapshot was not saved: cannot save to" in caplog.text
    best.consider(12, {"loss": 3.5}, tensors)
    assert steps(folder) == [12]


def test_a_killed_validator_loses_measures_only(run_file: Path, plain: Run) -> None:
    kill = {"rank": 2, "after": 0}
    run = train_with_roles(run_file, "killed", "plan.data=2", "roles.validator=1", kill=kill, waits_for_return=True)
    assert_bit_equal(run, plain)
    assert "validator 0 was lost; step 4 is not evaluated, and training goes on" in said(run)
    assert 4 not in {event["step"] for event in events(run.folder, "evaluation")}
    inline = {event["step"]: event["loss"] for event in events(plain.folder, "evaluation")}
    found = {event["step"]: event["loss"] for event in events(run.folder, "evaluation")}
    assert found == pytest.approx({step: inline[step] for step in found}, rel=1e-6)
    assert 12 in found  # by the validator that was started again

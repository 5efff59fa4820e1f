"""The validator: its measures are those of inline evaluation of the same snapshot, and its loss loses measures only."""

from __future__ import annotations

from pathlib import Path

import pytest
from roles_for_tests import assert_bit_equal, said, train_with_roles
from runs_for_tests import events

from weft.checkpoint import Checkpoint, steps
from weft.checkpoint.folder import step_name
from weft.run_file import Run
from weft.saved_run import open_checkpoint

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

"""Early stopping: when it happens, what it says, that all ranks do it at one step, and that it is final."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs_for_tests import events, make_run, train_on_ranks, write_run_file

from weft.errors import ConfigError
from weft.run_file import load_run
from weft.train.early_stopping import EarlyStopping, stopped_early

pytestmark = pytest.mark.processes
PATIENT = ["train.evaluate_every=2", "train.patience=2"]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_file(tmp_path_factory.mktemp("early"))


def test_it_stops_after_so_many_losses_that_are_not_lower(run_file: Path) -> None:
    early = EarlyStopping(make_run(run_file, "judged", *PATIENT))
    for step, loss in ((2, 3.0), (4, 3.5), (6, 2.9), (8, 2.9)):
        early.judge(step, loss, step + 3)
        assert not early.wants_stop()
    early.judge(10, 3.0, 13)
    assert early.reason == (
        "the held-out loss has not fallen below 2.9000 (step 6) in 2 evaluations (train.patience); the last is that of "
        "step 10, known 3 steps later"
    )
    endless = EarlyStopping(make_run(run_file, "judged", "train.evaluate_every=2"))
    for step in range(50):
        endless.judge(step, 3.0, step)
    assert not endless.wants_stop()


def test_all_ranks_stop_at_one_step_and_a_second_start_does_nothing(run_file: Path) -> None:
    diverging = ["train.learning_rate=30", "train.warmup_steps=0", "train.schedule=constant", "train.steps=40"]
    run = make_run(run_file, "stopped", *PATIENT, *diverging, "plan.data=2")
    outcome = train_on_ranks(run)
    assert outcome["finished"]
    losses = {event["step"]: event["loss"] for event in events(run.folder, "evaluation")}
    best = min(losses, key=lambda step: losses[step])
    decided = next(step for step in losses if step >= best + 4)
    assert outcome["step"] == decided + 2  # the vote of the next step, read after the one behind it
    assert outcome["step"] < 40
    assert stopped_early(run, outcome["step"]) is not None
    assert train_on_ranks(run)["step"] == outcome["step"]
    more = make_run(run_file, "stopped", *PATIENT, *diverging, "plan.data=2", "train.patience=3")
    assert stopped_early(more, outcome["step"]) is None
    mark = json.loads((run.folder / "stopped-early.json").read_text())
    assert mark["step"] == outcome["step"]


def test_patience_without_evaluations_is_refused(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.patience = 2 counts evaluations, and train.evaluate_every is not"):
        load_run(run_file, ["train.patience=2"])
    with pytest.raises(ConfigError, match=r"train\.patience = 2 but data\.held_out = 0 leaves nothing to evaluate on"):
        load_run(run_file, [*PATIENT, "data.held_out=0"])

"""Early stopping: when it happens, what it says, that all ranks do it at one step, and that it is final."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from runs_for_tests import events, make_run, train_on_ranks, write_run_file

from weft.errors import ConfigError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.plan import Plan
from weft.roles.snapshots import SnapshotResult
from weft.run_file import Run, load_run
from weft.train import early_stopping
from weft.train.early_stopping import EarlyStopping, stopped_early
from weft.train.stop import Stop
from weft.train.validation import Validation

pytestmark = pytest.mark.processes
PATIENT = ["train.evaluate_every=2", "train.patience=2"]


def _of_rank_0(run: Run, step: int) -> str | None:
    return stopped_early(run, step) if dist.get_rank() == 0 else None


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_file(tmp_path_factory.mktemp("early"))


def test_it_stops_after_so_many_losses_that_are_not_lower(run_file: Path) -> None:
    early = EarlyStopping(make_run(run_file, "judged", *PATIENT), 0)
    for step, loss in ((2, 3.0), (4, 3.5), (6, 2.9), (8, 2.9)):
        early.judge(step, loss, step + 3)
        assert not early.wants_stop()
    early.judge(10, 3.0, 13)
    assert early.reason == (
        "the held-out loss has not fallen below 2.9000 (step 6) in 2 evaluations (train.patience); the last is that of "
        "step 10, known 3 steps later"
    )
    endless = EarlyStopping(make_run(run_file, "judged", "train.evaluate_every=2"), 0)
    for step in range(50):
        endless.judge(step, 3.0, step)
    assert not endless.wants_stop()


def test_a_loss_that_is_no_number_is_worse_than_any(run_file: Path) -> None:
    early = EarlyStopping(make_run(run_file, "nan", *PATIENT), 0)
    for step, loss in ((2, math.nan), (4, 3.0), (6, math.nan), (8, 2.9), (10, math.nan)):
        early.judge(step, loss, step)
        assert not early.wants_stop()
    early.judge(12, 3.0, 12)
    assert early.reason is not None
    assert early.reason.startswith("the held-out loss has not fallen below 2.9000 (step 8) in 2 evaluations")


def test_evaluations_of_steps_that_the_run_went_back_over_do_not_count(run_file: Path) -> None:
    run = make_run(run_file, "back", *PATIENT)
    early = EarlyStopping(run, 0)
    for step, loss in ((2, 3.0), (4, 2.0), (6, 2.5)):
        early.judge(step, loss, step)
    early.went_back(3)
    for step in (4, 6):
        assert not early.wants_stop()
        early.judge(step, 3.5, step)
    assert early.reason is not None
    assert "below 3.0000 (step 2)" in early.reason
    early.went_back(5)
    assert not early.wants_stop()
    lines: list[dict[str, Any]] = [
        *({"kind": "evaluation", "step": step, "loss": loss} for step, loss in ((2, 3.0), (4, 2.0), (6, 2.5))),
        {"kind": "numbers", "step": 5, "bad": 5},  # skipped
        {"kind": "numbers", "step": 2, "bad": 7, "left_out": []},  # the evaluation of step 2 counts
        {"kind": "evaluation", "step": 4, "loss": 3.5},
    ]
    run.folder.mkdir()
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = EarlyStopping(run, 4)
    assert not again.wants_stop()
    again.judge(6, 3.1, 6)
    assert again.wants_stop()
    before = EarlyStopping(run, 3)  # a full disk has kept the line of step 4
    before.judge(4, 3.5, 4)
    assert not before.wants_stop()


def test_a_step_that_was_logged_twice_counts_once(run_file: Path) -> None:
    """A start on a full disk kept the lines of steps 4 and 6, which were done again; then there was another start."""
    run = make_run(run_file, "twice", *PATIENT)
    losses = ((2, 3.0), (4, 3.5), (6, 2.5), (4, 3.5), (6, 2.6))
    run.folder.mkdir()
    lines = (json.dumps({"kind": "evaluation", "step": step, "loss": loss}) + "\n" for step, loss in losses)
    (run.folder / "metrics.jsonl").write_text("".join(lines))
    early = EarlyStopping(run, 7)
    assert not early.wants_stop()
    early.judge(8, 2.7, 8)
    assert not early.wants_stop()
    early.judge(10, 2.7, 10)
    assert early.reason is not None
    assert "below 2.6000 (step 6) in 2 evaluations" in early.reason


def test_a_damaged_mark_is_none(run_file: Path) -> None:
    run = make_run(run_file, "damaged mark", *PATIENT)
    run.folder.mkdir()
    for mark in ("", "\0", "[4, 2]", '{"step": 4, "patience": 2}'):
        (run.folder / "stopped-early.json").write_text(mark)
        assert stopped_early(run, 4) is None, mark


def test_a_mark_that_cannot_be_written_does_not_end_the_run(run_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(run_file, "no mark", *PATIENT)
    (run.folder / "stopped-early.json").mkdir(parents=True)
    EarlyStopping(run, 4).mark(4)
    assert "stopped-early.json cannot be written (Is a directory): a second start of the run goes on" in caplog.text
    assert stopped_early(run, 4) is None


def test_a_snapshot_of_before_the_run_went_back_does_not_count(run_file: Path) -> None:
    run = make_run(run_file, "snapshots", *PATIENT)
    said: list[str] = []
    logged: list[int] = []
    results: list[SnapshotResult] = []
    sender: Any = SimpleNamespace(outstanding=[20], results=lambda: results, offer=lambda step: True)
    status = SimpleNamespace(phase=lambda name: None)
    state: Any = SimpleNamespace(run=run, step=0, mesh=SimpleNamespace(is_first=True), say=said.append, status=status)
    log: Any = SimpleNamespace(write=lambda kind, step, values: logged.append(step))
    validation = Validation(state, log, sender)
    validation.went_back(10)
    for step, known_at in ((20, 21), (20, 23)):  # the second is of the way that counts
        results[:] = [SnapshotResult(step, "validator 0", [3.0])]
        validation.after_step(known_at, False)
    assert logged == [20]
    assert "step 20 is not evaluated: its snapshot is of before the run went back" in said
    assert "step 20: held-out loss 3.0000 (by validator 0, known at step 23)" in said


def test_a_vote_to_stop_early_does_not_outlast_a_way_back() -> None:
    def rank(index: int) -> list[bool]:
        wants, found = [index == 0], []
        stop = Stop(Mesh(Plan(data=2)), None, lambda: wants[0])
        for step in range(4):
            stop.ask()
            if step == 1:
                found += [stop.agreed, stop.is_early]
                wants[0] = False
                stop.went_back()
        found += [stop.agreed, stop.is_early]
        if index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        wants[0] = index == 0
        stop.ask()
        stop.went_back()
        wants[0] = False
        stop.ask()
        stop.close()
        return [*found, stop.agreed, stop.is_early]

    assert run_local(rank, 2) == [[True, True, False, False, True, False]] * 2


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
    with patch.object(early_stopping, "stopped_early", _of_rank_0):  # another host does not see the mark yet
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

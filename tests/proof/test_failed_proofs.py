"""A proof that does not end has failed, and stops its run; one that could show nothing is refused."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import models_for_tests as models
import pytest
import torch.distributed as dist
from commands_for_tests import Weft
from runs_for_tests import DEEP, make_run, write_run_file
from torch import nn

from weft.comm import barrier
from weft.errors import PlanError, VerifyError
from weft.plan import Plan
from weft.proof.prove import verify, verify_run
from weft.proof.trial import explained

ORACLE, RANK = importlib.import_module("weft.proof.prove"), importlib.import_module("weft.proof.rank")
SHARDED = ("plan.shard={degree=2, stage=3}", "plan.micro_batch=2")
Fault = Callable[..., Any]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_run_file(tmp_path, DEEP)


# --- what rank 1 does in place of a training step


def one_micro_batch_less(train_step: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    model, optimizer, micro_batches, *others = given
    return train_step(model, optimizer, micro_batches[:-1], *others, **options)


def wait(*_: Any) -> None:
    time.sleep(600)


def die(*_: Any) -> None:
    os._exit(3)


def fail(*_: Any) -> None:
    raise ValueError("one rank alone")


def spoil(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    train_step = RANK.train_step

    def step(*given: Any, **options: Any) -> Any:
        return fault(train_step, given, options) if dist.get_rank() == 1 else train_step(*given, **options)

    monkeypatch.setattr(RANK, "train_step", step)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (one_micro_batch_less, "ranks take different ways through the model: rank 0 is in "),
        (wait, "no answer from rank.* 0, 1 of 2 after 3 s"),
        (die, "rank 1 died with status 3"),
        (fail, "Decoder runs unsplit and fails under .*: ValueError: one rank alone"),
    ],
)
def test_a_proof_that_does_not_end_has_failed(
    text: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault, words: str
) -> None:
    monkeypatch.setattr(ORACLE, "SECONDS", 3.0 if fault is wait else ORACLE.SECONDS)
    spoil(monkeypatch, fault)
    with pytest.raises(VerifyError, match=rf"(?s)shard 2 \(stage 3\) failed its proof, on a small .*: {words}"):
        verify_run(make_run(text, "run", *SHARDED))


@pytest.mark.processes
def test_a_run_whose_ranks_make_other_collectives_in_its_proof_does_not_train(
    text: Path, weft: Weft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.commands.train.start_ranks", lambda *_: pytest.fail("ranks were started"))
    spoil(monkeypatch, one_micro_batch_less)
    left = weft("train", text, "folder=run", *SHARDED)
    assert left.status == 1
    assert "shard 2 (stage 3) failed its proof, on a small copy of the model: ranks take different ways" in left.err


def test_a_lost_connection_is_no_error_of_the_models_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank died because their collectives differ. An error of weft's here would hide that."""
    monkeypatch.setattr(dist, "barrier", partial(int, "no connection"))
    with pytest.raises(ValueError, match="no connection"), explained(Plan(data=2), "Net"):
        barrier()
    with pytest.raises(PlanError, match="Net runs unsplit and fails under data 2: ValueError"):  # noqa: SIM117
        with explained(Plan(data=2), "Net"):
            int("no connection")


# --- numbers


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"steps": 0}, "steps = 0, and a proof compares the results of training"),
        ({"clip": 0.0}, "clip = 0 would leave no gradient to compare"),
        ({"tolerance": -1e-9}, "tolerance = -1e-09; give a relative error of at least 0"),
        ({"tolerance": float("nan")}, "tolerance = nan; give"),
        ({"tolerance": float("inf")}, "tolerance = inf; give"),
        ({"timeout_seconds": 0.0}, "timeout_seconds = 0; give"),
    ],
)
def test_numbers_with_which_a_proof_shows_nothing_are_refused(numbers: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        verify(lambda: nn.Linear(2, 2), models.vector_batch, Plan(), **numbers)


@pytest.mark.processes
def test_a_tolerance_of_0_allows_no_difference() -> None:
    report = verify(lambda: nn.Linear(models.WIDTH, 6), models.vector_batch, Plan(data=2), tolerance=0)
    assert report.checks[0].expected == "≤ 0e+00"
    assert report.first_failure is not None
    verify(lambda: nn.Linear(models.WIDTH, 6), models.vector_batch, Plan(), tolerance=0).require()

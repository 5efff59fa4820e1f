"""What a run says about roles that would pay, from times that are given."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs_for_tests import make_run, write_run_file

from weft.run_file import Run
from weft.train.role_advice import loader_advice, validator_advice


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(write_run_file(tmp_path), "advised", "plan.data=2", "train.evaluate_every=10")


def test_loaders_are_suggested_as_many_as_sustain_the_demand(run: Run) -> None:
    assert loader_advice(run, 0.009, 0.1, is_gpu=False) is None
    few = loader_advice(run, 0.02, 0.1, is_gpu=False)  # 2 ranks x 20 ms in 80 ms
    assert few is not None
    assert "loading takes 20 ms of a step's 100 ms (20%); roles.loader=1 " in few
    many = loader_advice(run, 0.075, 0.1, is_gpu=False)  # 2 ranks x 75 ms in 25 ms
    assert many is not None
    assert "roles.loader=6 " in many


def test_loading_that_a_gpu_hides_needs_no_loader(run: Run) -> None:
    assert loader_advice(run, 0.08, 0.1, is_gpu=True) is None
    assert loader_advice(run, 0.095, 0.1, is_gpu=True) is not None


def test_a_validator_is_suggested_if_it_keeps_up(run: Run) -> None:
    assert validator_advice(run, 0.1, 2.0) is None
    text = validator_advice(run, 0.5, 2.0)
    assert text is not None
    assert text.startswith("an evaluation takes 0.50 s, 20% of the time; roles.validator=1 would evaluate beside")
    slow = validator_advice(run, 1.5, 2.0)
    assert slow is not None
    assert "about 3.00 s for it, more than the 2.00 s between two, so it does not pay" in slow


def test_a_run_with_these_roles_hears_no_suggestion_of_them(tmp_path: Path) -> None:
    run = make_run(write_run_file(tmp_path), "has", "train.evaluate_every=10", "roles.loader=1", "roles.validator=1")
    assert validator_advice(run, 0.5, 2.0) is None
    text = loader_advice(run, 0.05, 0.1, is_gpu=False)
    assert text is not None
    assert "for roles.loader = 1 rank; more would hide it" in text

"""Whether other roles pay: said after a run, from given times, and before a run, from what is measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands_for_tests import Weft
from runs_for_tests import make_run, write_run_file

from weft.run_file import Run, load_run
from weft.train import batches, role_advice
from weft.train.batches import TrainingData
from weft.train.role_advice import (
    CurvatureForecast,
    RoleForecast,
    forecast_curvature,
    forecast_roles,
    loader_advice,
    validator_advice,
)

EVALUATED = ["train.evaluate_every=4", "train.evaluate_sequences=16", "data.held_out=0.2"]
KFAC = ["plan.exact=false", "plan.data=2", "train.batch=8", "train.kfac={inverse_every=5}"]
SUB_GRID = ["roles.curvature=2", "train.kfac.mode=sub-grid-async"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return load_run(write_run_file(tmp_path), ["plan.data=2", "train.batch=8", *EVALUATED])


# --- loaders and validators


@pytest.mark.parametrize(
    ("load_seconds", "is_gpu", "words"),
    [
        (0.009, False, None),
        (0.02, False, "loading takes 20 ms of a step's 100 ms (20%); roles.loader=1 "),  # 2 ranks x 20 ms in 80 ms
        (0.075, False, "roles.loader=6 "),  # 2 ranks x 75 ms in 25 ms
        (0.08, True, None),  # a GPU hides it
        (0.095, True, "roles.loader=2 "),
    ],
)
def test_loaders_are_suggested_as_many_as_sustain_the_demand(
    run: Run, load_seconds: float, is_gpu: bool, words: str | None
) -> None:
    found = loader_advice(run, load_seconds, 0.1, is_gpu)
    assert found is None if words is None else words in (found or "")


def test_a_validator_is_suggested_if_it_keeps_up(run: Run) -> None:
    assert validator_advice(run, 0.1, 2.0) is None
    text, slow = validator_advice(run, 0.5, 2.0), validator_advice(run, 1.5, 2.0)
    assert "an evaluation takes 0.50 s, 20% of the time; roles.validator=1 would evaluate beside" in (text or "")
    assert "about 3.00 s for it, more than the 2.00 s between two, so it does not pay" in (slow or "")


def test_a_run_with_these_roles_hears_no_suggestion_of_them(tmp_path: Path) -> None:
    run = make_run(write_run_file(tmp_path), "has", "train.evaluate_every=10", "roles.loader=1", "roles.validator=1")
    assert validator_advice(run, 0.5, 2.0) is None
    text = loader_advice(run, 0.05, 0.1, is_gpu=False)
    assert "for roles.loader = 1 rank; more would hide it" in (text or "")


def test_a_step_is_loaded_and_evaluations_are_a_third_of_training(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    times, seen = iter(np.arange(100.0)), []
    load = TrainingData.host_batches

    def host_batches(self: TrainingData, run: Run, step: int, axis: Any) -> Any:
        seen.append((step, axis.degree, axis.index))
        next(times)  # so loading takes two of the clock's seconds
        return load(self, run, step, axis)

    monkeypatch.setattr(batches.TrainingData, "host_batches", host_batches)
    monkeypatch.setattr(role_advice.time, "perf_counter", lambda: float(next(times)))
    found = forecast_roles(run, 6.0)
    assert seen == [(step, 2, 0) for step in range(6)]
    assert found == RoleForecast(2.0, 6.0, evaluate_seconds=6.0 * 16 / 8 / 3, interval_seconds=24.0)


@pytest.mark.parametrize(
    ("found", "is_gpu", "words"),
    [
        (RoleForecast(0.001, 0.2), False, ["1 ms and the step 200 ms; loaders would not pay"]),
        (RoleForecast(0.1, 0.2), False, ["loading takes 100 ms of a step's 300 ms (33%); roles.loader=1"]),
        (RoleForecast(0.1, 0.2), True, ["100 ms and the step 200 ms; loaders would not pay"]),
        (RoleForecast(0.3, 0.2), True, ["loading takes 300 ms of a step's 300 ms (100%); roles.loader=2"]),
        (RoleForecast(0, 1, 0.5, 20.0), True, ["loaders would not pay", "500 ms and the training between two 20 s"]),
        (RoleForecast(0, 1, 5.0, 20.0), True, ["loaders would not pay", "20% of the time; roles.validator=1"]),
    ],
)
def test_both_numbers_are_told(found: RoleForecast, is_gpu: bool, words: list[str], run: Run) -> None:
    lines = found.lines(run, is_gpu)
    assert len(lines) == len(words)
    for line, expected in zip(lines, words, strict=True):
        assert expected in line


# --- curvature ranks


def kfac_run(folder: Path, *overrides: str) -> Run:
    return load_run(write_run_file(folder), [*KFAC, *overrides])


def test_owners_and_curvature_ranks_share_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_advice, "_size_seconds", lambda size, *_: float(size))
    monkeypatch.setattr(role_advice, "owners_of", lambda layers, degree: [n % degree for n in range(len(layers))])
    owned = forecast_curvature(kfac_run(tmp_path), 2.0)
    whole = forecast_curvature(kfac_run(tmp_path, "train.kfac.mode=inline"), 2.0)
    asked = forecast_curvature(kfac_run(tmp_path, *SUB_GRID), 2.0)
    assert owned is not None
    assert whole is not None
    assert asked is not None
    assert owned.interval_seconds == 10.0
    assert owned.rank_seconds == whole.own_seconds == whole.rank_seconds  # one curvature rank inverts all layers
    assert whole.own_seconds / 2 <= owned.own_seconds < whole.own_seconds
    assert (asked.num_ranks, asked.rank_seconds) == (2, owned.own_seconds)
    assert forecast_curvature(load_run(write_run_file(tmp_path), ["plan.data=2"]), 2.0) is None


def test_larger_factors_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_advice, "MEASURED_SIZE", 8)
    times = iter(range(100))
    monkeypatch.setattr(role_advice.time, "perf_counter", lambda: float(next(times)))
    dtype = role_advice.torch.float64
    assert role_advice._size_seconds(4, dtype, 0.1) == 1.0
    assert role_advice._size_seconds(24, dtype, 0.1) == 27.0


@pytest.mark.parametrize(
    ("found", "more", "is_gpu", "words"),
    [
        (CurvatureForecast(0.01, 0.02, 2.0, 1), [], False, "10 ms, and the training between two 2 s (0% of the time)"),
        (CurvatureForecast(0.01, 0.02, 2.0, 1), [], False, "curvature ranks would not pay"),
        (CurvatureForecast(1.0, 2.0, 3.0, 1), [], False, "(25% of the time); roles.curvature=1 would take 2 s beside"),
        (CurvatureForecast(1.0, 2.0, 3.0, 1), [], False, "with 'sub-grid' training would wait as long or longer"),
        (CurvatureForecast(4.0, 2.0, 3.0, 2), [], False, "with 'sub-grid' training would wait 2 s"),
        (CurvatureForecast(4.0, 4.0, 3.0, 1), [], False, "left out: raise train.kfac.inverse_every"),
        (CurvatureForecast(4.0, 2.0, 3.0, 2), SUB_GRID, False, "roles.curvature=2 takes 2 s"),
        (CurvatureForecast(1.0, 2.0, 3.0, 2), [], True, "would take 2 curvature ranks 2 s"),
        (CurvatureForecast(1.0, 2.0, 3.0, 1), [], True, "how long the GPUs take for it was not measured"),
    ],
)
def test_what_curvature_ranks_take_is_told(
    found: CurvatureForecast, more: list[str], is_gpu: bool, words: str, tmp_path: Path
) -> None:
    assert words in found.line(kfac_run(tmp_path, *more), is_gpu)


# --- `weft plan --roles`


@pytest.mark.processes
def test_weft_plan_says_which_role_pays(weft: Weft, tmp_path: Path) -> None:
    given = (write_run_file(tmp_path), *KFAC, "cluster=h100:1x2", *EVALUATED, "--roles")
    told = weft("plan", *given)
    assert told.status == 0, told.err
    assert told.out.count("roles ") >= 2
    assert "a renewal of K-FAC's inverses would take 1 curvature rank" in " ".join(told.out.split())
    asked = weft("plan", *given, "--json").json
    assert asked["roles"]["load_seconds"] > 0
    assert asked["roles"]["step_seconds"] == asked["seconds"]["step"]
    assert asked["roles"]["curvature"]["own_seconds"] > 0
    assert asked["roles"]["curvature"]["interval_seconds"] == pytest.approx(5 * asked["seconds"]["step"])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "llama3-8b", "--cluster", "h100:1x8", "--roles"], "give a run file with a"),
        (["RUN", "plan.data=2", "train.device=cpu", "--roles"], "is not predicted on this machine; give cluster=FILE"),
    ],
)
def test_what_cannot_be_said_is_refused(arguments: list[str], words: str, weft: Weft, tmp_path: Path) -> None:
    refused = weft("plan", *[str(write_run_file(tmp_path)) if one == "RUN" else one for one in arguments])
    assert refused.status == 2
    assert words in refused.err

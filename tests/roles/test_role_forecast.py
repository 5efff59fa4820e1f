"""Whether a role would pay, said before a run: by loading as measured here, and a predicted step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands_for_tests import Weft
from runs_for_tests import write_run_file

from weft.run_file import Run, load_run
from weft.train import batches, role_forecast
from weft.train.batches import TrainingData
from weft.train.role_forecast import RoleForecast, forecast_roles

EVALUATED = ["train.evaluate_every=4", "train.evaluate_sequences=16", "data.held_out=0.2"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return load_run(write_run_file(tmp_path), ["plan.data=2", "train.batch=8", *EVALUATED])


def test_a_step_is_loaded_and_evaluations_are_a_third_of_training(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    times, seen = iter(np.arange(100.0)), []
    load = TrainingData.host_batches

    def host_batches(self: TrainingData, run: Run, step: int, axis: Any) -> Any:
        seen.append((step, axis.degree, axis.index))
        next(times)  # so loading takes two of the clock's seconds
        return load(self, run, step, axis)

    monkeypatch.setattr(batches.TrainingData, "host_batches", host_batches)
    monkeypatch.setattr(role_forecast.time, "perf_counter", lambda: float(next(times)))
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
        (
            RoleForecast(0, 1, 0.5, 20.0),
            True,
            ["loaders would not pay", "500 ms and the training between two 20 s"],
        ),
        (RoleForecast(0, 1, 5.0, 20.0), True, ["loaders would not pay", "20% of the time; roles.validator=1"]),
    ],
)
def test_both_numbers_are_told(found: RoleForecast, is_gpu: bool, words: list[str], run: Run) -> None:
    lines = found.lines(run, is_gpu)
    assert len(lines) == len(words)
    for line, expected in zip(lines, words, strict=True):
        assert expected in line


@pytest.mark.processes
def test_weft_plan_says_which_role_pays(weft: Weft, tmp_path: Path) -> None:
    given = (write_run_file(tmp_path), "plan.data=2", "cluster=h100:1x2", *EVALUATED, "--roles")
    told = weft("plan", *given)
    assert told.status == 0, told.err
    assert told.out.count("roles ") == 2
    asked = weft("plan", *given, "--json").json
    assert asked["roles"]["load_seconds"] > 0
    assert asked["roles"]["step_seconds"] == asked["seconds"]["step"]


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

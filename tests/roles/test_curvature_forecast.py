"""Whether curvature ranks would pay, said before a run: by inversions as measured here, and predicted steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands_for_tests import Weft
from runs_for_tests import write_run_file

from weft.run_file import Run, load_run
from weft.train import curvature_forecast
from weft.train.curvature_forecast import CurvatureForecast, forecast_curvature

KFAC = ["plan.exact=false", "plan.data=2", "train.batch=8", "train.kfac={inverse_every=5}"]
SUB_GRID = ["roles.curvature=2", "train.kfac.mode=sub-grid-async"]


def run_of(folder: Path, *overrides: str) -> Run:
    return load_run(write_run_file(folder), [*KFAC, *overrides])


def test_owners_and_curvature_ranks_share_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curvature_forecast, "_size_seconds", lambda size, *_: float(size))
    monkeypatch.setattr(
        curvature_forecast, "owners_of", lambda layers, degree: [n % degree for n in range(len(layers))]
    )
    owned = forecast_curvature(run_of(tmp_path), 2.0)
    whole = forecast_curvature(run_of(tmp_path, "train.kfac.mode=inline"), 2.0)
    asked = forecast_curvature(run_of(tmp_path, *SUB_GRID), 2.0)
    assert owned is not None
    assert whole is not None
    assert asked is not None
    assert owned.interval_seconds == 10.0
    assert owned.rank_seconds == whole.own_seconds == whole.rank_seconds  # one curvature rank inverts all layers
    assert whole.own_seconds / 2 <= owned.own_seconds < whole.own_seconds
    assert (asked.num_ranks, asked.rank_seconds) == (2, owned.own_seconds)
    assert forecast_curvature(load_run(write_run_file(tmp_path), ["plan.data=2"]), 2.0) is None


def test_larger_factors_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curvature_forecast, "MEASURED_SIZE", 8)
    times = iter(range(100))
    monkeypatch.setattr(curvature_forecast.time, "perf_counter", lambda: float(next(times)))
    dtype = curvature_forecast.torch.float64
    assert curvature_forecast._size_seconds(4, dtype, 0.1) == 1.0
    assert curvature_forecast._size_seconds(24, dtype, 0.1) == 27.0


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
def test_both_numbers_are_told(
    found: CurvatureForecast, more: list[str], is_gpu: bool, words: str, tmp_path: Path
) -> None:
    assert words in found.line(run_of(tmp_path, *more), is_gpu)


@pytest.mark.processes
def test_weft_plan_tells_them(weft: Weft, tmp_path: Path) -> None:
    given = (write_run_file(tmp_path), *KFAC, "cluster=h100:1x2", "--roles")
    told = weft("plan", *given)
    assert told.status == 0, told.err
    assert "a renewal of K-FAC's inverses would take 1 curvature rank" in " ".join(told.out.split())
    asked = weft("plan", *given, "--json").json
    found = asked["roles"]["curvature"]
    assert found["own_seconds"] > 0
    assert found["interval_seconds"] == pytest.approx(5 * asked["seconds"]["step"])

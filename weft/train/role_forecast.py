"""Says before a run whether ranks of other roles would pay: `weft plan run.toml --roles`.

Loading is measured on this machine, by the batches of one training rank for a few steps; the time of a step is
predicted. An evaluation is a forward of the held-out sequences: a third of what their forward and backward take. With
K-FAC, inverting its factors is measured, too (`curvature_forecast.py`).
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

from weft.comm import Axis, Ledger
from weft.run_file import Run
from weft.train.batches import Progress, TrainingData, prepare_data
from weft.train.curvature_forecast import CurvatureForecast, forecast_curvature
from weft.train.role_advice import loader_advice, validator_advice

NUM_STEPS = 5  # whose batches are loaded, after a first one that opens files


@dataclass(frozen=True)
class RoleForecast:
    """Seconds that decide which roles pay, on the training ranks: of loading, of a step, and of evaluation.

    `evaluate_seconds` is 0 if the run does not evaluate. `interval_seconds` is the training between two evaluations.
    `curvature` is None without K-FAC.
    """

    load_seconds: float
    step_seconds: float
    evaluate_seconds: float = 0.0
    interval_seconds: float = 0.0
    curvature: CurvatureForecast | None = None

    def lines(self, run: Run, is_gpu: bool) -> list[str]:
        """What to tell the user, with both numbers of each role."""
        loads, computes = self.load_seconds, self.step_seconds
        whole = max(computes, loads) if is_gpu else computes + loads
        found = [
            loader_advice(run, loads, whole, is_gpu)
            or f"loading a step's batches takes {_time(loads)} and the step {_time(computes)}; loaders would not pay"
        ]
        if self.evaluate_seconds:
            evaluates, between = self.evaluate_seconds, self.interval_seconds
            found.append(
                validator_advice(run, evaluates, between)
                or f"an evaluation takes {_time(evaluates)} and the training between two {_time(between)}; "
                + ("the validator does it" if run.roles.validator else "a validator would not pay")
            )
        if self.curvature is not None:
            found.append(self.curvature.line(run, is_gpu))
        return found


def forecast_roles(run: Run, step_seconds: float, progress: Progress | None = None) -> RoleForecast:
    """Measures how long a training rank of the run loads on this machine, for steps of so many predicted seconds."""
    data = prepare_data(run, progress)
    every, curvature = run.train.evaluate_every, forecast_curvature(run, step_seconds)
    found = RoleForecast(_load_seconds(run, data), step_seconds, curvature=curvature)
    if every is None or data.held_out is None:
        return found
    share = min(run.train.evaluate_sequences, len(data.held_out)) / run.split.batch
    return replace(found, evaluate_seconds=step_seconds * share / 3, interval_seconds=step_seconds * every)


def _load_seconds(run: Run, data: TrainingData) -> float:
    """The median seconds in which the first training rank loads a step's batches."""
    axis, seconds = Axis("batch", run.split.num_batch_ranks, 0, None, Ledger()), []
    for step in range(NUM_STEPS + 1):
        began = time.perf_counter()
        data.host_batches(run, step, axis)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"

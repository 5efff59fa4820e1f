"""Says whether ranks of other roles pay, with the numbers that decide it: before a run (`weft plan run.toml --roles`),
and after one.

Loaders pay if training waits for batches and the loaders sustain its demand: as many as load all training ranks'
batches in the time that the rest of a step takes. A validator pays if evaluation takes a share of the run, and no
longer than the training between two evaluations. Curvature ranks pay if inverting K-FAC's factors takes a share.

Before a run, loading is measured on this machine, by the batches of one training rank for a few steps, and the time of
a step is predicted. An evaluation is a forward of the held-out sequences: a third of what their forward and backward
take. Inverting a layer's factors is measured on one core, which is where curvature ranks do it; factors of more than
`MEASURED_SIZE` rows are scaled from that size, with the cube of rows. Sending factors and inverses is not counted.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from weft.comm import Axis, Ledger
from weft.optim.kfac_layers import FactorSizes
from weft.optim.kfac_placement import owners_of
from weft.optim.kfac_sub_grid import damped_inverses
from weft.planner.kfac_cost import kfac_layers
from weft.run_file import Run
from weft.sharding.layout import MASTER_DTYPE
from weft.step.examples import micro_batch_profile
from weft.train.batches import Progress, TrainingData, prepare_data
from weft.train.parts import Evaluation, TrainingPart
from weft.train.prefetch import Batches
from weft.train.state import TrainState

SHARE = 0.1  # of the time, below which no role is suggested
HIDDEN_SHARE = 0.9  # of a step on a GPU, which computes while batches are loaded
MIN_STEPS = 10  # steps without which nothing is said
MEASURED_SIZE, NUM_READINGS = 1024, 3  # rows of a factor that is inverted, and how often
NUM_STEPS = 5  # whose batches are loaded, after a first one that opens files


def loader_advice(run: Run, load_seconds: float, step_seconds: float, is_gpu: bool) -> str | None:
    """Returns words about loaders; None if they would not pay. Both times are of one step, the second without
    evaluations and saves.
    """
    share = load_seconds / step_seconds
    if share < (HIDDEN_SHARE if is_gpu else SHARE):
        return None
    rest = step_seconds if is_gpu else step_seconds - load_seconds
    now = run.roles.loader
    if now:
        return (
            f"training waits {load_seconds * 1e3:.0f} ms of a step's {step_seconds * 1e3:.0f} ms ({share:.0%}) for "
            f"roles.loader = {now} rank{'s' * (now > 1)}; more would hide it, if there are cores for them"
        )
    needed = max(1, math.ceil(run.plan.num_ranks * load_seconds / max(rest, 1e-9)))
    return (
        f"loading takes {load_seconds * 1e3:.0f} ms of a step's {step_seconds * 1e3:.0f} ms ({share:.0%}); "
        f"roles.loader={needed} would load beside training, with the same result, if there are cores for "
        f"{'it' if needed == 1 else 'them'}"
    )


def validator_advice(run: Run, evaluate_seconds: float, interval_seconds: float) -> str | None:
    """Returns words about a validator; None if it would not pay. The times are those of one evaluation, and of the
    training between two.
    """
    share = evaluate_seconds / (evaluate_seconds + interval_seconds)
    if run.roles.validator or share < SHARE:
        return None
    took = f"an evaluation takes {evaluate_seconds:.2f} s, {share:.0%} of the time"
    if evaluate_seconds * run.plan.num_ranks > interval_seconds:
        return (
            f"{took}; a validator would need about {evaluate_seconds * run.plan.num_ranks:.2f} s for it, more than the "
            f"{interval_seconds:.2f} s between two, so it does not pay: evaluate less often (train.evaluate_every) or "
            f"on less (train.evaluate_sequences)"
        )
    return f"{took}; roles.validator=1 would evaluate beside training, which lasts {interval_seconds:.2f} s between two"


class RoleAdvice(TrainingPart):
    """Measures how long a run loads and evaluates, and says at its end which role would pay."""

    def __init__(self, state: TrainState, batches: Batches, evaluation: Evaluation) -> None:
        self._state, self._batches, self._evaluation = state, batches, evaluation
        self._began: tuple[float, float] | None = None  # when the second step began, and the seconds of loading
        self._num_steps = 0

    def before_step(self, step: int) -> None:
        self._num_steps += 1
        if self._num_steps == 2:  # the first step also compiles, connects and allocates
            self._began = time.perf_counter(), self._batches.seconds
            self._evaluation.seconds, self._evaluation.count = 0.0, 0

    def end(self) -> None:
        state, run = self._state, self._state.run
        if self._began is None or self._num_steps < MIN_STEPS or not state.mesh.is_first:
            return
        began_at, loaded_before = self._began
        num_steps = self._num_steps - 1
        evaluated = self._evaluation.seconds
        step_seconds = (time.perf_counter() - began_at - evaluated) / num_steps
        load_seconds = (self._batches.seconds - loaded_before) / num_steps
        words = [loader_advice(run, load_seconds, step_seconds, state.mesh.device.type == "cuda")]
        if self._evaluation.count and run.train.evaluate_every is not None:
            interval = step_seconds * run.train.evaluate_every
            words.append(validator_advice(run, evaluated / self._evaluation.count, interval))
        for text in filter(None, words):
            state.say(text)


@dataclass(frozen=True)
class CurvatureForecast:
    """Seconds of one renewal of the inverses, on one core: `own_seconds` if training ranks invert, each its part, and
    `rank_seconds` if `num_ranks` curvature ranks do. `interval_seconds` is the training between two renewals.
    """

    own_seconds: float
    rank_seconds: float
    interval_seconds: float
    num_ranks: int

    def line(self, run: Run, is_gpu: bool) -> str:
        """What to tell the user: how long renewals take on either kind of rank, and what follows."""
        own, other, between = (_time(one) for one in (self.own_seconds, self.rank_seconds, self.interval_seconds))
        num, ranks = self.num_ranks, f"{self.num_ranks} curvature rank{'s' * (self.num_ranks > 1)}"
        keeps_up = self.rank_seconds <= self.interval_seconds
        late = "" if keeps_up else ", and some renewals would be left out: raise train.kfac.inverse_every"
        if is_gpu:
            return (
                f"a renewal of K-FAC's inverses would take {ranks} {other} on cores like this one, and the training "
                f"between two takes {between}{late}; how long the GPUs take for it was not measured"
            )
        share = self.own_seconds / (self.own_seconds + self.interval_seconds)
        took = f"a renewal of K-FAC's inverses takes a training rank {own}, and the training between two {between}"
        if share < SHARE:
            return f"{took} ({share:.0%} of the time); curvature ranks would not pay"
        if run.roles.curvature:
            return f"{took} ({share:.0%} of the time); roles.curvature={num} takes {other}{late}"
        waits = "would wait as long or longer" if self.rank_seconds >= self.own_seconds else f"would wait {other}"
        return (
            f"{took} ({share:.0%} of the time); roles.curvature={num} would take {other} beside training with "
            f"train.kfac.mode='sub-grid-async', if there is a core for it{late}; with 'sub-grid' training {waits}"
        )


def forecast_curvature(run: Run, step_seconds: float) -> CurvatureForecast | None:
    """What a renewal takes in the run, whose step takes so many predicted seconds. None without K-FAC."""
    options = run.train.kfac
    if options is None:
        return None
    layers = kfac_layers(options, run.plan, micro_batch_profile(run))
    seconds = _layer_seconds(layers, MASTER_DTYPE[run.plan.precision], options.damping)
    num_training, num_ranks = run.plan.data * run.plan.shard.degree, run.roles.curvature or 1
    own = 1 if options.mode == "inline" else num_training
    return CurvatureForecast(
        _longest(layers, seconds, own),
        _longest(layers, seconds, num_ranks),
        options.inverse_every * step_seconds,
        num_ranks,
    )


def _longest(layers: Sequence[FactorSizes], seconds: Sequence[float], num_ranks: int) -> float:
    """The seconds of the rank that inverts longest, if so many share the layers."""
    work = [0.0] * num_ranks
    for owner, one in zip(owners_of(layers, num_ranks), seconds, strict=True):
        work[owner] += one
    return max(work)


def _layer_seconds(layers: Sequence[FactorSizes], dtype: torch.dtype, damping: float) -> list[float]:
    """The seconds in which one core inverts the two factors of each layer."""
    threads, known = torch.get_num_threads(), dict[int, float]()
    torch.set_num_threads(1)
    try:
        for layer in layers:
            for size in (layer.inputs, layer.outputs):
                if size not in known:
                    known[size] = _size_seconds(size, dtype, damping)
    finally:
        torch.set_num_threads(threads)
    return [layer.groups * (known[layer.inputs] + known[layer.outputs]) for layer in layers]


def _size_seconds(size: int, dtype: torch.dtype, damping: float) -> float:
    """The median seconds in which one factor of so many rows is inverted."""
    measured = min(size, MEASURED_SIZE)
    rows = torch.randn(measured, measured, dtype=dtype, generator=torch.Generator().manual_seed(0))
    factor, small = (rows @ rows.T / measured)[None], torch.ones(1, 1, 1, dtype=dtype)
    damped_inverses(factor, small, damping)
    readings = []
    for _ in range(NUM_READINGS):
        began = time.perf_counter()
        damped_inverses(factor, small, damping)
        readings.append(time.perf_counter() - began)
    return statistics.median(readings) * (size / measured) ** 3


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

"""Says before a run with K-FAC whether curvature ranks would pay: `weft plan run.toml --roles`.

Inverting a layer's factors is measured on one core of this machine, which is where curvature ranks do it; factors of
more than `MEASURED_SIZE` rows are scaled from that size, with the cube of rows. The training between two renewals is
`inverse_every` predicted steps. What it takes to send factors and inverses is not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.optim.kfac_inverse import damped_inverses
from weft.optim.kfac_layers import FactorSizes
from weft.optim.kfac_placement import owners_of
from weft.planner.kfac_cost import kfac_layers
from weft.run_file import Run
from weft.sharding.layout import MASTER_DTYPE
from weft.step.examples import micro_batch_profile

MEASURED_SIZE = 1024
NUM_READINGS = 3
SHARE = 0.1  # of the time, below which curvature ranks are not suggested


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


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"

"""Times the strategies of small all-reduces over an axis, and makes the table by which they are chosen."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from weft.cluster.small_choice import STRATEGIES, SYMMETRIC, SmallChoice, Strategy
from weft.comm import collectives, hierarchical
from weft.comm.collectives import Axis
from weft.comm.ledger import Ledger

SIZES = tuple(2**power for power in range(8, 22, 2))  # bytes at which strategies are timed
NUM_TIMED = 9
LEAST_GAIN = 0.95  # of the library's time, which another strategy must not exceed


def measured_choice(axis: Axis, device: torch.device, sizes: Sequence[int] = SIZES) -> SmallChoice:
    """Returns the fastest strategy at each size. All ranks of the axis must call it, and get the same table."""
    return SmallChoice(tuple(sizes), tuple(map(fastest, measured_seconds(axis, device, sizes))))


def measured_seconds(axis: Axis, device: torch.device, sizes: Sequence[int]) -> list[dict[Strategy, float]]:
    """Returns the time of each strategy that the axis can have, for each size: the slowest rank's median."""
    strategies = [one for one in STRATEGIES if one not in SYMMETRIC or axis.symmetric is not None]
    seconds = torch.tensor([[_median_seconds(axis, device, size, one) for one in strategies] for size in sizes])
    seconds = seconds.to(device)
    collectives.all_reduce(seconds, _uncounted(axis), "max").wait()
    return [dict(zip(strategies, row, strict=True)) for row in seconds.tolist()]


def fastest(seconds: Mapping[Strategy, float]) -> Strategy:
    """Returns the strategy to take, given the time of each. The library's is kept unless another gains 5 %."""
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] <= LEAST_GAIN * seconds["library"] else "library"


def _median_seconds(axis: Axis, device: torch.device, size: int, strategy: Strategy) -> float:
    quiet = replace(_uncounted(axis), small=SmallChoice.always(strategy))
    tensor, times = torch.zeros(size // 4, device=device), []
    for _ in range(NUM_TIMED + 2):
        begin = time.perf_counter()
        hierarchical.all_reduce(tensor, quiet).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return sorted(times[2:])[NUM_TIMED // 2]


def _uncounted(axis: Axis) -> Axis:
    """Returns the axis with a ledger of its own, so that measurements are not among a run's calls."""
    ledger = Ledger()
    levels = axis.levels and (replace(axis.levels[0], ledger=ledger), replace(axis.levels[1], ledger=ledger))
    return replace(axis, ledger=ledger, levels=levels)

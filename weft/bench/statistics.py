"""Medians, tails and variation of repeated measurements, and when to stop repeating."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIN_BLOCKS, MAX_BLOCKS = 5, 40
STABLE_VARIATION = 0.05  # blocks whose medians vary less than this are enough


@dataclass(frozen=True)
class Timing:
    """Statistics of the seconds of an operation. `variation` is the coefficient of variation of the blocks' medians."""

    median: float
    p99: float
    least: float
    most: float
    variation: float
    repeats: int

    @property
    def is_stable(self) -> bool:
        return self.variation < STABLE_VARIATION


def measure(block: Callable[[], Sequence[float]], limit_seconds: float) -> Timing:
    """Call `block`, which returns the seconds of some repeats, until its medians are stable or `limit_seconds` were
    measured. The decision depends on the returned seconds only, so ranks that get the same seconds stop together.
    """
    seconds: list[float] = []
    medians: list[float] = []
    while len(medians) < MIN_BLOCKS or (
        _variation(medians) >= STABLE_VARIATION and len(medians) < MAX_BLOCKS and sum(seconds) < limit_seconds
    ):
        found = block()
        seconds += found
        medians.append(statistics.median(found))
    return summarise_seconds(seconds, _variation(medians))


def summarise_seconds(seconds: Sequence[float], variation: float) -> Timing:
    """The statistics of single repeats."""
    ordered = sorted(seconds)
    tail = ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
    return Timing(statistics.median(ordered), tail, ordered[0], ordered[-1], variation, len(ordered))


def _variation(medians: Sequence[float]) -> float:
    mean = statistics.fmean(medians)
    return statistics.pstdev(medians) / mean if mean else 0.0

"""Repeats a measurement until it is stable, and fits latency and bandwidth to times: t(n) = alpha + beta n.

A fit has one or two pieces. It is of relative errors, so that small messages count as much as large ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.cluster.hardware import ring_seconds

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


USABLE_ERROR = 0.2  # a fit whose relative errors are larger than this (95th percentile) describes nothing
GOOD_ERROR = 0.05  # one piece with smaller errors is enough
_MIN_PIECE = 3  # sizes of a piece
_MUCH_BETTER = 0.5  # two pieces are used if they have at most this share of the squared errors of one


class Point(NamedTuple):
    """The measured seconds of one call of `operation` with so many bytes over `degree` ranks."""

    operation: str
    degree: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class LinearFit:
    """alpha + beta n for sizes up to `most_bytes`. `error` is the 95th percentile of relative errors."""

    alpha_seconds: float
    beta_seconds_per_byte: float
    error: float
    r_squared: float
    most_bytes: int

    @property
    def is_usable(self) -> bool:
        return self.error <= USABLE_ERROR

    def seconds(self, num_bytes: float) -> float:
        return self.alpha_seconds + self.beta_seconds_per_byte * num_bytes


@dataclass(frozen=True)
class LinkFit:
    """The latency of a hop and the bandwidth with which the ring formulas best describe all measured operations."""

    latency_seconds: float
    bandwidth_bytes_per_second: float
    error: float


def fit_pieces(points: Sequence[Point]) -> list[LinearFit]:
    """One fit, or two where libraries change their protocol at some size."""
    ordered = sorted(points, key=lambda point: point.num_bytes)
    whole = _fit_line(ordered)
    if whole.error < GOOD_ERROR:
        return [whole]
    best, limit = [whole], _MUCH_BETTER * _cost(ordered, whole)
    for cut in range(_MIN_PIECE, len(ordered) - _MIN_PIECE + 1):
        pieces = [_fit_line(ordered[:cut]), _fit_line(ordered[cut:])]
        cost = _cost(ordered[:cut], pieces[0]) + _cost(ordered[cut:], pieces[1])
        if cost < limit:
            best, limit = pieces, cost
    return best


def fit_link(points: Sequence[Point]) -> LinkFit:
    """One latency and one bandwidth for all operations, by the formulas that the planner uses."""
    rows = []
    for point in points:
        hops = ring_seconds(point.operation, 0, point.degree, 1.0, 1.0)
        sent = ring_seconds(point.operation, point.num_bytes, point.degree, 1.0, 0.0)
        rows.append((hops, sent, point.seconds))
    latency, inverse = _least_squares(rows)
    errors = [abs(hops * latency + sent * inverse - seconds) / seconds for hops, sent, seconds in rows]
    return LinkFit(latency, 1 / inverse if inverse else math.inf, _percentile95(errors))


def _fit_line(points: Sequence[Point]) -> LinearFit:
    alpha, beta = _least_squares([(1.0, float(point.num_bytes), point.seconds) for point in points])
    errors = [abs(alpha + beta * point.num_bytes - point.seconds) / point.seconds for point in points]
    mean = sum(point.seconds for point in points) / len(points)
    spread = sum((point.seconds - mean) ** 2 for point in points)
    rest = sum((alpha + beta * point.num_bytes - point.seconds) ** 2 for point in points)
    most = max(point.num_bytes for point in points)
    return LinearFit(alpha, beta, _percentile95(errors), 1 - rest / spread if spread else 1.0, most)


def _cost(points: Sequence[Point], fit: LinearFit) -> float:
    return sum(((fit.seconds(point.num_bytes) - point.seconds) / point.seconds) ** 2 for point in points)


def _least_squares(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(a, b) >= 0 with the least sum of ((a u + b v - t) / t)² over rows (u, v, t)."""
    scaled = [(u / t, v / t) for u, v, t in rows]
    uu, uv, vv = (sum(x * y for x, y in pairs) for pairs in _products(scaled))
    u1, v1 = sum(u for u, _ in scaled), sum(v for _, v in scaled)
    determinant = uu * vv - uv * uv
    if determinant > 1e-12 * uu * vv:
        a, b = (u1 * vv - v1 * uv) / determinant, (v1 * uu - u1 * uv) / determinant
        if a >= 0 and b >= 0:
            return a, b
    alone_a, alone_b = (u1 / uu if uu else 0.0, 0.0), (0.0, v1 / vv if vv else 0.0)
    return min(alone_a, alone_b, key=lambda ab: sum((ab[0] * u + ab[1] * v - 1) ** 2 for u, v in scaled))


def _products(rows: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    return [[(u, u) for u, _ in rows], list(rows), [(v, v) for _, v in rows]]


def _percentile95(errors: Sequence[float]) -> float:
    return sorted(errors)[math.ceil(0.95 * len(errors)) - 1]

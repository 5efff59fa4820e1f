"""Results of `weft bench` as text, as a plot in the terminal, and as an SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from weft.bench.fit import USABLE_ERROR, LinkFit, fit_link, fit_pieces
from weft.bench.links import WORLD, LinkRow, points_of
from weft.cluster.collective_choice import Levels, describe_choices
from weft.cluster.hardware import MeasuredCollective

_MARKS = "ox+*#@%&=~svdzn^"
_COLOURS = (
    "#2a78d6",
    "#eb6834",
    "#1baf7a",
    "#eda100",
    "#e87ba4",
    "#4a3aa7",
    "#008300",
    "#62c6e6",
    "#8f8e88",
    "#b3261e",
    "#7a5c00",
    "#00695c",
    "#a23bc4",
    "#5d6b7a",
    "#c2185b",
    "#3c9a3c",
)
_WIDTH, _HEIGHT = 800, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 190, 20, 50
Series = Mapping[str, Sequence[tuple[float, float]]]


def link_table(rows: Sequence[LinkRow]) -> str:
    """A line for each operation and size, and one for each fit."""
    lines = [
        f"{'operation':<24}{'ranks':>5}{'groups':>7}{'bytes':>11}{'median':>14}{'p99':>14}{'varies':>8}"
        f"{'bus GB/s':>10}{'repeats':>9}"
    ]
    for row in rows:
        timing = row.timing
        lines.append(
            f"{_name(row):<24}{row.degree:>5}{row.num_groups:>7}{row.num_bytes:>11,}{_us(timing.median):>14}"
            f"{_us(timing.p99):>14}{timing.variation:>8.1%}{row.bus_bytes_per_second / 1e9:>10.3f}{timing.repeats:>9}"
            f"{'' if timing.is_stable else '  not stable'}"
        )
    for name in dict.fromkeys(map(_name, rows)):
        points = [row.point for row in rows if _name(row) == name and row.point is not None]
        if len({point.num_bytes for point in points}) < 3:
            continue
        for fit in fit_pieces(points):
            rate = "no bandwidth" if not fit.beta_seconds_per_byte else f"{1e-9 / fit.beta_seconds_per_byte:.3f} GB/s"
            lines.append(
                f"fit {name}, up to {fit.most_bytes:,} bytes: {_us(fit.alpha_seconds)} + n / {rate}, errors up to "
                f"{fit.error:.0%}, R² {fit.r_squared:.3f}{'' if fit.is_usable else ' (unusable)'}"
            )
    return "\n".join(lines)


def _name(row: LinkRow) -> str:
    where = "" if row.axis == WORLD else f" over {row.axis}"
    return f"{row.operation}{where}" if row.algorithm == "flat" else f"{row.operation} {row.algorithm}"


def backends_table(found: Mapping[str, Sequence[LinkRow]]) -> str:
    """The medians of the same operations over several back-ends, and the ratio of the last to the first."""
    names = list(found)
    lines = [f"{'operation':<24}{'bytes':>11}" + "".join(f"{name:>16}" for name in names) + f"{'ratio':>8}"]
    for rows in zip(*found.values(), strict=True):
        medians = [row.timing.median for row in rows]
        ratio = medians[-1] / medians[0] if medians[0] else 0.0
        lines.append(
            f"{_name(rows[0]):<24}{rows[0].num_bytes:>11,}"
            + "".join(f"{_us(one):>16}" for one in medians)
            + f"{ratio:>8.2f}"
        )
    return "\n".join(lines)


def choices_table(collectives: Sequence[MeasuredCollective]) -> str:
    """Which algorithm was fastest for each operation, by size."""
    lines = []
    for first in collectives:
        if first.algorithm == "flat":
            levels = Levels(first.num_nodes, first.num_local, measured=tuple(collectives))
            ranges = describe_choices(levels, first.operation, first.sizes)
            words = ", ".join(f"{name} from {low:,} bytes" for name, low, _ in ranges)
            lines.append(f"fastest {first.operation} on {first.num_nodes} nodes x {first.num_local} ranks: {words}")
    return "\n".join(lines)


def describe_links(rows: Sequence[LinkRow]) -> str:
    """The link of each measured axis, by the formulas of the planner."""
    axes = dict.fromkeys(row.axis for row in rows if row.point is not None)
    lines = []
    for axis in axes:
        fit = link_of_rows([row for row in rows if row.axis == axis])
        lines.append(describe_link(fit, "the planner" if axis == WORLD else f"{axis}, all its groups at once"))
    return "\n".join(lines)


def describe_link(fit: LinkFit, what: str = "the planner") -> str:
    """The link as the planner will see it."""
    return (
        f"link for {what}: {_us(fit.latency_seconds)} a hop, {fit.bandwidth_bytes_per_second / 1e9:.3f} GB/s, "
        f"errors of the ring formulas up to {fit.error:.0%}"
        f"{'' if fit.error <= USABLE_ERROR else '; measure again while nothing else runs'}"
    )


def link_of_rows(rows: Sequence[LinkRow]) -> LinkFit:
    """The link that best describes all operations."""
    return fit_link(points_of(rows))


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us"


def series_of(rows: Sequence[LinkRow]) -> dict[str, list[tuple[float, float]]]:
    """(bytes, microseconds) by operation, for plots; operations of a single size are left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        found.setdefault(_name(row), []).append((row.num_bytes, row.timing.median * 1e6))
    return {name: points for name, points in found.items() if len(points) > 1}


def terminal_plot(series: Series, columns: int = 72, lines: int = 18) -> str:
    """Both axes logarithmic; a letter for each series."""
    if not series:
        return ""
    low_x, high_x, low_y, high_y = _bounds(series)
    grid = [[" "] * columns for _ in range(lines)]
    for mark, points in zip(_MARKS, series.values(), strict=False):
        for x, y in points:
            column = round((math.log(x) - low_x) / (high_x - low_x) * (columns - 1))
            line = round((math.log(y) - low_y) / (high_y - low_y) * (lines - 1))
            grid[lines - 1 - line][column] = mark
    top, bottom = f"{math.exp(high_y):,.3g} us", f"{math.exp(low_y):,.3g} us"
    labels = [top, *[""] * (lines - 2), bottom]
    rows = [f"{label:>12} |{''.join(line)}" for label, line in zip(labels, grid, strict=True)]
    first, last = f"{math.exp(low_x):,.0f} bytes", f"{math.exp(high_x):,.0f}"
    names = "  ".join(f"{mark} {name}" for mark, name in zip(_MARKS, series, strict=False))
    return "\n".join([*rows, f"{'':>12} +{'-' * columns}", f"{'':>14}{first}{last:>{columns - len(first)}}", names])


def svg_plot(series: Series, title: str) -> str:
    """Microseconds over bytes, both logarithmic, with a line for each series."""
    low_x, high_x, low_y, high_y = _bounds(series)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - low_x) / (high_x - low_x) * (_WIDTH - _LEFT - _RIGHT)
        up = (math.log(y) - low_y) / (high_y - low_y) * (_HEIGHT - _TOP - _BOTTOM)
        return _LEFT + across, _HEIGHT - _BOTTOM - up

    shapes = [f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>']
    for power in range(math.ceil(low_y / math.log(10)), math.floor(high_y / math.log(10)) + 1):
        y = place(math.exp(low_x), 10.0**power)[1]
        shapes.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        shapes.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} us</text>')
    for power in range(math.ceil(low_x / math.log(16)), math.floor(high_x / math.log(16)) + 1):
        x = place(16.0**power, math.exp(low_y))[0]
        shapes.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{16**power:,}</text>')
    shapes.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">bytes</text>')
    for index, (name, points) in enumerate(series.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        shapes.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = _TOP + 12 + 20 * index
        shapes.append(f'<rect x="{_WIDTH - _RIGHT + 12}" y="{y - 9}" width="12" height="12" fill="{colour}"/>')
        shapes.append(f'<text x="{_WIDTH - _RIGHT + 30}" y="{y + 1}">{escape(name)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="12" role="img" aria-label="{escape(title)}">\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def _bounds(series: Series) -> tuple[float, float, float, float]:
    """The logarithms of the least and the largest x and y; never equal."""
    xs = [math.log(x) for points in series.values() for x, _ in points]
    ys = [math.log(y) for points in series.values() for _, y in points]
    return min(xs), max(max(xs), min(xs) + 1e-9), min(ys), max(max(ys), min(ys) + 1e-9)

"""The pictures of a plan's page, as SVG to stand inside HTML: parts of a step, memory, traffic and scaling.

Every bar is a row of `rect`s, whose classes name the parts (`style.py`), with the numbers as a title to hover over.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from weft.planner.report.style import bytes_text, count_text, number, part_class, percent, policy_text, seconds_text
from weft.schedule.draw import axis_marks

WIDTH = 1000  # of every figure; the page scales it
CHARACTER = 7.0  # pixels that a character takes, about
_LINE = 16  # from one line of text to the next
_LEFT, _RIGHT = 340, 80  # of bars beside their labels: room for the labels, and for the numbers
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "other")


def text(x: float, y: float, words: object, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(str(words))}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def rectangle(x: float, y: float, width: float, height: float, kind: str, title: str) -> str:
    size = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f'<rect {size} class="{kind}"><title>{escape(title)}</title></rect>'


def svg(width: float, height: float, label: str, shapes: Iterable[str]) -> str:
    """A picture with words for those who cannot see it."""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">\n' + "\n".join(shapes) + "\n</svg>"


def stacked(
    parts: Mapping[str, float], scale: float, x: float, y: float, height: float, unit: str, edge: float = WIDTH
) -> list[str]:
    """One bar: a rectangle for each part, `scale` pixels long for each second or byte, cut off at `edge`."""
    tell = seconds_text if unit == "s" else bytes_text
    total = sum(parts.values())
    shapes = []
    for name, value in parts.items():
        width = min(value * scale, edge - x)
        if width > 0:
            title = f"{name}: {tell(value)}, {percent(value / total)}"
            shapes.append(rectangle(x, y, width, height, part_class(name), title))
            x += width
    return shapes


def small_step_bar(where: Mapping[str, float], longest_seconds: float) -> str:
    """Returns a bar of the seconds of a step by part, small enough for a row of a table."""
    label = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in where.items())
    return svg(180, 16, label, stacked(where, 180 / longest_seconds, 0, 0, 16, "s"))


def memory_bars(plans: Sequence[Mapping[str, Any]], rejected: Sequence[Mapping[str, Any]], limit_bytes: float) -> str:
    """The fullest rank of each plan, against the limit; under the rejected ones why, and what would help."""
    longest = max([limit_bytes, *(float(plan.get("memory_bytes") or 0) for plan in [*plans, *rejected])])
    if plans:  # a plan that is far too large leaves room to see those that fit
        longest = min(longest, 3 * limit_bytes)
    scale = (WIDTH - _LEFT - _RIGHT) / longest
    shapes, y = [], 26.0
    for index, plan in enumerate(plans):
        note = f"micro-batch {plan['micro_batch']}, recompute {policy_text(plan)}"
        rows, y = _memory_row(f"{index + 1}. {plan['axes']}", note, plan, [], limit_bytes, scale, y)
        shapes += rows
    if rejected:
        shapes.append(text(0, y + 14, "rejected", "strong"))
        y += 26
    for plan in rejected:
        why = "; ".join(str(plan[key]) for key in ("reason", "remedy") if plan.get(key))
        below = textwrap.wrap(why, int((WIDTH - _LEFT) / CHARACTER))
        note = f"step {seconds_text(plan['seconds'])}" if plan.get("seconds") else ""
        rows, y = _memory_row(str(plan["axes"]), note, plan, below, limit_bytes, scale, y)
        shapes += rows
    marks = axis_marks(longest)
    grid = [line(_LEFT + mark * scale, 20, _LEFT + mark * scale, y, "grid") for mark in marks]
    axis = [text(_LEFT + mark * scale, y + 16, number(mark / 1e9), "quiet", "middle") for mark in marks[::2]]
    axis.append(text(0, y + 16, "GB per device", "quiet"))
    edge = _LEFT + limit_bytes * scale
    limit = [line(edge, 20, edge, y, "limit"), text(edge, 14, f"limit {bytes_text(limit_bytes)}", "strong", "middle")]
    bars = [shape for shape in shapes if shape.startswith("<rect")]
    words = [shape for shape in shapes if not shape.startswith("<rect")]
    label = f"Memory of {len(plans)} plans and {len(rejected)} rejected ones against {bytes_text(limit_bytes)}"
    return svg(WIDTH, y + 22, label, [*grid, *bars, *limit, *words, *axis])


def _memory_row(
    name: str, note: str, plan: Mapping[str, Any], below: Sequence[str], limit_bytes: float, scale: float, top: float
) -> tuple[list[str], float]:
    """The label at the left, the bar with its total, lines of text below it; and where the next row begins."""
    labels = textwrap.wrap(name, int((_LEFT - 16) / CHARACTER))
    shapes = [text(0, top + 12 + _LINE * index, words) for index, words in enumerate(labels)]
    shapes.append(text(0, top + 12 + _LINE * len(labels), note, "quiet"))
    parts = {part: float((plan.get("memory") or {}).get(part, 0)) for part in MEMORY_PARTS}
    edge = WIDTH - _RIGHT
    shapes += stacked(parts, scale, _LEFT, top, 18, "B", edge)
    if sum(parts.values()) * scale > edge - _LEFT + 1:
        shapes.append(f'<path d="M{edge + 3} {top + 3:.1f}l9 6l-9 6z" class="over"/>')
    if total := plan.get("memory_bytes"):
        shapes.append(text(WIDTH, top + 13, bytes_text(total), "over" if total > limit_bytes else "", "end"))
    shapes += [text(_LEFT, top + 34 + _LINE * index, words, "halo quiet") for index, words in enumerate(below)]
    return shapes, top + max(_LINE * (len(labels) + bool(note)), 24 + _LINE * len(below)) + 12


def traffic_bars(traffic: Sequence[Mapping[str, Any]], cluster: Mapping[str, Any]) -> str:
    """Returns bars of the bytes that one rank sends in a step, by link, axis and operation, on a logarithmic scale."""
    sizes = [float(entry["bytes"]) for entry in traffic]
    low, high = math.floor(math.log10(min(sizes)) - 0.3), math.ceil(math.log10(max(sizes)))
    scale = (WIDTH - _LEFT - 190) / (high - low)
    shapes, y = [], 4.0
    for link, words in (("intra", "inside a node"), ("inter", "between nodes")):
        entries = sorted((one for one in traffic if one["link"] == link), key=lambda one: -one["bytes"])
        if not entries:
            continue
        rate = cluster.get(f"{link}_bytes_per_second")
        total = bytes_text(sum(one["bytes"] for one in entries))
        shapes.append(text(0, y + 10, words + (f" ({bytes_text(rate, 'B/s')})" if rate else ""), "strong"))
        shapes.append(text(_LEFT + 4, y + 10, f"{total} in all", "quiet"))
        y += 22
        for one in entries:
            told = f"{bytes_text(one['bytes'])} in {number(one['calls'])} call{'s' * (one['calls'] != 1)}"
            length = (math.log10(one["bytes"]) - low) * scale
            shapes.append(text(16, y + 12, f"{one['axis']}: {one['operation']}"))
            title = f"{one['axis']}, {one['operation']}, {words}: {told}"
            shapes.append(rectangle(_LEFT, y, length, 16, part_class(one["axis"]), title))
            shapes.append(text(_LEFT + length + 8, y + 12, told, "halo"))
            y += 24
        y += 10
    marks = range(low, high + 1, math.ceil((high - low) / 8))
    places = [(_LEFT + (mark - low) * scale, bytes_text(10.0**mark)) for mark in marks]
    grid = [line(x, 20, x, y - 4, "grid") for x, _ in places]
    axis = [text(x, y + 12, words, "quiet", "middle") for x, words in places]
    label = "Bytes of one rank in a step by link, axis and operation, on a logarithmic scale"
    return svg(WIDTH, y + 18, label, [*grid, *shapes, *axis, text(0, y + 12, "bytes, log scale", "quiet")])


def scaling_curve(points: Sequence[Mapping[str, Any]], num_devices: int, unit: str) -> str:
    """Tokens or images a second over devices, both logarithmic, with the ideal line; what does not fit is a cross."""
    points, key = sorted(points, key=lambda point: point["devices"]), f"{unit}_per_second"
    fitting = [point for point in points if point.get("fits", True) and point.get(key)]
    top, bottom, left, right = 16, 300, 96, WIDTH - 130
    first, last = math.log(points[0]["devices"]), math.log(points[-1]["devices"])
    rates = [float(point[key]) for point in fitting]
    ideal = ideal_rates(fitting, key)
    low, high = math.log(min(rates, default=1)), math.log(max([*rates, *ideal], default=10))
    low, high = low - max(0.3, 0.14 * (high - low)), high + max(0.2, 0.04 * (high - low))  # room for labels

    def at_x(devices: float) -> float:
        share = (math.log(devices) - first) / (last - first) if last > first else 0.5
        return left + 24 + share * (right - left - 48)

    def at_y(rate: float) -> float:
        return bottom - (math.log(rate) - low) / (high - low) * (bottom - top)

    shapes = [line(left, bottom, right, bottom, "grid")]
    for mark in _log_marks(math.exp(low), math.exp(high)) if fitting else ():
        shapes += [line(left, at_y(mark), right, at_y(mark), "grid")]
        shapes.append(text(left - 8, at_y(mark) + 4, count_text(mark), "quiet", "end"))
    taken = -math.inf
    for point in points:
        x, words = at_x(point["devices"]), f"{point['devices']:,}"
        if x - taken > CHARACTER * (len(words) + 1):  # labels that would touch are left out
            shapes.append(text(x, bottom + 18, words, "quiet", "middle"))
            taken = x
    if len(fitting) > 1:
        ends = [fitting[0]["devices"], fitting[-1]["devices"]]
        shapes.append(line(at_x(ends[0]), at_y(ideal[0]), at_x(ends[1]), at_y(ideal[-1]), "ideal"))
        places = " ".join(f"{at_x(point['devices']):.1f},{at_y(point[key]):.1f}" for point in fitting)
        shapes.append(f'<polyline points="{places}" class="curve"/>')
    for point in points:
        place = (at_x(point["devices"]), at_y(point[key]) if point in fitting else bottom - 12)
        shapes += _scaling_point(point, point in fitting, point["devices"] == num_devices, unit, *place)
    shapes += [text(left - 8, top - 4, f"{unit}/s", "quiet", "end"), text(right + 8, bottom + 18, "devices", "quiet")]
    label = (
        f"{unit.capitalize()} a second over devices, both axes logarithmic, with the ideal line through the smallest"
    )
    return svg(WIDTH, bottom + 26, label, shapes)


def _scaling_point(point: Mapping[str, Any], fits: bool, is_this: bool, unit: str, x: float, y: float) -> list[str]:
    if not fits:
        cross = f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10"
        return [f'<path d="{cross}" class="cross"><title>{point["devices"]:,} devices: does not fit</title></path>']
    rate = f"{number(point[f'{unit}_per_second'])} {unit}/s"
    title = f"{point['devices']:,} devices: {rate}, MFU {percent(point.get('mfu'))}"
    kind, radius = ("ring", 6) if is_this else ("compute", 5)
    circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{kind}"><title>{escape(title)}</title></circle>'
    words = [percent(point["mfu"])] if point.get("mfu") is not None else []
    return [circle, *(text(x + 6, y + 20, one, "halo strong" if is_this else "halo quiet") for one in words)]


def ideal_rates(fitting: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Returns the rate of each number of devices if each device were as fast as in the smallest number that fits."""
    return [point["devices"] * fitting[0][key] / fitting[0]["devices"] for point in fitting]


def _log_marks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten between two numbers; the powers alone where that would crowd."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    return [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]

"""What clients saw under a load, as a table and as a picture (SVG)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from weft.serve.load_generator import RateResult

HEAD = (
    f"{'requests/s':>10}{'answered':>12}{'tokens/s':>10}   {'first token p50, p90, p99':<32}{'per token p50, p90, p99'}"
).rstrip()
COLOURS = {"p50": "#2a78d6", "p90": "#eda100", "p99": "#b3261e"}
WIDTH, PANEL_HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 220, 90, 70, 46, 30
Line = tuple[str, str, list[float]]  # a name, a colour, and a value for each rate


def table_row(one: RateResult) -> str:
    """A line of the table below `HEAD`."""
    errors = ", ".join(f"{count} {word}" for word, count in one.errors.items())
    counts = f"{one.num_answered} of {one.num_requests}"
    times = f"{_times(one.first_token):<32}{_times(one.per_token):<32}"
    return f"{one.rate:>10g}{counts:>12}{one.tokens_per_second:>10.0f}   {times}{errors}".rstrip()


def svg(results: Sequence[RateResult], title: str) -> str:
    """Three plots over the rate of requests: tokens a second, time to the first token, time per token."""
    shown = [one for one in results if one.first_token and one.per_token]
    rates = [one.rate for one in shown]
    firsts: list[Line] = [(p, COLOURS[p], [one.first_token[p] * 1e3 for one in shown]) for p in COLOURS]
    nexts: list[Line] = [(p, COLOURS[p], [one.per_token[p] * 1e3 for one in shown]) for p in COLOURS]
    tokens: list[Line] = [("", COLOURS["p50"], [one.tokens_per_second for one in shown])]
    panels = (("output tokens/s", tokens), ("time to first token, ms", firsts), ("time per token, ms", nexts))
    height = TOP + len(panels) * PANEL_HEIGHT + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" fill="#1b1f27">{escape(title)}</text>',
    ]
    for number, (name, lines) in enumerate(panels):
        parts += _panel(name, rates, lines, TOP + number * PANEL_HEIGHT, number == len(panels) - 1)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(name: str, rates: list[float], lines: list[Line], top: int, is_last: bool) -> list[str]:
    values = [value for _, _, found in lines for value in found]
    if not values:
        return [f'<text x="{LEFT}" y="{top + 40}" fill="#667085">{name}: nothing was answered</text>']
    low, high = top + PANEL_HEIGHT - BOTTOM, top + 18
    across = _scale(min(rates), max(rates), LEFT + 20, WIDTH - RIGHT - 20)
    up = _scale(min(values) / 1.2, max(values) * 1.2, low, high)
    parts = [f'<text x="{LEFT}" y="{top + 8}" fill="#1b1f27" font-weight="bold">{name}</text>']
    for value in _ticks(min(values) / 1.2, max(values) * 1.2):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(value):.1f}" y2="{up(value):.1f}" stroke="#e3e6ec"/>'
        )
        parts.append(f'<text x="{LEFT - 8}" y="{up(value) + 4:.1f}" text-anchor="end" fill="#667085">{value:g}</text>')
    for rate in rates:
        parts.append(f'<text x="{across(rate):.1f}" y="{low + 16}" text-anchor="middle" fill="#667085">{rate:g}</text>')
    if is_last:
        parts.append(f'<text x="{WIDTH - 8}" y="{low + 16}" text-anchor="end" fill="#667085">requests/s</text>')
    ends: list[float] = []
    for label, colour, found in lines:
        points = [(across(rate), up(value)) for rate, value in zip(rates, found, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        place = points[-1][1] + 4
        while any(abs(place - other) < 13 for other in ends):  # labels do not lie on each other
            place -= 13
        ends.append(place)
        parts.append(f'<text x="{points[-1][0] + 9:.1f}" y="{place:.1f}" fill="{colour}">{label}</text>')
    return parts


def _scale(smallest: float, largest: float, start: float, end: float) -> Callable[[float], float]:
    """A logarithmic scale from values to places; the middle if there is one value alone."""
    if largest <= smallest:
        return lambda value: (start + end) / 2
    span = math.log(largest / smallest)
    return lambda value: start + (end - start) * math.log(value / smallest) / span


def _ticks(smallest: float, largest: float) -> list[float]:
    """Round numbers between two values: 1, 2 and 5 times powers of ten."""
    exponents = range(math.floor(math.log10(smallest)), math.ceil(math.log10(largest)) + 1)
    found = [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]
    return [value for value in found if smallest <= value <= largest]


def _times(by_percentile: dict[str, float]) -> str:
    return ", ".join(_words(seconds) for seconds in by_percentile.values()) or "–"


def _words(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"

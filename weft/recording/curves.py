"""The page of a run: one HTML file with its losses and its speed against steps, which loads nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from weft.planner.report.figures import WIDTH, line, svg, text
from weft.planner.report.html_parts import document, figure, legend_list
from weft.planner.report.style import number
from weft.schedule.draw import axis_marks

Points = list[tuple[int, float]]
_LEFT, _TOP, _HEIGHT = 84, 12, 280  # of the area that curves are drawn in
MAX_POINTS = 500  # of a curve; more are means of neighbours
_COLOURS = ("compute", "x")  # of the first and the second curve of a picture


def run_page(name: str, events: Sequence[Mapping[str, Any]]) -> str:
    """Returns the page of a run, from the events of its metrics.jsonl."""
    steps = [event for event in events if event["kind"] == "step"]
    held = [event for event in events if event["kind"] == "evaluation"]
    rate = next((key for event in steps for key in event if key.endswith("s_per_second")), "tokens_per_second")
    unit = rate.removesuffix("_per_second")
    losses = {"training loss": _points(steps, "loss"), "held-out loss": _points(held, "loss")}
    last = {what: points[-1] for what, points in losses.items() if points}
    tiles = {f"{what} (step {step})": f"{value:.4f}" for what, (step, value) in last.items()}
    speed = {f"{unit} per second": _points(steps, rate)}
    shown = "".join(f"<div><b>{escape(value)}</b><small>{escape(what)}</small></div>" for what, value in tiles.items())
    head = (
        f'<header><div class="kicker">weft report</div><h1>{escape(name)}</h1></header>'
        f'<section class="answer"><div class="tiles">{shown}</div></section>'
    )
    pictures = [
        _picture("Loss", "Mean of the targets of a step, and of the held-out samples.", losses),
        _picture("Speed", f"{unit.capitalize()} per second of the whole job.", speed, from_zero=True),
    ]
    return document(f"weft report: {name}", "\n".join([head, *pictures]))


def _points(events: Sequence[Mapping[str, Any]], key: str) -> Points:
    """The finite values of a key by step."""
    found = [(int(event["step"]), event.get(key)) for event in events]
    return [(step, float(value)) for step, value in found if isinstance(value, int | float) and math.isfinite(value)]


def _thinned(points: Points) -> list[tuple[float, float]]:
    size = -(-len(points) // MAX_POINTS)
    groups = [points[begin : begin + size] for begin in range(0, len(points), size)] if points else []
    return [(sum(one[0] for one in own) / len(own), sum(one[1] for one in own) / len(own)) for own in groups]


def _picture(title: str, what: str, curves: Mapping[str, Points], from_zero: bool = False) -> str:
    drawn = {name: _thinned(points) for name, points in curves.items() if points}
    if not drawn:
        return ""
    values = [value for points in drawn.values() for _, value in points]
    low = 0.0 if from_zero else min(values)
    high = max(values) if max(values) > low else low + (abs(low) or 1.0)
    last = max(step for points in drawn.values() for step, _ in points) or 1.0
    right = WIDTH - _LEFT - 16

    def x(step: float) -> float:
        return _LEFT + step / last * right

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * _HEIGHT

    shapes = []
    for mark in axis_marks(high - low)[::2]:
        shapes.append(line(_LEFT, y(low + mark), WIDTH - 16, y(low + mark), "grid"))
        shapes.append(text(_LEFT - 8, y(low + mark) + 4, number(low + mark), "quiet", "end"))
    for mark in axis_marks(last):
        shapes.append(text(x(mark), _TOP + _HEIGHT + 18, f"{mark:g}", "quiet", "middle"))
    shapes.append(text(0, _TOP + _HEIGHT + 18, "step", "quiet"))
    colours = dict(zip(curves, _COLOURS, strict=False))
    for name, points in drawn.items():
        places = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        style = f'fill="none" stroke="var(--{colours[name]})" stroke-width="2"'
        dot = f'<circle cx="{x(points[-1][0]):.1f}" cy="{y(points[-1][1]):.1f}" r="3" class="{colours[name]}"/>'
        shapes += [f'<polyline {style} points="{places}"><title>{escape(name)}</title></polyline>', dot]
    names = {colours[name]: name for name in drawn}
    picture = svg(WIDTH, _TOP + _HEIGHT + 28, f"{title} against steps", shapes)
    return figure(title, what, legend_list(names, names=names), picture)

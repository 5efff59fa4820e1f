"""The picture of a step: what each rank of `pipe` does when, and below it, on the same scale, where the step goes.

A page stays small however long the pipeline is: at most 16 ranks are drawn, and at most 4,000 rectangles. Where spans
are more than that, time is cut into columns, each filled in proportion to what the rank does in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from weft.planner.report.figures import CHARACTER, WIDTH, line, rectangle, stacked, svg, text
from weft.planner.report.style import percent, seconds_text
from weft.schedule.draw import axis_marks, time_unit

MAX_RANKS, MAX_RECTANGLES = 16, 4000
KINDS = ("forward", "backward", "weight")
_LEFT, _ROW, _BAR = 84, 24, 20
_DARK_PARTS = ("compute", "context", "optimizer")  # that white letters can be read on


def step_picture(plan: Mapping[str, Any]) -> tuple[str, str, list[str]]:
    """The picture of a plan's step, a note on what it leaves out, and the kinds of work that it draws."""
    timeline = plan.get("timeline") or {}
    ranks = timeline.get("ranks") or []
    longest = max(plan["seconds"], timeline.get("makespan_seconds", 0))
    scale = (WIDTH - _LEFT - 16) / longest
    drawn = drawn_ranks(len(ranks))
    kinds = [kind for kind in KINDS if any(span["kind"] == kind for rank in drawn for span in ranks[rank])]
    num_spans = sum(span["kind"] in KINDS for rank in drawn for span in ranks[rank])
    num_columns = MAX_RECTANGLES // (len(drawn) * len(kinds)) if num_spans > MAX_RECTANGLES else 0
    shapes, y = [], 4.0
    for rank in drawn:
        shapes.append(text(0, y + 14, f"rank {rank}"))
        if num_columns:
            shapes += _columns(ranks[rank], kinds, timeline["makespan_seconds"], num_columns, scale, y)
        else:
            shapes += _spans(ranks[rank], scale, y)
        y += _ROW
    y += 12 if drawn else 0
    shapes += [text(0, y + 17, "the step"), *stacked(plan["where"], scale, _LEFT, y, 26, "s")]
    shapes += _part_names(plan["where"], scale, y)
    per_second, unit = time_unit(longest)
    marks = [(_LEFT + mark * scale, f"{mark * per_second:.6g}") for mark in axis_marks(longest)]
    grid = [line(x, 0, x, y + 32, "grid") for x, _ in marks]
    axis = [text(x, y + 46, words, "quiet", "middle") for x, words in marks]
    label = f"Timeline of a step of {seconds_text(plan['seconds'])}" + (f" on {len(ranks)} pipe ranks" if ranks else "")
    picture = svg(WIDTH, y + 52, label, [*grid, *shapes, *axis, text(0, y + 46, f"time, {unit}", "quiet")])
    return picture, _note(len(ranks), len(drawn), num_columns), kinds


def drawn_ranks(num_ranks: int) -> list[int]:
    """The first, the last, and ranks evenly between."""
    if num_ranks <= MAX_RANKS:
        return list(range(num_ranks))
    return [round(index * (num_ranks - 1) / (MAX_RANKS - 1)) for index in range(MAX_RANKS)]


def _note(num_ranks: int, num_drawn: int, num_columns: int) -> str:
    notes = [f"{num_drawn} of {num_ranks} ranks are drawn, evenly chosen."] if num_drawn < num_ranks else []
    if num_columns:
        notes.append(
            f"Single micro-batches would be too thin: time is cut into {num_columns} columns, each filled in "
            "proportion to what the rank does in it."
        )
    return " ".join(notes)


def _spans(spans: Sequence[Mapping[str, Any]], scale: float, y: float) -> list[str]:
    """A rectangle for each span of work, with its micro-batch where there is room; a wait is a gap."""
    shapes = []
    work = [span for span in spans if span["kind"] in KINDS]
    room = CHARACTER * max((len(str(span["micro_batch"])) for span in work), default=0) + 2  # all have numbers, or none
    for span in work:
        x, width = _LEFT + span["start"] * scale, (span["end"] - span["start"]) * scale
        gap = 0.6 if width > 3 else 0  # so that neighbours are told apart
        times = f"{seconds_text(span['start'])} to {seconds_text(span['end'])}"
        title = f"{span['kind']} of micro-batch {span['micro_batch']}, stage {span['stage']}: {times}"
        shapes.append(rectangle(x, y, width - gap, _BAR, span["kind"], title))
        words = str(span["micro_batch"])
        if room <= width:
            kind = "on-light" if span["kind"] == "forward" else "on-dark"
            shapes.append(text(x + width / 2, y + 14, words, kind, "middle"))
    return shapes


def _columns(
    spans: Sequence[Mapping[str, Any]], kinds: Sequence[str], longest: float, num_columns: int, scale: float, y: float
) -> list[str]:
    """Columns of time, filled from below by kind; equal neighbours are one rectangle."""
    shares = column_shares(spans, kinds, longest, num_columns)
    width = longest / num_columns * scale
    shapes, index = ['<g class="columns">'], 0
    for fill, same in groupby(tuple(round(share, 2) for share in column) for column in shares):
        num = len(list(same))
        bottom = y + _BAR
        for kind, share in zip(kinds, fill, strict=True):
            if share:
                title = f"{kind}: {percent(share)} of this time"
                bottom -= share * _BAR
                shapes.append(rectangle(_LEFT + index * width, bottom, num * width, share * _BAR, kind, title))
        index += num
    return [*shapes, "</g>"]


def column_shares(
    spans: Sequence[Mapping[str, Any]], kinds: Sequence[str], longest: float, num_columns: int
) -> list[list[float]]:
    """For each of `num_columns` equal stretches of time, the share of it that each kind takes."""
    width = longest / num_columns
    shares = [[0.0] * len(kinds) for _ in range(num_columns)]
    for span in spans:
        if span["kind"] not in kinds:
            continue
        which = kinds.index(span["kind"])
        first, last = int(span["start"] / width), min(num_columns - 1, int(span["end"] / width))
        for column in range(first, last + 1):
            inside = min(span["end"], (column + 1) * width) - max(span["start"], column * width)
            shares[column][which] += max(0.0, inside) / width
    return shares


def _part_names(where: Mapping[str, float], scale: float, y: float) -> list[str]:
    """Names inside the parts that have room for them."""
    shapes, x = [], float(_LEFT)
    for name, seconds in where.items():
        if seconds * scale > len(name) * CHARACTER + 10:
            kind = "" if name == "bubble" else "on-dark" if name in _DARK_PARTS else "on-light"
            shapes.append(text(x + seconds * scale / 2, y + 17, name, kind, "middle"))
        x += seconds * scale
    return shapes

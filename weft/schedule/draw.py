"""Drawings of timelines, rank by time: text for a terminal, a self-contained SVG for documents, and PNG from it.

If a rank holds several stages, the SVG draws later ones darker. In text, the second replica of a mirrored schedule has
lower-case letters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.schedule.actions import SHADOW, Action
from weft.schedule.simulate import Span, Timeline

ENDINGS = (".svg", ".png", ".txt")
# Red, green, blue of a rank's first and last stage, per kind.
_FILLS = {
    "forward": ((178, 208, 246), (95, 151, 220)),
    "backward": ((249, 208, 152), (224, 149, 58)),
    "weight": ((196, 230, 186), (121, 187, 104)),
    SHADOW: ((216, 216, 228), (176, 176, 196)),
}
_WAIT_FILL = "#eeeeee"
_ROW, _BAR, _LEFT, _RIGHT = 34, 26, 84, 112  # pixels
_LEGEND, _TITLE, _GAP = 40, 34, 14  # the heights of the legend, of a panel's title, and between panels
_CHARACTER = 7.5  # pixels per digit of a bar's label


def to_text(timeline: Timeline, width: int = 100, title: str | None = None) -> str:
    """Return one line per rank: F, B, W or S (shadow) with the micro-batch if there is space, and dots for waits."""
    scale = width / timeline.makespan_seconds
    label = len(f"rank {len(timeline.spans) - 1}")
    lines = [f"{title or heading(timeline)}: {_summary(timeline)}"]
    for rank, spans in enumerate(timeline.spans):
        row = ""
        for span in spans:
            room = round(span.end_seconds * scale) - len(row)
            row += _cell(span, room)
        lines.append(f"{f'rank {rank}':{label}} |{row}| {timeline.peak_activations[rank]} held")
    return "\n".join(lines)


def to_svg(timelines: Mapping[str, Timeline], width: int = 1000) -> str:
    """Return an SVG of timelines under their titles, one below the other on one time axis, `width` pixels wide.

    A bar shows its micro-batch number if it is wide enough.
    """
    longest = max(timeline.makespan_seconds for timeline in timelines.values())
    scale, marks = (width - _LEFT - _RIGHT) / longest, axis_marks(longest)
    lines = [_LEFT + mark * scale for mark in marks]
    shapes: list[str] = []
    top = _LEGEND
    for title, timeline in timelines.items():
        shapes += _panel(title, timeline, top, scale, width, lines)
        top += _TITLE + _ROW * len(timeline.spans) + _GAP
    height = top + 26
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            'font-family="DejaVu Sans, Verdana, Helvetica, Arial, sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *_legend(list(timelines.values())),
            *shapes,
            *_time_axis(marks, top - _GAP, scale, *time_unit(longest)),
            "</svg>\n",
        ]
    )


def write(path: Path, timelines: Mapping[str, Timeline]) -> None:
    """Draw timelines to a file, in the format of its suffix."""
    refuse_path(path)
    if path.suffix == ".txt":
        text = "\n\n".join(to_text(timeline, title=title) for title, timeline in timelines.items())
        path.write_text(text + "\n", encoding="utf-8")
    elif path.suffix == ".png":
        _cairosvg(path).svg2png(bytestring=to_svg(timelines).encode(), write_to=str(path), scale=2)
    else:
        path.write_text(to_svg(timelines), encoding="utf-8")


def refuse_path(path: Path) -> None:
    """Raise ConfigError if a timeline could not be drawn to this file."""
    if path.suffix not in ENDINGS:
        raise ConfigError(f"a timeline is drawn to {', '.join(ENDINGS)}; '{path}' ends in '{path.suffix}'")
    if path.suffix == ".png":
        _cairosvg(path)
    if not path.parent.is_dir():
        raise ConfigError(f"'{path}' cannot be written: there is no folder '{path.parent}'; make it first")


def _cairosvg(path: Path) -> Any:
    try:
        import cairosvg
    except (ImportError, OSError):  # the package, or the cairo library that it needs
        raise ConfigError(f"'{path}' needs cairosvg and cairo; pip install 'weft[draw]', or draw to .svg") from None
    return cairosvg


def heading(timeline: Timeline) -> str:
    """Return a title: the schedule, its stages and its micro-batches."""
    schedule = timeline.schedule
    return f"{schedule.name}, {schedule.num_stages} stages, {schedule.num_micro_batches} micro-batches"


def _panel(title: str, timeline: Timeline, top: float, scale: float, width: int, lines: Sequence[float]) -> list[str]:
    """Draw one timeline below its title, with vertical lines behind its bars and the activations held at the right."""
    right, first, bottom = width - _RIGHT + 10, top + _TITLE - 4, top + _TITLE + _ROW * len(timeline.spans)
    shapes = [
        f'<text x="16" y="{top + 20}" font-size="14" font-weight="bold">{escape(title)}: {_summary(timeline)}</text>',
        f'<text x="{right}" y="{top + 20}" fill="#555">most held</text>',
        *(f'<line x1="{x:.2f}" y1="{first}" x2="{x:.2f}" y2="{bottom}" stroke="#dddddd"/>' for x in lines),
    ]
    for rank, spans in enumerate(timeline.spans):
        row = top + _TITLE + _ROW * rank
        middle = row + _BAR / 2 + 4
        shapes.append(f'<text x="16" y="{middle}">rank {rank}</text>')
        shades = _shades(timeline, rank)
        shapes += [shape for span in spans for shape in _bar(span, row, scale, shades)]
        shapes.append(f'<text x="{right}" y="{middle}">{_held(timeline, rank)}</text>')
    return shapes


def _summary(timeline: Timeline) -> str:
    per_second, unit = time_unit(timeline.makespan_seconds)
    return f"{timeline.makespan_seconds * per_second:.4g} {unit}, bubble {100 * timeline.bubble_share:.1f} %"


def _held(timeline: Timeline, rank: int) -> str:
    num = timeline.peak_activations[rank]
    return f"{num} activation{'s' if num != 1 else ''}"


def _cell(span: Span, room: int) -> str:
    """Return `room` characters for a span: 'F12', or only the letter if that does not fit, padded with dashes."""
    if not isinstance(span.action, Action):
        return "." * room
    letter = span.action.kind[0]
    letter = letter if span.action.replica else letter.upper()
    text = f"{letter}{span.action.micro_batch}"
    return (text if len(text) <= room else letter).ljust(room, "-")[:room]


def _shades(timeline: Timeline, rank: int) -> dict[tuple[int, int], float]:
    """Return how dark, from 0 to 1, each (replica, stage) of a rank is drawn."""
    held = sorted(
        (replica, stage)
        for replica, homes in enumerate(timeline.schedule.placement)
        for stage, home in enumerate(homes)
        if home == rank
    )
    return {key: index / max(1, len(held) - 1) for index, key in enumerate(held)}


def _fill(kind: str, shade: float) -> str:
    light, dark = _FILLS[kind]
    red, green, blue = (round(a + shade * (b - a)) for a, b in zip(light, dark, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _bar(span: Span, top: float, scale: float, shades: dict[tuple[int, int], float]) -> list[str]:
    """Draw the rectangle of a span and its number."""
    left, width = _LEFT + span.start_seconds * scale, (span.end_seconds - span.start_seconds) * scale
    action = span.action
    if not isinstance(action, Action):
        return [f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_BAR}" fill="{_WAIT_FILL}"/>']
    fill = _fill(action.kind, shades.get((action.replica, action.stage), 0.0))
    shapes = [
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_BAR}" fill="{fill}" stroke="white">'
        f"<title>{action}: {span.start_seconds:.4g} to {span.end_seconds:.4g} s</title></rect>"
    ]
    number = str(action.micro_batch)
    if len(number) * _CHARACTER + 2 <= width:
        middle = left + width / 2
        shapes.append(f'<text x="{middle:.2f}" y="{top + _BAR / 2 + 4}" text-anchor="middle">{number}</text>')
    return shapes


def _legend(timelines: Sequence[Timeline]) -> list[str]:
    """Draw a square and a word for each kind of action, and the meaning of darker bars."""
    schedules = [timeline.schedule for timeline in timelines]
    kinds = ["forward", "backward", *(["weight"] if any(one.split_stages for one in schedules) else [])]
    kinds += [SHADOW] if any(one.has_shadows for one in schedules) else []
    shapes, left = [], 16.0
    for fill, word in [*((_fill(kind, 0), kind) for kind in kinds), (_WAIT_FILL, "wait")]:
        shapes.append(f'<rect x="{left:.1f}" y="14" width="14" height="14" fill="{fill}" stroke="#999"/>')
        shapes.append(f'<text x="{left + 20:.1f}" y="26">{word}</text>')
        left += 44 + _CHARACTER * len(word)
    notes = {
        "the second replica": any(len(one.placement) > 1 for one in schedules),
        "later stages of the rank": any(one.num_stages > one.num_ranks for one in schedules),
    }
    if any(notes.values()):
        darker = " or ".join(note for note, holds in notes.items() if holds)
        shapes.append(f'<text x="{left:.1f}" y="26">darker: {darker}</text>')
    return shapes


def axis_marks(longest: float) -> list[float]:
    """Return round numbers from 0 to `longest`, between seven and eighteen of them."""
    rough = longest / 10
    power = 10 ** math.floor(math.log10(rough))
    step = power * min((1, 2, 5, 10), key=lambda factor: abs(factor - rough / power))
    return [number * step for number in range(math.floor(longest / step * (1 + 1e-9)) + 1)]


def time_unit(longest_seconds: float) -> tuple[float, str]:
    """Return the unit for times of this length, as (units per second, symbol)."""
    units = {1.0: "s", 1e3: "ms", 1e6: "µs"}
    per_second = next((number for number in units if longest_seconds * number >= 1), 1e6)
    return per_second, units[per_second]


def _time_axis(marks: Sequence[float], bottom: float, scale: float, per_second: float, unit: str) -> list[str]:
    places = [(_LEFT + mark * scale, f"{mark * per_second:.6g}") for mark in marks]
    return [
        f'<text x="16" y="{bottom + 20}" fill="#555">time, {unit}</text>',
        *(f'<text x="{x:.2f}" y="{bottom + 20}" text-anchor="middle" fill="#555">{text}</text>' for x, text in places),
    ]

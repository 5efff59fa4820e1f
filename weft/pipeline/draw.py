"""Drawings of a timeline, rank by time: text for a terminal, and a self-contained SVG for documents.

Where a rank holds several stages, SVG draws later ones darker; the second replica of a mirrored schedule is lower-case
in text.
"""

from __future__ import annotations

import math
from html import escape

from weft.pipeline.actions import Action
from weft.pipeline.simulate import Span, Timeline

# Red, green, blue of a rank's first and last stage, per kind.
_FILLS = {
    "forward": ((178, 208, 246), (95, 151, 220)),
    "backward": ((249, 208, 152), (224, 149, 58)),
    "weight": ((196, 230, 186), (121, 187, 104)),
}
_WAIT_FILL = "#eeeeee"
_ROW, _BAR, _LEFT, _TOP, _RIGHT = 34, 26, 84, 78, 112  # pixels
_CHARACTER = 7.5  # pixels that a digit of a bar's label takes


def to_text(timeline: Timeline, width: int = 100) -> str:
    """One line per rank: F, B and W with the micro-batch where `width` characters leave room, dots for waits."""
    scale = width / timeline.makespan_seconds
    label = len(f"rank {len(timeline.spans) - 1}")
    lines = [f"{_heading(timeline)}: {_summary(timeline)}"]
    for rank, spans in enumerate(timeline.spans):
        row = ""
        for span in spans:
            room = round(span.end_seconds * scale) - len(row)
            row += _cell(span, room)
        lines.append(f"{f'rank {rank}':{label}} |{row}| {timeline.peak_activations[rank]} held")
    return "\n".join(lines)


def to_svg(timeline: Timeline, title: str | None = None, width: int = 1000) -> str:
    """A picture of the timeline, `width` pixels wide; micro-batch numbers stand where they have room."""
    scale = (width - _LEFT - _RIGHT) / timeline.makespan_seconds
    bottom = _TOP + _ROW * len(timeline.spans)
    height = bottom + 44
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="DejaVu Sans, Verdana, Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="16" y="26" font-size="16" font-weight="bold">{escape(title or _heading(timeline))}: '
        f"{_summary(timeline)}</text>",
        *_legend(timeline),
        f'<text x="{width - _RIGHT + 10}" y="{_TOP - 8}" fill="#555">most held</text>',
    ]
    for rank, spans in enumerate(timeline.spans):
        top = _TOP + _ROW * rank
        middle = top + _BAR / 2 + 4
        shapes.append(f'<text x="16" y="{middle}">rank {rank}</text>')
        shades = _shades(timeline, rank)
        shapes += [shape for span in spans for shape in _bar(span, top, scale, shades)]
        shapes.append(f'<text x="{width - _RIGHT + 10}" y="{middle}">{_held(timeline, rank)}</text>')
    return "\n".join([*shapes, *_time_axis(timeline, bottom, scale), "</svg>"]) + "\n"


def _heading(timeline: Timeline) -> str:
    schedule = timeline.schedule
    return f"{schedule.name}, {schedule.num_stages} stages, {schedule.num_micro_batches} micro-batches"


def _summary(timeline: Timeline) -> str:
    return f"{timeline.makespan_seconds:.4g} s, bubble {100 * timeline.bubble_share:.1f} %"


def _held(timeline: Timeline, rank: int) -> str:
    num = timeline.peak_activations[rank]
    return f"{num} activation{'s' if num != 1 else ''}"


def _cell(span: Span, room: int) -> str:
    """`room` characters for a span: 'F12', cut to its letter where that is all that fits, then filled."""
    if not isinstance(span.action, Action):
        return "." * room
    letter = span.action.kind[0]
    letter = letter if span.action.replica else letter.upper()
    text = f"{letter}{span.action.micro_batch}"
    return (text if len(text) <= room else letter).ljust(room, "-")[:room]


def _shades(timeline: Timeline, rank: int) -> dict[tuple[int, int], float]:
    """How dark, from 0 to 1, each (replica, stage) of a rank is drawn."""
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
    """The rectangle of a span and its number."""
    left, width = _LEFT + span.start_seconds * scale, (span.end_seconds - span.start_seconds) * scale
    action = span.action
    if not isinstance(action, Action):
        return [f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_BAR}" fill="{_WAIT_FILL}"/>']
    fill = _fill(action.kind, shades[action.replica, action.stage])
    shapes = [
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_BAR}" fill="{fill}" stroke="white">'
        f"<title>{action}: {span.start_seconds:.4g} to {span.end_seconds:.4g} s</title></rect>"
    ]
    number = str(action.micro_batch)
    if len(number) * _CHARACTER + 2 <= width:
        middle = left + width / 2
        shapes.append(f'<text x="{middle:.2f}" y="{top + _BAR / 2 + 4}" text-anchor="middle">{number}</text>')
    return shapes


def _legend(timeline: Timeline) -> list[str]:
    """A square and a word for each kind, and what darker bars mean."""
    schedule = timeline.schedule
    kinds = ["forward", "backward", *(["weight"] if schedule.split_stages else [])]
    shapes, left = [], 16.0
    for fill, word in [*((_fill(kind, 0), kind) for kind in kinds), (_WAIT_FILL, "wait")]:
        shapes.append(f'<rect x="{left:.1f}" y="40" width="14" height="14" fill="{fill}" stroke="#999"/>')
        shapes.append(f'<text x="{left + 20:.1f}" y="52">{word}</text>')
        left += 44 + _CHARACTER * len(word)
    if len(schedule.placement) > 1:
        shapes.append(f'<text x="{left:.1f}" y="52">darker: replica 1</text>')
    elif schedule.num_stages > schedule.num_ranks:
        shapes.append(f'<text x="{left:.1f}" y="52">darker: later stages of the rank</text>')
    return shapes


def _time_axis(timeline: Timeline, bottom: float, scale: float) -> list[str]:
    """Marks at round numbers of seconds, five to twelve of them."""
    rough = timeline.makespan_seconds / 10
    power = 10 ** math.floor(math.log10(rough))
    step = power * min((1, 2, 5, 10), key=lambda factor: abs(factor - rough / power))
    shapes = [f'<text x="16" y="{bottom + 20}" fill="#555">seconds</text>']
    for mark in range(math.floor(timeline.makespan_seconds / step * (1 + 1e-9)) + 1):
        left = _LEFT + mark * step * scale
        shapes.append(f'<line x1="{left:.2f}" y1="{bottom}" x2="{left:.2f}" y2="{bottom + 5}" stroke="#777"/>')
        shapes.append(
            f'<text x="{left:.2f}" y="{bottom + 20}" text-anchor="middle" fill="#555">{mark * step:.6g}</text>'
        )
    return shapes

"""The pictures of a recording's page, as SVG: a step by rank, exposed time by axis, and bytes between ranks."""

from __future__ import annotations

from collections.abc import Sequence

from weft.comm.recorder import CommunicationCall, PhaseSpan
from weft.planner.report.figures import WIDTH, line, rectangle, svg, text
from weft.planner.report.style import bytes_text, part_class, seconds_text
from weft.planner.report.timeline import MAX_RANKS, MAX_RECTANGLES, drawn_ranks
from weft.recording.rank_file import RankRecording
from weft.recording.summary import OperationSummary
from weft.schedule.draw import axis_marks, time_unit

_LEFT, _ROW = 84, 38
_BAR, _CALLS = 20, 9  # heights of a rank's phases and waits, and of the calls below them
MAX_CELLS = 64  # ranks of a heat map; more are summed in blocks
# Phases of a step, and the colours of the planner's page that stand for them here.
PHASE_COLOURS = {
    "forward and backward": "forward",
    "the update": "optimizer",
    "loading data": "weight",
    "other": "bubble",
}


def axis_colour(axis: str) -> str:
    """The class that colours an axis, or a level or a part of it."""
    return part_class(axis.partition("/")[0].partition(":")[0].partition("%")[0])


def rank_timeline(ranks: Sequence[RankRecording]) -> tuple[str, list[str], str]:
    """The last recorded step of each rank; the axes that are drawn; and a note on what is left out."""
    step = ranks[0].last_step
    drawn = [ranks[index] for index in drawn_ranks(len(ranks))]
    events: list[PhaseSpan | CommunicationCall] = [span for one in drawn for span in one.phases if span.step == step]
    events += [call for one in drawn for call in one.calls if call.step == step]
    first = min((event.start for event in events), default=0.0)
    longest = max((event.end for event in events), default=1.0) - first or 1.0
    scale = (WIDTH - _LEFT - 16) / longest
    calls = [call for one in drawn for call in one.calls if call.step == step]
    shortest = sorted((call.end - call.start for call in calls), reverse=True)[:MAX_RECTANGLES][-1:] or [0.0]
    shapes, y = [], 4.0
    for one in drawn:
        shapes.append(text(0, y + 14, f"rank {one.rank}"))
        shapes += _rank_row(one, step, first, scale, y, shortest[0])
        y += _ROW
    per_second, unit = time_unit(longest)
    for mark in axis_marks(longest * per_second):
        x = _LEFT + mark / per_second * scale
        shapes = [line(x, 0, x, y, "grid"), *shapes, text(x, y + 14, f"{mark:g}", "quiet", "middle")]
    shapes.append(text(0, y + 14, unit, "quiet"))
    left_out = [] if len(drawn) == len(ranks) else [f"{MAX_RANKS} of {len(ranks)} ranks are drawn."]
    left_out += [f"Of {len(calls)} calls the longest are drawn."] if len(calls) > MAX_RECTANGLES else []
    axes = sorted({call.axis for call in calls})
    return svg(WIDTH, y + 22, f"Step {step} of {len(drawn)} ranks over time", shapes), axes, " ".join(left_out)


def _rank_row(one: RankRecording, step: int, first: float, scale: float, y: float, shortest: float) -> list[str]:
    shapes = []
    for span in one.phases:
        if span.step == step and span.end > span.start:
            colour = PHASE_COLOURS.get(span.name, PHASE_COLOURS["other"])
            title = f"{span.name}: {seconds_text(span.end - span.start)}"
            width = (span.end - span.start) * scale
            shapes.append(rectangle(_LEFT + (span.start - first) * scale, y, width, _BAR, colour, title))
    pale = f'<g opacity="0.45">{"".join(shapes)}</g>'
    shapes = [pale]
    for call in one.calls:
        if call.step != step or call.end - call.start < shortest:
            continue
        inside = f", {call.block}" if call.block else ""
        title = (
            f"{call.operation} over {call.axis}, {bytes_text(call.num_bytes)}{inside}: "
            f"{seconds_text(call.end - call.start)}, exposed {seconds_text(call.exposed)}"
        )
        colour, x = axis_colour(call.axis), _LEFT + (call.start - first) * scale
        width = max(0.4, (call.end - call.start) * scale)
        shapes.append(rectangle(x, y + _BAR + 2, width, _CALLS, colour, title))
        if call.exposed > 0:
            x = _LEFT + (call.wait_start - first) * scale
            shapes.append(rectangle(x, y, max(0.4, call.exposed * scale), _BAR, colour, title))
    return shapes


def exposed_bars(rows: Sequence[OperationSummary]) -> str:
    """Exposed seconds of a step by axis and operation, the longest first."""
    left, right = 200, 110
    scale = (WIDTH - left - right) / max(row.exposed_seconds for row in rows)
    shapes, y = [], 4.0
    for row in rows:
        shapes.append(text(0, y + 12, f"{row.axis}: {row.operation}"))
        told = seconds_text(row.exposed_seconds)
        title = f"{row.operation} over {row.axis}: {told}, {bytes_text(row.num_bytes)} in {row.calls:g} calls"
        width = row.exposed_seconds * scale
        shapes.append(rectangle(left, y, width, 16, axis_colour(row.axis), title))
        shapes.append(text(left + width + 8, y + 12, told))
        y += 24
    return svg(WIDTH, y, "Exposed seconds of a step by axis and operation", shapes)


def heat_map(matrix: Sequence[Sequence[float]]) -> str:
    """Cells of bytes from each rank to each other one; many ranks are summed in blocks."""
    block = -(-len(matrix) // MAX_CELLS)
    num = -(-len(matrix) // block)
    cells = [[0.0] * num for _ in range(num)]
    for sender, row in enumerate(matrix):
        for receiver, num_bytes in enumerate(row):
            cells[sender // block][receiver // block] += num_bytes
    most = max((value for row in cells for value in row), default=0.0) or 1.0
    size, left, top = min(64.0, 560 / num), 120, 34
    names = [
        str(n * block) if block == 1 else f"{n * block}–{min(len(matrix), (n + 1) * block) - 1}" for n in range(num)
    ]
    shapes = [text(left, 12, "to rank", "quiet"), text(0, top + size / 2 + 4, "from rank", "quiet")]
    every = -(-num // 16)
    for n in range(0, num, every):
        shapes.append(text(left + (n + 0.5) * size, top - 6, names[n], "quiet", "middle"))
        shapes.append(text(left - 8, top + (n + 0.5) * size + 4, names[n], "quiet", "end"))
    for sender, row in enumerate(cells):
        for receiver, value in enumerate(row):
            x, y = left + receiver * size, top + sender * size
            title = f"rank {names[sender]} to {names[receiver]}: {bytes_text(value)}"
            shade = f'<g opacity="{0.06 + 0.94 * value / most:.3f}">'
            shapes.append(f"{shade}{rectangle(x, y, size - 1, size - 1, 'compute', title)}</g>")
            if size >= 60 and value:
                dark = "on-dark" if value > 0.55 * most else ""
                shapes.append(text(x + size / 2, y + size / 2 + 4, bytes_text(value), dark, "middle"))
    return svg(WIDTH, top + num * size + 8, f"Bytes between {len(matrix)} ranks", shapes)

"""The page of `weft profile`: one HTML file that shows where communication time goes and loads nothing.

Its pictures are SVG: a step by rank, exposed time by axis, and bytes between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from weft.comm.recorder import CommunicationCall, PhaseSpan
from weft.planner.report.figures import WIDTH, line, rectangle, svg, text
from weft.planner.report.html_parts import document, figure, legend_list, table
from weft.planner.report.style import bytes_text, number, part_class, percent, seconds_text
from weft.planner.report.timeline import MAX_RANKS, MAX_RECTANGLES, drawn_ranks
from weft.recording.rank_file import RankRecording
from weft.recording.summary import OperationSummary, RecordingSummary
from weft.schedule.draw import axis_marks, time_unit

TABLE_HEADS = (
    "axis",
    "operation",
    "#calls",
    "#bytes",
    "#exposed",
    "#measured",
    "#predicted",
    "#spread",
    "#late",
)


def profile_page(name: str, ranks: Sequence[RankRecording], found: RecordingSummary) -> str:
    """The page of a recording. `name` is that of the run."""
    body = "\n".join(
        (
            *(_head(name, found), _timeline(ranks), _exposed(found), _late(found), _matrix(found)),
            *(_operations(found), _nics(found)),
        )
    )
    return document(f"weft profile: {name}", body)


def row_texts(row: OperationSummary) -> list[str]:
    """The cells of an operation's row, under TABLE_HEADS."""
    return [
        row.axis,
        row.operation,
        number(row.calls),
        bytes_text(row.num_bytes),
        seconds_text(row.exposed_seconds),
        seconds_text(row.seconds),
        seconds_text(row.predicted_seconds),
        seconds_text(row.spread_seconds),
        "–" if row.late_rank is None else str(row.late_rank),
    ]


def late_sentences(found: RecordingSummary) -> list[str]:
    """A sentence for each rank that others waited for."""
    return [
        f"Others waited {seconds_text(late.late_seconds)} for rank {late.rank}, at most "
        f"{seconds_text(late.longest_seconds)} at once: {late.operation} over {late.axis} in step {late.longest_step}"
        f"{f', {late.longest_block}' if late.longest_block else ''}."
        for late in found.late_ranks
    ]


def _head(name: str, found: RecordingSummary) -> str:
    sent = sum(map(sum, found.matrix_bytes)) / max(1, found.num_ranks) / (found.last_step - found.first_step + 1)
    clock = "CUDA events" if found.device == "cuda" else "the host's clock"
    tiles = {
        "a step": seconds_text(found.step_seconds),
        "exposed communication": percent(found.exposed_share),
        "sent by a rank in a step": bytes_text(sent),
        **{name: seconds_text(seconds) for name, seconds in list(found.phase_seconds.items())[:4]},
    }
    shown = "".join(f"<div><b>{escape(value)}</b><small>{escape(what)}</small></div>" for what, value in tiles.items())
    late = "".join(f"<p>{escape(sentence)}</p>" for sentence in late_sentences(found)) or "<p>No rank is late.</p>"
    return (
        f'<header><div class="kicker">weft profile</div><h1>{escape(name)}</h1><ul class="facts">'
        f"<li>Plan: {escape(found.plan)}, {found.num_ranks} ranks on {escape(found.device)}</li>"
        f"<li>Steps {found.first_step} to {found.last_step}; times by {clock}, on the clock of rank 0</li></ul>"
        f'</header><section class="answer"><h2>Where communication time goes</h2><div class="tiles">{shown}</div>{late}'
        "</section>"
    )


def _timeline(ranks: Sequence[RankRecording]) -> str:
    picture, axes, note = rank_timeline(ranks)
    what = (
        "One step of each rank: phases (pale), waits for communication that nothing hides (full height), and below "
        f"them calls from their start to the use of their result. {note}"
    )
    legend = legend_list(PHASE_COLOURS.values(), before="phases:", names={v: k for k, v in PHASE_COLOURS.items()})
    return figure("The last recorded step by rank", what, legend + _axis_legend(axes), picture)


def _axis_legend(axes: Sequence[str]) -> str:
    names: dict[str, str] = {}
    for axis in dict.fromkeys(axes):
        colour = axis_colour(axis)
        names[colour] = f"{names[colour]}, {axis}" if colour in names else axis
    return legend_list(names, before="axes:", names=names)


def _exposed(found: RecordingSummary) -> str:
    rows = [row for row in found.operations if row.exposed_seconds > 0]
    if not rows:
        return ""
    what = "Seconds of a step in which a rank waited (mean over ranks), by axis and operation."
    return figure("Exposed time by axis", what, _axis_legend([row.axis for row in rows]), exposed_bars(rows))


def _late(found: RecordingSummary) -> str:
    if not found.longest:
        return ""
    rows = [
        [
            f"rank {one.late_rank}",
            seconds_text(one.waited_seconds),
            str(one.step),
            escape(one.axis),
            escape(one.operation),
            escape(one.block),
            bytes_text(one.num_bytes),
        ]
        for one in found.longest
    ]
    heads = ["late rank", "#waited for it", "#step", "axis", "operation", "block", "#bytes"]
    return (
        '<section><h2>Stragglers</h2><p class="quiet">The longest waits for a rank that came last to a call.'
        f"</p>{table(heads, rows)}</section>"
    )


def _matrix(found: RecordingSummary) -> str:
    what = (
        "Bytes that each rank (row) sent to each other one (column): counted for messages, as rings send them for "
        "collectives."
    )
    return figure("Bytes between ranks", what, "", heat_map(found.matrix_bytes))


def _operations(found: RecordingSummary) -> str:
    rows = [[escape(cell) for cell in row_texts(row)] for row in found.operations]
    return (
        '<section><h2>All operations</h2><p class="quiet">In a step of one rank. Measured: from the last rank\'s '
        "arrival until a rank used the result, so it is an upper bound where communication is hidden. Predicted: the "
        f"ring formulas on the planner's links. Spread: from the first arrival to the last.</p>"
        f"{table(TABLE_HEADS, rows)}</section>"
    )


def _nics(found: RecordingSummary) -> str:
    rows = [
        [escape(host), escape(name), bytes_text(one.sent_bytes), bytes_text(one.received_bytes), str(one.errors)]
        for host, nics in found.nics.items()
        for name, one in nics.items()
    ]
    if not rows:
        return ""
    return (
        '<section><h2>Network interfaces</h2><p class="quiet">What they counted while steps were recorded, of all '
        f"processes of a host.</p>{table(['host', 'interface', '#sent', '#received', '#errors'], rows)}</section>"
    )


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

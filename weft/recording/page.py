"""The page of `weft profile`: one HTML file that shows where communication time goes and loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from weft.planner.report.html_parts import document, figure, legend_list, table
from weft.planner.report.style import bytes_text, number, percent, seconds_text
from weft.recording.pictures import PHASE_COLOURS, axis_colour, exposed_bars, heat_map, rank_timeline
from weft.recording.rank_file import RankRecording
from weft.recording.summary import OperationSummary, RecordingSummary

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

"""Draws schedules.svg and prints the table of pipeline.md, both from the simulator: python docs/schedules.py

Four ranks, eight micro-batches, free messages; a rank's share of the model takes 1 s forward, 1 s for the gradients of
its inputs and 1 s for those of its weights.
"""

from __future__ import annotations

from pathlib import Path

from weft.schedule import Message, Schedule, Timeline, make_schedule, simulate, to_svg, with_messages

NUM_RANKS, NUM_MICRO_BATCHES = 4, 8
SHOWN: dict[str, tuple[str, dict[str, int]]] = {
    "gpipe": ("gpipe", {}),
    "1f1b": ("1f1b", {}),
    "interleaved, chunks = 2": ("interleaved", {"chunks": 2}),
    "zero-bubble": ("zero-bubble", {}),
    "bidirectional": ("bidirectional", {}),
    "message": ("message", {}),
    "gems, batches = 2": ("gems", {"batches": 2}),
    "gems": ("gems", {}),
}
NOT_DRAWN = "gems"  # so long that it would leave little room for the others


def timelines() -> dict[str, Timeline]:
    """Each schedule with its options, by what it is called here."""
    found = {}
    for title, (name, options) in SHOWN.items():
        schedule = make_schedule(name, NUM_RANKS, NUM_MICRO_BATCHES, **options)
        seconds = schedule.num_ranks / schedule.num_stages
        found[title] = simulate(schedule, seconds, seconds, seconds)
    return found


def table() -> list[str]:
    """The rows of the table, in Markdown."""
    return [
        "| schedule | step | bubble | activations | weights | messages |",
        "|---|---|---|---|---|---|",
        *(_row(title, timeline) for title, timeline in timelines().items()),
    ]


def picture() -> str:
    """The schedules one below the other."""
    return to_svg({title: timeline for title, timeline in timelines().items() if title != NOT_DRAWN})


def _row(title: str, timeline: Timeline) -> str:
    schedule = timeline.schedule
    shares = max(timeline.peak_activations) * schedule.num_ranks / schedule.num_stages
    return (
        f"| `{title}` | {timeline.makespan_seconds:g} s | {100 * timeline.bubble_share:.1f} % | {shares:g} "
        f"| {len(schedule.placement)}× | {_num_messages(schedule)} |"
    )


def _num_messages(schedule: Schedule) -> int:
    steps = [step for steps in with_messages(schedule).lists for step in steps]
    return sum(isinstance(step, Message) and step.is_send for step in steps)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
    print("\n".join(table()))

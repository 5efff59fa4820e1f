"""Simulation of a schedule: when every action runs, how long ranks wait, and how many activations they hold.

Ranks run their lists in order. An action starts when its rank is free and its inputs have arrived. A message takes
`message_seconds` between ranks and no time of a rank (sends and receives overlap computation). An activation lives from
the end of its forward to the end of its last use: the backward, or the weight action if that is separate. The
activation of a shadow lives until the end of the step.

`timeline_of` makes a timeline from measured spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from weft.errors import PlanError
from weft.schedule.actions import SHADOW, Action, Schedule
from weft.schedule.check import order_with_needs

PerStage = float | Sequence[float]
PerEdge = float | Sequence[float]


class Span(NamedTuple):
    """An action or a wait of one rank, from start to end."""

    start_seconds: float
    end_seconds: float
    action: Action | Literal["wait"]


class LiveActivations(NamedTuple):
    """The activations that a rank holds from this time on."""

    seconds: float
    num_activations: int
    activation_bytes: float


@dataclass(frozen=True)
class Timeline:
    """The spans of each rank, without gaps from 0 to the makespan, and the activations that each rank holds."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    live: tuple[tuple[LiveActivations, ...], ...]
    makespan_seconds: float

    @property
    def bubble_share(self) -> float:
        """The share of all ranks' time in which they wait."""
        waits = (span for spans in self.spans for span in spans if span.action == "wait")
        waited_seconds = sum(span.end_seconds - span.start_seconds for span in waits)
        return waited_seconds / (len(self.spans) * self.makespan_seconds)

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """The largest number of micro-batches whose activations each rank holds at once."""
        return tuple(max((now.num_activations for now in live), default=0) for live in self.live)

    @property
    def peak_activation_bytes(self) -> tuple[float, ...]:
        return tuple(max((now.activation_bytes for now in live), default=0) for live in self.live)


def simulate(
    schedule: Schedule,
    forward_seconds: PerStage = 1,
    backward_seconds: PerStage = 2,
    weight_seconds: PerStage = 0,
    message_seconds: PerEdge = 0,
    activation_bytes: PerStage = 1,
) -> Timeline:
    """Run the lists with the given times, each one number or one per stage (messages: one per edge).

    `backward_seconds` is the time of the input gradients and `weight_seconds` that of the weight gradients. A backward
    that computes both takes the sum, so schedules can be compared under the same numbers.
    """
    num_stages = schedule.num_stages
    forward = _each("forward_seconds", forward_seconds, schedule, num_stages, "stage")
    backward = _each("backward_seconds", backward_seconds, schedule, num_stages, "stage")
    weight = _each("weight_seconds", weight_seconds, schedule, num_stages, "stage")
    message = _each("message_seconds", message_seconds, schedule, len(schedule.edges), "edge")
    whole = [b if stage in schedule.split_stages else b + weight[stage] for stage, b in enumerate(backward)]
    seconds = {"forward": forward, "backward": whole, "weight": weight, SHADOW: forward}
    end: dict[Action, float] = dict.fromkeys(schedule.done, 0.0)
    spans: list[list[Span]] = [[] for _ in schedule.lists]
    for rank, action, needs in order_with_needs(schedule):
        start = spans[rank][-1].end_seconds if spans[rank] else 0
        for need, edge in needs:
            arrived = end[need]
            if edge is not None and schedule.rank_of(need.stage, need.replica) != rank:
                arrived += message[edge]
            start = max(start, arrived)
        end[action] = start + seconds[action.kind][action.stage]
        spans[rank].append(Span(start, end[action], action))
    if max(end.values()) <= 0:
        raise PlanError("forward, backward, weight and message_seconds are all 0; give at least one a time")
    return timeline_of(schedule, spans, activation_bytes)


def timeline_of(schedule: Schedule, busy: Sequence[Sequence[Span]], activation_bytes: PerStage = 1) -> Timeline:
    """Return the timeline of the actions that every rank ran, in order and on one clock. Gaps are waits."""
    size_bytes = _each("activation_bytes", activation_bytes, schedule, schedule.num_stages, "stage")
    makespan = max(span.end_seconds for spans in busy for span in spans)
    lines, lives = [], []
    for spans in busy:
        line: list[Span] = []
        live: list[LiveActivations] = []
        free = 0.0
        for span in spans:
            assert isinstance(span.action, Action)
            if span.start_seconds > free:
                line.append(Span(free, span.start_seconds, "wait"))
            line.append(span)
            free = span.end_seconds
            _note(live, span.action, free, size_bytes[span.action.stage], span.action.stage in schedule.split_stages)
        if free < makespan:
            line.append(Span(free, makespan, "wait"))
        lines.append(tuple(line))
        lives.append(tuple(live))
    return Timeline(schedule, tuple(lines), tuple(lives), makespan)


def simulate_like(measured: Timeline) -> Timeline:
    """Simulate a measured timeline's schedule with the mean time of each action kind at each stage; messages are
    free.
    """
    schedule = measured.schedule
    taken: dict[tuple[str, int], list[float]] = {}
    for spans in measured.spans:
        for span in spans:
            if isinstance(span.action, Action):
                key = span.action.kind, span.action.stage
                taken.setdefault(key, []).append(span.end_seconds - span.start_seconds)

    def mean(kind: str) -> list[float]:
        found = (taken.get((kind, stage), [0.0]) for stage in range(schedule.num_stages))
        return [sum(one) / len(one) for one in found]

    return simulate(schedule, mean("forward"), mean("backward"), mean("weight"))


def _note(live: list[LiveActivations], action: Action, now_seconds: float, size_bytes: float, split: bool) -> None:
    """Append the change in live activations that `action` makes, if any."""
    change = {"forward": 1, "backward": 0 if split else -1, "weight": -1, SHADOW: 1}[action.kind]
    if change:
        _, num, held_bytes = live[-1] if live else LiveActivations(0, 0, 0)
        live.append(LiveActivations(now_seconds, num + change, held_bytes + change * size_bytes))


def _each(name: str, value: float | Sequence[float], schedule: Schedule, count: int, what: str) -> list[float]:
    values = list(value) if isinstance(value, Sequence) else [value] * count
    if len(values) != count:
        raise PlanError(
            f"{name} has {len(values)} values but {schedule.name} has {count} {what}s; "
            f"give one number or one per {what}"
        )
    if any(v < 0 for v in (values if isinstance(value, Sequence) else [value])):
        raise PlanError(f"{name} = {value} has a negative value; give numbers from 0 on")
    return values

"""Simulation: when every action of a schedule runs, how long ranks wait, and how many activations they hold.

Ranks run their lists in order; an action starts when its rank is free and what it needs has arrived. A message takes
`message_seconds` between ranks and no rank's time (sends and receives run beside computation). An activation lives
from the end of its forward to the end of its last use: the backward, or the weight action where that is split off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from weft.errors import PlanError
from weft.pipeline.actions import Action, Schedule
from weft.pipeline.check import run_order

PerStage = float | Sequence[float]


class Span(NamedTuple):
    """A stretch of a rank's time."""

    start_seconds: float
    end_seconds: float
    action: Action | Literal["wait"]


class Live(NamedTuple):
    """What a rank holds from this moment on."""

    seconds: float
    num_activations: int
    activation_bytes: float


@dataclass(frozen=True)
class Timeline:
    """What a simulation found: per rank the spans without gaps from 0 to the makespan, and the activations held."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    live: tuple[tuple[Live, ...], ...]
    makespan_seconds: float

    @property
    def bubble_share(self) -> float:
        """The share of all ranks' time in which they wait."""
        waits = (span for spans in self.spans for span in spans if span.action == "wait")
        waited_seconds = sum(span.end_seconds - span.start_seconds for span in waits)
        return waited_seconds / (len(self.spans) * self.makespan_seconds)

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """The most micro-batches' activations that each rank holds at once."""
        return tuple(max((now.num_activations for now in live), default=0) for live in self.live)

    @property
    def peak_activation_bytes(self) -> tuple[float, ...]:
        return tuple(max((now.activation_bytes for now in live), default=0) for live in self.live)


def simulate(
    schedule: Schedule,
    forward_seconds: PerStage = 1,
    backward_seconds: PerStage = 2,
    weight_seconds: PerStage = 0,
    message_seconds: float = 0,
    activation_bytes: PerStage = 1,
) -> Timeline:
    """Runs the lists under the given times, each one number or one per stage.

    `backward_seconds` is the time of the input gradients and `weight_seconds` that of the weight gradients; a backward
    from which nothing is split off takes both, so schedules compare under the same numbers.
    """
    forward = _per_stage("forward_seconds", forward_seconds, schedule)
    backward = _per_stage("backward_seconds", backward_seconds, schedule)
    weight = _per_stage("weight_seconds", weight_seconds, schedule)
    size_bytes = _per_stage("activation_bytes", activation_bytes, schedule)
    _per_stage("message_seconds", message_seconds, schedule)
    whole = [b if stage in schedule.split_stages else b + weight[stage] for stage, b in enumerate(backward)]
    seconds = {"forward": forward, "backward": whole, "weight": weight}
    end: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.lists]
    live: list[list[Live]] = [[] for _ in schedule.lists]
    for rank, action in run_order(schedule):
        free = spans[rank][-1].end_seconds if spans[rank] else 0
        start = free
        for need, _ in schedule.needs(action):
            travel = message_seconds if schedule.rank_of(need.stage, need.replica) != rank else 0
            start = max(start, end[need] + travel)
        if start > free:
            spans[rank].append(Span(free, start, "wait"))
        end[action] = start + seconds[action.kind][action.stage]
        spans[rank].append(Span(start, end[action], action))
        _note(live[rank], action, end[action], size_bytes[action.stage], action.stage in schedule.split_stages)
    makespan = max(end.values())
    if makespan <= 0:
        raise PlanError("forward, backward, weight and message_seconds are all 0; give at least one a time")
    for line in spans:
        if (last := line[-1].end_seconds if line else 0) < makespan:
            line.append(Span(last, makespan, "wait"))
    return Timeline(schedule, tuple(map(tuple, spans)), tuple(map(tuple, live)), makespan)


def _note(live: list[Live], action: Action, now_seconds: float, size_bytes: float, split: bool) -> None:
    """Enters an activation that begins or ends with `action`."""
    change = {"forward": 1, "backward": 0 if split else -1, "weight": -1}[action.kind]
    if change:
        _, num, held_bytes = live[-1] if live else Live(0, 0, 0)
        live.append(Live(now_seconds, num + change, held_bytes + change * size_bytes))


def _per_stage(name: str, value: PerStage, schedule: Schedule) -> list[float]:
    values = list(value) if isinstance(value, Sequence) else [value] * schedule.num_stages
    if len(values) != schedule.num_stages:
        raise PlanError(
            f"{name} has {len(values)} values but {schedule.name} has {schedule.num_stages} stages; "
            "give one number or one per stage"
        )
    if any(v < 0 for v in values):
        raise PlanError(f"{name} = {value} has a negative value; give numbers from 0 on")
    return values

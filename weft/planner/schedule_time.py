"""The duration of a pipeline schedule, computed in one pass over an order of its actions that is found once.

`schedule/simulate.py` returns the whole timeline. The search needs only the duration and the share of waiting, for many
plans with the same schedule. A test checks that both give the same numbers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from weft.plan import Pipe
from weft.schedule.actions import SHADOW, Action
from weft.schedule.check import order_with_needs
from weft.schedule.schedules import make_schedule
from weft.schedule.shadow import with_shadows


class _OrderedAction(NamedTuple):
    """An action in an executable order.

    `needs` are the positions in that order of the actions on the same rank that must be done before. `from_others` are
    (position, edge) of actions on other ranks: the edge is the earlier stage of the two that the message connects.
    """

    rank: int
    kind: str
    stage: int
    needs: tuple[int, ...]
    from_others: tuple[tuple[int, int], ...]


class ScheduleTime(NamedTuple):
    """The duration of a schedule, and the share of the ranks' time in which they wait."""

    makespan_seconds: float
    bubble_share: float


@lru_cache(maxsize=64)
def _entries(pipe: Pipe, num_micro_batches: int) -> tuple[tuple[_OrderedAction, ...], frozenset[int]]:
    """Returns the actions in an executable order, and the stages whose weight gradients are separate actions."""
    schedule = make_schedule(pipe.schedule, pipe.degree, num_micro_batches, **pipe.options)
    if pipe.shadow:
        schedule = with_shadows(schedule)
    found: list[_OrderedAction] = []
    index: dict[Action, int] = {}
    for rank, action, needed in order_with_needs(schedule):
        needs: list[int] = []
        others: list[tuple[int, int]] = []
        for need, edge in needed:
            if edge is not None and schedule.rank_of(need.stage, need.replica) != rank:
                others.append((index[need], min(need.stage, action.stage)))
            else:
                needs.append(index[need])
        index[action] = len(found)
        found.append(_OrderedAction(rank, action.kind, action.stage, tuple(needs), tuple(others)))
    return tuple(found), schedule.split_stages


@lru_cache(maxsize=64)  # cached, as plans that differ only in shard and data have equal stages
def run(
    pipe: Pipe, num_micro_batches: int, stages: tuple[tuple[float, float], ...], message_seconds: tuple[float, ...]
) -> ScheduleTime:
    """The duration of a schedule.

    `stages` are (forward, backward) seconds of one micro-batch in each stage; half of backward is that of the weights.
    `message_seconds` are those of a message between each stage and the next.
    """
    entries, split = _entries(replace(pipe, split=()), num_micro_batches)
    seconds = {
        "forward": [stage[0] for stage in stages],
        "backward": [stage[1] / 2 if place in split else stage[1] for place, stage in enumerate(stages)],
        "weight": [stage[1] / 2 for stage in stages],
        SHADOW: [stage[0] for stage in stages],
    }
    ends: list[float] = []
    free, busy = [0.0] * pipe.degree, 0.0
    for rank, kind, stage, needs, others in entries:
        start = free[rank]
        for need in needs:  # `max` would take most of the time of this loop
            if ends[need] > start:
                start = ends[need]
        for need, edge in others:
            arrived = ends[need] + message_seconds[edge]
            if arrived > start:
                start = arrived
        taken = seconds[kind][stage]
        busy += taken
        end = free[rank] = start + taken
        ends.append(end)
    makespan = max(free)
    return ScheduleTime(makespan, 1 - busy / (pipe.degree * makespan))

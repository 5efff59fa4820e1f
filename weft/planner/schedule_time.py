"""How long a schedule's own lists take, without the picture: one pass over an order found once.

`simulate` of the pipeline says all that happens; the search asks only how long it takes and how long ranks wait, of
many plans with the same lists. A test holds both to the same numbers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from weft.plan import Pipe
from weft.schedule.actions import SHADOW, Action
from weft.schedule.check import run_order
from weft.schedule.schedules import make_schedule
from weft.schedule.shadow import with_shadows


class _Entry(NamedTuple):
    """An action in an order that can run: what it needs by place in the order, and what of it comes by message, with
    the stage before the edge over which that comes.
    """

    rank: int
    kind: str
    stage: int
    needs: tuple[int, ...]
    from_others: tuple[tuple[int, int], ...]


class Run(NamedTuple):
    makespan_seconds: float
    bubble_share: float


@lru_cache(maxsize=64)
def _entries(pipe: Pipe, num_micro_batches: int) -> tuple[tuple[_Entry, ...], frozenset[int]]:
    """The lists in an order that can run, and the stages whose weight gradients are actions of their own."""
    schedule = make_schedule(pipe.schedule, pipe.degree, num_micro_batches, **pipe.options)
    if pipe.shadow:
        schedule = with_shadows(schedule)
    found: list[_Entry] = []
    index: dict[Action, int] = {}
    for rank, action in run_order(schedule):
        needs: list[int] = []
        others: list[tuple[int, int]] = []
        for need, edge in schedule.needs(action):
            if edge is not None and schedule.rank_of(need.stage, need.replica) != rank:
                others.append((index[need], min(need.stage, action.stage)))
            else:
                needs.append(index[need])
        index[action] = len(found)
        found.append(_Entry(rank, action.kind, action.stage, tuple(needs), tuple(others)))
    return tuple(found), schedule.split_stages


@lru_cache(maxsize=64)  # plans that differ in shard and data have the same stages
def run(
    pipe: Pipe, num_micro_batches: int, stages: tuple[tuple[float, float], ...], message_seconds: tuple[float, ...]
) -> Run:
    """The lists under (forward, backward) of each stage, half of which is that of the weights, and the seconds of a
    message between each stage and the next.
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
        for need in needs:
            start = max(start, ends[need])
        for need, edge in others:
            start = max(start, ends[need] + message_seconds[edge])
        taken = seconds[kind][stage]
        busy += taken
        free[rank] = start + taken
        ends.append(start + taken)
    makespan = max(free)
    return Run(makespan, 1 - busy / (pipe.degree * makespan))

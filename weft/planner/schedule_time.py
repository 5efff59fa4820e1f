"""The duration of a pipeline schedule, computed in one pass over an order of its actions that is found once.

`schedule/simulate.py` returns the whole timeline. The search needs only the duration and the share of waiting, for many
plans with the same schedule. A test checks that both give the same numbers.

A steady schedule of many micro-batches repeats itself: each round ends the same time after the round before. Once the
rounds that later ones depend on do, the rest of the duration is their number times that period, and is not simulated.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from weft.plan import Pipe, Plan
from weft.schedule.actions import SHADOW, Action
from weft.schedule.check import order_with_needs
from weft.schedule.schedules import make_schedule, refuse_schedule
from weft.schedule.shadow import with_shadows

KINDS = ("forward", "backward", "weight", SHADOW)
# Schedules whose rounds of as many micro-batches as ranks repeat themselves: the rounds that are simulated first, and
# those of them, counted from the end, in which each kind of action must do so. A forward is at most one round (in
# interleaved three) ahead of its backward, and a backward one ahead of its gradients of weights. So no action after
# these rounds depends on an action before them.
STEADY = {
    "1f1b": (4, {"forward": (2, 0), "backward": (2, 1)}),
    "zero-bubble": (5, {"forward": (2, 0), "backward": (2, 1), "weight": (3, 2)}),
    "interleaved": (6, {"forward": (4, 0), "backward": (4, 3)}),
}
NOTHING = -2  # in place of a position: no action of another rank is needed
SAME = 1e-9  # relative difference of two rounds that are equally long


class _Order(NamedTuple):
    """The actions of a schedule in an executable order.

    `work` is the place of an action's kind in KINDS times the number of stages, plus its stage. `need` is the position
    of the action on another rank whose message it waits for (-1: none), and `edge` the earlier stage of the two that
    the message connects. What it needs of its own rank comes before it there. `place` is the position of each action,
    at its work times the number of micro-batches, plus its micro-batch.
    """

    rank: array[int]
    work: array[int]
    need: array[int]
    edge: array[int]
    place: array[int]
    split: frozenset[int]  # stages whose gradients of weights are actions of their own


class ScheduleTime(NamedTuple):
    """The duration of a schedule, and the share of the ranks' time in which they wait."""

    makespan_seconds: float
    bubble_share: float


@lru_cache(maxsize=16)
def _order_of(pipe: Pipe, num_micro_batches: int) -> _Order:
    schedule = make_schedule(pipe.schedule, pipe.degree, num_micro_batches, **pipe.options)
    if pipe.shadow:
        schedule = with_shadows(schedule)
    num_stages, last = schedule.num_stages, schedule.num_stages - 1
    place = array("i", [-1]) * (len(KINDS) * num_stages * num_micro_batches)
    order = _Order(array("i"), array("i"), array("i"), array("i"), place, schedule.split_stages)

    def append(rank: int, action: Action, need: int, edge: int) -> None:
        work = KINDS.index(action.kind) * num_stages + action.stage
        place[work * num_micro_batches + action.micro_batch] = len(order.rank)
        for numbers, number in zip(order[:4], (rank, work, need, edge), strict=True):
            numbers.append(number)

    if pipe.shadow or len(schedule.placement) > 1:
        for rank, action, needed in order_with_needs(schedule):
            of_others = [(one, edge) for one, edge in needed if schedule.rank_of(one.stage, one.replica) != rank]
            assert len(of_others) <= 1, "a stage of a chain waits for one neighbour"
            if not of_others or of_others[0][1] is None:
                append(rank, action, -1, 0)
                continue
            one = of_others[0][0]
            at = (KINDS.index(one.kind) * num_stages + one.stage) * num_micro_batches + one.micro_batch
            append(rank, action, place[at], min(one.stage, action.stage))
        return order
    positions, moved = [0] * pipe.degree, True
    while moved:
        moved = False
        for rank, steps in enumerate(schedule.lists):
            while positions[rank] < len(steps):
                step = steps[positions[rank]]
                assert isinstance(step, Action)
                kind, stage, micro_batch, _ = step
                need = edge = 0
                if kind == "forward" and stage:
                    need, edge = place[(stage - 1) * num_micro_batches + micro_batch], stage - 1
                elif kind == "backward" and stage < last:
                    need, edge = place[(num_stages + stage + 1) * num_micro_batches + micro_batch], stage
                else:
                    need = NOTHING
                if need == -1:  # not yet in the order
                    break
                append(rank, step, max(need, -1), edge)
                positions[rank] += 1
                moved = True
    return order


def schedule_refusal(plan: Plan, num_micro_batches: int) -> str | None:
    """Returns why the plan's schedule does not allow its options or so many micro-batches; None if it does."""
    pipe = plan.pipe
    if pipe.schedule in STEADY and pipe.in_flight is None:  # which allow any number
        return None
    return refuse_schedule(pipe.schedule, pipe.degree, num_micro_batches, **pipe.options)


def least_makespan(
    pipe: Pipe, num_micro_batches: int, stages: Sequence[tuple[float, float]], message_seconds: Sequence[float]
) -> float:
    """A lower bound of the duration that `run` returns, without a schedule.

    A rank computes all of its micro-batches. The first of them reaches it through the stages before its own; unless
    gradients of weights are computed late, the last gradient then goes back through them. With 1f1b and zero-bubble,
    micro-batches also go around any part of the pipeline with as many micro-batches as that has ranks.
    """
    degree, loads = pipe.degree, [sum(map(sum, stages[rank :: pipe.degree])) for rank in range(pipe.degree)]
    if pipe.is_mirrored:
        return num_micro_batches * max((one + other) / 2 for one, other in zip(loads, reversed(loads), strict=True))
    is_split = pipe.schedule == "zero-bubble"
    backwards = [backward / 2 if is_split else backward for _, backward in stages[:degree]]
    messages = [*message_seconds[: degree - 1], 0.0]
    way_in = [0.0, *accumulate(stage[0] + message for stage, message in zip(stages, messages, strict=False))]
    way_out = [0.0, *accumulate(one + message for one, message in zip(backwards, messages, strict=True))]
    longest = max(
        way_in[rank] + num_micro_batches * load + (0.0 if is_split else way_out[rank])
        for rank, load in enumerate(loads)
    )
    if pipe.schedule not in ("1f1b", "zero-bubble"):
        return longest
    whole = way_in[degree] + way_out[degree] - 2 * messages[-1]  # of one micro-batch through all stages and back
    for first in range(degree):
        ahead = degree - 1 - first  # forwards of the first rank of the part before its first backward
        if ahead >= num_micro_batches:
            continue
        begin = way_in[first] + ahead * stages[first][0]
        for end in range(first + 1, degree):
            size = end - first + 1
            around = way_in[end] - way_in[first] + stages[end][0] + way_out[end] - way_out[first] + backwards[end]
            times = (num_micro_batches - 1 - ahead) // size
            left = num_micro_batches - 1 - ahead - times * size
            longest = max(longest, begin + times * around + whole - way_in[first] + left * backwards[first])
    return longest


def least_with_any_stages(seconds: float, degree: int, num_micro_batches: int, share: float = 1.0) -> float:
    """A lower bound of a pipeline's duration, whose ranks together compute `seconds` for a micro-batch in any stages.

    A rank computes all micro-batches, and waits for at least `share` of the time of one in all ranks before its own.
    The duration is shortest if each rank takes as long as that allows: it is this wait plus the rank's work for all.
    """
    if share == 0:
        return num_micro_batches * seconds / degree
    return seconds * share / (1 - (1 - share / num_micro_batches) ** degree)


@lru_cache(maxsize=1 << 10)  # cached, as plans that differ only in shard and data have equal stages
def run(
    pipe: Pipe, num_micro_batches: int, stages: tuple[tuple[float, float], ...], message_seconds: tuple[float, ...]
) -> ScheduleTime:
    """The duration of a schedule.

    `stages` are (forward, backward) seconds of one micro-batch in each stage; half of backward is that of the weights.
    `message_seconds` are those of a message between each stage and the next.
    """
    pipe = replace(pipe, split=(), balance="time")
    period = pipe.degree if pipe.schedule == "interleaved" else 1
    if pipe.schedule in STEADY and not pipe.shadow and num_micro_batches % period == 0:
        fewer = STEADY[pipe.schedule][0] * pipe.degree
        while 3 * fewer < 2 * num_micro_batches:
            found, ends = _run(pipe, fewer, stages, message_seconds)
            round_seconds = _period_seconds(pipe, fewer, period, ends)
            if round_seconds is not None:
                busy = (1 - found.bubble_share) * found.makespan_seconds * num_micro_batches / fewer
                makespan = found.makespan_seconds + (num_micro_batches - fewer) // period * round_seconds
                return ScheduleTime(makespan, 1 - busy / makespan)
            fewer *= 2
    return _run(pipe, num_micro_batches, stages, message_seconds)[0]


def _run(
    pipe: Pipe, num_micro_batches: int, stages: Sequence[tuple[float, float]], message_seconds: Sequence[float]
) -> tuple[ScheduleTime, list[float]]:
    """Runs the whole schedule. Returns its duration, and the end of each action."""
    order = _order_of(pipe, num_micro_batches)
    backwards = [stage[1] / 2 if place in order.split else stage[1] for place, stage in enumerate(stages)]
    forwards, weights = [stage[0] for stage in stages], [stage[1] / 2 for stage in stages]
    seconds = [*forwards, *backwards, *weights, *forwards]
    ends: list[float] = []
    free, busy = [0.0] * pipe.degree, 0.0
    for rank, work, need, edge in zip(order.rank, order.work, order.need, order.edge, strict=True):
        start, taken = free[rank], seconds[work]
        if need >= 0:  # `max` would take most of the time of this loop
            arrived = ends[need] + message_seconds[edge]
            if arrived > start:
                start = arrived
        busy += taken
        end = free[rank] = start + taken
        ends.append(end)
    makespan = max(free)
    return ScheduleTime(makespan, 1 - busy / (pipe.degree * makespan)), ends


def _period_seconds(pipe: Pipe, num_micro_batches: int, period: int, ends: Sequence[float]) -> float | None:
    """The seconds after which each action of the last rounds is repeated for the micro-batch `period` later.

    Returns None if they are not the same for all actions.
    """
    place, found = _order_of(pipe, num_micro_batches).place, None
    for kind, (first, last) in STEADY[pipe.schedule][1].items():
        for stage in range(pipe.num_stages):
            begin = (KINDS.index(kind) * pipe.num_stages + stage) * num_micro_batches
            end = begin + num_micro_batches - last * pipe.degree
            for at in range(begin + num_micro_batches - first * pipe.degree, end):
                seconds = ends[place[at]] - ends[place[at - period]]
                if found is None:
                    found = seconds
                elif abs(seconds - found) > SAME * found:
                    return None
    return found

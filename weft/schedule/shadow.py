"""Shadows (Bamboo, NSDI 2023): each rank also keeps the next rank's stage, and takes it over if that rank is lost.

The functions here work on lists only. `with_shadows` adds the forwards of the shadowed stage. Their input is the rank's
own result, so they need no messages. They run before backwards, which would wait for gradients (Bamboo has one before
each backward; running one for each available input fills the first wait better). Their backwards run only if the rank
is lost: `take_over` returns the lists with which the other ranks finish the interrupted step (and, with nothing done,
any later step).

Living ranks keep what they computed: each keeps the results it has sent until the step ends, and sends again those that
are still needed. The lost rank's results are gone, except for the forwards that its shadow ran too. The backwards of
its stage run in its own order, so gradients are summed in the same order and are bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from weft.errors import PlanError
from weft.schedule.actions import SHADOW, Action, Schedule, Steps, with_messages

SHADOWED_SCHEDULES = ("gpipe", "1f1b")


def with_shadows(schedule: Schedule) -> Schedule:
    """Return lists without messages in which each rank but the last also runs the forwards of the next rank's stage."""
    lists: list[Steps] = []
    for rank in range(schedule.num_ranks):
        steps: list[Action] = []
        made: list[Action] = []  # forwards whose result has no shadow forward yet
        for action in schedule.compute(rank):
            if action.kind == "forward" and action.stage < schedule.num_stages - 1:
                made.append(action)
            elif action.kind == "backward":
                steps += [Action(SHADOW, forward.stage + 1, forward.micro_batch) for forward in made]
                made.clear()
            steps.append(action)
        lists.append(tuple(steps))
    return replace(schedule, lists=tuple(lists))


def kept_actions(schedule: Schedule, lost: int, done: Iterable[Action], has_gradients: bool) -> frozenset[Action]:
    """Return the actions that need not be computed again, given those that living ranks have `done`.

    `has_gradients`: the shadow of the lost rank's stage has received that stage's gradients of this step; they are sent
    to it when they are complete.
    """
    stage = schedule.placement[0].index(lost)
    found = {action for action in done if action.kind != SHADOW}
    found |= {Action("forward", stage, a.micro_batch) for a in done if a.kind == SHADOW and a.stage == stage}
    if has_gradients:
        found |= {Action(kind, stage, n) for kind in ("forward", "backward") for n in range(schedule.num_micro_batches)}
    return frozenset(found)


def take_over(schedule: Schedule, lost: int, done: frozenset[Action] = frozenset()) -> Schedule:
    """Return lists with messages for the remaining ranks after `lost` is lost, given the actions `done` in this step.

    The rank before the lost one runs both stages. Later ranks get the next lower number. The lists have no shadows.
    """
    if not 0 < lost < schedule.num_ranks:
        raise PlanError(f"rank {lost} of {schedule.num_ranks} has no rank before it that could take its stage over")
    number = {rank: rank - (rank > lost) for rank in range(schedule.num_ranks) if rank != lost} | {lost: lost - 1}
    placement = tuple(number[rank] for rank in schedule.placement[0])
    # per rank: one list of actions per stage
    streams: list[list[list[Action]]] = [[] for _ in range(schedule.num_ranks - 1)]
    for rank in range(schedule.num_ranks):
        own = [action for action in schedule.compute(rank) if action.kind != SHADOW and action not in done]
        streams[number[rank]].append(own)
    empty: tuple[Steps, ...] = ((),) * len(streams)
    moved = replace(schedule, placement=(placement,), lists=empty, done=done)
    return with_messages(replace(moved, lists=_merge(moved, streams)))


def _merge(schedule: Schedule, streams: list[list[list[Action]]]) -> tuple[Steps, ...]:
    """Merge the lists of each rank's stages into one, in an order that can run.

    Each rank runs an action that is ready, backwards before forwards; every action is assumed to take equally long.
    """
    places = [[0] * len(own) for own in streams]
    lists: list[list[Action]] = [[] for _ in streams]
    done = set(schedule.done)
    while True:
        running = []
        for rank, own in enumerate(streams):
            heads = [
                (n, stream[place])
                for n, (stream, place) in enumerate(zip(own, places[rank], strict=True))
                if place < len(stream)
            ]
            ready = [(n, head) for n, head in heads if all(need in done for need, _ in schedule.needs(head))]
            if ready:
                n, chosen = min(ready, key=lambda one: (one[1].kind != "backward", -one[1].stage))
                places[rank][n] += 1
                lists[rank].append(chosen)
                running.append(chosen)
        if not running:
            break
        done.update(running)
    assert all(
        place == len(stream)
        for own, at in zip(streams, places, strict=True)
        for stream, place in zip(own, at, strict=True)
    )
    return tuple(tuple(one) for one in lists)

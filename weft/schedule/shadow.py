"""Shadows (Bamboo, NSDI 2023): each rank also keeps the next rank's stage, and takes it over when that rank is lost.

Pure functions on lists. `with_shadows` adds the forwards of the shadowed stage: their input is what the rank has made,
so nothing more is said, and they stand before backwards, which would wait for gradients (Bamboo has one before each; as
many as there are inputs fill the first wait better). Their backwards are done only when the rank is lost: `take_over`
gives the lists with which the others finish the step that it was lost in (and, with nothing done, any later one).

What was computed stays: a rank that lives keeps the results it has sent until the step ends, and sends again what is
still needed. What the lost rank had computed is gone, but for the forwards that its shadow did too. Its stage's
backwards are done in its own order, so gradients add up as they would have, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from weft.errors import PlanError
from weft.schedule.actions import SHADOW, Action, Schedule, Steps, with_messages

SHADOWED_SCHEDULES = ("gpipe", "1f1b")


def with_shadows(schedule: Schedule) -> Schedule:
    """The lists, without messages, in which each rank but the last also does the forwards of the next one's stage."""
    lists: list[Steps] = []
    for rank in range(schedule.num_ranks):
        steps: list[Action] = []
        made: list[Action] = []  # forwards that are not shadowed yet
        for action in schedule.compute(rank):
            if action.kind == "forward" and action.stage < schedule.num_stages - 1:
                made.append(action)
            elif action.kind == "backward":
                steps += [Action(SHADOW, forward.stage + 1, forward.micro_batch) for forward in made]
                made.clear()
            steps.append(action)
        lists.append(tuple(steps))
    return replace(schedule, lists=tuple(lists))


def kept(schedule: Schedule, lost: int, done: Iterable[Action], has_gradients: bool) -> frozenset[Action]:
    """What need not be computed again, of what living ranks have `done`. `has_gradients`: the shadow of the lost rank's
    stage has its gradients of this step, which it is sent when they are complete.
    """
    stage = schedule.placement[0].index(lost)
    found = {action for action in done if action.kind != SHADOW}
    found |= {Action("forward", stage, a.micro_batch) for a in done if a.kind == SHADOW and a.stage == stage}
    if has_gradients:
        found |= {Action(kind, stage, n) for kind in ("forward", "backward") for n in range(schedule.num_micro_batches)}
    return frozenset(found)


def take_over(schedule: Schedule, lost: int, done: frozenset[Action] = frozenset()) -> Schedule:
    """The lists, with messages, of the ranks that are left when `lost` is, and that have `done` so much of the step.

    The rank before the lost one does both stages; ranks behind it move up by one. No shadow is left.
    """
    if not 0 < lost < schedule.num_ranks:
        raise PlanError(f"rank {lost} of {schedule.num_ranks} has no rank before it that could take its stage over")
    number = {rank: rank - (rank > lost) for rank in range(schedule.num_ranks) if rank != lost} | {lost: lost - 1}
    placement = tuple(number[rank] for rank in schedule.placement[0])
    streams: list[list[list[Action]]] = [[] for _ in range(schedule.num_ranks - 1)]  # of each rank, one a stage
    for rank in range(schedule.num_ranks):
        own = [action for action in schedule.compute(rank) if action.kind != SHADOW and action not in done]
        streams[number[rank]].append(own)
    empty: tuple[Steps, ...] = ((),) * len(streams)
    moved = replace(schedule, placement=(placement,), lists=empty, done=done)
    return with_messages(replace(moved, lists=_merge(moved, streams)))


def _merge(schedule: Schedule, streams: list[list[list[Action]]]) -> tuple[Steps, ...]:
    """One list a rank, in an order that can run: each rank does what is ready, backwards before forwards, if every
    action takes as long.
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


# --- what cannot be shadowed

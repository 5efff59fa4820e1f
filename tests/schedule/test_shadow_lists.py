"""Shadows as lists: wherever a rank is lost in a step, the others' lists finish it, each computation once."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from weft.errors import PlanError
from weft.schedule import Action, Message, Schedule, check, make_schedule, simulate, with_messages
from weft.schedule.actions import SHADOW
from weft.schedule.check import run_order
from weft.schedule.shadow import SHADOWED_SCHEDULES, kept_actions, take_over, with_shadows

SIZES = [(name, ranks, batches) for name in SHADOWED_SCHEDULES for ranks in range(2, 7) for batches in range(2, 9)]


def shadowed(name: str, ranks: int, micro_batches: int) -> Schedule:
    return with_messages(with_shadows(make_schedule(name, ranks, micro_batches)))


def random_order(schedule: Schedule, seed: int) -> list[tuple[int, Action]]:
    """The computations in an order that could happen."""
    draw, done, order = random.Random(seed), set[Action](), list[tuple[int, Action]]()
    lists = [list(schedule.compute(rank)) for rank in range(schedule.num_ranks)]
    while any(lists):
        may = [r for r, one in enumerate(lists) if one and all(need in done for need, _ in schedule.needs(one[0]))]
        rank = draw.choice(may)
        order.append((rank, lists[rank].pop(0)))
        done.add(order[-1][1])
    return order


def sends(schedule: Schedule) -> Counter[tuple[int, int, int, str]]:
    return Counter(step.key for steps in schedule.lists for step in steps if isinstance(step, Message) and step.is_send)


@pytest.mark.parametrize(("name", "ranks", "batches"), SIZES)
@pytest.mark.full(5)
def test_a_shadow_adds_forwards_and_no_message(name: str, ranks: int, batches: int) -> None:
    plain, made = with_messages(make_schedule(name, ranks, batches)), shadowed(name, ranks, batches)
    check(made)
    assert sends(made) == sends(plain)
    for rank in range(ranks):
        beside = [action for action in made.compute(rank) if action.kind == SHADOW]
        numbers = range(batches) if rank < ranks - 1 else ()
        assert beside == [Action(SHADOW, rank + 1, number) for number in numbers]
        assert [action for action in made.compute(rank) if action.kind != SHADOW] == list(plain.compute(rank))


def assert_finished(schedule: Schedule, lost: int, order: list[tuple[int, Action]], has_gradients: bool) -> Schedule:
    """What is done of the order, and the rest by the ranks that are left: all of the step, once, and in order."""
    done = {action for rank, action in order if rank != lost}
    have = kept_actions(schedule, lost, done, has_gradients)
    rest = take_over(schedule, lost, have)
    check(rest)
    assert rest.num_ranks == schedule.num_ranks - 1
    again = [action for rank in range(rest.num_ranks) for action in rest.compute(rank)]
    kinds = ("forward", "backward")
    all_of_it = {
        Action(k, s, m) for k in kinds for s in range(schedule.num_stages) for m in range(schedule.num_micro_batches)
    }
    assert Counter([*have, *again]) == Counter(all_of_it)
    assert not {action for action in again if action in done}  # nothing that a living rank did is lost
    for stage in range(schedule.num_stages):
        late = [action.micro_batch for action in again if (action.kind, action.stage) == ("backward", stage)]
        assert late == list(range(schedule.num_micro_batches))[schedule.num_micro_batches - len(late) :]
    needed = {
        (edge, action.micro_batch, 0, action.kind)
        for rank in range(rest.num_ranks)
        for action in rest.compute(rank)
        for need, edge in rest.needs(action)
        if edge is not None and rest.rank_of(need.stage) != rank
    }
    assert sends(rest) == Counter(needed)  # what had been delivered and used is not said again
    return rest


def check_losses(schedule: Schedule, stride: int) -> None:
    """Lose each rank at every `stride`-th moment of two orders, at other moments for each rank and order."""
    orders = [list(run_order(schedule)), random_order(schedule, 1)]
    for lost in range(1, schedule.num_ranks):
        for number, order in enumerate(orders):
            for moment in range((11 * lost + 17 * number) % stride, len(order) + 1, stride):
                assert_finished(schedule, lost, order[:moment], has_gradients=False)
        assert_finished(schedule, lost, orders[0], has_gradients=True)


@pytest.mark.parametrize(("name", "ranks", "batches"), SIZES)
@pytest.mark.sampled(2)
@pytest.mark.full(4)
def test_any_loss_at_any_moment_is_finished(name: str, ranks: int, batches: int) -> None:
    check_losses(shadowed(name, ranks, batches), stride=1 if ranks * batches <= 8 else 47)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "ranks", "batches"), SIZES)
def test_all_losses_at_all_moments_are_finished(name: str, ranks: int, batches: int) -> None:
    check_losses(shadowed(name, ranks, batches), stride=1)


def test_what_is_left_of_a_small_step() -> None:
    """Rank 1 of 3 is lost when rank 2 has sent its first gradient back, and rank 0 has shadowed the first forward."""
    schedule = shadowed("1f1b", 3, 2)
    done = [(0, Action("forward", 0, 0)), (0, Action("forward", 0, 1)), (1, Action("forward", 1, 0))]
    done += [(2, Action("forward", 2, 0)), (2, Action("backward", 2, 0)), (0, Action(SHADOW, 1, 0))]
    rest = assert_finished(schedule, 1, done, has_gradients=False)
    assert [str(action) for action in rest.compute(0)] == [
        "forward of micro-batch 1 at stage 1",
        "backward of micro-batch 0 at stage 1",
        "backward of micro-batch 0 at stage 0",
        "backward of micro-batch 1 at stage 1",
        "backward of micro-batch 1 at stage 0",
    ]
    assert [str(step) for step in rest.lists[1] if isinstance(step, Message) and step.is_send] == [
        "send_backward of micro-batch 0 at stage 2, edge 1, peer rank 0",  # again: the lost rank had it
        "send_backward of micro-batch 1 at stage 2, edge 1, peer rank 0",
    ]


def test_later_steps_are_whole_and_have_no_shadows() -> None:
    rest = take_over(shadowed("1f1b", 4, 6), 2)
    check(rest)
    assert rest.placement == ((0, 1, 1, 2),)
    assert all(action.kind != SHADOW for rank in range(3) for action in rest.compute(rank))


def test_rank_0_has_nobody_before_it() -> None:
    with pytest.raises(PlanError, match="rank 0 of 4 has no rank before it"):
        take_over(shadowed("1f1b", 4, 4), 0)


def test_shadows_cost_time_where_ranks_do_not_wait() -> None:
    """Four ranks, forward 1 s, backward 2 s: the first forwards fill waits, those in the steady state do not."""
    plain, made = make_schedule("1f1b", 4, 8), with_shadows(make_schedule("1f1b", 4, 8))
    assert simulate(plain).makespan_seconds == 33
    assert 33 < simulate(made).makespan_seconds < 33 + 8
    assert simulate(made).peak_activations[0] > simulate(plain).peak_activations[0]


# --- lists that are wrong are seen


def a_resumed_step() -> Schedule:
    schedule = shadowed("1f1b", 4, 4)
    order = list(run_order(schedule))[:25]
    return take_over(schedule, 2, kept_actions(schedule, 2, {action for rank, action in order if rank != 2}, False))


def test_a_message_that_is_not_sent_again_is_missed() -> None:
    rest = a_resumed_step()
    message = next(one for rank in range(3) for one in rest.resent_messages(rank))
    lists = [tuple(step for step in steps if step != message) for steps in rest.lists]
    with pytest.raises(PlanError, match=r"lacks the send_\w+ .* of what was made before its list begins"):
        check(replace(rest, lists=tuple(lists)))


def test_a_computation_that_is_done_twice_is_seen() -> None:
    rest = a_resumed_step()
    again = next(action for action in rest.done if rest.home(action) == 0)
    with pytest.raises(PlanError, match="more than once"):
        check(replace(rest, lists=((again, *rest.lists[0]), *rest.lists[1:])))


def test_a_shadow_on_another_rank_is_refused() -> None:
    made = with_shadows(make_schedule("1f1b", 3, 2))
    with pytest.raises(PlanError, match="shadow of micro-batch 0 at stage 2, which belongs on rank 1"):
        check(replace(made, lists=((Action(SHADOW, 2, 0), *made.lists[0]), *made.lists[1:])))

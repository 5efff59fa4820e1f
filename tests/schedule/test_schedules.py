"""Schedules: every list set is complete, ordered and free of deadlock, and `check` sees what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weft.errors import PlanError
from weft.schedule import SCHEDULES, Action, Edge, Message, Schedule, check, make_schedule, simulate, with_messages
from weft.schedule.actions import Channel, Steps

Options = dict[str, object]
quick = settings(max_examples=40)


LEAST_IN_FLIGHT = {"gpipe": 1, "1f1b": 1, "interleaved": 1, "zero-bubble": 1, "bidirectional": 2}  # of one stage


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule that can be made, small."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    ranks, micro_batches = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    options: Options = {}
    if name == "interleaved":
        options["chunks"] = draw(st.integers(1, 3))
    if name == "message":
        options["in_flight"] = draw(st.lists(st.integers(1, 7), min_size=ranks, max_size=ranks))
    if name == "gems":
        batches = draw(st.sampled_from([1, 2, 4, 6]))
        options["batches"], micro_batches = batches, batches * draw(st.integers(1, 3))
    if name == "bidirectional" or options.get("batches", 1) != 1:
        ranks += ranks % 2
    if name in LEAST_IN_FLIGHT and draw(st.booleans()):
        group = -(-micro_batches // max(1, micro_batches // ranks))
        least = LEAST_IN_FLIGHT[name] + (options.get("chunks", 1) - 1) * group
        options["in_flight"] = least + draw(st.integers(0, ranks))
    return make_schedule(name, ranks, micro_batches, **options)


def short(steps: Steps) -> str:
    """`F0 B0 W0`; a small letter is replica 1; `rf0` receives a forward, `sb0` sends a backward."""
    words = []
    for step in steps:
        letter = step.kind[0] if step.replica else step.kind[0].upper()
        if isinstance(step, Message):
            letter = step.kind[0] + step.direction[0]
        words.append(f"{letter}{step.micro_batch}")
    return " ".join(words)


def sends(schedule: Schedule) -> list[Message]:
    return [step for steps in schedule.lists for step in steps if isinstance(step, Message) and step.is_send]


# --- what each schedule is


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "options", "expected"),
    [
        ("gpipe", 2, 3, {}, ["F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2"]),
        ("gpipe", 1, 3, {"in_flight": 2}, ["F0 F1 B0 B1 F2 B2"]),
        ("1f1b", 3, 3, {"in_flight": 2}, ["F0 F1 B0 F2 B1 B2", "F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]),
        ("1f1b", 3, 4, {}, ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]),
        ("zero-bubble", 2, 3, {}, ["F0 F1 B0 W0 F2 B1 W1 B2 W2", "F0 B0 F1 B1 W0 F2 B2 W1 W2"]),
        ("interleaved", 2, 2, {}, ["F0 F1 F0 F1 B0 B1 B0 B1", "F0 F1 F0 B0 F1 B1 B0 B1"]),
        ("gems", 2, 2, {}, ["F0 B0 f1 b1", "F0 B0 f1 b1"]),
        ("gems", 2, 4, {"batches": 2}, ["F0 F1 B0 B1 f2 f3 b2 b3", "F0 F1 B0 B1 f2 f3 b2 b3"]),
        ("gems", 3, 2, {"batches": 1}, ["F0 F1 B0 B1"] * 3),
        ("bidirectional", 2, 2, {}, ["F0 f1 b1 B0", "f1 F0 B0 b1"]),
        (
            "bidirectional",
            4,
            4,
            {},
            [
                "F0 F2 f1 b1 f3 b3 B0 B2",
                "F0 f1 F2 f3 b1 B0 b3 B2",
                "f1 F0 f3 F2 B0 b1 B2 b3",
                "f1 f3 F0 B0 F2 B2 b1 b3",
            ],
        ),
        ("message", 3, 4, {}, ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 F2 B0 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]),
    ],
)
def test_orders(name: str, ranks: int, micro_batches: int, options: Options, expected: list[str]) -> None:
    schedule = make_schedule(name, ranks, micro_batches, **options)
    assert [short(steps) for steps in schedule.lists] == expected
    assert schedule.name == name


@given(schedules())
@quick
def test_every_schedule_is_consistent_with_and_without_messages(schedule: Schedule) -> None:
    check(schedule)
    full = with_messages(schedule)
    check(full)
    assert tuple(full.compute(rank) for rank in range(full.num_ranks)) == schedule.lists
    assert with_messages(full) == full
    crossing = sum(schedule.rank_of(s) != schedule.rank_of(s + 1) for s in range(schedule.num_stages - 1))
    assert len(sends(full)) == 2 * crossing * schedule.num_micro_batches


@given(schedules(), st.data())
@quick
def test_edges_may_skip_stages_and_each_sends_one_message_per_direction(
    schedule: Schedule, data: st.DataObject
) -> None:
    assume(schedule.num_stages > 1)
    pairs = [(a, b) for b in range(schedule.num_stages) for a in range(b)]
    extra = data.draw(st.lists(st.sampled_from(pairs), max_size=6, unique=True))
    edges = [*schedule.edges, *((a, b, "skip") for a, b in extra)]
    full = with_messages(schedule, edges)
    check(full)
    crossing = sum(full.rank_of(edge[0]) != full.rank_of(edge[1]) for edge in edges)
    assert len(sends(full)) == 2 * crossing * schedule.num_micro_batches


@given(schedules())
@quick
def test_backwards_of_a_stage_follow_the_order_of_micro_batches(schedule: Schedule) -> None:
    for rank in range(schedule.num_ranks):
        last: dict[tuple[int, int], int] = {}
        for action in schedule.compute(rank):
            if action.kind == "backward":
                assert action.micro_batch > last.get((action.stage, action.replica), -1)
                last[action.stage, action.replica] = action.micro_batch


@given(schedules())
@quick
def test_no_rank_holds_more_micro_batches_than_its_cap(schedule: Schedule) -> None:
    cap = schedule.options.get("in_flight")
    assume(isinstance(cap, int))
    assert max(simulate(schedule).peak_activations) <= cap


@given(st.integers(1, 6), st.integers(1, 14))
@quick
def test_messages_with_falling_caps_come_as_1f1b(ranks: int, micro_batches: int) -> None:
    falling = make_schedule("message", ranks, micro_batches, in_flight=list(range(ranks, 0, -1)))
    assert falling.lists == make_schedule("1f1b", ranks, micro_batches).lists


def test_mirrored_replicas_alternate() -> None:
    for name in ("gems", "bidirectional"):
        schedule = make_schedule(name, 4, 6)
        assert schedule.placement == ((0, 1, 2, 3), (3, 2, 1, 0))
        actions = [action for rank in range(4) for action in schedule.compute(rank)]
        assert all(action.replica == action.micro_batch % 2 for action in actions)


def test_one_batch_of_gems_needs_no_second_replica() -> None:
    assert make_schedule("gems", 3, 4, batches=1).placement == ((0, 1, 2),)


def test_one_chunk_is_1f1b() -> None:
    assert make_schedule("interleaved", 3, 5, chunks=1).lists == make_schedule("1f1b", 3, 5).lists


# --- messages


def test_receives_are_posted_one_computation_ahead_and_sends_follow_their_computation() -> None:
    full = with_messages(make_schedule("1f1b", 2, 3))
    assert short(full.lists[0]) == "F0 sf0 rb0 F1 sf1 B0 rb1 F2 sf2 rb2 B1 B2"
    assert short(full.lists[1]) == "rf0 F0 rf1 B0 sb0 F1 rf2 B1 sb1 F2 B2 sb2"


def test_receives_follow_the_order_of_sends_where_their_users_do_not() -> None:
    # Stage 0 feeds stages 1 and 3, both on rank 1, which uses the second tensor of micro-batch 0 after the first of 1.
    schedule = make_schedule("interleaved", 2, 2)
    full = with_messages(schedule, [*schedule.edges, (0, 3, "skip")])
    check(full)
    received = [step for step in full.lists[1] if isinstance(step, Message) and step.kind == "recv_forward"]
    assert [(full.edges[step.edge].target, step.micro_batch) for step in received] == [
        *((1, 0), (3, 0), (1, 1), (3, 1)),
        *((3, 0), (3, 1)),
    ]


def test_stages_on_one_rank_need_no_message() -> None:
    assert sends(with_messages(make_schedule("interleaved", 1, 3, chunks=3))) == []


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        ([(1, 0, "hidden")], "edge 'hidden' goes from stage 1 to stage 0; it must go from an earlier stage"),
        ([(1, 1, "self")], "from stage 1 to stage 1"),
        ([(0, 2, "far")], "among 0..1"),
        ([(0, 1, "a"), (0, 1, "a")], "edge 'a' from stage 0 to 1 is listed twice"),
    ],
)
def test_bad_edges_are_refused(edges: list[tuple[int, int, str]], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        with_messages(make_schedule("gpipe", 2, 2), edges)


# --- what cannot be made


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "options", "words"),
    [
        *((name, 0, 4, {}, f"{name}: ranks = 0 must be a whole number from 1 on") for name in SCHEDULES),
        *((name, 2, 0, {}, f"{name}: micro_batches = 0 must be") for name in SCHEDULES),
        ("gpipe", 2.0, 4, {}, "ranks = 2.0 must be a whole number"),
        ("gpipe", True, 4, {}, "ranks = True must be a whole number"),
        ("interleaved", 2, 4, {"chunks": 0}, "chunks = 0 must be"),
        ("gems", 3, 4, {}, "gems: 3 ranks are odd; two mirrored replicas need an even number"),
        ("bidirectional", 5, 4, {}, "bidirectional: 5 ranks are odd"),
        ("gems", 2, 3, {}, "batches = 3 is odd; the two replicas take turns, so use 1 or an even number"),
        ("gems", 2, 6, {"batches": 4}, "batches = 4 does not divide micro_batches = 6"),
        ("gems", 2, 6, {"batches": 0}, "batches = 0 must be"),
        ("message", 2, 4, {"in_flight": 0}, "in_flight = 0 must be"),
        ("message", 2, 4, {"in_flight": [2, 1, 1]}, "in_flight has 3 caps for 2 stages"),
        ("1f1b", 2, 4, {"in_flight": 0}, "1f1b: in_flight = 0 must be"),
        ("interleaved", 4, 8, {"in_flight": 4}, "groups of 4 micro-batches at 2 stages need at least 5"),
        ("bidirectional", 4, 8, {"in_flight": 1}, "in_flight = 1 is too few"),
        ("1f1d", 2, 4, {}, "unknown schedule '1f1d'; did you mean '1f1b'?"),
        ("interleaved", 2, 4, {"chunk": 2}, "no option 'chunk'; did you mean 'chunks'?"),
        ("gpipe", 2, 4, {"chunks": 2}, "schedule 'gpipe' has no option 'chunks'"),
        ("gems", 2, 4, {"in_flight": 2}, "schedule 'gems' has no option 'in_flight'"),
    ],
)
def test_bad_input_is_refused_in_words(name: str, ranks: int, micro_batches: int, options: Options, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        make_schedule(name, ranks, micro_batches, **options)
    assert words in str(caught.value)


# --- what check sees


def edited(schedule: Schedule, rank: int, steps: Steps) -> Schedule:
    return replace(schedule, lists=(*schedule.lists[:rank], tuple(steps), *schedule.lists[rank + 1 :]))


def refused(schedule: Schedule) -> str:
    with pytest.raises(PlanError) as caught:
        check(schedule)
    return str(caught.value)


@given(schedules(), st.data())
@quick
def test_no_step_can_be_left_out_or_doubled(schedule: Schedule, data: st.DataObject) -> None:
    full = with_messages(schedule)
    rank = data.draw(st.integers(0, full.num_ranks - 1))
    place = data.draw(st.integers(0, len(full.lists[rank]) - 1))
    steps = full.lists[rank]
    # Without its only weight action a stage's backward computes all gradients, which is consistent.
    assume(steps[place].kind != "weight" or full.num_micro_batches > 1)
    refused(edited(full, rank, steps[:place] + steps[place + 1 :]))
    refused(edited(full, rank, steps[:place] + steps[place : place + 1] * 2 + steps[place + 1 :]))


BASE = make_schedule("1f1b", 2, 2)  # F0 F1 B0 B1 | F0 B0 F1 B1
SPLIT = make_schedule("zero-bubble", 2, 2)  # F0 F1 B0 W0 B1 W1 | F0 B0 F1 B1 W0 W1


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (edited(BASE, 1, BASE.lists[1][1:]), "rank 1 lacks the forward of micro-batch 0 at stage 1"),
        (edited(BASE, 0, BASE.lists[0][:-1]), "rank 0 lacks the backward of micro-batch 1 at stage 0"),
        (edited(SPLIT, 0, SPLIT.lists[0][:-1]), "rank 0 lacks the weight of micro-batch 1 at stage 0"),
        (edited(BASE, 0, BASE.lists[0] * 2), "rank 0 has the forward of micro-batch 0 at stage 0 more than once"),
        (edited(BASE, 0, BASE.lists[0] + BASE.lists[1][:1]), "at stage 1, which belongs on rank 1"),
        (edited(BASE, 0, (Action("forward", 0, 2),)), "rank 0 has a forward of micro-batch 2 at stage 0, which does"),
        (edited(BASE, 0, (Action("optimize", 0, 0),)), "rank 0 has a optimize"),
        (
            edited(BASE, 0, BASE.lists[0][::-1]),
            "rank 0 has the backward of micro-batch 1 at stage 0 before the forward",
        ),
        (
            edited(SPLIT, 0, (*SPLIT.lists[0][:2], *SPLIT.lists[0][3:1:-1], *SPLIT.lists[0][4:])),
            "rank 0 has the weight of micro-batch 0 at stage 0 before the backward of micro-batch 0 at stage 0",
        ),
    ],
)
def test_broken_lists_are_named(schedule: Schedule, words: str) -> None:
    assert words in refused(schedule)


def test_a_micro_batch_belongs_to_one_replica() -> None:
    schedule = make_schedule("gems", 2, 2)
    first = schedule.lists[0][0]
    assert isinstance(first, Action)
    moved = first._replace(micro_batch=1)
    assert "another replica has that micro-batch too" in refused(edited(schedule, 0, (*schedule.lists[0], moved)))


def test_a_deadlock_between_ranks_is_named() -> None:
    # Rank 0 asks for the gradient of micro-batch 0 before it has sent micro-batch 1, which rank 1 wants first.
    ring = edited(BASE, 0, tuple(BASE.lists[0][i] for i in (0, 2, 1, 3)))
    ring = edited(ring, 1, tuple(BASE.lists[1][i] for i in (0, 2, 1, 3)))
    words = refused(ring)
    assert words == refused(with_messages(ring))
    assert "1f1b deadlocks: rank 0 waits at the backward of micro-batch 0 at stage 0" in words
    assert "for the backward of micro-batch 0 at stage 1 on rank 1, which never comes" in words


FULL = with_messages(BASE)
SECOND = FULL.lists[1]  # rf0 F0 rf1 B0 sb0 F1 B1 sb1
STRAY = Message("recv_forward", stage=1, micro_batch=0, replica=0, channel=Channel(0, 1, "forward"), edge=1)
MISLED = Message("recv_forward", stage=1, micro_batch=0, replica=0, channel=Channel(1, 1, "forward"), edge=0)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (SECOND[1:], "rank 1 has the forward of micro-batch 0 at stage 1 but lacks its recv_forward of micro-batch 0"),
        (SECOND[:-1], "rank 1 has the backward of micro-batch 1 at stage 1 but lacks its send_backward"),
        (
            (SECOND[1], SECOND[0], *SECOND[2:]),
            "recv_forward of micro-batch 0 at stage 1, edge 0, peer rank 0 after the",
        ),
        (
            (*SECOND[:-2], SECOND[-1], SECOND[-2]),
            "send_backward of micro-batch 1 at stage 1, edge 0, peer rank 0 before",
        ),
        (
            (*SECOND, SECOND[0]),
            "rank 1 has the recv_forward of micro-batch 0 at stage 1, edge 0, peer rank 0 more than",
        ),
        ((*SECOND, STRAY), "edge 1, peer rank 0 that no action of it needs"),
        ((MISLED, *SECOND[1:]), "lacks its recv_forward of micro-batch 0 at stage 1, edge 0, peer"),
        ((SECOND[2], *SECOND[:2], *SECOND[3:]), "rank 0 sends in another order than rank 1 receives"),
    ],
)
def test_broken_messages_are_named(steps: Steps, words: str) -> None:
    check(FULL)
    assert words in refused(edited(FULL, 1, steps))


def test_a_send_that_comes_too_late_is_a_deadlock() -> None:
    first = FULL.lists[0]  # F0 sf0 rb0 F1 sf1 rb1 B0 B1
    late = (first[0], *first[2:4], *first[5:], first[1], first[4])
    words = refused(edited(FULL, 0, late))
    assert "rank 0 waits at the backward of micro-batch 0 at stage 0" in words


def test_lists_can_be_merged_onto_one_rank() -> None:
    """What a failover does: rank 0 takes over stage 1, whose messages become local."""
    pairs = (
        BASE.lists[0][0],
        *BASE.lists[1][:2],
        BASE.lists[0][2],
        BASE.lists[0][1],
        *BASE.lists[1][2:],
        BASE.lists[0][3],
    )
    merged = replace(BASE, lists=(pairs, ()), placement=((0, 0),))
    check(merged)
    assert sends(with_messages(merged)) == []
    assert merged.edges == (Edge(0, 1, "hidden"),)

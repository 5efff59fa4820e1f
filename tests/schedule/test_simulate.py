"""Simulated times against the formulas of the papers, hand-computed timelines, and the drawings."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import PlanError
from weft.schedule import Action, Schedule, Timeline, check, make_schedule, simulate, to_svg, to_text, with_messages

quick = settings(max_examples=40)
ranks_ = st.integers(1, 7)
even_ranks = st.integers(1, 4).map(lambda half: 2 * half)
micro_batches_ = st.integers(1, 16)
seconds = st.integers(1, 9)  # whole numbers, so that formulas hold exactly


def makespan(schedule: Schedule, *times: float) -> float:
    check(schedule)
    return simulate(schedule, *times).makespan_seconds


# --- formulas


@given(ranks_, micro_batches_, seconds, seconds)
@quick
def test_gpipe(p: int, m: int, f: int, b: int) -> None:
    timeline = simulate(make_schedule("gpipe", p, m), f, b)
    assert timeline.makespan_seconds == (m + p - 1) * (f + b)
    assert timeline.bubble_share == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.peak_activations == (m,) * p


@given(ranks_, micro_batches_, seconds, seconds)
@quick
def test_1f1b(p: int, m: int, f: int, b: int) -> None:
    timeline = simulate(make_schedule("1f1b", p, m), f, b)
    assert timeline.makespan_seconds == (m + p - 1) * (f + b)
    assert timeline.peak_activations == tuple(min(m, p - stage) for stage in range(p))


@given(ranks_, micro_batches_, seconds, seconds, st.integers(2, 4))
@quick
def test_interleaved(p: int, m: int, f: int, b: int, v: int) -> None:
    timeline = simulate(make_schedule("interleaved", p, m, chunks=v), f, b)
    assert timeline.makespan_seconds == (v * m + p - 1 if m >= p else v * p + m - 1) * (f + b)
    largest_group = -(-m // max(1, m // p))
    assert timeline.peak_activations == tuple(
        min(v * m, (v - 1) * largest_group + 2 * (p - rank) - 1) for rank in range(p)
    )
    if m >= p:  # waiting over computing is (p - 1) / (v m)
        share = timeline.bubble_share
        assert share / (1 - share) == pytest.approx((p - 1) / (v * m))


@given(ranks_, micro_batches_, seconds, seconds, seconds)
@quick
def test_zero_bubble(p: int, m: int, f: int, b: int, w: int) -> None:
    timeline = simulate(make_schedule("zero-bubble", p, m), f, b, w)
    whole = makespan(make_schedule("1f1b", p, m), f, b, w)
    assert whole == (m + p - 1) * (f + b + w)
    assert timeline.makespan_seconds < whole if p > 1 else timeline.makespan_seconds == whole
    assert timeline.peak_activations == (min(m, p),) * p
    if m >= p:
        assert timeline.makespan_seconds == m * (f + b + w) + (p - 1) * (f + b - min(f, b, w))


@given(even_ranks, st.integers(1, 4), st.integers(1, 4), seconds, seconds)
@quick
def test_gems(s: int, pairs: int, parts: int, f: int, b: int) -> None:
    k = 2 * pairs
    timeline = simulate(make_schedule("gems", s, k * parts, batches=k), f, b)
    assert timeline.peak_activations == (parts,) * s  # one batch, whatever k
    wave = s + parts - 1
    assert timeline.makespan_seconds == wave * (f + b) + (k - 1) * (wave * max(f, b) + parts * min(f, b))
    if parts == 1 and f <= b:
        assert timeline.makespan_seconds == s * f + (k - 1) * (s * b + f) + s * b


@pytest.mark.parametrize(("s", "speedups"), [(4, [1.14, 1.23, 1.31]), (16, [1.19, 1.31, 1.41])])
def test_gems_over_one_direction(s: int, speedups: list[float]) -> None:
    found = [k * s * 3 / makespan(make_schedule("gems", s, k), 1, 2) for k in (2, 4, 16)]
    assert found == pytest.approx(speedups, abs=0.006)


@given(even_ranks, st.integers(1, 4), seconds, seconds)
@quick
def test_bidirectional(p: int, runs: int, f: int, b: int) -> None:
    m = runs * p
    timeline = simulate(make_schedule("bidirectional", p, m), f, b)
    longer, shorter = max(f, b), min(f, b)
    assert timeline.makespan_seconds == m * (f + b) + (p - 2) * (longer + (runs - 1) * (longer - shorter))
    assert max(timeline.peak_activations) <= p


@given(ranks_, micro_batches_, seconds, seconds)
@quick
def test_message(p: int, m: int, f: int, b: int) -> None:
    found = makespan(make_schedule("message", p, m), f, b)
    assert found == (m + p - 1) * (f + b) if f <= b else found >= (m + p - 1) * (f + b)


@given(ranks_, micro_batches_, st.data())
@quick
def test_message_keeps_its_caps(p: int, m: int, data: st.DataObject) -> None:
    caps = data.draw(st.lists(st.integers(1, 8), min_size=p, max_size=p))
    timeline = simulate(make_schedule("message", p, m, in_flight=caps))
    assert all(peak <= cap for peak, cap in zip(timeline.peak_activations, caps, strict=True))


# --- times that differ


@st.composite
def simulations(draw: st.DrawFn) -> tuple[Timeline, list[int], list[int], list[int], int]:
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "gems", "bidirectional", "message"]))
    schedule = make_schedule(name, draw(even_ranks), 2 * draw(st.integers(1, 5)))
    times = st.lists(st.integers(0, 9), min_size=schedule.num_stages, max_size=schedule.num_stages)
    forward, backward, weight = [draw(times) for _ in range(3)]
    forward[0] = 1
    message_seconds = draw(st.integers(0, 5))
    return simulate(schedule, forward, backward, weight, message_seconds), forward, backward, weight, message_seconds


@given(simulations())
@quick
def test_a_timeline_has_no_gap_takes_the_given_times_and_waits_for_what_it_needs(
    found: tuple[Timeline, list[int], list[int], list[int], int],
) -> None:
    timeline, forward, backward, weight, message_seconds = found
    schedule = timeline.schedule
    end = {span.action: span.end_seconds for spans in timeline.spans for span in spans if span.action != "wait"}
    for rank, spans in enumerate(timeline.spans):
        now = 0.0
        for span in spans:
            assert span.start_seconds == now
            now = span.end_seconds
            if span.action == "wait":
                continue
            stage = span.action.stage
            whole = backward[stage] + (0 if schedule.name == "zero-bubble" else weight[stage])
            taken = {"forward": forward[stage], "backward": whole, "weight": weight[stage]}[span.action.kind]
            assert now - span.start_seconds == taken
            for need, _ in schedule.needs(span.action):
                travel = message_seconds if schedule.rank_of(need.stage, need.replica) != rank else 0
                assert span.start_seconds >= end[need] + travel
        assert now == timeline.makespan_seconds
        assert tuple(span.action for span in spans if span.action != "wait") == schedule.lists[rank]
        assert [live.seconds for live in timeline.live[rank]] == sorted(live.seconds for live in timeline.live[rank])
        assert timeline.live[rank][-1].num_activations == timeline.live[rank][-1].activation_bytes == 0


def test_a_timeline_computed_by_hand() -> None:
    timeline = simulate(make_schedule("gpipe", 2, 2), [1, 3], [2, 4], message_seconds=10, activation_bytes=[100, 7])
    spans = [
        [
            (span.start_seconds, span.end_seconds, "wait" if span.action == "wait" else span.action.kind)
            for span in spans
        ]
        for spans in timeline.spans
    ]
    assert spans == [
        [
            *((0, 1, "forward"), (1, 2, "forward"), (2, 31, "wait")),
            *((31, 33, "backward"), (33, 35, "wait"), (35, 37, "backward")),
        ],
        [
            *((0, 11, "wait"), (11, 14, "forward"), (14, 17, "forward")),
            *((17, 21, "backward"), (21, 25, "backward"), (25, 37, "wait")),
        ],
    ]
    assert timeline.spans[1][3].action == Action("backward", 1, 0)
    assert timeline.makespan_seconds == 37
    assert timeline.bubble_share == pytest.approx((29 + 2 + 11 + 12) / 74)
    assert timeline.live == (
        ((1, 1, 100), (2, 2, 200), (33, 1, 100), (37, 0, 0)),
        ((14, 1, 7), (17, 2, 14), (21, 1, 7), (25, 0, 0)),
    )
    assert timeline.peak_activation_bytes == (200, 14)


def test_a_weight_action_keeps_the_activation() -> None:
    timeline = simulate(make_schedule("zero-bubble", 1, 1), 1, 2, 3, activation_bytes=5)
    assert timeline.live == (((1, 1, 5), (6, 0, 0)),)


def test_messages_in_the_lists_change_no_time() -> None:
    schedule = make_schedule("interleaved", 3, 5)
    full = with_messages(schedule)
    assert simulate(full, 1, 2, 0, 4).spans == simulate(schedule, 1, 2, 0, 4).spans


def test_a_skip_edge_delays_only_what_needs_it() -> None:
    schedule = with_messages(make_schedule("gpipe", 3, 1), [(0, 1, "hidden"), (0, 2, "skip"), (1, 2, "hidden")])
    assert simulate(schedule, [1, 0, 1], [0, 0, 0], message_seconds=10).makespan_seconds == 42
    alone = with_messages(make_schedule("gpipe", 3, 1), [(0, 2, "skip")])
    assert simulate(alone, [1, 0, 1], [0, 0, 0], message_seconds=10).makespan_seconds == 22
    assert simulate(schedule, [1, 0, 1], [0, 0, 0], message_seconds=[3, 100, 4]).makespan_seconds == 202
    assert simulate(schedule, [1, 0, 1], [0, 0, 0], message_seconds=[3, 1, 4]).makespan_seconds == 1 + 7 + 1 + 7


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({"forward_seconds": [1, 2, 3]}, "forward_seconds has 3 values but 1f1b has 2 stages"),
        ({"backward_seconds": -1}, "backward_seconds = -1 has a negative value"),
        ({"message_seconds": -2}, "message_seconds = -2 has a negative value"),
        ({"message_seconds": [1, 2]}, "message_seconds has 2 values but 1f1b has 1 edges; give one number or one per"),
        ({"forward_seconds": 0, "backward_seconds": 0}, "are all 0; give at least one a time"),
    ],
)
def test_bad_times_are_refused(times: dict[str, float], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        simulate(make_schedule("1f1b", 2, 2), **times)
    assert words in str(caught.value)


# --- drawings


def test_text() -> None:
    assert to_text(simulate(make_schedule("1f1b", 2, 2), 1, 2), width=18).splitlines() == [
        "1f1b, 2 stages, 2 micro-batches: 9 s, bubble 33.3 %",
        "rank 0 |F0F1....B0--..B1--| 2 held",
        "rank 1 |..F0B0--F1B1--....| 1 held",
    ]
    mirrored = simulate(make_schedule("gems", 2, 2), 1, 1)
    assert to_text(mirrored, width=14).splitlines()[1:] == [
        "rank 0 |F0....B0f1b1..| 1 held",
        "rank 1 |..F0B0f1....b1| 1 held",
    ]
    assert to_text(mirrored, width=7).splitlines()[1:] == ["rank 0 |F..Bfb.| 1 held", "rank 1 |.FBf..b| 1 held"]


@given(simulations(), st.integers(1, 120))
@quick
def test_text_rows_have_the_width_asked_for(
    found: tuple[Timeline, list[int], list[int], list[int], int], width: int
) -> None:
    rows = to_text(found[0], width).splitlines()[1:]
    assert [len(row.split("|")[1]) for row in rows] == [width] * len(rows)


def test_svg_shows_every_span_its_number_and_the_bubble() -> None:
    timeline = simulate(make_schedule("zero-bubble", 4, 8), 1, 1, 1)
    root = ElementTree.fromstring(to_svg({"p < 4 & m": timeline}))
    space = "{http://www.w3.org/2000/svg}"
    words = [text.text or "" for text in root.iter(f"{space}text")]
    assert "p < 4 & m: 27 s, bubble 11.1 %" in words
    assert {"forward", "backward", "weight", "wait", "rank 0", "rank 3", "4 activations"} <= set(words)
    titled = [rect for rect in root.iter(f"{space}rect") if rect.find(f"{space}title") is not None]
    assert len(titled) == 4 * 8 * 3
    assert len({rect.get("fill") for rect in titled}) == 3
    assert sum(words.count(str(mb)) for mb in range(8)) >= 4 * 8 * 3
    right = max(float(rect.get("x", 0)) + float(rect.get("width", 0)) for rect in titled)
    assert right == pytest.approx(1000 - 112, abs=0.1)


def test_svg_tells_stages_of_one_rank_apart() -> None:
    space = "{http://www.w3.org/2000/svg}"
    for name, words in (("gems", "darker: the second replica"), ("interleaved", "darker: later stages of the rank")):
        root = ElementTree.fromstring(to_svg({name: simulate(make_schedule(name, 4, 4))}))
        titled = [rect for rect in root.iter(f"{space}rect") if rect.find(f"{space}title") is not None]
        assert len({rect.get("fill") for rect in titled}) == 4
        assert words in [text.text for text in root.iter(f"{space}text")]

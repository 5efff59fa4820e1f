"""The page of a plan: what it shows, that it is well-formed and loads nothing, and that its bars are true to scale."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_for_tests import make_answer, make_plan, make_timeline

from weft.planner.report.page import exposed_seconds, page
from weft.planner.report.style import bytes_text, count_text, number, percent, seconds_text
from weft.planner.report.timeline import MAX_RECTANGLES, column_shares, drawn_ranks

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Reader(HTMLParser):
    """Reads a page strictly: every tag is closed by its own end, and nothing points outside."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def pictures(source: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", source, re.DOTALL)]


def picture(source: str, label: str) -> ElementTree.Element:
    """The one whose words for those who cannot see it begin with `label`."""
    (found,) = [svg for svg in pictures(source) if svg.attrib["aria-label"].startswith(label)]
    return found


def check(answer: dict[str, Any]) -> Reader:
    """Well-formed, self-contained, all pictures with sizes and words, and nothing drawn outside of them."""
    source = page(answer)
    reader, drawn = Reader(source), pictures(source)
    assert reader.tags.count("svg") == len(drawn)
    assert not {"link", "script", "img", "iframe", "object"} & set(reader.tags)
    assert reader.addresses == []
    assert "@import" not in source
    assert "url(" not in source
    assert not re.search(r"nan|\binf\b|None", reader.text)
    for svg in drawn:
        assert svg.attrib["role"] == "img"
        assert svg.attrib["aria-label"]
        left, top, width, height = (float(number) for number in svg.attrib["viewBox"].split())
        assert (left, top) == (0, 0)
        for rect in svg.iter("rect"):
            x, y, wide, high = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
            assert min(x, y, wide, high) >= 0
            assert x + wide <= width + 0.1
            assert y + high <= height + 0.1
        for word in svg.iter("text"):
            assert 0 <= float(word.attrib["x"]) <= width
            assert 0 <= float(word.attrib["y"]) <= height
    return reader


def widths(svg: ElementTree.Element, kind: str) -> list[float]:
    return [float(rect.attrib["width"]) for rect in svg.iter("rect") if rect.attrib["class"] == kind]


def test_values() -> None:
    text = check(make_answer()).text
    for words in (
        *("gpt-530b on a100-80:640x8", "530B parameters in 105 blocks", "640 nodes × 8 A100-80 = 5,120 devices"),
        *("300 GB/s inside a node, 200 GB/s between nodes", "3,932,160 tokens", "with pipe>=4, tensor.x<=8"),
        *("data 40 × pipe 16 (1f1b) × x 8 (sequence)", "11.92 s", "329,879", "52.0 %", "61.8 GB", "limit 80 GB"),
        *(
            "Its bubble is 4 points smaller",
            "does not fit: 100.4 of 80 GB, activations 61 GB; recompute = full would fit",
        ),
        *("380 GB in 3,264 calls", "4 B in 1 call", "750 GB in all", "58.0 %", "77.5 %", "+1 GB/s between nodes"),
        *("2.000 ms", "the same plan", "12,345 plans considered in 3.2 s", "compute 8.582 s (72 %)"),
    ):
        assert words in text


def test_hostile_names_stay_text() -> None:
    answer = make_answer()
    attack = '"><script>alert(1)</script><img src=http://x onerror="y">&amp;'
    answer["model"]["name"] = answer["cluster"]["name"] = answer["cluster"]["device"] = attack
    answer["why"] = answer["question"]["objective"] = answer["question"]["precision"] = attack
    answer["question"]["constraints"] = [attack]
    best = answer["plans"][0]
    best["axes"] = best["recompute"] = attack
    best["where"][attack] = best["where"].pop("x")
    best["traffic"][0].update(axis=attack, operation=attack)
    best["timeline"]["ranks"][0][0].update(micro_batch=attack, stage=attack)
    answer["rejected"][0].update(axes=attack, reason=attack, remedy=attack)
    answer["sensitivities"][0].update(change=attack, axes=attack + "2")
    answer["scaling"][1]["axes"] = attack
    assert check(answer).text.count(attack) >= 10  # and no script, image or handler, which `check` looks for


def test_memory_bars_are_to_scale() -> None:
    answer = make_answer()
    svg = picture(page(answer), "Memory")
    told = [*answer["plans"], *answer["rejected"]]
    scale = widths(svg, "activations")[-1] / 158e9
    for part in ("parameters", "gradients", "optimizer", "activations"):
        assert widths(svg, part) == pytest.approx([plan["memory"][part] * scale for plan in told], abs=0.01)
    (limit,) = [line for line in svg.iter("line") if line.attrib["class"] == "limit"]
    start = min(float(rect.attrib["x"]) for rect in svg.iter("rect"))
    assert float(limit.attrib["x1"]) - start == pytest.approx(80e9 * scale, abs=0.1)
    over = [word.text for word in svg.iter("text") if word.attrib["class"] == "over"]
    assert over == ["100 GB", "197 GB"]


def test_a_far_too_large_plan_is_cut_so_that_others_are_seen() -> None:
    answer = make_answer()
    answer["rejected"][0]["memory"]["activations"] = 3.4e12
    answer["rejected"][0]["memory_bytes"] = 3.4394e12
    check(answer)
    svg = picture(page(answer), "Memory")
    shown = widths(svg, "activations")
    assert shown[0] == pytest.approx(22.4e9 * (1000 - 340 - 80) / 240e9, abs=0.01)  # three limits wide
    assert len([path for path in svg.iter("path") if path.attrib["class"] == "over"]) == 1
    assert "3.44 TB" in [word.text for word in svg.iter("text")]
    alone = picture(page({**answer, "plans": []}), "Memory")  # nothing to make room for
    assert widths(alone, "activations")[0] > 0.9 * 580
    assert not list(alone.iter("path"))


def test_small_bars_share_one_scale() -> None:
    answer = make_answer()
    bars = [svg for svg in pictures(page(answer)) if svg.attrib["aria-label"].startswith("compute")]
    assert len(bars) == 5
    for bar, plan in zip(bars, answer["plans"], strict=True):
        total = sum(float(rect.attrib["width"]) for rect in bar.iter("rect"))
        assert total == pytest.approx(180 * plan["seconds"] / 13.36, abs=0.05)


def test_step_bar_and_timeline_share_one_scale() -> None:
    answer = make_answer()
    answer["plans"][0]["timeline"] = make_timeline("zero-bubble", 4, 6, 11.4)
    svg = picture(page(answer), "Timeline of a step of 11.92 s on 4 pipe ranks")
    where, ranks = answer["plans"][0]["where"], answer["plans"][0]["timeline"]["ranks"]
    scale = widths(svg, "compute")[0] / where["compute"]
    assert widths(svg, "bubble") == pytest.approx([where["bubble"] * scale], abs=0.01)
    for kind in ("forward", "backward", "weight"):
        seconds = [span["end"] - span["start"] for spans in ranks for span in spans if span["kind"] == kind]
        assert len(seconds) == 24
        assert widths(svg, kind) == pytest.approx([one * scale - 0.6 for one in seconds], abs=0.01)
    numbers = [word.text for word in svg.iter("text") if (word.attrib["class"] or "").startswith("on-")]
    assert numbers.count("5") == 12  # forward, backward and weight on four ranks


def test_traffic_is_logarithmic_and_apart_by_link() -> None:
    svg = picture(page(make_answer()), "Bytes")
    (pipe,) = widths(svg, "pipe")
    data = widths(svg, "data")
    decade = (data[0] - data[2]) / 9.306425  # of 8.1e9 over 4
    assert data[0] == data[1]
    assert data[0] - pipe == pytest.approx(decade * 0.704365, abs=0.02)
    words = [word.text for word in svg.iter("text")]
    assert words.index("x: all_gather") < words.index("between nodes (200 GB/s)") < words.index("pipe: send")


def test_scaling_curve() -> None:
    svg = picture(page(make_answer()), "Tokens a second")
    circles = sorted((float(one.attrib["cx"]), float(one.attrib["cy"])) for one in svg.iter("circle"))
    (ideal,) = [line for line in svg.iter("line") if line.attrib["class"] == "ideal"]
    steps = {round(b[0] - a[0], 1) for a, b in pairwise(circles)}
    assert len(circles) == 5
    assert max(steps) - min(steps) <= 0.1  # each count is twice the one before
    assert (float(ideal.attrib["x1"]), float(ideal.attrib["y1"])) == circles[0]
    assert float(ideal.attrib["y2"]) < circles[-1][1]  # higher on the page
    slopes = [(a[1] - b[1]) for a, b in pairwise(circles)]
    assert slopes == sorted(slopes, reverse=True)  # ever further from the ideal
    assert [one.attrib["class"] for one in svg.iter("circle")].index("ring") == 3  # 5,120 devices
    assert len([one for one in svg.iter("path") if one.attrib["class"] == "cross"]) == 1


def test_a_long_pipeline_stays_small() -> None:
    answer = make_answer()
    answer["plans"][0]["timeline"] = make_timeline("1f1b", 64, 128, 11.4)
    source = page(answer)
    svg = picture(source, "Timeline")
    assert len(source.encode()) < 1_000_000
    assert 1000 < sum(1 for _ in svg.iter("rect")) <= MAX_RECTANGLES + 10
    assert "16 of 64 ranks are drawn" in check(answer).text
    named = [word.text for word in svg.iter("text") if (word.text or "").startswith("rank")]
    assert named[0] == "rank 0"
    assert named[-1] == "rank 63"
    assert len(named) == 16
    # The area of a rank's columns is its work, as the lengths of its spans would be.
    spans = answer["plans"][0]["timeline"]["ranks"][0]
    busy = sum(span["end"] - span["start"] for span in spans if span["kind"] == "forward")
    scale = widths(svg, "compute")[0] / answer["plans"][0]["where"]["compute"]
    first = [rect for rect in svg.iter("rect") if rect.attrib["class"] == "forward" and float(rect.attrib["y"]) < 24]
    area = sum(float(rect.attrib["width"]) * float(rect.attrib["height"]) for rect in first)
    assert area / 20 == pytest.approx(busy * scale, rel=0.01)


@given(st.integers(0, 300))
def test_drawn_ranks(num_ranks: int) -> None:
    drawn = drawn_ranks(num_ranks)
    assert drawn == sorted(set(drawn))
    assert len(drawn) == min(16, num_ranks)
    assert drawn[:1] == list(range(num_ranks))[:1]
    assert drawn[-1:] == list(range(num_ranks))[-1:]


@given(
    st.lists(st.tuples(st.floats(0.01, 5), st.sampled_from(["forward", "backward", "wait"])), max_size=30),
    st.integers(1, 40),
)
def test_columns_lose_no_time(lengths: list[tuple[float, str]], num_columns: int) -> None:
    spans, at = [], 0.0
    for length, kind in lengths:
        spans.append({"start": at, "end": at + length, "kind": kind})
        at += length
    shares = column_shares(spans, ("forward", "backward"), at or 1.0, num_columns)
    for index, kind in enumerate(("forward", "backward")):
        seconds = sum(length for length, one in lengths if one == kind)
        assert sum(column[index] for column in shares) * (at or 1.0) / num_columns == pytest.approx(seconds, abs=1e-9)
    assert all(sum(column) <= 1 + 1e-9 for column in shares)


def test_no_plan_at_all() -> None:
    answer = make_answer(plans=[], scaling=[], sensitivities=[], why="800 nodes would fit it.")
    reader = check(answer)
    assert "No plan fits 800 nodes would fit it." in reader.text
    assert "100 GB" in reader.text
    assert "The best plans" not in reader.text
    assert reader.tags.count("svg") == 1


@pytest.mark.parametrize("missing", ["rejected", "scaling", "sensitivities", "why", "considered", "search_seconds"])
@pytest.mark.full(2)
def test_each_part_may_be_missing(missing: str) -> None:
    answer = make_answer(**{missing: None})
    nothing = check(answer).text
    del answer[missing]
    headings = {
        "scaling": "Scaling",
        "sensitivities": "What a little more",
        "rejected": "rejected",
        "why": "Its bubble",
    }
    assert headings.get(missing, "plans considered in") not in nothing
    assert check(answer).text == nothing


def test_one_plan_without_a_pipeline_on_one_device() -> None:
    where = {"compute": 0.012, "bubble": 0.0, "optimizer": 0.0003}
    memory = {"parameters": 2e9, "activations": 1e9}
    plan = make_plan("1 device", 0.0123, mfu=None, where=where, memory=memory, memory_bytes=3e9, num_devices=1)
    answer = make_answer(plans=[plan], rejected=[], sensitivities=[])
    answer["cluster"].update(nodes=1, devices=1, devices_per_node=1, inter_bytes_per_second=None)
    answer["question"].update(constraints=[], asked="1 sequence of 2,048 tokens")
    answer["scaling"] = answer["scaling"][1:2]
    reader = check(answer)
    assert "1 node × 1 A100-80 = 1 device, 300 GB/s inside a node Question: 1 sequence of 2,048 tokens" in reader.text
    assert "12.30 ms" in reader.text
    assert "Traffic" not in reader.text
    svg = picture(page(answer), "Timeline of a step of 12.30 ms")
    assert [rect.attrib["class"] for rect in svg.iter("rect")] == ["compute", "optimizer"]


def test_nothing_fits_at_any_count_and_a_plan_is_refused_without_sizes() -> None:
    refused = {"axes": "x 3", "plan": {}, "reason": "x = 3 does not divide num_heads = 8", "remedy": "use 1, 2, 4 or 8"}
    points = [{"devices": n, "nodes": n // 8, "axes": None, "fits": False} for n in (8, 16)]
    text = check(make_answer(plans=[], rejected=[refused], scaling=points)).text
    assert "x = 3 does not divide num_heads = 8; use 1, 2, 4 or 8" in text
    assert text.count("does not fit") >= 2


def test_exposed_seconds_are_those_of_axes() -> None:
    assert exposed_seconds({"compute": 8.0, "x": 1.5, "data": 0.5, "bubble": 1.0, "optimizer": 0.1}) == 2.0


def test_numbers_as_text() -> None:
    assert [seconds_text(value) for value in (0, None, 12.3, 0.0041253, 2e-6, 1234.6, 999.9, -0.5)] == [
        *("0 s", "–", "12.30 s", "4.125 ms", "2.000 µs", "1,235 s", "1,000 s", "-500.0 ms"),
    ]
    assert [bytes_text(value) for value in (4, 999, 999.6, 71.23e9, 3.2e12, 5e18)] == [
        *("4 B", "999 B", "1 kB", "71.2 GB", "3.2 TB", "5,000 PB"),
    ]
    assert [count_text(value) for value in (50e3, 529.6e9, 1.01e12)] == ["50k", "530B", "1.01T"]
    assert [number(value) for value in (None, 341250.3, 12.5, 999.96)] == ["–", "341,250", "12.5", "1,000"]
    assert [percent(value) for value in (None, 0.52, 0)] == ["–", "52.0 %", "0.0 %"]

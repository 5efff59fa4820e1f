"""A pipeline's predicted time by hand, its pictures from the commands, and the picture of a real step."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from commands_for_tests import Weft, caller
from hypothesis import given, settings
from hypothesis import strategies as st
from models_for_tests import tied_decoder, token_batch
from runs_for_tests import train_on_ranks, write_run_file
from torch.optim import SGD

from weft.cluster.hardware import Cluster, Device, Link, Node
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.parallel.apply import cost, parallelize
from weft.plan import Pipe, Plan
from weft.planner.predict import ASSUMED_EFFICIENCY, Prediction, predict, run_cluster
from weft.run_file import Run, load_run
from weft.schedule import Action, Span, Timeline, make_schedule, simulate, simulate_like, timeline_of
from weft.step.examples import micro_batch_profile
from weft.step.train_step import evaluate, train_step
from weft.train.timeline import measured

pytestmark = pytest.mark.processes

DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"
RATE = 1e9  # FLOP/s that the predicted devices reach
ROWS, HIDDEN, VOCABULARY = 4 * 24, 40, 257  # of a micro-batch of 4 sequences of 24 tokens, in the run file
BLOCK_FLOPS = 2 * ROWS * (2 * 40 * 40 + 2 * 40 * 40 + 3 * 40 * 52) + 4 * 4 * 4 * 24 * 24 * 10  # linears, attention
HEAD_FLOPS = 2 * ROWS * HIDDEN * VOCABULARY
MESSAGE_BYTES = ROWS * HIDDEN * 4
WIDE = "model.intermediate_size=256"  # blocks that hold more than the loss does
WIDE_BLOCK_FLOPS = BLOCK_FLOPS + 2 * ROWS * 3 * 40 * (256 - 52)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_file(tmp_path_factory.mktemp("timeline"))


def pipe_run(run_file: Path, schedule: str, *overrides: str, degree: int = 2, micro_batches: int = 2) -> Run:
    """An untied model with as many key heads as heads, in micro-batches of 4 sequences."""
    return load_run(
        run_file,
        [
            f'plan.pipe={{degree={degree}, schedule="{schedule}"}}',
            "plan.micro_batch=4",
            f"train.batch={4 * micro_batches}",
            "model.tie_word_embeddings=false",
            "model.num_key_value_heads=4",
            *overrides,
        ],
    )


def cluster_of(bandwidth: float = 1e12, latency: float = 0.0, is_cpu: bool = False) -> Cluster:
    """Eight devices that reach RATE, on one kind of link; a GPU hides what it says behind what it computes."""
    device = Device("device", 1 << 30, None, {"fp32": RATE / ASSUMED_EFFICIENCY})
    link = Link("link", bandwidth, latency)
    return Cluster("eight", Node("node", device, 8, link, link, 1 << 33, 8, None if is_cpu else 1e12), 1)


def timeline_in(prediction: Prediction) -> Timeline:
    assert prediction.timeline is not None
    return prediction.timeline


# --- predicted times


def test_1f1b_by_hand(run_file: Path) -> None:
    """Two micro-batches: the last stage is busy throughout, the first one waits for it twice."""
    found = predict(pipe_run(run_file, "1f1b"), cluster_of(MESSAGE_BYTES / 1e-3, 2e-3))
    first, last, message = BLOCK_FLOPS / RATE, (BLOCK_FLOPS + HEAD_FLOPS) / RATE, 3e-3
    timeline = timeline_in(found)
    makespan = first + message + 2 * 3 * last + message + 2 * first
    assert timeline.makespan_seconds == pytest.approx(makespan, rel=1e-9)
    assert timeline.bubble_share == pytest.approx(1 - 6 * (first + last) / (2 * makespan), rel=1e-9)
    assert found.compute_seconds == pytest.approx(6 * last, rel=1e-9)
    assert timeline.peak_activations == (2, 1)


def test_recompute_does_the_blocks_forward_again(run_file: Path) -> None:
    found = predict(pipe_run(run_file, "1f1b", "plan.memory.recompute=full"), cluster_of())
    block, last, message = BLOCK_FLOPS / RATE, (BLOCK_FLOPS + HEAD_FLOPS) / RATE, MESSAGE_BYTES / 1e12
    makespan = block + 2 * (3 * last + block) + 3 * block + 2 * message
    assert timeline_in(found).makespan_seconds == pytest.approx(makespan, rel=1e-9)


def test_zero_bubble_by_hand(run_file: Path) -> None:
    """Weight gradients are a third; those of the last stage come at its end, nobody waits for them."""
    found = predict(pipe_run(run_file, "zero-bubble"), cluster_of())
    first, last, message = BLOCK_FLOPS / RATE, (BLOCK_FLOPS + HEAD_FLOPS) / RATE, MESSAGE_BYTES / 1e12
    makespan = max(first + 4 * last + 2 * first + 2 * message, first + message + 6 * last)
    assert timeline_in(found).makespan_seconds == pytest.approx(makespan, rel=1e-9)
    for spans in timeline_in(found).spans:
        lengths = {span.action.kind: span.end_seconds - span.start_seconds for span in spans if span.action != "wait"}
        assert lengths["forward"] == pytest.approx(lengths["backward"]) == pytest.approx(lengths["weight"])


def test_a_gpu_hides_reductions_behind_the_last_backward_and_a_cpu_does_not(run_file: Path) -> None:
    run = pipe_run(run_file, "1f1b", "plan.data=2", WIDE, micro_batches=8)  # four for each rank of data
    last_backward = 2 * WIDE_BLOCK_FLOPS / RATE
    for bandwidth in (1e9, 2e6):
        for is_cpu in (False, True):
            found = predict(run, cluster_of(bandwidth, 0.0, is_cpu))
            assert found.pipe_rank == 0  # which ends last too
            told = sum(seconds for axis, seconds in found.communication_seconds.items() if axis != "pipe")
            assert (told > last_backward) == (bandwidth == 2e6)
            shown = told if is_cpu else max(0.0, told - last_backward)
            assert found.step_seconds == pytest.approx(timeline_in(found).makespan_seconds + shown, rel=1e-9)


def test_what_a_stage_says_inside_lengthens_its_actions(run_file: Path) -> None:
    run = pipe_run(run_file, "gpipe", "plan.tensor.x=2")
    found = predict(run, cluster_of(1e6, 1e-4, is_cpu=True))
    rank = found.pipe_rank
    assert rank is not None
    flops = cost(micro_batch_profile(run), run.plan, run.split, {**dict.fromkeys(run.plan.degrees, 0), "pipe": rank})
    spans = timeline_in(found).spans[rank]
    busy = sum(span.end_seconds - span.start_seconds for span in spans if span.action != "wait")
    assert found.communication_seconds["x"] > 0.01
    assert busy == pytest.approx(flops.flops / RATE + found.communication_seconds["x"], rel=1e-9)
    hidden = timeline_in(predict(run, cluster_of(1e12, 0.0)))
    assert sum(s.end_seconds - s.start_seconds for s in hidden.spans[rank] if s.action != "wait") == pytest.approx(
        flops.flops / RATE, rel=1e-9
    )


@pytest.mark.parametrize(("axis", "overrides"), [("mirror", []), ("tied", ["model.tie_word_embeddings=true"])])
def test_pairs_along_pipe_talk_over_its_link(run_file: Path, axis: str, overrides: list[str]) -> None:
    schedule = "gems" if axis == "mirror" else "1f1b"
    run = pipe_run(run_file, schedule, "model.num_hidden_layers=4", *overrides, degree=4, micro_batches=4)
    found = predict(run, cluster_of(1e6, 1e-3))
    (value,) = (value for (name, _), value in found.traffic.items() if name == axis)
    assert found.communication_seconds[axis] == pytest.approx(value.calls * 2 * 1e-3 + value.num_bytes / 1e6)


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "fullest"), [("1f1b", 4, 0), ("zero-bubble", 2, 1), ("gems", 2, 0)]
)
def test_memory_is_that_of_the_fullest_rank(run_file: Path, schedule: str, micro_batches: int, fullest: int) -> None:
    run = pipe_run(run_file, schedule, WIDE, micro_batches=micro_batches)
    found = predict(run, cluster_of())
    ranks = [{**dict.fromkeys(run.plan.degrees, 0), "pipe": index} for index in range(2)]
    costs = [cost(micro_batch_profile(run), run.plan, run.split, at) for at in ranks]
    assert found.pipe_rank == fullest
    assert found.cost == costs[fullest]
    assert found.cost.memory_bytes == max(one.memory_bytes for one in costs)


def test_without_a_pipeline_there_is_no_timeline(run_file: Path) -> None:
    found = predict(load_run(run_file, ["plan.data=2"]), cluster_of())
    assert (found.timeline, found.pipe_rank) == (None, None)
    assert "pipeline" not in found.to_json()


# --- the command


@pytest.fixture
def weft(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Weft:
    return caller(monkeypatch, capfd, columns=120)


# Large enough that an H100 takes longer to compute than to send.
PIPE = (
    "plan.pipe=2",
    "plan.micro_batch=4",
    "plan.precision=fp32",
    "cluster=h100:1x8",
    "model.hidden_size=4096",
    "data.sequence=1024",
)


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def num_actions(svg: str) -> int:
    return sum(rect.find(f"{SVG}title") is not None for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"))


def test_plan_draws_here(run_file: Path, weft: Weft) -> None:
    left = weft("plan", run_file, "--timeline", *PIPE)
    assert left.status == 0
    rows = [line for line in left.out.splitlines() if line.startswith("rank ")]
    assert [row.split("|")[2].strip() for row in rows] == ["2 held", "1 held"]
    for row in rows:
        assert all(f"{kind}{number}" in row for kind in "FB" for number in range(4)), row
    for words in ("1f1b, 2 stages, 4 micro-batches: ", "% of 1f1b", "(pipe rank 0, the fullest)"):
        assert words in left.out, words


def test_plan_draws_to_files(run_file: Path, tmp_path: Path, weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "cairosvg", SimpleNamespace(svg2png=lambda **given: drawn.append(given)))
    for ending in ("svg", "txt", "png"):
        path = tmp_path / f"steps.{ending}"
        left = weft("plan", run_file, "--timeline", path, *PIPE)  # a file may stand before overrides
        assert (left.status, f"wrote {path}" in left.out) == (0, True), left.err
    svg = (tmp_path / "steps.svg").read_text()
    assert num_actions(svg) == 2 * 2 * 4
    assert any(text.startswith("1f1b, 2 stages, 4 micro-batches: ") and "bubble" in text for text in texts(svg))
    assert (tmp_path / "steps.txt").read_text().count("held") == 2
    assert drawn[0]["write_to"] == str(tmp_path / "steps.png")
    assert num_actions(drawn[0]["bytestring"].decode()) == 2 * 2 * 4


def test_plan_in_json(run_file: Path, tmp_path: Path, weft: Weft) -> None:
    left = weft("plan", run_file, *PIPE, "--timeline", "--json")
    found = json.loads(left.out)
    timeline = timeline_in(predict(load_run(run_file, PIPE), run_cluster(load_run(run_file, PIPE))))
    assert found["pipeline"] == {
        "schedule": "1f1b",
        "bubble_share": timeline.bubble_share,
        "makespan_seconds": timeline.makespan_seconds,
        "peak_activations": [2, 1],
    }
    assert found["memory"]["pipe_rank"] == 0
    left = weft("plan", run_file, *PIPE, "--timeline", tmp_path / "a.svg", "--json")
    assert json.loads(left.out) == found
    assert (tmp_path / "a.svg").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["plan.data=2"],
            "a timeline shows the schedule of a pipeline, and this plan (data 2) has none; set plan.pipe",
        ),
        ([*PIPE, "steps.pdf"], "a timeline is drawn to .svg, .png, .txt; 'steps.pdf' ends in '.pdf'"),
        ([*PIPE, "nowhere/steps.svg"], "there is no folder 'nowhere'; make it first"),
        ([*PIPE, "a.svg", "b.svg"], "--timeline draws to one file; given a.svg and b.svg"),
        ([*PIPE, "a.png"], "'a.png' needs cairosvg and cairo; pip install 'weft[draw]'"),
        ([*PIPE, "cluster=summit", "plan.precision=bf16"], "this device's peak is not known; use another cluster"),
    ],
)
def test_refusals(
    run_file: Path, arguments: list[str], words: str, weft: Weft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cairosvg", None)  # as if it were not installed
    left = weft("plan", run_file, *arguments, "--timeline")
    assert left.status == 2
    assert words in left.err


def test_a_file_without_timeline_is_no_override(run_file: Path, weft: Weft) -> None:
    left = weft("plan", run_file, *PIPE, "steps.svg")
    assert left.status == 2
    assert "override 'steps.svg' is not of the form" in left.err


def test_train_refuses_a_timeline_before_it_trains(run_file: Path, weft: Weft) -> None:
    left = weft("train", run_file, "train.timeline=steps.svg")
    assert left.status == 2
    assert "this plan (1 process) has none; set plan.pipe, or leave the timeline out" in left.err


# --- measured


@given(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "gems", "bidirectional"]), st.data())
@settings(max_examples=30)
def test_a_step_as_simulated_is_simulated_alike(name: str, data: st.DataObject) -> None:
    schedule = make_schedule(name, 2, 4)
    times = st.lists(st.integers(1, 9), min_size=schedule.num_stages, max_size=schedule.num_stages)
    timeline = simulate(schedule, data.draw(times), data.draw(times), data.draw(times))
    assert simulate_like(timeline) == timeline


def test_measured_spans_become_a_timeline() -> None:
    schedule = make_schedule("gpipe", 1, 2)
    lengths = [(0, 1), (1, 4), (5, 7), (7, 13)]
    timeline = timeline_of(
        schedule, [[Span(*times, action) for times, action in zip(lengths, schedule.compute(0), strict=True)]]
    )
    assert timeline.spans[0][2] == Span(4, 5, "wait")
    assert (timeline.makespan_seconds, timeline.peak_activations) == (13, (2,))
    assert timeline.bubble_share == pytest.approx(1 / 13)
    assert simulate_like(timeline).makespan_seconds == 2 * 2 + 2 * 4  # the mean forward, the mean backward


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "gems", "message"])
def test_a_measured_step_is_the_schedule_and_enters_no_ledger(schedule: str) -> None:
    plan = Plan(pipe=Pipe(2, schedule), micro_batch=2)  # type: ignore[arg-type]

    def rank(_: int) -> Any:
        mesh = Mesh(plan)
        model = parallelize(tied_decoder(), plan, mesh, example=lambda: (token_batch(0)[0][:2],))
        optimizer = SGD(model.parameters(), 0.1)
        tokens, labels = token_batch(0)
        batches = list(zip(tokens.split(2), labels.split(2), strict=True))
        train_step(model, optimizer, batches, mesh)
        counted = mesh.ledger.entries()
        train_step(model, optimizer, batches, mesh)
        spans = model.spans
        evaluate(model, batches, mesh)
        assert model.spans == spans  # of the last training step
        mesh.ledger.clear()
        train_step(model, optimizer, batches, mesh)
        found = measured(model, mesh, 4)
        assert mesh.ledger.entries() == counted
        ends = {span.action: span.end_seconds for line in found.spans for span in line}
        for line in found.spans:
            for span in line:
                needs = found.schedule.needs(span.action) if isinstance(span.action, Action) else []
                assert all(ends[need.action] < span.start_seconds + 1e-3 for need in needs)  # clocks' grain
        done = [[str(span.action) for span in line if span.action != "wait"] for line in found.spans]
        listed = [[str(action) for action in found.schedule.compute(index)] for index in range(2)]
        assert [sorted(one) for one in done] == [sorted(one) for one in listed]
        assert done == listed or schedule == "message"  # which takes what comes
        return [found.makespan_seconds, [min(span.start_seconds for span in line) for line in found.spans]]

    first, second = run_local(rank, 2)
    assert first == second
    assert first[1] == [0, 0]


@pytest.mark.parametrize("overrides", [[], ["plan.data=2"]])
def test_training_draws_its_last_step(run_file: Path, tmp_path: Path, overrides: list[str]) -> None:
    run = pipe_run(run_file, "1f1b", *overrides, f"folder={tmp_path / 'run'}", "train.steps=2", "train.warmup_steps=0")
    run = replace(run, train=replace(run.train, timeline=str(tmp_path / "steps.svg")))
    assert train_on_ranks(run)["finished"]
    svg = (tmp_path / "steps.svg").read_text()
    num_micro_batches = run.split.accumulation
    assert num_actions(svg) == 2 * 2 * 2 * num_micro_batches  # two pictures of two ranks, forward and backward
    titles = [text for text in texts(svg) if "bubble" in text]
    assert [title.partition(":")[0] for title in titles] == [
        f"simulated, 1f1b, 2 stages, {num_micro_batches} micro-batches",
        "measured",
    ]


# --- the documents


def test_the_page_shows_what_the_simulator_says() -> None:
    made = runpy.run_path(str(DOCS / "schedules.py"))
    page = (DOCS / "pipeline.md").read_text(encoding="utf-8")
    assert "\n".join(made["table"]()) in page, "run docs/schedules.py and put its table into docs/pipeline.md"
    assert (DOCS / "schedules.svg").read_text(encoding="utf-8") == made["picture"](), "run docs/schedules.py"

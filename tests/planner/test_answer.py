"""The planner's answers: where time goes, why, what was rejected and what helps; and the command that prints them."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from commands_for_tests import Weft, caller
from runs_for_tests import write_run_file

from weft.cluster.hardware import load
from weft.commands import app as cli
from weft.commands import plan as plan_command
from weft.commands.run_planning import has_layout
from weft.errors import PlanError
from weft.models import GPT2Config, build
from weft.models.catalog import load_model
from weft.parallel.apply import refuse
from weft.plan import split_batch
from weft.planner import answer as answer_module
from weft.planner.answer import Answer, ask, effective_seconds, with_more, with_scaling
from weft.planner.candidate import SearchResult
from weft.planner.explain import smaller, why_none
from weft.planner.predict import predict
from weft.planner.question import Objective, Question, parse_constraints
from weft.planner.report.page import page
from weft.planner.search import Model
from weft.profiling import profile
from weft.run_file import load_run

pytestmark = pytest.mark.processes

SMALL = GPT2Config(vocab_size=50304, n_positions=1024, n_embd=2048, n_layer=8, n_head=16)


@lru_cache(maxsize=16)
def answer(cluster: str = "h100:1x8", *constraints: str, batch: int = 64, objective: Objective = "time") -> Answer:
    question = Question(batch, 1024, "bf16", parse_constraints(constraints))
    return ask("small", SMALL, load(cluster), question, objective)


def test_where_a_step_goes_adds_up() -> None:
    for constraint in ("no pipe", "pipe=4", "schedule=interleaved", "shard=8", "x=2"):
        for one in answer("h100:1x8", constraint).layouts():
            assert one.step is not None
            assert sum(one.step.where.values()) == pytest.approx(one.seconds, rel=1e-9), constraint
            assert all(seconds >= -1e-9 for seconds in one.step.where.values()), one.step.where


def test_memory_adds_up_and_fits() -> None:
    for one in answer().found.best:
        assert sum(one.memory.parts().values()) == pytest.approx(one.memory.total_bytes)
        assert one.memory.total_bytes <= 80e9


def test_why_names_the_first_and_the_next_layout() -> None:
    found = answer("h100:1x8", "pipe>=2")
    first, second = found.layouts()[0], next(o for o in found.found.best if o.plan.degrees != found.best.plan.degrees)
    assert found.why.startswith(first.plan.describe_axes())
    assert second.plan.describe_axes() in found.why
    assert f"takes {second.seconds / first.seconds - 1:.1%} longer" in found.why


def test_rejected_plans_say_how_much_and_what_would_fit() -> None:
    question = Question(512, 1024, "bf16", parse_constraints(["no recompute"]))
    found = ask("large", load_model("mpt-7b"), load("a100-40:1x8"), question)
    assert found.rejected
    for one in found.rejected:
        assert one.candidate.memory.total_bytes > 40e9
        assert one.reason.startswith(f"does not fit: {one.candidate.memory.total_bytes / 1e9:.1f} of 40 GB, ")
    assert any(one.remedy and one.remedy.endswith("would fit") for one in found.rejected)
    sizes = [one.candidate.memory.total_bytes for one in found.rejected]
    assert sizes == sorted(sizes)  # the nearest first


@pytest.mark.soak
def test_what_does_not_fit_says_how_many_nodes_would() -> None:
    found = ask("huge", load_model("gpt-145b"), load("a100-40:1x8"), Question(64, 2048))
    assert not found.found.best
    assert "No plan fits: the one that holds least" in found.why
    nodes = int(found.why.split(" nodes (")[0].split()[-1])
    assert nodes > 1
    assert ask("huge", load_model("gpt-145b"), load(f"a100-40:{nodes}x8"), Question(64, 2048)).found.best
    with pytest.raises(PlanError, match=r"No plan fits.* nodes \("):
        _ = found.best


def test_an_impossible_constraint_is_named() -> None:
    said = "No plan satisfies 'pipe=7': plans with pipe.degree = 1, 2, 4, 8 were tried. Without it the best is "
    assert answer("h100:1x8", "pipe=7", "x<=8").why.startswith(said)


def test_a_batch_that_does_not_divide() -> None:
    found = answer("h100:1x8", "x=1", "y=1", "no pipe", batch=7)
    assert found.why.startswith("No plan satisfies 'x=1'. Without it the best is ")
    nothing = SearchResult((), (), (), 0)
    why = why_none(found.model, Question(7, 1024), nothing)
    assert why.endswith("Use another batch (a batch of 7 sequences over 8 devices is asked), or other devices.")


def test_the_smallest_cluster_and_the_cheapest() -> None:
    smallest = answer("h100:2x8", objective="devices")
    assert smallest.best.plan.num_ranks == 1  # half a billion parameters fit one device
    cheapest = answer("h100:2x8", objective="cost")
    cost = cheapest.best.seconds * cheapest.best.plan.num_ranks
    for devices in (1, 2, 4, 8):
        there = answer(f"h100:1x{devices}")
        assert cost <= there.best.seconds * devices * (1 + 1e-9)


@pytest.mark.parametrize(
    ("cluster", "batch"), [("h100:1x8", 24), ("h100:1x6", 30), ("a100-80:3x8", 96), ("v100-16:1x4", 4)]
)
def test_every_plan_found_is_one_that_weft_runs(cluster: str, batch: int) -> None:
    found = answer(cluster, batch=batch)
    with torch.device("meta"):
        whole = profile(build(SMALL), lambda: (torch.zeros(1, 1024, dtype=torch.long, device="cpu"),))
    assert found.found.best
    for one in found.found.best:
        refuse(whole, one.plan)
        split = split_batch(one.plan, batch, 1024)
        assert (split.micro_batch, split.accumulation) == (one.plan.micro_batch, one.num_micro_batches)
        assert one.plan.num_ranks == load(cluster).num_devices


def test_smaller_clusters() -> None:
    assert [one.num_devices for one in smaller(load("h100:6x8"))] == [1, 2, 4, 8, 16, 24, 32, 48]
    assert [one.num_devices for one in smaller(load("h100:1x8"))] == [1, 2, 4, 8]


def test_more_of_anything_is_never_worse() -> None:
    found = with_more(answer("a100-80:2x8"), lambda what: None)
    assert [one.change.split()[0] for one in found.sensitivities] == ["links", "links", "a", "one", "twice"]
    assert all(one.saved_seconds >= -1e-12 for one in found.sensitivities)
    assert found.sensitivities[1].saved_seconds < 0.1 * found.best.seconds  # a tenth more


def test_scaling_goes_up_with_devices() -> None:
    found = with_scaling(answer("h100:1x8"), lambda what: None)
    counts = [point.cluster.num_devices for point in found.scaling]
    assert counts == [1, 2, 4, 8, 16, 32]
    rates = [point.best.seconds for point in found.scaling if point.best]
    assert rates == sorted(rates, reverse=True)


def test_predict_gives_the_time_that_the_search_found(tmp_path: Path) -> None:
    run = load_run(write_run_file(tmp_path), ["plan.data=2", "plan.precision=bf16", "cluster=h100:1x2"])
    found = predict(run, load("h100:1x2"))
    assert found.is_modelled
    again = ask("run", run.model, load("h100:1x2"), Question(run.split.batch, run.split.sequence))
    same = [one for one in again.found.best if one.plan.data == 2 and one.plan.micro_batch == run.split.micro_batch]
    assert any(one.seconds == pytest.approx(found.step_seconds) for one in same)


# --- the command


NAMED = ("plan", "--model", "mpt-1b", "--cluster", "h100:1x8", "--tokens-per-step", "256K")


def test_a_model_of_the_catalog(weft: Weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left = weft(*NAMED, "--where", "x<=2", "--write", "best.toml", "--report", "best.html", "--json")
    assert left.status == 0, left.err
    found = json.loads(left.out)
    assert found["question"]["tokens_per_step"] == 256 << 10
    assert found["question"]["constraints"] == ["x<=2"]
    best = found["plans"][0]
    assert all(plan["plan"]["tensor"]["x"] <= 2 for plan in found["plans"])
    assert best["seconds"] == min(plan["seconds"] for plan in found["plans"])
    assert 0.1 < best["mfu"] < 0.8
    assert best["traffic"]
    assert all(row["link"] == "intra" for row in best["traffic"])
    assert (tmp_path / "best.html").read_text() == page(found)
    run = load_run(tmp_path / "best.toml", [])  # what weft train would run
    assert has_layout(run)
    assert run.plan.degrees == {axis: run.plan.degree(axis) for axis in run.plan.degrees}
    assert run.plan.describe_axes() == best["axes"]
    assert run.split.tokens == 256 << 10


def test_files_are_there_when_nobody_reads_what_is_printed(
    weft: Weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_command, "show_answer", closed)
    with suppress(BrokenPipeError):
        weft(*NAMED, "--where", "data=8", "--write", "best.toml", "--report", "best.html")
    assert load_run(tmp_path / "best.toml", []).plan.data == 8
    assert "data 8" in (tmp_path / "best.html").read_text()


def test_tokens_of_a_step_have_a_default_that_is_said(weft: Weft) -> None:
    left = weft("plan", "--model", "mpt-1b", "--cluster", "h100:1x8", "--json")
    assert left.status == 0, left.err
    assert left.err == "weft: 4,194,304 tokens a step, as --tokens-per-step is not given\n"
    assert left.json["question"]["tokens_per_step"] == 4 << 20


def test_in_words(weft: Weft) -> None:
    left = weft(*NAMED, "--what-if")
    assert left.status == 0, left.err
    for words in ("mpt-1b, 1.3", "the best plan of each layout", "MFU", "/80 GB", "why  ", "what more would change"):
        assert words in left.out, words
    assert "0.00%" not in left.out


def test_a_plan_is_a_line_at_80_columns(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The column of plans was 20 columns wide, and a plan had up to 7 lines in it."""
    left = caller(monkeypatch, capfd, 80)(*NAMED)
    lines = left.out.splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("plan  "))
    assert lines[head + 1].startswith("1  ")
    assert lines[head + 2].startswith("2  ")
    assert any(line.startswith("plan 1: ") and "micro-batch" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a run file, or --model"),
        (["--model", "gpt-9t", "--cluster", "h100", "--tokens-per-step", "1M"], "unknown model 'gpt-9t'"),
        (["--model", "mpt-1b", "--cluster", "z80", "--tokens-per-step", "1M"], "unknown cluster 'z80'.*known: a100-40"),
        (["--model", "mpt-1b", "--cluster", "h100:0x8", "--tokens-per-step", "1M"], "zero nodes or devices"),
        (["--model", "mpt-1b"], "--model needs --cluster, e.g. "),
        (["--model", "mpt-1b", "--cluster", "h100", "--size", "64"], "needs --cluster, --images-per-step and --size"),
        (["--model", "resnet50", "--cluster", "h100"], "resnet50 is of images; give --images-per-step and --size"),
        (["--model", "mpt-1b", "--cluster", "h100", "--tokens-per-step", "1000"], "is not a multiple of the sequence"),
        ([*NAMED[1:], "--best", "luck"], "--best luck is not one of time, cost, devices"),
        ([*NAMED[1:], "--where", "pipe=a"], "'a' is not a whole number"),
        ([*NAMED[1:], "--report", "no/such/folder.html"], "its folder no/such does not exist"),
    ],
)
def test_bad_input(weft: Weft, arguments: list[str], message: str) -> None:
    left = weft("plan", *arguments)
    assert left.status == 2
    assert left.out == ""
    assert re.search(message, left.err), left.err
    assert left.err.count("\n") == 1


def test_train_without_a_plan_plans_first(weft: Weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(cli.__file__).parent.parent))  # for the ranks
    run_file = write_run_file(tmp_path)
    assert not has_layout(load_run(run_file, []))
    assert not has_layout(load_run(run_file, ["plan.precision=fp64"]))
    left = weft("train", run_file, "train.steps=4", "cluster=local:1x2", "--no-verify", "folder=run")
    assert left.status == 0, left.err
    assert "planned  no [plan] is given. " in left.out
    assert re.search(r"^plan     (data|shard|pipe|x|y) 2", left.out, re.MULTILINE), left.out


# --- with failures


def test_failures_count_in_the_choice_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the devices are a little more than twice as fast: worth it, unless twice the failures eat it up."""
    model, question, one = answer().model, Question(64, 1024), answer().best

    def search(here: Model, question: Question, keep: int) -> SearchResult:
        return SearchResult((replace(one, seconds=8 / here.cluster.num_devices**1.001),), (), (), 1)

    monkeypatch.setattr(answer_module, "search", search)
    chosen = {
        mtbf: answer_module._best(model, question, "cost", lambda what: None, mtbf)[0].cluster.num_devices
        for mtbf in (None, 1e12, 1e5)
    }
    assert chosen == {None: 8, 1e12: 8, 1e5: 1}


def test_failures_count_in_the_order_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan whose state is on the host waits for every save to be written; the other is a little slower."""
    model, question, one = answer().model, Question(64, 1024), answer().best
    hosted = replace(one, plan=replace(one.plan, memory=replace(one.plan.memory, offload=1.0)))
    slower = replace(one, seconds=one.seconds * 1.001)
    monkeypatch.setattr(answer_module, "search", lambda *_, keep: SearchResult((hosted, slower), (), (), 2))
    for mtbf, first in ((None, hosted), (1e12, hosted), (1e6, slower)):
        found = answer_module._best(model, question, "time", lambda what: None, mtbf)[1]
        assert found.best[0] == first, mtbf
    assert effective_seconds(model, question, one, None) == one.seconds
    assert effective_seconds(model, question, one, 1e3) > 1.1 * one.seconds

"""Famous runs by name: a table that is whole, and a comparison whose words are its numbers."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import pytest

from weft.cluster.hardware import load
from weft.errors import ConfigError
from weft.models import GPT2Config
from weft.models.catalog import load_model
from weft.plan import Memory, Plan, Shard
from weft.planner.famous_runs import (
    compare,
    famous_run,
    famous_runs,
    framework_seconds,
    predicted,
    published_seconds,
)
from weft.planner.frameworks import FRAMEWORKS


def test_every_famous_plan_uses_all_devices_of_its_machine_and_divides_its_batch() -> None:
    assert len(famous_runs()) >= 11
    for run in famous_runs().values():
        assert load_model(run.model).num_layers >= run.plan.pipe.num_stages, run.name
        assert run.plan.num_ranks == load(run.cluster).num_devices, run.name
        assert run.num_micro_batches * run.plan.num_batch_ranks * (run.plan.micro_batch or 0) == run.sequences, run.name
        assert run.source, run.name
        assert not run.framework or run.framework in FRAMEWORKS, run.name
        assert run.tflops * 1e12 < load(run.cluster).node.device.peak_flops["bf16"], run.name


def test_an_unknown_run_is_refused_with_the_nearest_and_all_names() -> None:
    with pytest.raises(
        ConfigError, match=r"'llama3-405b'; did you mean 'llama3-405b-meta'\?.*known: .*mt-nlg-530b-2240"
    ):
        famous_run("llama3-405b")


def test_a_run_is_compared_with_wefts_best_by_the_same_model() -> None:
    plan = Plan(shard=Shard(2, 3), micro_batch=1, memory=Memory("full"), precision="bf16")
    run = replace(
        famous_run("bloom-176b"),
        model="llama-1.2b",
        cluster="h100:1x2",
        sequences=4,
        sequence=4096,
        plan=plan,
        seconds=None,
        missing="telepathy",
    )
    found = compare(run)
    assert found.fits
    best, words = found.answer.best, dict(found.lines)
    assert best.seconds <= found.theirs.seconds  # the search has their plan among its own
    assert f"{1 - best.seconds / found.theirs.seconds:.1%} faster than their plan" in words["best"]
    assert f"predicted for weft {found.theirs.seconds:.2f} s" in words["time"]
    assert words["memory"].endswith("; their software has what weft lacks: telepathy")
    assert found.framework_seconds is not None
    assert f"predicted for megatron-deepspeed-bf16 {found.framework_seconds:.2f} s" in words["time"]
    assert found.framework_seconds > found.theirs.seconds  # eager, with scores of attention in memory
    work = found.answer.model.steps.workload
    whole = 3 * sum(part.flops for part in (work.first, *work.blocks, work.last))
    assert found.published_seconds == pytest.approx(4 / 3 * whole * 4 / (150e12 * 2))
    told = json.loads(json.dumps(found.to_json()))
    assert told["like"]["predicted_seconds"] == found.theirs.seconds
    assert told["plans"][0]["seconds"] == best.seconds


@pytest.mark.full
def test_published_seconds_follow_from_the_formula_of_those_who_published_them() -> None:
    printed = famous_run("bloom-176b")
    run = replace(printed, seconds=None)
    config = load_model(run.model)
    assert isinstance(config, GPT2Config)
    hidden, layers, vocabulary = config.n_embd, config.n_layer, config.vocab_size
    ratios = 1 + run.sequence / (6 * hidden) + vocabulary / (16 * layers * hidden)  # attention, whole, and the head
    flops = 96 * run.sequences * run.sequence * layers * hidden**2 * ratios  # arXiv 2104.04473, equation 3
    seconds = flops / (run.tflops * 1e12 * load(run.cluster).num_devices)
    assert published_seconds(run) == pytest.approx(seconds, rel=0.01)
    assert published_seconds(printed) == pytest.approx(seconds, rel=0.01)  # both were published
    half = flops * (1 - run.sequence / (12 * hidden) / ratios) / (run.tflops * 1e12 * load(run.cluster).num_devices)
    assert published_seconds(run) != pytest.approx(half, rel=0.01)


def test_a_model_has_the_dropout_of_its_run() -> None:
    bloom, glm = famous_run("bloom-176b").config, famous_run("glm-130b").config
    assert isinstance(bloom, GPT2Config)
    assert bloom.resid_pdrop == 0.1
    assert not isinstance(glm, GPT2Config)
    assert replace(bloom, resid_pdrop=0.0) == load_model("bloom-176b")


@pytest.mark.soak
def test_famous_runs_are_predicted_within_a_tenth_in_the_mean_and_a_fifth_at_worst() -> None:
    errors = {}
    for name, run in famous_runs().items():
        seconds = framework_seconds(run)
        errors[name] = (predicted(run).seconds if seconds is None else seconds) / published_seconds(run) - 1
    assert statistics.mean(map(abs, errors.values())) < 0.10, errors
    assert max(map(abs, errors.values())) < 0.20, errors


@pytest.mark.soak
@pytest.mark.parametrize("name", famous_runs())
def test_every_famous_plan_fits_or_needs_what_weft_lacks(name: str) -> None:
    run = famous_run(name)
    fits = predicted(run).memory.total_bytes <= load(run.cluster).node.device.memory_bytes
    assert fits != bool(run.missing)


@pytest.mark.soak
@pytest.mark.parametrize("name", famous_runs())
def test_wefts_best_is_no_slower_than_theirs(name: str) -> None:
    found = compare(famous_run(name))
    assert not found.fits or found.answer.best.seconds <= found.theirs.seconds * 1.0001

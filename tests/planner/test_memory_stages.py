"""Stages by memory: the fastest stages that fit, as trying all finds them; what the search makes of them and says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest

from weft.cluster.hardware import Cluster, load
from weft.commands.run_planning import catalog_run, with_plan
from weft.models import GPT2Config
from weft.plan import Memory, Pipe, Plan, Shard
from weft.planner.answer import ask
from weft.planner.closed_form_memory import RESERVE_BYTES, working
from weft.planner.model import planned_model
from weft.planner.predict import predict
from weft.planner.question import Question, parse_constraints
from weft.planner.search import Model

TINY = GPT2Config(vocab_size=4096, n_positions=256, n_embd=256, n_layer=10, n_head=4)
SEQUENCE, COUNT = 256, 8
PLAN = Plan(pipe=Pipe(4), micro_batch=8, precision="bf16")


@cache
def model() -> Model:
    return planned_model(TINY, SEQUENCE, load("h100:1x4"))


def with_memory(num_bytes: float) -> Cluster:
    cluster = load("h100:1x4")
    return replace(
        cluster, node=replace(cluster.node, device=replace(cluster.node.device, memory_bytes=int(num_bytes)))
    )


def all_stages(pipe: Pipe) -> list[Pipe]:
    """The pipe with every way to cut the chain of blocks into its stages."""
    units = model().steps.units
    assert units is not None
    cuts = combinations(units.block_names[1:], pipe.num_stages - 1)
    return [replace(pipe, split=split) for split in cuts]


def slowest(plan: Plan) -> float:
    """The seconds of a micro-batch on the slowest rank."""
    alone, degree = model().steps.planned_stages(plan).alone, plan.pipe.degree
    return max(sum(map(sum, alone[rank::degree])) for rank in range(degree))


def stages_that_fit(plan: Plan, num_micro_batches: int, limit_bytes: float) -> Plan | None:
    choice = model().stage_choice(plan, num_micro_batches, limit_bytes)
    assert choice is not None
    return choice.with_stages()


def sizes_of(plan: Plan) -> dict[Plan, float]:
    """The memory of the plan with all of its stages."""
    choices = [replace(plan, pipe=one) for one in all_stages(plan.pipe)]
    return {one: model().held(one, COUNT).total_bytes for one in choices}


def test_stages_that_fit_are_the_fastest() -> None:
    sizes = sizes_of(PLAN)
    equal, least = model().held(PLAN, COUNT).total_bytes, min(sizes.values())
    assert least < equal
    for limit in (equal - 1, (equal + least) / 2, least * 1.001):
        found = stages_that_fit(PLAN, COUNT, limit)
        best = min(slowest(one) for one, size in sizes.items() if size <= limit)
        assert found is not None
        assert sizes[found] <= limit
        assert slowest(found) == pytest.approx(best)
    assert stages_that_fit(PLAN, COUNT, least * 0.99) is None


def test_interleaved_stages_fit() -> None:
    plan = replace(PLAN, pipe=Pipe(2, "interleaved"))
    sizes, equal = sizes_of(plan), model().held(plan, COUNT).total_bytes
    found = stages_that_fit(plan, COUNT, equal - 1)
    assert found is not None
    assert sizes[found] < equal


def test_the_search_uses_them_and_says_so() -> None:
    where = parse_constraints(
        ["pipe=4", "schedule=1f1b", "micro_batch=8", "no recompute", "no offload", "pipe.in_flight=4"]
    )
    question = Question(64, SEQUENCE, constraints=where)
    limit = model().held(replace(PLAN, pipe=Pipe(4, in_flight=4)), COUNT).total_bytes - 1
    roomy, tight = (ask("tiny", TINY, with_memory(size), question) for size in (80e9, limit))
    assert roomy.best.plan.pipe.split == ()
    assert tight.best.plan.pipe.split
    assert tight.best.memory.total_bytes <= limit
    counts = [units.num_blocks for units in tight.model.steps.stage_units(tight.best.plan)]
    assert counts[0] < max(counts)
    needed = f"stages of equal time need {(limit + 1) / 1e9:.1f} of {limit / 1e9:.4g} GB"
    assert needed in tight.why
    assert needed not in roomy.why

    run = replace(catalog_run("mpt-125m", "h100:1x4", 64 * SEQUENCE, SEQUENCE), model=TINY)
    predicted = predict(with_plan(run, tight), with_memory(limit))
    assert predicted.step_seconds == pytest.approx(tight.best.seconds, rel=1e-6)
    assert predicted.cost.memory_bytes == pytest.approx(tight.best.memory.tensor_bytes, rel=0.05)


def test_recompute_in_some_stages_is_the_fastest_that_fits() -> None:
    """Of all stages and numbers of stages that recompute, where stages alone do not fit."""
    least = min(sizes_of(PLAN).values())
    some = [replace(PLAN, memory=Memory("full", recompute_stages=count)) for count in (1, 2, 3)]
    sizes = {plan: size for one in some for plan, size in sizes_of(one).items()}
    for limit in (least * 0.99, (least + min(sizes.values())) / 2, min(sizes.values()) * 1.001):
        assert stages_that_fit(PLAN, COUNT, limit) is None
        choice = model().stage_choice(some[0], COUNT, limit)
        assert choice is not None
        found = choice.with_recompute()
        assert found is not None
        assert sizes[found] <= limit
        assert slowest(found) == pytest.approx(min(slowest(one) for one, size in sizes.items() if size <= limit))
        if limit == least * 0.99:  # tighter limits leave almost no blocks to early ranks
            assert slowest(found) < slowest(replace(PLAN, memory=Memory("full")))
    hopeless = model().stage_choice(some[0], COUNT, 0.99 * min(sizes.values()))
    assert hopeless is not None
    assert hopeless.with_recompute() is None


def test_interleaved_stages_recompute_where_needed() -> None:
    plan = replace(PLAN, pipe=Pipe(2, "interleaved"), memory=Memory("full", recompute_stages=1))
    nowhere, everywhere = replace(plan, memory=Memory()), replace(plan, memory=Memory("full"))
    large, small = (model().held(one, COUNT).total_bytes for one in (nowhere, everywhere))
    counts = []
    for share in (0.9, 0.5, 0.1):
        choice = model().stage_choice(plan, COUNT, small + share * (large - small))
        assert choice is not None
        found = choice.with_recompute()
        assert found is not None
        held = model().held(found, COUNT).total_bytes
        assert small < held <= small + share * (large - small)
        counts.append(found.memory.recompute_stages or 0)
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


@pytest.mark.parametrize("shard", [Shard(1), Shard(2, 1), Shard(2, 2), Shard(2, 3)], ids=str)
def test_memory_of_a_rank_with_any_stages_is_that_of_the_plan(shard: Shard) -> None:
    plan = replace(PLAN, shard=shard, memory=Memory(offload=0.25))
    choice = model().stage_choice(plan, COUNT, 1e12)
    assert choice is not None
    stages = model().steps.stage_units(plan)
    ranks = working(choice.costs.sizes, plan, stages, COUNT)
    assert max(map(choice.rank_bytes, ranks)) == pytest.approx(model().held(plan, COUNT).total_bytes, rel=1e-12)
    assert choice.costs.working(1, 0, False, stages[1].num_blocks) in ranks


@pytest.mark.parametrize("pipe", [Pipe(4), Pipe(2, "interleaved")], ids=lambda pipe: pipe.schedule)
def test_bounds_of_stages_are_below_what_they_bound(pipe: Pipe) -> None:
    plan = replace(PLAN, pipe=pipe, memory=Memory("full", recompute_stages=1))
    sharded = replace(plan, pipe=replace(pipe, degree=2), shard=Shard(2, 3)) if pipe.degree == 4 else plan
    large, small = (model().held(replace(plan, memory=Memory(kind)), COUNT).total_bytes for kind in ("none", "full"))
    found = 0
    for limit in (small * 0.5, small * 0.9, (small + large) / 2, small * 0.1 + large * 0.9):
        for one in (plan, sharded):
            choice = model().stage_choice(one, COUNT, limit)
            assert choice is not None
            stages = choice.recompute()
            assert stages is None or choice.costs.may_fit(limit)
            if stages is not None:
                found += 1
                seconds = model().steps.step_seconds(choice.plan_of(*stages), COUNT)
                assert 0.5 * seconds < choice.bound(*stages) <= seconds
                assert choice.least_seconds(stages[0]) <= choice.bound(*stages)
    assert found > 1
    nothing = model().stage_choice(plan, COUNT, RESERVE_BYTES)
    assert nothing is not None
    assert not nothing.costs.may_fit(RESERVE_BYTES)


def test_the_search_recomputes_in_the_stages_that_need_it_and_says_so() -> None:
    where = parse_constraints(["pipe=4", "schedule=1f1b", "micro_batch=8", "no offload", "recompute!=selective"])
    question = Question(64, SEQUENCE, constraints=where)
    limit = min(sizes_of(PLAN).values()) - 1
    tight, none = (
        ask("tiny", TINY, with_memory(limit), replace(question, constraints=(*where, *more)))
        for more in ((), parse_constraints(["no recompute"]))
    )
    plan = tight.best.plan
    assert plan.memory.recompute == "full"
    assert plan.memory.recompute_stages in (1, 2, 3)
    assert tight.best.memory.total_bytes <= limit
    full = tight.model.steps.step(replace(plan, memory=Memory("full"), pipe=Pipe(4)), COUNT).seconds
    assert tight.best.seconds < full
    assert f"{plan.memory.recompute_stages} of 4 stages recompute" in tight.why
    assert f"{full / tight.best.seconds - 1:.1%} longer" in tight.why
    assert all(one.plan.memory.recompute_stages is None for one in none.found.best)  # a constraint is kept

    run = replace(catalog_run("mpt-125m", "h100:1x4", 64 * SEQUENCE, SEQUENCE), model=TINY)
    predicted = predict(with_plan(run, tight), with_memory(limit))
    assert predicted.step_seconds == pytest.approx(tight.best.seconds, rel=1e-6)
    assert predicted.cost.memory_bytes == pytest.approx(tight.best.memory.tensor_bytes, rel=0.05)

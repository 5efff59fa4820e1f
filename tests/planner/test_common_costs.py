"""Costs that plans share, and bounds: the search with them gives the answers of a search that times every plan."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import pytest

from weft.cluster.hardware import Cluster, load
from weft.models import GPT2Config
from weft.plan import Plan, Recompute, Tensor
from weft.planner.candidate import Candidate, SearchResult
from weft.planner.closed_form_memory import RankMemory, memory, plan_sizes, working
from weft.planner.common_costs import CommonCosts, TextCosts
from weft.planner.memory_stages import StageCosts
from weft.planner.model import planned_model
from weft.planner.question import Question, parse_constraints
from weft.planner.search import Model, TextSearch, search
from weft.profiling.software import Software

SMALL = GPT2Config(vocab_size=50304, n_positions=1024, n_embd=1024, n_layer=8, n_head=16)
NUM_SAMPLED, NUM_SOAK = 1, 200
WORDS = ((), ("pipe>=2",), ("no recompute",), ("x>=2", "sequence=true"), ("schedule=interleaved",), ("offload<=0.5",))


class Unbounded(CommonCosts):
    """Costs that say nothing about the time of other plans."""

    least_seconds = 0.0


@dataclass(frozen=True)
class EachAlone(Model):
    """The model with the costs of every plan computed alone: nothing shared, no bound, all pipeline ranks.

    Pipelines come in no order, so the search tries more of them.
    """

    def held(self, plan: Plan, num_micro_batches: int) -> RankMemory:
        own = plan_sizes(self.profile, plan)
        ranks = working(own, plan, self.steps.stage_units(plan), num_micro_batches)
        return memory(ranks, own, plan, num_micro_batches)

    def common(self, plan: Plan, num_micro_batches: int) -> CommonCosts:
        costs = Unbounded(plan, num_micro_batches, self.steps, self.held)

        def stage_costs(recompute: Recompute) -> StageCosts | None:
            return TextCosts(plan, num_micro_batches, self.steps, partial(plan_sizes, self.profile)).stage_costs(
                recompute
            )

        costs.stage_costs = stage_costs  # type: ignore[method-assign]
        return costs


@lru_cache(maxsize=1)
def small() -> Model:
    return planned_model(SMALL, 1024, load("h100:1x8"), Software())


def on(cluster: Cluster, gigabytes: float) -> Model:
    device = replace(cluster.node.device, memory_bytes=int(gigabytes * 1e9))
    return small().on(replace(cluster, node=replace(cluster.node, device=device)))


def question_of(seed: int) -> tuple[Model, Question]:
    """A model that few of the plans fit, and a question about it."""
    rng = random.Random(f"common {seed}")
    cluster = load(rng.choice(["h100:1x8", "h100:2x4", "a100-40:4x4", "gh200:4x4"]))
    question = Question(rng.choice([16, 24, 64]), 1024, "bf16", parse_constraints(rng.choice(WORDS)))
    return on(cluster, rng.choice([2.5, 3.0, 4.0, 6.0])), question


def shown(found: SearchResult) -> tuple[list[tuple[Plan, float, RankMemory]], ...]:
    """The plans found, and those that would be faster but do not fit."""

    def of(candidates: tuple[Candidate, ...]) -> list[tuple[Plan, float, RankMemory]]:
        return [(one.plan, one.seconds, one.memory) for one in candidates]

    fastest = found.best[0].seconds if found.best else math.inf
    return of(found.best), of(tuple(one for one in found.too_large if one.seconds < fastest))


def check_question(seed: int) -> None:
    model, question = question_of(seed)
    found, alone = (search(one, question) for one in (model, EachAlone(model.steps, model.profile)))
    assert shown(found) == shown(alone)
    assert found.num_considered <= alone.num_considered


@pytest.mark.parametrize("seed", range(NUM_SAMPLED))
def test_shared_costs_and_bounds_change_no_answer(seed: int) -> None:
    check_question(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(NUM_SAMPLED, NUM_SOAK + NUM_SAMPLED))
def test_shared_costs_and_bounds_change_no_answer_to_more_questions(seed: int) -> None:
    check_question(seed)


def test_a_bound_of_memory_that_is_too_high_loses_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    words = parse_constraints(["no recompute", "no offload"])
    model, question = on(load("h100:1x8"), 2.5), Question(64, 1024, constraints=words)
    before = search(model, question)
    assert any(one.plan.tensor.regather for one in before.best)
    monkeypatch.setattr(TextCosts, "floor_bytes", property(lambda costs: 4e9))
    monkeypatch.setattr(TextCosts, "halved_floor_bytes", property(lambda costs: 4e9))
    assert shown(search(model, question)) != shown(before)


def test_inner_plans_come_in_the_order_of_their_bounds() -> None:
    seeker, steps = TextSearch(small(), Question(64, 1024), 10), small().steps
    laid_out: list[Plan] = []
    seeker._lay_out = laid_out.append  # type: ignore[method-assign]
    found, plans = seeker.run(), [*seeker._inner_plans()]
    bounds = [seeker._inner_bound(plan, sum(steps.chain(plan))) for plan in laid_out]
    assert bounds == sorted(bounds)
    assert found.least_device_seconds == bounds[0] * 8
    assert len(set(plans)) == len(plans) == len(laid_out)
    assert set(plans) == set(laid_out)
    for plan in plans:
        assert steps.kernel_seconds(plan) <= sum(steps.chain(plan))


def test_a_bound_of_times_that_is_too_high_loses_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    model, question = on(load("h100:1x8"), 3.0), Question(64, 1024)
    before = search(model, question)
    of_pipe, bound = before.best[0].plan.pipe.degree > 1, vars(TextCosts)["least_seconds"].fget

    def too_high(costs: TextCosts) -> float:
        return float(bound(costs)) * (3 if (costs._plan.pipe.degree > 1) == of_pipe else 1)

    monkeypatch.setattr(TextCosts, "least_seconds", property(too_high))
    assert shown(search(model, question))[0] != shown(before)[0]


def test_a_cap_that_some_schedules_do_not_allow_leaves_them_out() -> None:
    question = Question(64, 1024, constraints=parse_constraints(["pipe=4", "pipe.in_flight=3"]))
    found = search(small(), question)
    assert found.best
    assert all(one.plan.pipe.in_flight == 3 and one.plan.pipe.schedule != "interleaved" for one in found.best)
    assert any("in_flight = 3 is too few" in reason for _, reason in found.refused)


@pytest.mark.parametrize(("before", "after"), [("h100:4x8", "h100:2x8"), ("h100:2x8", "h100:1x8")])
def test_times_that_are_kept_for_other_numbers_of_nodes_are_theirs(before: str, after: str) -> None:
    plan = Plan(tensor=Tensor(5), micro_batch=2, precision="bf16")  # 5 ranks cross nodes of 8, if there are several
    known = small().on(load(before))
    assert sum(known.steps.chain(plan)) > 0
    again, fresh = known.on(load(after)).steps, small().on(load("a100-40:1x8")).on(load(after)).steps
    is_kept = "_known" in vars(again)
    assert is_kept == (after != "h100:1x8")  # on one node, links are others
    assert "_known" not in vars(fresh)
    assert again.chain(plan) == fresh.chain(plan)
    assert (again.chain(plan) == known.steps.chain(plan)) == is_kept

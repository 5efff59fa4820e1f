"""Recompute in the first stages only: exact under every schedule, refused in words, and slower than none of it."""

from __future__ import annotations

from typing import Any

import pipeline_for_tests as models
import pytest

import weft.pipeline.build
from weft.errors import PlanError
from weft.parallel.apply import cost
from weft.plan import Memory, Pipe, Plan, Recompute, split_batch
from weft.plan import Tensor as TensorPlan
from weft.profiling import profile
from weft.proof.prove import verify
from weft.sharding.layout import STAGING

SHARDED = TensorPlan(2, sequence=True, regather=True)  # the stages without recompute gather again
PLANS = {
    "1f1b": Plan(pipe=Pipe(2), memory=Memory("full", recompute_stages=1), micro_batch=1),
    "interleaved, x": Plan(
        pipe=Pipe(2, "interleaved"), tensor=SHARDED, memory=Memory("selective", recompute_stages=3), micro_batch=1
    ),
    "interleaved": Plan(pipe=Pipe(2, "interleaved"), memory=Memory("full", recompute_stages=3), micro_batch=1),
    "gpipe": Plan(pipe=Pipe(2, "gpipe"), memory=Memory("selective", recompute_stages=1), micro_batch=1),
    "zero-bubble": Plan(pipe=Pipe(2, "zero-bubble"), memory=Memory("full", recompute_stages=1), micro_batch=1),
    "bidirectional": Plan(pipe=Pipe(2, "bidirectional"), memory=Memory("full", recompute_stages=1), micro_batch=1),
    "1f1b, x": Plan(pipe=Pipe(2), tensor=SHARDED, memory=Memory("full", recompute_stages=1), micro_batch=1),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.sampled(8)
def test_stages_with_different_policies_are_exact(name: str) -> None:
    verify(models.decoder, models.tokens(4), PLANS[name], steps=2).require()


@pytest.mark.processes
@pytest.mark.soak
def test_a_stage_with_another_policy_than_predicted_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stage recomputes, too, and gathers over x more often than the plan says."""
    plan, built = PLANS["1f1b, x"], weft.pipeline.build._build_stage

    def build_wrong(staging: Any, number: int, *others: Any) -> Any:
        given = staging.plan
        object.__setattr__(staging, "plan", given.of_stage(0))
        made = built(staging, number, *others)
        object.__setattr__(staging, "plan", given)
        return made

    monkeypatch.setattr(weft.pipeline.build, "_build_stage", build_wrong)
    assert not verify(models.decoder, models.tokens(4), plan, steps=1).passed


def test_each_stage_follows_its_own_plan() -> None:
    plan = PLANS["interleaved, x"]
    assert [plan.of_stage(stage).memory.recompute for stage in range(4)] == ["selective"] * 3 + ["none"]
    assert [plan.of_stage(stage).tensor.regather for stage in range(4)] == [False] * 3 + [True]
    assert Plan(pipe=Pipe(2)).of_stage(1) == Plan(pipe=Pipe(2))


@pytest.mark.parametrize(
    ("pipe", "recompute", "count", "words"),
    [
        (Pipe(4), "none", 1, "memory.recompute = 'none'; set it to 'selective' or 'full'"),
        (Pipe(), "full", 1, "needs a pipeline, and pipe = 1"),
        (Pipe(4), "full", 0, "the pipeline has 4 stages (pipe.degree × chunks); use 1 to 3"),
        (Pipe(4, "interleaved"), "full", 8, "the pipeline has 8 stages (pipe.degree × chunks); use 1 to 7"),
    ],
)
def test_what_makes_no_sense_is_refused(pipe: Pipe, recompute: Recompute, count: int, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(pipe=pipe, memory=Memory(recompute, recompute_stages=count))
    assert words in str(caught.value)


def test_only_the_first_stages_compute_again() -> None:
    batch = models.tokens(4)(0)
    whole = profile(models.decoder(), lambda: (batch[0][:1],))

    def flops(memory: Memory) -> list[int]:
        plan = Plan(pipe=Pipe(2, split=("model.layers.2",)), memory=memory, micro_batch=1)
        split = split_batch(plan, 4, models.SEQUENCE)
        return [cost(whole, plan, split, {**dict.fromkeys(plan.degrees, 0), "pipe": rank}).flops for rank in (0, 1)]

    none, some, full = flops(Memory()), flops(Memory("full", recompute_stages=1)), flops(Memory("full"))
    assert some == [full[0], none[1]]
    assert none[0] < some[0]
    assert some[1] < full[1]


def test_stages_of_a_rank_share_the_room_through_which_state_is_moved() -> None:
    """Rank 0 of two has the stages that ranks 0 and 2 of four have, and as much room as the larger of them needs."""
    batch = models.tokens(4)(0)
    whole = profile(models.decoder(), lambda: (batch[0][:1],))

    def room(pipe: Pipe, rank: int) -> int:
        plan = Plan(pipe=pipe, memory=Memory(offload=1.0), micro_batch=1)
        at = {**dict.fromkeys(plan.degrees, 0), "pipe": rank}
        return cost(whole, plan, split_batch(plan, 4, models.SEQUENCE), at).state_bytes[STAGING]

    assert room(Pipe(2, "interleaved"), 0) == max(room(Pipe(4), 0), room(Pipe(4), 2)) > 0

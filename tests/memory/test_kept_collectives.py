"""Recompute that communicates nothing: as many collectives as without recompute, equal bits, the predicted memory."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from experts_for_tests import CONFIG, batch, make, make_balanced, make_random
from torch import nn

import weft
from weft.comm.kept_results import KeptResults
from weft.errors import PlanError
from weft.launch.local_ranks import run_local
from weft.models.loss import ExampleLoss
from weft.parallel.apply import cost
from weft.parallel.model_state import named_pieces
from weft.plan import Context, Memory, Pipe, Plan, Shard, Tile, split_batch
from weft.plan import Tensor as TensorAxis
from weft.profiling import profile
from weft.proof.prove import verify
from weft.step.train_step import train_step

KEPT = Memory("full", keep_collectives=True)


def dense() -> nn.Module:
    return make(replace(CONFIG, architecture="qwen3", num_experts=0, num_experts_per_tok=0, moe_intermediate_size=0))


def steps_on_rank(model: Any, plan: Plan) -> dict[str, Any]:
    """Two steps: the collectives of the second, its largest sum of kept results, and the parameters after it."""
    mesh = weft.Mesh(plan)
    parallel = weft.parallelize(model().double(), plan, mesh)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(2):
        mesh.ledger.clear()
        mesh.ledger.kept_bytes.most = 0
        optimizer.zero_grad()
        own = mesh["batch"]
        inputs, labels = (one.chunk(own.degree)[own.index] for one in batch(step))
        train_step(parallel, optimizer, [(inputs, labels)], mesh)
    digest = hashlib.sha256()
    for _, piece in named_pieces(parallel):
        digest.update(piece.detach().numpy().tobytes())
    calls = {" ".join(key): [traffic.calls, traffic.num_bytes] for key, traffic in mesh.ledger}
    return {
        "calls": calls,
        "kept": mesh.ledger.kept_bytes.most,
        "left": mesh.ledger.kept_bytes.now,
        "bits": digest.hexdigest(),
    }


def predicted(model: Any, plan: Plan) -> int:
    """The bytes that a rank keeps: what `cost` adds to the saved activations."""
    split = split_batch(plan, 4, 16)
    tokens = torch.zeros(split.micro_batch, 16, dtype=torch.long)
    found = profile(model(), lambda: (tokens,), ExampleLoss(lambda: tokens))
    without = replace(plan, memory=replace(plan.memory, keep_collectives=False))
    return cost(found, plan, split).saved_bytes - cost(found, without, split).saved_bytes


@pytest.mark.processes
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (make_random, Plan(expert=2, tensor=TensorAxis(2, drop_duplicates=True))),
        (dense, Plan(tensor=TensorAxis(2, 1, True), context=Context(2))),
        (dense, Plan(tensor=TensorAxis(2, 2))),
        (make_random, Plan(expert=2, shard=Shard(2, 3))),
    ],
    ids=["experts x", "sequence context", "x y", "experts shard"],
)
def test_recompute_communicates_nothing(model: Any, plan: Plan) -> None:
    plan = replace(plan, precision="fp64")
    none, again, kept = (
        run_local(lambda rank, memory=memory: steps_on_rank(model, replace(plan, memory=memory)), plan.num_ranks)
        for memory in (Memory(), Memory("full"), KEPT)
    )
    expected = predicted(model, replace(plan, memory=KEPT))
    assert expected > 0
    for rank, one in enumerate(kept):
        assert one["bits"] == again[rank]["bits"]
        assert one["calls"] == none[rank]["calls"] != again[rank]["calls"]
        assert (one["kept"], one["left"], again[rank]["kept"]) == (expected, 0, 0)


@pytest.mark.processes
@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "plan",
    [
        Plan(expert=2, tensor=TensorAxis(2), memory=KEPT),
        Plan(expert=2, pipe=Pipe(2), micro_batch=1, memory=KEPT),
        Plan(expert=2, shard=Shard(2, 3), memory=replace(KEPT, recompute="selective")),
        Plan(tensor=TensorAxis(2, 2), expert_over=("x", "y"), memory=KEPT),
        Plan(tensor=TensorAxis(2), memory=replace(KEPT, recompute="selective")),
    ],
    ids=lambda plan: plan.describe_axes() + plan.memory.words,
)
def test_plans_are_proved(plan: Plan) -> None:
    verify(make_balanced, batch, plan, steps=2).require()


@pytest.mark.processes
def test_results_that_are_not_taken_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a recompute that communicates in spite of the plan has more traffic than predicted."""
    monkeypatch.setattr(KeptResults, "take", lambda *_: False)
    report = verify(make, batch, Plan(expert=2, memory=KEPT), steps=1)
    assert "traffic: expert all_to_all" in {check.what for check in report.checks if not check.passed}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory": Memory(keep_collectives=True)}, "memory.recompute = 'none'; set recompute"),
        ({"memory": KEPT, "tile": Tile(2)}, "does not keep what tiles"),
    ],
)
def test_plans_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(**fields)

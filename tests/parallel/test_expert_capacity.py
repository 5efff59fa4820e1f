"""Experts with a capacity under `expert`: the same tokens are dropped under every plan; bytes are a closed form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from experts_for_tests import CONFIG, LOSSES, batch, make, make_random
from torch import Tensor, nn

from weft.architectures import Capacity
from weft.errors import PlanError
from weft.models.experts import SparseMLP
from weft.models.loss import ExampleLoss
from weft.parallel.apply import cost, refuse
from weft.plan import Context, Memory, Pipe, Plan, Shard, split_batch
from weft.plan import Tensor as TensorAxis
from weft.profiling import profile
from weft.proof.prove import verify


def make_first() -> nn.Module:
    """Top-1 with the first tokens."""
    return make(replace(CONFIG, num_experts_per_tok=1, capacity=Capacity(0.75, 1), **LOSSES))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (make_first, Plan(expert=2, shard=Shard(2, 3), memory=Memory("full"))),
        (make_random, Plan(expert=2, pipe=Pipe(2), micro_batch=1, memory=Memory("full"))),
        (make_random, Plan(expert=2, tensor=TensorAxis(2))),
    ],
    ids=["first", "random pipe", "random x"],
)
def test_plans_are_proved(model: Any, plan: Plan) -> None:
    verify(model, batch, plan, steps=2).require()


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.parametrize("model", [make_first, make_random])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(expert=4),
        Plan(expert=4, data=2, micro_batch=1, memory=Memory("selective")),
        Plan(expert=2, shard=Shard(2, 1)),
        Plan(expert=2, shard=Shard(2, 2), memory=Memory("full")),
        Plan(data=2, pipe=Pipe(2), micro_batch=1),
    ],
    ids=lambda plan: plan.describe_axes() if isinstance(plan, Plan) else "",
)
def test_more_plans_are_proved(model: Any, plan: Plan) -> None:
    verify(model, lambda index: tuple(one.repeat(2, 1) for one in batch(index)), plan, steps=2).require()


@pytest.mark.processes
def test_first_tokens_instead_of_random_ones_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    order = SparseMLP._order

    def first_tokens(self: Any, experts: Tensor, hidden: Tensor, keys: Tensor | None) -> Any:
        is_split = "forward" in vars(self.experts)  # not in the sequential model
        selection = "first" if is_split else self.capacity.selection
        with monkeypatch.context() as patch:
            patch.setattr(self, "capacity", replace(self.capacity, selection=selection))
            return order(self, experts, hidden, keys)

    monkeypatch.setattr(SparseMLP, "_order", first_tokens)
    report = verify(make_random, batch, Plan(expert=2), steps=1)
    assert {"loss", "worst gradient"} <= {check.what for check in report.checks if not check.passed}


def test_bytes_are_a_closed_form() -> None:
    """Each all-to-all sends all slots: experts × capacity × sequences rows; two in forward, two in backward."""
    tokens = torch.zeros(2, 16, dtype=torch.long)
    found = profile(make_first(), lambda: (tokens,), ExampleLoss(lambda: tokens))
    plan = Plan(expert=2, precision="fp64")
    sent = cost(found, plan, split_batch(plan, 4, 16)).traffic["expert", "all_to_all"]
    capacity, layers, calls = 2, 2, 4  # ceil(0.75 * 16 / 8)
    assert (sent.calls, sent.num_bytes) == (layers * calls, layers * calls * 8 * capacity * 2 * 16 * 8)


def test_sequences_are_not_split() -> None:
    with pytest.raises(PlanError, match="context = 2 splits sequences, and experts take a part of the tokens"):
        refuse(profile(make(replace(CONFIG, capacity=Capacity()))), Plan(context=Context(2)))

"""Routing that is as bad as can be: all tokens to one expert, none to some ranks, to others each step. Still exact."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from experts_for_tests import CONFIG, batch, make
from torch import Tensor, nn

from weft.architectures import Capacity
from weft.models.router import Router
from weft.plan import Context, Memory, Plan, Shard
from weft.plan import Tensor as TensorAxis
from weft.proof.prove import verify

TOP_1 = replace(CONFIG, num_experts_per_tok=1)
FIRST = replace(TOP_1, capacity=Capacity(0.75, 2))
RANDOM = replace(TOP_1, capacity=Capacity(4.0, 2, "random"))


class FewExperts:
    """Sends all tokens of a step to k neighbours: always to the same, or (`stride` > 0) to others each step."""

    def __init__(self, router: Router, k: int, first: int, stride: int) -> None:
        self._router, self._k, self._first, self._stride, self._step = router, k, first, stride, 0

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        first = (self._first + self._stride * self._step) % (CONFIG.num_experts - self._k + 1)
        if self._router.training and torch.is_grad_enabled():
            self._step += 1  # a step has one forward: one micro-batch; recompute is tried without a stride
        experts = torch.arange(first, first + self._k)
        scores = torch.nn.functional.linear(hidden, self._router.weight).flatten(0, -2)[:, experts]
        weights = scores.softmax(-1) if self._k > 1 else scores.sigmoid()
        return weights, experts.expand(len(scores), self._k)


def make_adversarial(config: Any, stride: int) -> nn.Module:
    """Layer 0 begins with the first experts and layer 1 with the last two."""
    model = make(config)
    routers: list[Any] = [module for module in model.modules() if isinstance(module, Router)]
    for layer, router in enumerate(routers):
        router.forward = FewExperts(router, config.num_experts_per_tok, 6 * layer, stride)
    return model


PLANS = {
    "expert": Plan(expert=4),
    "shard": Plan(expert=2, shard=Shard(2, 3)),
    "x": Plan(expert=2, tensor=TensorAxis(2), expert_over=("x",)),
    "duplicates": Plan(expert=2, tensor=TensorAxis(2, drop_duplicates=True)),
}
CASES = [
    *((config, stride, PLANS[name]) for config in (FIRST, RANDOM, TOP_1) for stride in (3, 0) for name in PLANS),
    (TOP_1, 3, Plan(expert=2, context=Context(2), expert_over=("context",))),
    (CONFIG, 3, PLANS["shard"]),
]


def prove(config: Any, stride: int, plan: Plan, steps: int) -> None:
    report = verify(partial(make_adversarial, config, stride), batch, plan, steps=steps, timeout_seconds=1200)
    report.require()
    assert any(check.what.endswith("all_to_all") for check in report.checks)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("config", "stride", "plan"),
    [(FIRST, 3, PLANS["shard"]), (CONFIG, 3, PLANS["shard"]), (CONFIG, 0, Plan(expert=4, memory=Memory("full")))],
    ids=["one expert", "changing", "ranks without tokens"],
)
def test_all_tokens_go_to_few_experts(config: Any, stride: int, plan: Plan) -> None:
    prove(config, stride, plan, 3 if config is CONFIG and stride else 2)


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.parametrize(("config", "stride", "plan"), CASES)
def test_fifty_steps_are_exact(config: Any, stride: int, plan: Plan) -> None:
    prove(config, stride, plan, 50)

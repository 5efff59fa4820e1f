"""q, k and v as one matmul: the same numbers, names and checkpoints, fewer kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tensor_for_tests as shared
import torch
import torch._dynamo  # before the ranks are forked, which then need not import it
from tensor_for_tests import SHIPPED
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import weft.parallel.joined
from weft.local import run_local
from weft.mesh import Mesh
from weft.models.decoder import Joined
from weft.parallel import named_pieces, parallelize
from weft.plan import Memory, Pipe, Plan, Shard
from weft.plan import Tensor as TensorPlan
from weft.train.step import CROSS_ENTROPY
from weft.verify import verify

PLAIN = SHIPPED["tied"]


def joined_of(model: nn.Module) -> list[bool]:
    return [module.joined is not None for module in model.modules() if isinstance(module, Joined)]


class Matmuls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def step_of(make: Callable[[], nn.Module]) -> tuple[float, dict[str, torch.Tensor], int, nn.Module]:
    torch.manual_seed(0)
    model = parallelize(make(), Plan(precision="bf16"), Mesh(Plan(precision="bf16")))
    with Matmuls() as matmuls:
        total = CROSS_ENTROPY.total(model, shared.token_batch(0))
        total.backward()
    gradients = {p.parameter.name: piece.grad.clone() for p, piece in named_pieces(model) if piece.grad is not None}
    return total.item(), gradients, matmuls.count, model


def test_one_matmul_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    total, gradients, count, model = step_of(PLAIN)
    assert joined_of(model) == [True] * 2
    monkeypatch.setattr(weft.parallel.joined, "_join", lambda *_: None)
    expected, others, all_count, apart = step_of(PLAIN)
    assert joined_of(apart) == [False] * 2
    assert all_count - count == 2 * 3 * 2  # of two layers, forward and both gradients: 3 → 1
    assert total == pytest.approx(expected, rel=2e-3)  # sums in another order, in bf16
    assert set(gradients) == set(others)
    assert list(model.state_dict()) == list(apart.state_dict())
    for name, gradient in gradients.items():
        assert float((gradient - others[name]).abs().max()) <= 0.05 * float(others[name].abs().max()) + 1e-2, name


@pytest.mark.parametrize("name", ["biased", "two key heads"])
def test_biases_lie_between(name: str) -> None:
    found = joined_of(step_of(SHIPPED[name])[3])
    assert found and not any(found)


PLANS = {
    "shard 2 stage 3": Plan(shard=Shard(2, 3)),
    "shard 2 stage 2": Plan(shard=Shard(2, 2)),
    "data 2, full": Plan(data=2, memory=Memory("full")),
    "data 2, selective": Plan(data=2, memory=Memory("selective")),
    "pipe 2": Plan(pipe=Pipe(2)),
    "pipe 2, zero-bubble": Plan(pipe=Pipe(2, "zero-bubble")),
    "x 2": Plan(tensor=TensorPlan(2)),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_every_plan_computes_what_the_model_does(plan: Plan) -> None:
    def rank(_: int) -> list[bool]:
        torch.manual_seed(0)
        example = (shared.token_batch(0)[0],)
        return joined_of(parallelize(PLAIN(), plan, Mesh(plan), example=lambda: example))

    found = run_local(rank, plan.num_ranks, 60)
    is_joined = plan.tensor.x == 1 and plan.pipe.schedule != "zero-bubble"
    assert all(all(one) if is_joined else not any(one) for one in found)
    verify(PLAIN, shared.token_batch, replace(plan, micro_batch=1) if plan.pipe.degree > 1 else plan).require()


def test_a_gradient_that_is_not_handed_on_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weft.parallel.joined, "_hand_on", lambda *_: None)
    assert not verify(PLAIN, shared.token_batch, Plan(data=2)).passed


def test_blocks_compile_once() -> None:
    torch.manual_seed(0)
    config = shared.decoder(num_key_value_heads=4, num_hidden_layers=3)
    plan = Plan(precision="bf16")
    model = parallelize(shared.made(config)(), plan, Mesh(plan))
    for layer in model.get_submodule("model.layers").children():
        layer.forward = torch.compile(layer.forward, backend="aot_eager", dynamic=False)
    torch._dynamo.utils.counters.clear()
    for step in range(2):
        CROSS_ENTROPY.total(model, shared.token_batch(step)).backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]

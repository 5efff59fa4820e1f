"""Blocks compiled by torch.compile, under each axis, compute what they compute uncompiled: loss and every gradient.

`aot_eager` traces forward and backward and generates no code; inductor, which does, runs with `-m soak`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensor_for_tests as shared
import torch
import torch._dynamo  # before the ranks are forked, which then need not import it
import torch._inductor.config
from sampled_for_tests import one_in
from tensor_for_tests import SHIPPED, TRANSFORMERS
from torch import nn

from weft.inspection.blocks import find_blocks
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.parallel.apply import parallelize
from weft.parallel.context.axis import own_tokens
from weft.parallel.model_state import named_pieces
from weft.plan import Context, Memory, Plan, Shard
from weft.plan import Tensor as TensorPlan
from weft.step.objective import CROSS_ENTROPY

pytestmark = pytest.mark.processes

Compile = Callable[[nn.Module], None]
MODELS = {"shipped": SHIPPED["tied"], "transformers": TRANSFORMERS["Llama"]}
PLANS = {
    "x 2": Plan(tensor=TensorPlan(2), precision="fp64"),
    "shard 2": Plan(shard=Shard(2, 3), precision="fp64"),
    "data 2": Plan(data=2, precision="fp64"),
}
OTHERS = {
    "x 2, sequence": Plan(tensor=TensorPlan(2, sequence=True, regather=True, chunks=2), precision="fp64"),
    "y 2": Plan(tensor=TensorPlan(1, 2), precision="fp64"),
    "x 2, full": Plan(tensor=TensorPlan(2), memory=Memory("full"), precision="fp64"),
    "shard 2, selective": Plan(shard=Shard(2, 3), memory=Memory("selective"), precision="fp64"),
}


def trained(
    make: Callable[[], nn.Module], plan: Plan, change: Compile, num_steps: int = 2
) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradients of some steps, on this rank; `change` is done to each block."""
    torch.manual_seed(0)
    mesh = Mesh(plan)
    model = parallelize(make().double(), plan, mesh)
    for block in find_blocks(model).values():
        change(block)
    found = []
    for step in range(num_steps):
        batch = tuple(tensor.chunk(mesh["batch"].degree)[mesh["batch"].index] for tensor in shared.token_batch(step))
        loss = CROSS_ENTROPY.total(model, own_tokens(batch, mesh["context"]))
        loss.backward()
        pieces = [(part.parameter.name, piece) for part, piece in named_pieces(model)]
        found.append((loss.item(), {name: piece.grad.clone() for name, piece in pieces if piece.grad is not None}))
        model.zero_grad()
    return found


def check(make: Callable[[], nn.Module], plan: Plan, backend: str) -> list[dict[str, int]]:
    """Compiled against uncompiled on every rank; what the compiler counted."""

    def compile_forward(block: nn.Module) -> None:
        block.forward = torch.compile(block.forward, backend=backend)

    def rank(index: int) -> dict[str, int]:
        expected = trained(make, plan, lambda block: None)
        torch._dynamo.utils.counters.clear()
        found = trained(make, plan, compile_forward)
        for (loss, gradients), (expected_loss, expected_gradients) in zip(found, expected, strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-12)
            assert set(gradients) == set(expected_gradients)
            largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
            for name, gradient in gradients.items():
                assert float((gradient - expected_gradients[name]).abs().max()) <= 1e-12 * largest, name
        return dict(torch._dynamo.utils.counters["stats"])

    counts: list[dict[str, int]] = run_local(rank, plan.num_ranks, 300)
    return counts


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("make", one_in(2, MODELS))
def test_compiled_blocks_compute_the_same(
    make: Callable[[], nn.Module], plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.with_exact_norms(monkeypatch)
    for counts in check(make, plan, "aot_eager"):
        assert counts["calls_captured"] > 30  # operations of a block: it was not left as it is


def test_blocks_share_what_was_compiled() -> None:
    config = shared.decoder(num_key_value_heads=4, num_hidden_layers=3)
    for counts in check(shared.made(config), OTHERS["x 2, sequence"], "eager"):
        # Of one block: before, between and behind the collectives of attention and MLP.
        assert counts["unique_graphs"] == 7


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["ring", "all-to-all"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_blocks_over_context(kind: Any, backend: str) -> None:
    with torch._inductor.config.patch(compile_threads=1):
        check(MODELS["shipped"], Plan(context=Context(2, kind), precision="fp64"), backend)


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", PLANS | OTHERS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_compiled_blocks_of_every_plan(
    make: Callable[[], nn.Module], name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.with_exact_norms(monkeypatch)
    with torch._inductor.config.patch(compile_threads=1):
        check(make, (PLANS | OTHERS)[name], backend)


@pytest.mark.parametrize("kind", ["ring", "all-to-all"])
def test_attention_over_context_is_compiled_once_and_never_again(kind: Any) -> None:
    """Its collectives are no part of a graph; seen by dynamo, each step had other ones, and was compiled anew."""
    plan = Plan(context=Context(2, kind), precision="fp64")

    def compile_forward(block: nn.Module) -> None:
        block.forward = torch.compile(block.forward, backend="eager", dynamic=False)

    def rank(_: int) -> list[int]:
        found = []
        for num_steps in (1, 4):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            trained(MODELS["shipped"], plan, compile_forward, num_steps)
            found.append(torch._dynamo.utils.counters["frames"]["total"])  # what was compiled, with a graph or without
        return found

    for one, several in run_local(rank, 2):
        assert one == several > 0

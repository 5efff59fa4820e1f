"""Matmuls in fp8 against a direct reference of their rounding, and what refuses them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tensor_for_tests as shared
import torch
from torch import Tensor, nn

from weft.compile.saved_bytes import compiled_profile
from weft.errors import PlanError
from weft.mesh import Mesh
from weft.models.experts import StackedExperts, stacked_experts
from weft.models.loss import ExampleLoss
from weft.parallel.apply import parallelize, refuse
from weft.parallel.fp8.experts import fp8_stacked_experts
from weft.parallel.fp8.matmuls import multiply, quantise
from weft.parallel.fp8.operations import LARGEST
from weft.plan import Memory, Pipe, Plan
from weft.plan import Tensor as TensorPlan
from weft.profiling import profile
from weft.proof.prove import verify
from weft.step.objective import CROSS_ENTROPY

pytestmark = pytest.mark.processes

PLAN = Plan(precision="bf16", exact=False, matmul="fp8")


def made() -> nn.Module:
    return shared.made(shared.decoder(hidden_size=32, intermediate_size=64, num_key_value_heads=4))()


def with_experts(inner: int) -> nn.Module:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": inner}
    return shared.made(shared.decoder(architecture="qwen3_moe", hidden_size=32, num_key_value_heads=4, **sizes))()


def rounded(matrix: Tensor) -> Tensor:
    """Each row rounded to e4m3 by its own scale, as numbers: by hand, from the nearest of all values that it has."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    values = values[values.isfinite()].unique()
    scale = matrix.double().abs().amax(-1, keepdim=True) / LARGEST
    nearest = (matrix.double() / scale)[..., None].sub(values).abs().argmin(-1)
    return values[nearest] * scale


def twice(matrix: Tensor) -> Tensor:
    """A matrix whose rows were rounded to fp8, in float64."""
    values, scale = quantise(matrix)
    return values.double() * scale


def test_rows_are_rounded_to_the_nearest() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(40, 64, dtype=torch.bfloat16) * torch.logspace(-6, 6, 40)[:, None].bfloat16()
    found, scale = quantise(matrix)
    assert found.dtype == torch.float8_e4m3fn
    assert float(found.float().abs().amax(-1).min()) == LARGEST  # each row uses all the range
    mine, expected = found.double() * scale, rounded(matrix)
    ties = (mine - expected).abs() > 1e-6 * expected.abs()  # a number between two goes to the even one
    assert float(ties.double().mean()) < 0.02
    assert float(((mine - matrix.double()).abs() / matrix.double().abs().clamp(min=1e-30))[~ties].quantile(0.5)) < 0.04
    assert torch.equal(quantise(torch.zeros(2, 16))[0].float(), torch.zeros(2, 16))


def test_product_and_gradients_are_those_of_rounded_numbers() -> None:
    torch.manual_seed(0)
    value = torch.randn(3, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(48, 32, dtype=torch.bfloat16, requires_grad=True)
    given = torch.randn(3, 16, 48, dtype=torch.bfloat16)

    out = multiply(value, weight)
    out.backward(given)
    rows, of_rows = value.detach().view(-1, 32), given.view(-1, 48)
    close: Any = {"rtol": 1e-2, "atol": 1e-2}
    assert torch.allclose(out.double().view(-1, 48), twice(rows) @ twice(weight.detach()).t(), **close)
    assert torch.allclose(value.grad.double().view(-1, 32), twice(of_rows) @ twice(weight.detach().t()).t(), **close)
    assert torch.allclose(weight.grad.double(), twice(of_rows.t()) @ twice(rows.t()).t(), **close)
    exact = rows.double() @ weight.detach().double().t()
    error = (out.detach().double().view(-1, 48) - exact).norm() / exact.norm()
    assert 0.005 < float(error) < 0.06  # it is fp8, and no worse


def test_tokens_that_the_kernel_does_not_take_give_weights_a_gradient_in_bf16() -> None:
    torch.manual_seed(0)
    value = torch.randn(15, 32, dtype=torch.bfloat16)
    weight = torch.randn(48, 32, dtype=torch.bfloat16, requires_grad=True)
    given = torch.randn(15, 48, dtype=torch.bfloat16)
    multiply(value, weight).backward(given)
    assert torch.equal(weight.grad, given.t() @ value)


def test_a_plan_computes_experts_in_fp8() -> None:
    totals = []
    for plan in (PLAN, replace(PLAN, matmul="compute")):
        torch.manual_seed(0)
        model = parallelize(with_experts(32), plan, Mesh(plan))
        layers = [module for module in model.modules() if isinstance(module, StackedExperts)]
        assert {layer.compute for layer in layers} == {fp8_stacked_experts if plan is PLAN else stacked_experts}
        totals.append(CROSS_ENTROPY.total(model, shared.token_batch(0)).item())
    assert totals[0] != totals[1]
    assert totals[0] == pytest.approx(totals[1], rel=0.02)
    narrow = parallelize(with_experts(24), PLAN, Mesh(PLAN))  # 24 is not a multiple of 16
    layers = [module for module in narrow.modules() if isinstance(module, StackedExperts)]
    assert all(layer.compute is stacked_experts for layer in layers)


def test_saved_bytes_of_compiled_experts_are_known() -> None:
    """The planner traces experts on a CPU as the kernels of a GPU."""

    def tokens() -> Tensor:
        return shared.token_batch(0)[0]

    known = profile(with_experts(32), lambda: (tokens(),), ExampleLoss(tokens), torch.bfloat16)
    assert compiled_profile(known, "fp8") is not known
    assert not compiled_profile(known, "fp8").assumptions


def test_a_model_trains_near_its_bf16_self() -> None:
    losses = {}
    for plan in (PLAN, replace(PLAN, matmul="compute")):
        torch.manual_seed(0)
        model = parallelize(made(), plan, Mesh(plan))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(20):
            total = CROSS_ENTROPY.total(model, shared.token_batch(0))
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[plan.matmul] = total.item()
        if plan.matmul == "fp8":
            assert type(model.lm_head.forward).__name__ == "method"
    assert losses["fp8"] != losses["compute"]
    assert losses["fp8"] == pytest.approx(losses["compute"], rel=0.1)


def test_recompute_computes_the_same() -> None:
    totals = []
    for recompute in ("none", "full", "selective"):
        torch.manual_seed(0)
        plan = replace(PLAN, memory=Memory(recompute))  # type: ignore[arg-type]
        model = parallelize(made(), plan, Mesh(plan))
        total = CROSS_ENTROPY.total(model, shared.token_batch(0))
        total.backward()
        totals.append(total.item())
    assert totals[0] == totals[1] == totals[2]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (replace(PLAN, tensor=TensorPlan(2)), r"'fp8' multiplies whole linears, and tensor.x = 2"),
        (replace(PLAN, pipe=Pipe(2, "zero-bubble")), r"does not put weight gradients off"),
    ],
)
def test_plans_that_are_refused(plan: Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        refuse(profile(made()), plan)


def test_what_a_plan_must_say() -> None:
    with pytest.raises(PlanError, match="precision = 'fp32' and exact = false"):
        Plan(matmul="fp8", exact=False)
    with pytest.raises(PlanError, match="exact = true; use 'bf16' and exact = false"):
        Plan(matmul="fp8", precision="bf16")
    narrow = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(PlanError, match="no linear inside a block has features in multiples of 16"):
        refuse(profile(narrow), PLAN)


def test_a_proof_is_of_the_exact_plan() -> None:
    verify(made, shared.token_batch, replace(PLAN, data=2), steps=2).require()

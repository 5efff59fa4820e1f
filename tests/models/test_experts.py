"""Mixtures of experts: routing, sorting and summing against a direct loop; plans without an axis of their own."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from experts_for_tests import SIX, layer_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import weft
from weft.errors import ConfigError, PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import IGNORE, DecoderConfig, build, initialise
from weft.models.expert_rows import sort_by_expert
from weft.models.experts import SparseMLP
from weft.models.grouped_matmul import grouped_linear
from weft.models.router import routers_of, take_router_losses
from weft.parallel.apply import parallelize
from weft.plan import Context, Memory, Pipe, Plan, Shard
from weft.plan import Tensor as TensorAxis
from weft.proof.prove import verify
from weft.step.objective import CROSS_ENTROPY, Objective
from weft.step.preference import preference
from weft.step.train_step import train_step

SHARED = replace(
    SIX,
    architecture="qwen2_moe",
    shared_expert_intermediate_size=12,
    norm_topk_prob=False,
    qkv_bias=True,
    qk_norm=False,
)


def looped(layer: SparseMLP, hidden: Tensor, config: DecoderConfig) -> Tensor:
    """What the layer computes, token by token and expert by expert."""
    rows = []
    for token in hidden.flatten(0, 1):
        probabilities = (layer.gate.weight @ token).softmax(-1)
        weights, chosen = probabilities.topk(config.num_experts_per_tok)
        if config.norm_topk_prob:
            weights = weights / weights.sum()
        row = torch.zeros_like(token)
        for weight, expert in zip(weights, chosen, strict=True):
            gate, up = (layer.experts.gate_up_proj[expert] @ token).chunk(2)
            row = row + weight * (layer.experts.down_proj[expert] @ (F.silu(gate) * up))
        if layer.shared_expert is not None and layer.shared_expert_gate is not None:
            row = row + torch.sigmoid(layer.shared_expert_gate(token)) * layer.shared_expert(token)
        rows.append(row)
    return torch.stack(rows).view_as(hidden)


@pytest.mark.parametrize("config", [SIX, SHARED, replace(SIX, num_experts_per_tok=1)], ids=["top-2", "shared", "top-1"])
def test_a_layer_is_the_loop_over_its_experts(config: DecoderConfig) -> None:
    layer = layer_of(config)
    hidden = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    inputs = (hidden, *layer.parameters())
    gradient = torch.randn(2, 5, 16, dtype=torch.float64)
    found, expected = layer(hidden), looped(layer, hidden, config)
    assert (found - expected).abs().max() < 1e-12
    for one, other in zip(*(torch.autograd.grad(out, inputs, gradient) for out in (found, expected)), strict=True):
        assert (one - other).abs().max() < 1e-12


def test_experts_without_tokens_get_zero_gradients() -> None:
    layer = layer_of(SIX)
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight[:2] = 1.0  # positive tokens all go to the first two
    layer(torch.rand(1, 7, 16, dtype=torch.float64)).sum().backward()
    assert layer.experts.down_proj.grad is not None
    assert [bool(gradient.any()) for gradient in layer.experts.down_proj.grad] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]


def test_sorting_keeps_the_order_of_tokens() -> None:
    found = sort_by_expert(torch.tensor([[2, 0], [0, 3], [2, 3]]), 5)
    assert found.sources.tolist() == [1, 2, 0, 4, 3, 5]
    ends = found.ends
    assert ends is not None
    assert (ends.tolist(), ends.dtype) == ([2, 2, 4, 6, 6], torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_matmuls_of_torch_agree_with_float64(dtype: torch.dtype) -> None:
    layer = layer_of(SIX)
    with torch.no_grad():
        layer.gate.weight.mul_(8)  # far from ties: rounding chooses no other expert
    hidden = torch.randn(2, 5, 16, dtype=torch.float64)
    expected = layer(hidden)
    narrow = layer_of(SIX).to(dtype)
    narrow.load_state_dict(layer.state_dict())
    found = narrow(hidden.to(dtype).requires_grad_())
    found.sum().backward()
    assert found.dtype == dtype
    assert (found.double() - expected).abs().max() < 20 * torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts = 0 must be positive"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok = 7 is more than num_experts = 6"),
        ({"mlp_only_layers": (0, 1)}, r"none of the 2 layers has experts.*mlp_only_layers = \[0, 1\]"),
        ({"decoder_sparse_step": 3}, "none of the 2 layers has experts; lower decoder_sparse_step = 3"),
        ({"shared_expert_intermediate_size": 8}, "does not exist in architecture 'qwen3_moe'.*'qwen2_moe'"),
        ({"architecture": "qwen3"}, "num_experts = 6 does not exist in architecture 'qwen3'.*mixtral"),
        (
            {"architecture": "mixtral", "qk_norm": False, "norm_topk_prob": False},
            "norm_topk_prob = false does not exist",
        ),
    ],
)
def test_configs_that_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SIX, **changes)  # type: ignore[arg-type]


def test_losses_of_routers() -> None:
    config = replace(SIX, router_aux_loss_coef=0.5, router_z_loss_coef=0.25)
    layer = layer_of(config)
    hidden = torch.randn(2, 5, 16, dtype=torch.float64)
    layer(hidden)
    found = take_router_losses(layer)
    assert found is not None
    assert take_router_losses(layer) is None  # taken once
    expected = torch.zeros((), dtype=torch.float64)
    for sequence in hidden:
        logits = sequence @ layer.gate.weight.T
        probabilities = logits.softmax(-1)
        chosen = F.one_hot(probabilities.topk(2).indices, 6).sum(1).double()
        expected += 0.5 * 5 * (6 / 2 * chosen.mean(0) * probabilities.mean(0)).sum()
        expected += 0.25 * logits.exp().sum(-1).log().square().sum()
    assert (found - expected).abs() < 1e-12
    with torch.no_grad():
        layer(hidden)
    layer.eval()(hidden)
    assert take_router_losses(layer) is None
    layer.train()(hidden)
    assert take_router_losses(copy.deepcopy(layer)) is None


def test_even_routing_has_a_balance_of_one() -> None:
    layer = layer_of(replace(SIX, num_experts=2, num_experts_per_tok=1, router_aux_loss_coef=1.0))
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight[0, 0], layer.gate.weight[1, 0] = 1e-9, -1e-9
    hidden = torch.zeros(1, 4, 16, dtype=torch.float64)
    hidden[0, :, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    layer(hidden)
    found = take_router_losses(layer)
    assert found is not None
    assert found.item() / 4 == pytest.approx(1.0, rel=1e-6)


def make() -> weft.models.Decoder:
    model = build(replace(SIX, router_aux_loss_coef=0.5, router_z_loss_coef=0.1))
    initialise(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.mul_(20)  # tokens differ in their experts
    return model


def batch(index: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 61, (4, 17), generator=torch.Generator().manual_seed(index))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def masked_batch(index: int) -> tuple[Tensor, Tensor]:
    """A batch of which few tokens are targets, more of some samples than of others."""
    inputs, labels = batch(index)
    for row, first in enumerate((3, 9, 15, 12)):
        labels[row, :first] = IGNORE
    return inputs, labels


def pairs(index: int) -> tuple[Tensor, ...]:
    """A batch of preferences: two pairs of answers."""
    inputs, labels = (tensor.unflatten(0, (2, 2)) for tensor in masked_batch(index))
    return inputs, labels, torch.full((2, 2), -20.0, dtype=torch.float64)


@pytest.mark.parametrize(
    ("given", "objective"),
    [(batch(0), CROSS_ENTROPY), (masked_batch(0), CROSS_ENTROPY), (pairs(0), preference(0.1))],
    ids=["all", "masked", "pairs"],
)
def test_losses_of_routers_are_means_over_tokens_however_few_are_targets(
    given: tuple[Tensor, ...], objective: Objective
) -> None:
    mesh, model, losses = Mesh(Plan(precision="fp64")), make().double(), []
    for takes in (True, False):
        split = parallelize(copy.deepcopy(model), mesh.plan, mesh)
        if not takes:
            for router in routers_of(split).values():
                router.balance = router.z_loss = 0.0
        result = train_step(split, torch.optim.SGD(split.parameters(), 0.0), [given], mesh, objective)
        losses.append(float(result.loss))
    model(given[0].view(-1, 16))
    total = take_router_losses(model)
    assert total is not None
    assert losses[0] - losses[1] == pytest.approx(total.item() / given[0].numel(), rel=1e-9)


def step_result(plan: Plan, batches: list[Any], objective: Objective = CROSS_ENTROPY) -> tuple[float, float]:
    """The loss and the gradient norm of a step."""
    mesh = Mesh(replace(plan, precision="fp64"))
    model = parallelize(make().double(), mesh.plan, mesh)
    result = train_step(model, torch.optim.SGD(model.parameters(), 0.0), batches, mesh, objective)
    return float(result.loss), float(result.grad_norm)


@pytest.mark.processes
def test_ranks_may_have_texts_of_different_lengths() -> None:
    """Routers' losses are means over the tokens of all ranks."""
    long, short = batch(0), tuple(one[:, :4].contiguous() for one in batch(1))
    alone = step_result(Plan(), [long, short])
    for found in run_local(lambda rank: step_result(Plan(data=2), [(long, short)[rank]]), 2, 60):
        assert found == pytest.approx(alone, rel=1e-9)


def test_tokens_are_counted_wherever_they_stand_in_a_batch() -> None:
    inputs, labels = masked_batch(0)

    def total(model: Any, given: dict[str, Tensor]) -> Tensor:
        losses = F.cross_entropy(model(given["inputs"]).flatten(0, 1), given["labels"].flatten(), reduction="none")
        return (losses.view_as(given["labels"]).sum(1) * given["weight"]).sum()

    objective = Objective(lambda given: (given["labels"] != IGNORE).sum(), total)
    weight, empty = torch.ones(4), torch.ones(4, 0)
    wanted = step_result(Plan(), [{"inputs": inputs, "labels": labels, "weight": weight}], objective)
    for first in (
        {"weight": weight},
        {"empty": empty, "weight": weight},
        {"mask": inputs[:, None] != inputs[..., None]},
    ):
        given = {**first, "inputs": inputs, "labels": labels, "weight": weight}
        assert step_result(Plan(), [given], objective) == wanted


def test_batches_without_tokens_take_a_step() -> None:
    mesh, model = Mesh(Plan(precision="fp64")), torch.nn.Linear(3, 2).double()
    split = parallelize(model, mesh.plan, mesh)
    objective = Objective(lambda given: torch.tensor(len(given["x"])), lambda model, given: model(given["x"]).sum())
    given = {"empty": torch.ones(4, 0), "x": torch.ones(4, 3, dtype=torch.float64)}
    assert train_step(split, torch.optim.SGD(split.parameters(), 0.0), [given], mesh, objective).grad_norm > 0


@pytest.mark.processes
@pytest.mark.parametrize(
    ("plan", "given", "objective"),
    [
        (Plan(data=2, micro_batch=1), masked_batch, None),
        (Plan(pipe=Pipe(2), micro_batch=2), masked_batch, None),
        (Plan(data=2), pairs, preference(0.1)),
    ],
    ids=["data", "pipe", "pairs"],
)
def test_plans_with_few_targets_are_proved(plan: Plan, given: Any, objective: Objective | None) -> None:
    verify(make, given, plan, objective=objective, steps=2).require()


@pytest.mark.processes
@pytest.mark.parametrize(
    "plan",
    [
        Plan(shard=Shard(2, 3), memory=Memory("full")),
        Plan(pipe=Pipe(2)),
        Plan(tensor=TensorAxis(2), memory=Memory("selective")),
    ],
    ids=lambda plan: plan.describe_axes(),
)
def test_plans_are_proved(plan: Plan) -> None:
    verify(make, batch, plan, steps=2).require()


def make_without_losses() -> weft.models.Decoder:
    model = build(SIX)
    initialise(model, 0)
    return model


@pytest.mark.processes
def test_sequences_are_split_where_routers_do_not_balance_over_them() -> None:
    verify(make_without_losses, batch, Plan(context=Context(2)), steps=2).require()
    with pytest.raises(PlanError, match="context = 2 splits sequences, over whose tokens routers balance"):
        verify(make, batch, Plan(context=Context(2)))


@pytest.mark.processes
def test_a_stage_without_its_routers_losses_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.pipeline.step_run.take_router_losses", lambda model: None)
    report = verify(make, batch, Plan(pipe=Pipe(2)))
    assert not report.passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_grouped_matmuls_have_shapes_on_fake_tensors(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        rows = torch.empty(10, 6, dtype=dtype, requires_grad=True)
        weight = torch.empty(3, 7, 6, dtype=dtype, requires_grad=True)
        ends = torch.empty(3, dtype=torch.int32)
        for make in (torch._grouped_mm, F.grouped_mm):
            product = make(rows, weight.transpose(1, 2), offs=ends)
            assert (product.shape, product.dtype) == ((10, 7), dtype)
            gradients = torch.autograd.grad(product, (rows, weight), torch.empty_like(product))
            assert [gradient.shape for gradient in gradients] == [(10, 6), (3, 7, 6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_matmuls_of_any_size(dtype: torch.dtype) -> None:
    """torch's kernel takes multiples of 16 bytes only."""
    rows, weight = torch.randn(9, 10, dtype=dtype, requires_grad=True), torch.randn(3, 7, 10, dtype=dtype)
    ends = torch.tensor([4, 4, 9], dtype=torch.int32)
    found = grouped_linear(rows, weight, ends)
    found.sum().backward()
    expected = torch.cat([rows[:4] @ weight[0].T, rows[4:] @ weight[2].T])
    torch.testing.assert_close(found, expected)
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad[0], weight[0].sum(0))

"""Mixtures of experts: routing, sorting, capacities and sums against direct loops; plans without an axis for them."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from experts_for_tests import LOSSES, SIX, batch, kept_by_loop, layer_of
from experts_for_tests import make as make_experts
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.architectures import Capacity
from weft.errors import ConfigError, PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import IGNORE, DecoderConfig, build
from weft.models.expert_rows import draw_priorities, fill_slots, sequence_keys, sort_by_expert
from weft.models.experts import SparseMLP, grouped_linear
from weft.models.router import routers_of, take_routed, take_router_losses
from weft.parallel.apply import parallelize
from weft.plan import Context, Memory, Pipe, Plan, Shard
from weft.plan import Tensor as TensorAxis
from weft.proof.prove import verify
from weft.step.objective import CROSS_ENTROPY, Objective
from weft.step.preference import preference
from weft.step.train_step import train_step

QWEN2 = {"architecture": "qwen2_moe", "norm_topk_prob": False, "qkv_bias": True, "qk_norm": False}
SHARED = replace(SIX, shared_expert_intermediate_size=12, **QWEN2)
FIRST = replace(SIX, capacity=Capacity(0.75, 1))
RANDOM = replace(FIRST, capacity=Capacity(0.75, 1, "random"))
LAYERS = {
    "top-2": SIX,
    "shared": SHARED,
    "top-1": replace(SIX, num_experts_per_tok=1),
    "first": FIRST,
    "first, top-1": replace(FIRST, num_experts_per_tok=1),
    "random": RANDOM,
    "residual": replace(RANDOM, residual_experts=True),
}


def looped(layer: SparseMLP, hidden: Tensor, config: DecoderConfig, keys: Tensor | None) -> tuple[Tensor, int]:
    """What the layer computes in training, choice by choice, and how many choices are dropped."""
    batch, sequence, _ = hidden.shape
    weights, experts = (hidden @ layer.gate.weight.T).softmax(-1).topk(config.num_experts_per_tok)
    if config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    kept = torch.ones_like(experts, dtype=torch.bool)
    if config.capacity is not None:
        limit = config.capacity.tokens(sequence, config.num_experts, config.num_experts_per_tok)
        drawn = None if keys is None else draw_priorities(keys, sequence)
        kept = kept_by_loop(experts, config.num_experts, limit, drawn)
    rows = []
    for sample in range(batch):
        for token in range(sequence):
            here, row = hidden[sample, token], torch.zeros_like(hidden[0, 0])
            for choice in kept[sample, token].nonzero().flatten().tolist():
                expert = int(experts[sample, token, choice])
                gate, up = (layer.experts.gate_up_proj[expert] @ here).chunk(2)
                result = layer.experts.down_proj[expert] @ (F.silu(gate) * up)
                row = row + weights[sample, token, choice] * result
            if layer.shared_expert is not None and layer.shared_expert_gate is not None:
                row = row + torch.sigmoid(layer.shared_expert_gate(here)) * layer.shared_expert(here)
            if config.residual_experts:
                first, second = layer.coefficient(here).softmax(-1)
                row = first * row + second * layer.mlp(here)
            rows.append(row)
    return torch.stack(rows).view_as(hidden), int((~kept).sum())


@pytest.mark.parametrize("config", LAYERS.values(), ids=LAYERS)
def test_a_layer_is_the_loop_over_the_choices_that_are_taken(config: DecoderConfig) -> None:
    layer = layer_of(config)
    hidden = torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    is_random = config.capacity is not None and config.capacity.selection == "random"
    keys = torch.tensor([11, 12]) if is_random else None
    found, (expected, dropped) = layer(hidden, keys), looped(layer, hidden, config, keys)
    assert (dropped > 0) == (config.capacity is not None)
    gradient = torch.randn_like(found)
    inputs = (hidden, *layer.parameters())
    assert (found - expected).abs().max() < 1e-12
    for one, other in zip(*(torch.autograd.grad(out, inputs, gradient) for out in (found, expected)), strict=True):
        assert (one - other).abs().max() < 1e-12
    take_router_losses(layer)
    (routed,) = take_routed(layer)
    assert routed[-3] == dropped
    layer.eval()  # a capacity applies in training only
    whole, _ = looped(layer, hidden, replace(config, capacity=None), None)
    assert (layer(hidden) - whole).abs().max() < 1e-12


def test_experts_without_tokens_get_zero_gradients() -> None:
    layer = layer_of(SIX)
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight[:2] = 1.0  # positive tokens all go to the first two
    layer(torch.rand(1, 7, 16, dtype=torch.float64)).sum().backward()
    assert layer.experts.down_proj.grad is not None
    assert [bool(gradient.any()) for gradient in layer.experts.down_proj.grad] == [True] * 2 + [False] * 4


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
        (
            {"num_experts_per_layer": (4, 8, 6)},
            r"num_experts_per_layer = \[4, 8, 6\] does not give each of the 2 layers",
        ),
        ({"num_experts_per_layer": (4, -1)}, "0 or more; give one number for each layer"),
        ({"num_experts_per_layer": (4, 8)}, "leave num_experts out"),
        ({"num_experts_per_layer": (1, 6)}, "num_experts_per_tok = 2 is more than num_experts = 1"),
        ({"num_experts_per_layer": (4, 6), "mlp_only_layers": (0,)}, "leave decoder_sparse_step, mlp_only_layers"),
        (
            {"architecture": "qwen3", "num_experts": 0, "capacity": Capacity()},
            "capacity = .* does not exist in architecture 'qwen3'",
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


make = partial(make_experts, replace(SIX, **LOSSES))


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


@pytest.mark.processes
def test_sequences_are_split_where_routers_do_not_balance_over_them() -> None:
    verify(partial(make_experts, SIX), batch, Plan(context=Context(2)), steps=2).require()
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


# --- a capacity


@pytest.mark.parametrize("limit", [1, 3, 7])
@pytest.mark.parametrize("is_random", [False, True])
@pytest.mark.parametrize("is_one_sided", [False, True])
def test_slots_take_the_tokens_that_a_loop_takes(limit: int, is_random: bool, is_one_sided: bool) -> None:
    batch, sequence, k, num_experts = 3, 7, 2, 5
    rng = torch.Generator().manual_seed(limit)
    experts = torch.rand(batch, sequence, num_experts, generator=rng).topk(k).indices
    if is_one_sided:
        experts = torch.tensor([4, 1]).expand(batch, sequence, k)
    priorities = draw_priorities(torch.arange(batch) + 1, sequence) if is_random else None
    found = fill_slots(experts, num_experts, limit, priorities)
    num_rows, num_pairs = num_experts * batch * limit, experts.numel()
    kept = kept_by_loop(experts, num_experts, limit, priorities).flatten()
    assert ((found.places < num_rows) == kept).all()
    pairs = found.sources[found.sources < num_pairs]
    assert sorted(pairs.tolist()) == kept.nonzero().flatten().tolist()  # each kept choice has one row
    for row, pair in enumerate(found.sources.tolist()):
        if pair < num_pairs:
            assert found.places[pair] == row
            assert row // limit == experts.flatten()[pair] * batch + pair // (sequence * k)


def test_random_numbers_follow_from_a_sequence_alone() -> None:
    tokens = torch.randint(0, 61, (4, 9), generator=torch.Generator().manual_seed(0))
    keys = sequence_keys(tokens)
    assert keys.unique().numel() == 4
    assert (sequence_keys(tokens[2:]) == keys[2:]).all()
    assert (sequence_keys(tokens.flip(1)) != keys).all()
    drawn = draw_priorities(keys, 4096)
    assert (draw_priorities(keys + 1, 4096) != drawn).all()
    assert drawn.unique().numel() == drawn.numel()
    first = drawn.argsort(1)[:, :2048]  # half of the tokens of each sequence, anywhere in it
    assert ((first < 2048).double().mean(1) - 0.5).abs().max() < 0.05


def test_layers_may_have_different_numbers_of_experts() -> None:
    config = replace(SIX, num_experts=0, num_experts_per_layer=(0, 4), num_hidden_layers=2)
    model: Any = build(config)
    layers = model.model.layers
    assert [type(layer.mlp).__name__ for layer in layers] == ["SwiGLU", "SparseMLP"]
    assert len(layers[1].mlp.gate.weight) == len(layers[1].mlp.experts.down_proj) == 4
    deep = replace(config, num_hidden_layers=5, num_experts=0, num_experts_per_layer=(0, 16, 4, 32, 0))
    assert deep.num_experts == 32
    assert deep.shrunk().num_experts_per_layer == (4, 8)


def test_a_capacity_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="factor = 0 must be positive"):
        Capacity(0)
    assert Capacity(1.25).tokens(64, 8, 2) == 20
    assert Capacity(0.1).tokens(64, 8, 1) == 4  # the minimum
    assert Capacity(9.0).tokens(6, 8, 2) == 6  # a sequence has no more tokens

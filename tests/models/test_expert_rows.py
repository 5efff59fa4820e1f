"""Rows of experts with a capacity: which tokens are taken, and what a layer computes, against direct loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from experts_for_tests import SIX, layer_of
from torch import Tensor

from weft.architectures import Capacity, DecoderConfig
from weft.errors import ConfigError
from weft.models import build
from weft.models.expert_rows import draw_priorities, fill_slots, sequence_keys
from weft.models.experts import SparseMLP
from weft.models.router import take_routed, take_router_losses


def kept_by_loop(experts: Tensor, num_experts: int, limit: int, priorities: Tensor | None) -> Tensor:
    """Which choices [batch, sequence, k] are taken, token by token."""
    batch, sequence, k = experts.shape
    kept = torch.zeros(batch, sequence, k, dtype=torch.bool)
    for sample in range(batch):
        order = list(range(sequence))
        if priorities is not None:
            order.sort(key=lambda token: int(priorities[sample, token]))
        room = [limit] * num_experts
        for token in order:
            for choice in range(k):
                expert = int(experts[sample, token, choice])
                kept[sample, token, choice] = room[expert] > 0
                room[expert] -= 1
    return kept


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


def looped(layer: SparseMLP, hidden: Tensor, config: DecoderConfig, keys: Tensor | None) -> tuple[Tensor, int]:
    """What the layer computes in training, choice by choice, and how many choices are dropped."""
    batch, sequence, _ = hidden.shape
    probabilities = (hidden @ layer.gate.weight.T).softmax(-1)
    weights, experts = probabilities.topk(config.num_experts_per_tok)
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
            if config.residual_experts:
                first, second = layer.coefficient(here).softmax(-1)
                row = first * row + second * layer.mlp(here)
            rows.append(row)
    return torch.stack(rows).view_as(hidden), int((~kept).sum())


FIRST = replace(SIX, capacity=Capacity(0.75, 1))
RANDOM = replace(FIRST, capacity=Capacity(0.75, 1, "random"))


@pytest.mark.parametrize(
    "config",
    [FIRST, replace(FIRST, num_experts_per_tok=1), RANDOM, replace(RANDOM, residual_experts=True)],
    ids=["first", "top-1", "random", "residual"],
)
def test_a_layer_is_the_loop_over_the_choices_that_are_taken(config: DecoderConfig) -> None:
    layer = layer_of(config)
    hidden = torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    assert config.capacity is not None
    keys = torch.tensor([11, 12]) if config.capacity.selection == "random" else None
    found, (expected, dropped) = layer(hidden, keys), looped(layer, hidden, config, keys)
    assert dropped > 0
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


def test_layers_may_have_different_numbers_of_experts() -> None:
    config = replace(SIX, num_experts=0, num_experts_per_layer=(0, 4), num_hidden_layers=2)
    model: Any = build(config)
    layers = model.model.layers
    assert [type(layer.mlp).__name__ for layer in layers] == ["SwiGLU", "SparseMLP"]
    assert len(layers[1].mlp.gate.weight) == len(layers[1].mlp.experts.down_proj) == 4
    deep = replace(config, num_hidden_layers=5, num_experts=0, num_experts_per_layer=(0, 16, 4, 32, 0))
    assert deep.num_experts == 32
    assert deep.shrunk().num_experts_per_layer == (4, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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


def test_a_capacity_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="factor = 0 must be positive"):
        Capacity(0)
    assert Capacity(1.25).tokens(64, 8, 2) == 20
    assert Capacity(0.1).tokens(64, 8, 1) == 4  # the minimum
    assert Capacity(9.0).tokens(6, 8, 2) == 6  # a sequence has no more tokens

"""Layers of experts of transformers' models, by what they are: parameters stacked by expert, and a forward of choices.

    forward(hidden_states [tokens, hidden], top_k_index [tokens, k], top_k_weights [tokens, k])
    gate_up_proj [experts, 2 · inner, hidden], down_proj [experts, hidden, inner], act_fn

The name of a class says nothing about what it computes, so a layer is tried on a small example: weft's own function of
stacked experts must give what the layer gives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from weft.models.expert_rows import sort_by_expert, through_experts
from weft.models.experts import stacked_experts
from weft.parallel.expert.dispatch import Compute

_TOKENS, _HIDDEN, _INNER, _TOLERANCE = 12, 8, 8, 1e-4


def is_interface(module: nn.Module) -> bool:
    """Has a module the parameters and attributes of transformers' stacked experts, and no others?"""
    if not callable(getattr(module, "act_fn", None)) or not hasattr(module, "num_experts"):
        return False  # before its parameters are looked for, since a search asks this of every module
    parameters = dict(module.named_parameters())
    return set(parameters) == {"gate_up_proj", "down_proj"} and all(one.dim() == 3 for one in parameters.values())


def refuse_interface(name: str, layer: Any) -> str | None:
    """Returns why weft cannot compute a layer's results in its place; None if both are equal on an example."""
    num_experts = layer.num_experts
    rng = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float32, device="cpu")

    shapes = {"gate_up_proj": (2 * _INNER, _HIDDEN), "down_proj": (_HIDDEN, _INNER)}
    parameters = {leaf: draw(num_experts, *shape) for leaf, shape in shapes.items()}
    hidden, k = draw(_TOKENS, _HIDDEN), min(2, num_experts)
    weights, experts = draw(_TOKENS, num_experts).softmax(-1).topk(k)
    try:
        with torch.no_grad():
            expected = functional_call(layer, parameters, (hidden, experts, weights))
            gate_up, down = parameters["gate_up_proj"], parameters["down_proj"]
            compute = partial(stacked_experts, gate_up_proj=gate_up, down_proj=down, activation=layer.act_fn)
            found = through_experts(hidden, weights, sort_by_expert(experts, num_experts), compute)
            is_equal = found.shape == expected.shape and bool((found - expected).abs().max() < _TOLERANCE)
    except Exception as error:  # the layer's own code, which may do anything
        return f"'{name}' ({type(layer).__name__}) cannot be tried on an example: {type(error).__name__}: {error}"
    if not is_equal:
        return (
            f"'{name}' ({type(layer).__name__}) has stacked experts, but does not compute down(act(gate(x)) * up(x)) "
            f"for each token's experts, times their weights"
        )
    return None


def compute_interface(
    layer: Any,
    num_experts: int,
    everywhere: Callable[[Compute], Compute],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Replaces the forward of a layer of which each rank of the axis holds a part of the `num_experts` experts.

    `everywhere` makes a function that computes with all ranks' experts from one that computes with this rank's.
    """

    def own(rows: Tensor, ends: Tensor | None) -> Tensor:
        return stacked_experts(rows, ends, layer.gate_up_proj, layer.down_proj, layer.act_fn)

    order = sort_by_expert(top_k_index, num_experts)
    return through_experts(hidden_states, top_k_weights, order, everywhere(own))

"""Linears of one input as one matmul: q, k and v. The names of parameters stay as they are.

A block's parameters lie end to end in one flat buffer, so the weights of neighbours [q; k; v] are one matrix there, and
looking at them as one costs nothing. The matrix is a leaf of its own over the same memory; its gradient, one matmul
too, is handed on in parts to the parameters that it is made of, which do with theirs what they always do.

It takes linears without biases, which would lie between, and in one buffer. Where the tensor axes split linears they
multiply in their own way, and a zero-bubble schedule puts off the gradient of each weight by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from weft.mesh import Mesh
from weft.models.decoder import Joined
from weft.parallel.flat import Flat
from weft.parallel.unit import units_of
from weft.plan import Plan
from weft.strategy import Strategy, Values

Place = tuple[Flat, int]


class JoinedWeights(Strategy):
    """One matmul for several linears, wherever it can be; nothing is sent, and as much is held."""

    name = "joined"

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        units = units_of(model)
        is_put_off = plan.pipe.degree > 1 and plan.pipe.schedule == "zero-bubble"
        if units is None or plan.tensor.x * plan.tensor.y > 1 or is_put_off:
            return model
        places: dict[tuple[int, str], Place] = {}
        for flat in units.flats:
            for index, owners in enumerate(flat.owners):
                if len(owners) == 1:  # a tied weight gets gradients from elsewhere, too
                    places[id(owners[0][0]), owners[0][1]] = flat, index
        for module in model.modules():
            if isinstance(module, Joined):
                module.joined = _join([getattr(module, name) for name in module.joins], places)
        return model


def _join(linears: Sequence[nn.Module], places: Mapping[tuple[int, str], Place]) -> Tensor | None:
    """The weights of linears as one matrix [all outputs, inputs]; None if they do not lie end to end."""
    if any(type(linear) is not nn.Linear or linear.bias is not None for linear in linears):
        return None
    found = [places.get((id(linear), "weight")) for linear in linears]
    held = [place for place in found if place is not None]
    if len(held) < len(found):
        return None
    flat, first = held[0]
    if held != [(flat, first + number) for number in range(len(held))]:
        return None
    weights = flat.whole_parameters[first : first + len(held)]
    starts = flat.layout.starts[first : first + len(held)]
    ends = [start + weight.numel() for start, weight in zip(starts, weights, strict=True)]
    if list(starts[1:]) != ends[:-1] or len({weight.shape[1] for weight in weights}) > 1:
        return None
    return _over(flat, starts[0], weights)


def _over(flat: Flat, start: int, weights: Sequence[nn.Parameter]) -> Tensor:
    rows, width = [len(weight) for weight in weights], weights[0].shape[1]
    is_freed = flat.frees_whole and not flat.is_whole
    matrix = torch.empty(0, dtype=flat.compute_dtype, device=flat.device)
    matrix.set_(flat.whole.untyped_storage(), start, (sum(rows), width), (width, 1))
    if is_freed:  # it has grown to hold the matrix
        flat.whole.untyped_storage().resize_(0)
    if flat.trainable:
        matrix.requires_grad_()
        matrix.register_post_accumulate_grad_hook(partial(_hand_on, weights, rows))
    return matrix


def _hand_on(weights: Sequence[nn.Parameter], rows: Sequence[int], matrix: Tensor) -> None:
    """Give each weight its part of the gradient, as if autograd had."""
    gradient, matrix.grad = matrix.grad, None
    assert gradient is not None
    for weight, part in zip(weights, gradient.split(list(rows)), strict=True):
        weight.grad = part
        for hook in (weight._post_accumulate_grad_hooks or {}).values():
            hook(weight)

"""Rounds weights so that the results on a calibration text change least, after GPTQ.

Weights of a row are rounded one input after another. What a rounding changes in the results is made up for by inputs
that are still to be rounded, by the second moments of the inputs on the text. Blocks are packed in their order, so that
the inputs of each are those that the packed blocks before it give. Each expert has the moments of the inputs that reach
it on the text; one that none reach is rounded as without a text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.errors import ConfigError, NumbersError
from weft.models.experts import StackedExperts
from weft.serve.weights.fast_path import place_of
from weft.serve.weights.group_codes import codes_of, group_range, joined_ranges, pack
from weft.serve.weights.packed_experts import PackedExperts
from weft.serve.weights.packed_linear import (
    PackedLinear,
    choose_kernels,
    experts_to_pack,
    linears_to_pack,
    replace_module,
)
from weft.serve.weights.weight_formats import Grouped, WeightFormat, refuse_bad_weight

DAMPING = 0.01  # of the mean second moment, added to each


@torch.no_grad()
def pack_corrected(model: nn.Module, format: WeightFormat, texts: Sequence[Tensor]) -> None:
    """Pack the linears and experts of a model. `texts` are rows of tokens [rows, tokens], on the model's device."""
    if not isinstance(format, Grouped):
        raise ConfigError("a calibration text corrects int4 and int8 only; leave it out with other formats")
    blocks: dict[str, list[tuple[str, nn.Linear | StackedExperts]]] = {}
    refuse_shapes(model, format)
    for name, linear in linears_to_pack(model):
        refuse_bad_weight(f"{name}.weight", linear.weight)
        _add(blocks, name, linear)
    for name, experts in experts_to_pack(model):
        for kind, weights in experts.named_parameters():
            for expert, weight in enumerate(weights):
                refuse_bad_weight(f"{name}.{kind}[{expert}]", weight)
        _add(blocks, name, experts)
    for modules in blocks.values():
        moments = second_moments(model, [module for _, module in modules], texts)
        for (name, module), own in zip(modules, moments, strict=True):
            if isinstance(module, StackedExperts):
                replace_module(model, name, corrected_experts(module, own, format))
            else:
                parts = corrected(module.weight, own[0], format)
                replace_module(model, name, PackedLinear(format, parts, module.weight.shape[1], module.bias))
        choose_kernels(model, place_of(texts[0].device, next(model.parameters()).dtype))  # the next blocks' inputs


def refuse_shapes(model: nn.Module, format: WeightFormat) -> None:
    """Raise ConfigError if a format cannot keep weights of a shape that the model has."""
    for _, linear in linears_to_pack(model):
        num_out, num_in = linear.weight.shape
        format.empty(num_out, num_in, "meta")
    for _, experts in experts_to_pack(model):
        PackedExperts(format, experts, "meta")


def _add(
    blocks: dict[str, list[tuple[str, nn.Linear | StackedExperts]]], name: str, module: nn.Linear | StackedExperts
) -> None:
    """Add a module to those of its block, such as model.layers.7 or transformer.h.7."""
    blocks.setdefault(".".join(name.split(".")[:3]), []).append((name, module))


def second_moments(
    model: nn.Module, modules: Sequence[nn.Linear | StackedExperts], texts: Sequence[Tensor]
) -> list[dict[int, Tensor]]:
    """The sums of x x^T over the inputs x of each module, in float64: of a linear [in, in] by 0, of experts those of
    expert i's gate and up by 2 * i, and of its down by 2 * i + 1, if it has inputs.
    """
    moments: dict[nn.Module, dict[int, Tensor]] = {module: {} for module in modules}

    def add(module: nn.Module, key: int, inputs: Tensor) -> None:
        rows, own = inputs.flatten(0, -2).double(), moments[module]
        own[key] = own.get(key, 0.0) + rows.T @ rows  # type: ignore[operator]

    def add_experts(module: StackedExperts, inputs: tuple[Tensor, Tensor]) -> None:
        rows, ends = inputs
        begin = 0
        for expert, end in enumerate(ends.tolist()):
            if end > begin:
                add(module, 2 * expert, rows[begin:end])
                gate, up = F.linear(rows[begin:end], module.gate_up_proj[expert]).chunk(2, dim=-1)
                add(module, 2 * expert + 1, F.silu(gate) * up)
            begin = end

    hooks = [
        module.register_forward_pre_hook(add_experts)  # type: ignore[arg-type]
        if isinstance(module, StackedExperts)
        else module.register_forward_pre_hook(lambda one, inputs: add(one, 0, inputs[0]))
        for module in modules
    ]
    try:
        for text in texts:
            model(text)
    finally:
        for hook in hooks:
            hook.remove()
    return [moments[module] for module in modules]


def corrected_experts(experts: StackedExperts, moments: dict[int, Tensor], format: Grouped) -> PackedExperts:
    """Experts in a format, by the second moments of the inputs of each."""
    packed = PackedExperts(format, experts, experts.down_proj.device)
    for place, (name, stack) in enumerate(packed.stacks.items()):
        for expert, weight in enumerate(experts.get_parameter(name)):
            moment = moments.get(2 * expert + place)
            parts = format.quantise(weight) if moment is None else corrected(weight, moment, format)
            stack.take_parts(expert, parts)
    return packed


def corrected(weight: Tensor, moment: Tensor, format: Grouped) -> tuple[Tensor, ...]:
    """The parts of a weight [out, in] in a format, by the second moments of its inputs."""
    if not bool(moment.isfinite().all()):
        raise NumbersError("the calibration text makes the model give NaN; its weights are damaged")
    num_in = weight.shape[1]
    damped = moment + (DAMPING * moment.diagonal().mean() + 1e-12) * torch.eye(num_in).to(moment)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor = torch.linalg.cholesky(inverse, upper=True)  # row i: how later inputs make up for input i
    rest, group = weight.double().clone(), format.size_of_group(num_in)
    codes, scales, leasts = list[Tensor](), list[Tensor](), list[Tensor]()
    for start in range(0, num_in, group):
        end = start + group
        scale, least = group_range(rest[:, start:end].float(), format.bits)
        errors = rest.new_zeros(len(rest), group)
        for index in range(start, end):
            column = codes_of(rest[:, index, None], scale, least, format.bits)
            kept = column[:, 0].double() * scale.double() + least.double()
            error = (rest[:, index] - kept) / factor[index, index]
            rest[:, index:end] -= error[:, None] * factor[index, index:end]
            errors[:, index - start] = error
            codes.append(column)
        rest[:, end:] -= errors @ factor[start:end, end:]
        scales.append(scale)
        leasts.append(least)
    ranges = joined_ranges(torch.stack(scales, dim=1), torch.stack(leasts, dim=1))
    return pack(torch.cat(codes, dim=1), format.bits, group), ranges

"""Rounds weights so that the results on a calibration text change least, after GPTQ.

Weights of a row are rounded one input after another. What a rounding changes in the results is made up for by inputs
that are still to be rounded, by the second moments of the inputs on the text. Blocks are packed in their order, so that
the inputs of each are those that the packed blocks before it give.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from weft.errors import ConfigError, NumbersError
from weft.serve.group_codes import codes_of, group_range, joined_ranges, pack
from weft.serve.packed_linear import PackedLinear, linears_to_pack, refuse_bad_weight, replace_linear
from weft.serve.weight_formats import Grouped, WeightFormat

DAMPING = 0.01  # of the mean second moment, added to each


@torch.no_grad()
def pack_corrected(model: nn.Module, format: WeightFormat, texts: Sequence[Tensor]) -> None:
    """Pack the linears of a model. `texts` are rows of tokens [rows, tokens], on the model's device."""
    if not isinstance(format, Grouped):
        raise ConfigError("a calibration text corrects int4 and int8 only; leave it out with other formats")
    blocks: dict[str, list[tuple[str, nn.Linear]]] = {}
    for name, linear in linears_to_pack(model):
        refuse_bad_weight(f"{name}.weight", linear.weight)
        blocks.setdefault(".".join(name.split(".")[:3]), []).append((name, linear))  # model.layers.7, transformer.h.7
    for linears in blocks.values():
        moments = second_moments(model, [linear for _, linear in linears], texts)
        for (name, linear), moment in zip(linears, moments, strict=True):
            parts = corrected(linear.weight, moment, format)
            replace_linear(model, name, PackedLinear(format, parts, linear.weight.shape[1], linear.bias))


def second_moments(model: nn.Module, linears: Sequence[nn.Linear], texts: Sequence[Tensor]) -> list[Tensor]:
    """The sum of x x^T over the inputs x of each linear [in, in], in float64."""
    moments: dict[nn.Module, Tensor] = {}

    def add(linear: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].flatten(0, -2).double()
        moments[linear] = moments.get(linear, 0.0) + rows.T @ rows  # type: ignore[operator]

    hooks = [linear.register_forward_pre_hook(add) for linear in linears]
    try:
        for text in texts:
            model(text)
    finally:
        for hook in hooks:
            hook.remove()
    return [moments[linear] for linear in linears]


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

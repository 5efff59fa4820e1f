"""Rounds weights so that the results on a calibration text change least, after GPTQ, for a model or a rank's part.

Weights of a row are rounded one input after another. What a rounding changes in the results is made up for by inputs
that are still to be rounded, by the second moments of the inputs on the text. Each expert has the moments of the inputs
that reach it on the text; one that none reach is rounded as without a text.

Blocks are packed in their order, so that the inputs of each are those that the packed blocks before it give. A block
needs only what the blocks before it make of the text. So each rank reads the blocks in their order, one at a time on
its device: it packs the whole block, computes what the packed block gives, keeps its own part of the codes and goes on
to the next, through all of them, so that no rank waits for others. All ranks compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.errors import ConfigError, NumbersError
from weft.inspection.parameter_cut import Cut
from weft.models import GPT2, Decoder, TransformerConfig, build
from weft.models.experts import StackedExperts
from weft.serve.weights.fast_path import place_of
from weft.serve.weights.folder_codes import Packed, cut_codes, local_group, packed_linears
from weft.serve.weights.group_codes import codes_of, group_range, joined_ranges, pack, unpack
from weft.serve.weights.packed_experts import PackedExperts, PackedStack
from weft.serve.weights.packed_linear import (
    PackedLinear,
    choose_kernels,
    experts_to_pack,
    linears_to_pack,
    make_room_for_experts,
    make_room_for_linear,
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
    """Return for each module the sums of x x^T over its inputs x, in float64, by key: 0 for a linear [in, in]; for
    experts, 2 * i for gate and up of expert i and 2 * i + 1 for its down. Experts without inputs have none.
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
            stack.take_expert(expert, parts)
    return packed


def corrected(weight: Tensor, moment: Tensor, format: Grouped) -> tuple[Tensor, ...]:
    """Return the parts of a weight [out, in] in a format, by the second moments of its inputs."""
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


Read = Callable[[str], Tensor]  # a whole parameter by name


class _FirstBlockError(Exception):
    """Ends a forward at the first block, and has what the block is given."""


class _OneBlock(nn.Module):
    """A block with what it is given beside hidden states; its name is that of a model's first block."""

    def __init__(self, block: nn.Module, others: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"layers": nn.ModuleList([block])})
        self._block, self._others = [block], others  # not a second time among modules

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self._block[0](hidden, *self._others)
        return out


def make_room_for_corrected(model: nn.Module, cuts: Mapping[str, Cut], format: WeightFormat) -> None:
    """Replace linears and experts of a rank's part, on the meta device, by packed ones without values."""
    if not isinstance(format, Grouped):
        raise ConfigError("a calibration text corrects int4 and int8 only; leave it out with other formats")
    for name, linear in list(linears_to_pack(model)):
        cut = cuts[f"{name}.weight"]
        group = local_group(format.size_of_group(cut.shape[1]), cut)
        make_room_for_linear(model, name, linear, Grouped(format.bits, group))
    make_room_for_experts(model, format)


@torch.no_grad()
def corrected_parts(
    model: nn.Module, cuts: Mapping[str, Cut], read: Read, format: WeightFormat, texts: Sequence[Tensor]
) -> Packed:
    """Return a function that gives the tensors of packed linears and experts of a rank's part, in host memory. `texts`
    are rows of tokens on the device that computes them.
    """
    assert isinstance(model, Decoder | GPT2)
    own, found = dict(packed_linears(model)), dict[str, Sequence[Tensor]]()
    dtype, stacks = next(model.parameters()).dtype, dict(packed_stacks(model))
    for prefix, block in _corrected_blocks(model.config, read, format, texts, dtype):
        for name, whole in packed_linears(block):
            linear, weight = own.pop(f"{prefix}.{name}", None), f"{prefix}.{name}.weight"
            if linear is not None:
                found[weight] = [part.cpu() for part in _part(whole, cuts[weight], linear.format)]
        for name, stack in packed_stacks(block):
            if stacks.pop(f"{prefix}.{name}", None) is not None:
                own_experts = cuts[f"{prefix}.{name}"].intervals[0]
                parts = [torch.cat([part[begin:end] for begin, end in own_experts]) for part in stack.parts]
                found[f"{prefix}.{name}"] = [part.cpu() for part in parts]
    return lambda name, linear: found[name]


def packed_stacks(model: nn.Module) -> Iterator[tuple[str, PackedStack]]:
    """Return the stacks of packed experts of a model, by name."""
    return ((name, one) for name, one in model.named_modules() if isinstance(one, PackedStack))


def _corrected_blocks(
    config: TransformerConfig, read: Read, format: WeightFormat, texts: Sequence[Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, nn.Module]]:
    """Each block of a model in its order, with packed linears, and the name of the block."""
    with torch.device("meta"):
        model = build(config)
    assert isinstance(model, Decoder | GPT2)
    model = model.to(dtype).eval()
    if isinstance(model, Decoder):
        body, prefix, blocks = model.model, "model.layers", model.model.layers
    else:
        body, prefix, blocks = model.transformer, "transformer.h", model.transformer.h  # type: ignore[assignment]
    device = texts[0].device
    for child, module in body.named_children():
        if isinstance(module, nn.Embedding):
            _read_values(module, f"{prefix.partition('.')[0]}.{child}", read, device)
    inputs = [_first_inputs(body, blocks[0], text) for text in texts]
    hidden, others = [one[0] for one in inputs], inputs[0][1:]
    for index, block in enumerate(blocks):
        _read_values(block, f"{prefix}.{index}", read, device)
        one = _OneBlock(block, others)
        pack_corrected(one, format, hidden)
        yield f"{prefix}.{index}", block
        hidden = [one(rows) for rows in hidden]
        block.to("meta")


def _read_values(module: nn.Module, prefix: str, read: Read, device: torch.device) -> None:
    module.to_empty(device=device)
    for name, parameter in module.named_parameters():
        parameter.copy_(read(f"{prefix}.{name}"))


def _first_inputs(body: nn.Module, block: nn.Module, text: Tensor) -> tuple[Tensor, ...]:
    """Return what a model gives its first block."""

    def stop(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        raise _FirstBlockError(given)

    hook = block.register_forward_pre_hook(stop)
    try:
        body(text)
    except _FirstBlockError as found:
        given: tuple[Tensor, ...] = found.args[0]
        return given
    finally:
        hook.remove()
    raise AssertionError("the model did not call its first block")


def _part(whole: PackedLinear, cut: Cut, format: WeightFormat) -> tuple[Tensor, ...]:
    """Return a rank's part of a packed weight."""
    assert isinstance(format, Grouped)
    assert isinstance(whole.format, Grouped)
    codes, ranges = whole.parts
    unpacked = unpack(codes, format.bits, whole.format.size_of_group(whole.in_features))
    return cut_codes(unpacked, ranges, cut, format)

"""Weights that are rounded by a calibration text (`corrected_codes.py`), block by block, for a model or a rank's part.

A block needs only what the blocks before it make of the text. So each rank reads the blocks in their order, one at a
time on its device: it packs the whole block, computes what the packed block gives, keeps its own part of the codes and
goes on to the next, through all of them, so that no rank waits for others. All ranks compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.inspection.parameter_cut import Cut
from weft.models import GPT2, Decoder, TransformerConfig, build
from weft.serve.calibration.corrected_codes import pack_corrected
from weft.serve.weights.folder_codes import Packed, cut_codes, local_group, make_room_of, packed_linears
from weft.serve.weights.group_codes import unpack
from weft.serve.weights.packed_experts import PackedStack
from weft.serve.weights.packed_linear import PackedLinear, linears_to_pack, make_room_for_experts
from weft.serve.weights.weight_formats import Grouped, WeightFormat

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
    for name, _ in list(linears_to_pack(model)):
        cut = cuts[f"{name}.weight"]
        make_room_of(model, name, Grouped(format.bits, local_group(format.size_of_group(cut.shape[1]), cut)))
    make_room_for_experts(model, format)


@torch.no_grad()
def corrected_parts(
    model: nn.Module, cuts: Mapping[str, Cut], read: Read, format: WeightFormat, texts: Sequence[Tensor]
) -> Packed:
    """The parts of packed linears and experts of a rank's part, in host memory. `texts` are rows of tokens on the
    device that computes them.
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
                found[f"{prefix}.{name}"] = [part.cpu() for part in _own_experts(stack, cuts[f"{prefix}.{name}"])]
    return lambda name, linear: found[name]


def packed_stacks(model: nn.Module) -> Iterator[tuple[str, PackedStack]]:
    """The stacks of packed experts of a model, by name."""
    return ((name, one) for name, one in model.named_modules() if isinstance(one, PackedStack))


def _own_experts(stack: PackedStack, cut: Cut) -> list[Tensor]:
    """The parts of a rank's experts, of those of all."""
    return [torch.cat([part[begin:end] for begin, end in cut.intervals[0]]) for part in stack.parts]


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
    """What a model gives its first block."""

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
    """A rank's part of a packed weight."""
    assert isinstance(format, Grouped)
    assert isinstance(whole.format, Grouped)
    codes, ranges = whole.parts
    unpacked = unpack(codes, format.bits, whole.format.size_of_group(whole.in_features))
    return cut_codes(unpacked, ranges, cut, format)

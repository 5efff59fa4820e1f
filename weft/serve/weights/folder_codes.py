"""Weights that a Hugging Face folder has in fewer bits (`models/quantised_weight.py`), in weft's formats: their codes
are taken over, and not rounded again.

    integers   code * scale + least, where least = -zero * scale, in groups of at most 128 inputs
    floats     float8, with a scale for each output

Larger groups become several with the same scale. A scale and a zero point have 16 bits. They are exact where the zero
point is a power of two, as in symmetric weights of 4 or 8 bits with scales of 16 bits. Elsewhere they are rounded if
that changes no weight by more than 1/64 of its scale. A weight that has no such codes is dequantised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from weft.inspection.parameter_cut import Cut
from weft.models.hf_config import folder_quantisation
from weft.models.hf_quantisation import Scheme
from weft.models.quantised_weight import QuantisedWeight
from weft.serve.weights.group_codes import BLOCK, joined_ranges, pack
from weft.serve.weights.packed_experts import PackedStack
from weft.serve.weights.packed_linear import PackedLinear, linears_to_pack, make_room_for_linear
from weft.serve.weights.weight_formats import Grouped, RowFp8, WeightFormat

MAX_ERROR = 1 / 64  # of a scale
MIN_GROUP = 16  # inputs; the ranges of fewer take too many bytes
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # that an engine computes as one linear
Quantised = Callable[[str], list[QuantisedWeight]]  # the weights of a folder in fewer bits that a parameter is made of
# The parts of a packed linear or of stacked experts, by the name of the weight.
Packed = Callable[[str, PackedLinear | PackedStack], Sequence[Tensor]]


def make_room_for_codes(model: nn.Module, cuts: Mapping[str, Cut], quantised: Quantised) -> list[str]:
    """Replace linears on the meta device whose weights have codes by packed ones without values. Returns sentences on
    weights in fewer bits that are dequantised instead.
    """
    linears = dict(linears_to_pack(model))
    formats: dict[str, WeightFormat] = {}
    reasons: dict[str, str] = {}
    for name in linears:
        for weight in quantised(f"{name}.weight"):
            found = format_of(weight, cuts[f"{name}.weight"])
            if isinstance(found, str):
                reasons[name] = found
            else:
                formats[name] = found
    for names in _joined_names(linears):
        if len({formats.get(name) for name in names}) > 1:
            for name in names:
                if formats.pop(name, None) is not None:
                    reasons[name] = "they are computed as one linear with others, of another format"
    for name, format in formats.items():
        make_room_for_linear(model, name, linears[name], format)
    for name, _ in model.named_parameters():
        if name.removesuffix(".weight") not in linears and quantised(name):
            reasons[name] = "only linears of attention and MLPs are kept in fewer bits"
    found_reasons = list(reasons.values())
    return [
        f"{found_reasons.count(reason)} weights of the folder in fewer bits are dequantised: {reason}"
        for reason in dict.fromkeys(found_reasons)
    ]


def packed_linears(model: nn.Module) -> Iterator[tuple[str, PackedLinear]]:
    """Return the packed linears of a model, by name."""
    return ((name, one) for name, one in model.named_modules() if isinstance(one, PackedLinear))


def codes_of_folder(
    cuts: Mapping[str, Cut], quantised: Quantised, name: str, linear: PackedLinear | PackedStack
) -> Sequence[Tensor]:
    """Return the tensors of a packed linear of a rank's part, made of the codes of a folder. `name` is the weight's."""
    (weight,) = quantised(name)
    return parts_of(weight, cuts[name], linear.format)


def format_of(weight: QuantisedWeight, cut: Cut) -> WeightFormat | str:
    """Return the format that keeps the codes of a rank's part of a weight, or why there is none. Reads scales, not
    codes.
    """
    if 0 in cut.local_shape:
        return "this rank has no part of them"
    if weight.scheme.is_float:
        return RowFp8()
    if weight.group_of() is not None:
        return "their groups are not of neighbouring inputs (desc_act or actorder)"
    group = local_group(math.gcd(weight.group, BLOCK), cut)
    if group < MIN_GROUP:
        return f"groups of {weight.group} inputs leave {group} in this part"
    if not _is_close(weight):
        return "16 bits are too few for their scales and zero points"
    return Grouped(weight.bits, group)


def nearest_format(scheme: Scheme) -> str:
    """Return the name of weft's format whose bits and groups are nearest to those of a folder, for prices."""
    if scheme.is_float:
        return "fp8"
    if scheme.bits == 8:
        return "int8"
    return "int4" if scheme.group_size is not None and scheme.group_size < BLOCK else "int4-128"


def folder_format(folder: Path) -> str | None:
    """Return the name of weft's format nearest to that of a Hugging Face folder, for prices of its linears; None if it
    is not quantised, or they are dequantised. Its experts are always dequantised.
    """
    quantisation = folder_quantisation(folder)
    if quantisation is None or any(map(_is_dequantised, quantisation.schemes)):
        return None
    return nearest_format(quantisation.schemes[0])


def _is_dequantised(scheme: Scheme) -> bool:
    """Does `format_of` find no format, whatever the scales are? Of 8 bits with zero points, 16 bits are too few."""
    is_large = scheme.bits == 8 and not scheme.is_symmetric and not scheme.is_float
    return scheme.has_order or is_large or math.gcd(scheme.group_size or BLOCK, BLOCK) < MIN_GROUP


def parts_of(weight: QuantisedWeight, cut: Cut, format: WeightFormat) -> tuple[Tensor, ...]:
    """Return a rank's part of a weight as the tensors of a format, which is the one that `format_of` gave."""
    if isinstance(format, RowFp8):
        rows = Cut((cut.shape[0], 1), (cut.intervals[0], ((0, 1),)))
        return cut.take(weight.codes()).view(torch.uint8), rows.take(weight.scale()).contiguous().view(torch.int32)
    assert isinstance(format, Grouped)
    scale, least = _range_of(weight)
    return cut_codes(weight.codes(), joined_ranges(scale.half(), least.half()), cut, format)


def local_group(group: int, cut: Cut) -> int:
    """Return the size of groups in which a rank's part of a weight can be kept, if the whole weight has groups of
    `group` inputs.
    """
    return math.gcd(group, *(end for interval in cut.intervals[1] for end in interval))


def cut_codes(codes: Tensor, ranges: Tensor, cut: Cut, format: Grouped) -> tuple[Tensor, ...]:
    """Return codes and ranges of a rank's part of a weight, of codes [out, in] and ranges [out, groups] of the whole.
    The part has groups of `format`, which are not larger.
    """
    group = format.group
    ranges = ranges.repeat_interleave(codes.shape[1] // ranges.shape[1] // group, dim=1)
    columns = tuple((begin // group, end // group) for begin, end in cut.intervals[1])
    of_groups = Cut(tuple(ranges.shape), (cut.intervals[0], columns))
    return pack(cut.take(codes).contiguous(), format.bits, group), of_groups.take(ranges)


def _range_of(weight: QuantisedWeight) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero point of each group, in float64."""
    scale = weight.scale().double()
    return scale, -weight.zero().double() * scale


def _is_close(weight: QuantisedWeight) -> bool:
    """Do scales and zero points of 16 bits give each weight to a small part of a scale?"""
    scale, least = _range_of(weight)
    of_scale, of_least = scale.half().double() - scale, least.half().double() - least
    last = of_least + (2**weight.bits - 1) * of_scale  # the error of the last code; that of the first is of_least
    return bool((torch.maximum(of_least.abs(), last.abs()) <= MAX_ERROR * scale.abs()).all())


def _joined_names(names: Mapping[str, nn.Linear]) -> list[Sequence[str]]:
    """Return the names of linears that an engine computes as one."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
    groups = [[f"{owner}.{leaf}" for leaf in leaves] for owner in owners for leaves in JOINED]
    return [group for group in groups if all(name in names for name in group)]

"""Quantised weights of Hugging Face folders: the tensors that make up one, and what they stand for.

    weight[o, i] = (code[o, i] - zero[o, g]) * scale[o, g], where g is the group of input i

GPTQ keeps codes along inputs, eight of 4 bits or four of 8 bits in an int32, the lowest bits first:

    qweight [in / 8, out]     qzeros [groups, out / 8]     scales [groups, out]     g_idx [in], the group of each input

compressed-tensors keeps weight_packed [out, in / 8], weight_scale [out, groups] and weight_shape; with zero points also
weight_zero_point [out / 8, groups], and with groups that are not of neighbours weight_g_idx [in]. Codes are signed
numbers plus half of their range. Or it keeps int8 or float8 (e4m3) in weight, and weight_scale and weight_zero_point.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.errors import CheckpointError
from weft.models.hf_quantisation import Quantisation, Scheme

SCALES, INDICES = ("F16", "BF16", "F32"), ("I32", "I64")
# Ends of names of the tensors of a weight, by the end of the name of its codes.
PARTS = {
    "qweight": ("qzeros", "scales", "g_idx"),
    "weight_packed": ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    "weight": ("weight_scale", "weight_zero_point"),
}
# Ends of names of tensors for activations, keys and values, which stay as they are (`Quantisation.notes`).
LEFT_OUT = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "k_scale", "v_scale")


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a safetensors file."""

    file: Path
    handle: Any
    name: str  # in the file

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.handle.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> str:
        """As safetensors names it."""
        return str(self.handle.get_slice(self.name).get_dtype())

    def read(self) -> Tensor:
        tensor: Tensor = self.handle.get_tensor(self.name)
        return tensor


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight of some tensors of a folder, which are read when they are asked for."""

    shape: tuple[int, int]
    scheme: Scheme
    tensor: FileTensor  # the codes
    parts: Mapping[str, FileTensor]  # the other tensors, by the ends of their names
    adds_one: bool

    @property
    def file(self) -> Path:
        return self.tensor.file

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def is_gptq(self) -> bool:
        return "qzeros" in self.parts

    @property
    def bits(self) -> int:
        """Bits of a code as it is stored."""
        return 8 if self.tensor.dtype == "I8" else self.scheme.bits

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return min(self.scheme.group_size or self.shape[1], self.shape[1])

    def codes(self) -> Tensor:
        """Returns the codes [out, in]: uint8, or float8. Raises CheckpointError if one of float8 is NaN."""
        codes = self.tensor.read()
        if self.scheme.is_float:
            if bool((codes.view(torch.uint8) & 127 == 127).any()):  # kernels decode NaN to numbers
                raise wrong(self.tensor, "some of its codes are NaN; the folder is damaged")
            return codes
        if codes.dtype == torch.int8:
            return codes.view(torch.uint8) ^ 128
        return unpacked(codes.T if self.is_gptq else codes, self.bits)[:, : self.shape[1]]

    def scale(self) -> Tensor:
        """Returns the scales [out, groups] in float32. Raises CheckpointError if one is not finite."""
        stored = self.parts["scales" if self.is_gptq else "weight_scale"].read().float()
        if not bool(stored.isfinite().all()):
            raise wrong(self.tensor, "some of its scales are not finite; the folder is damaged")
        stored = stored.T if self.is_gptq else stored.view(-1, stored.shape[-1] if stored.dim() else 1)
        return stored.expand(self.shape[0], -1)

    def zero(self) -> Tensor:
        """Returns the codes [out, groups] that stand for 0, in int32."""
        scheme, num_out, half = self.scheme, self.shape[0], 1 << (self.bits - 1)
        part = self.parts.get("qzeros" if self.is_gptq else "weight_zero_point")
        if part is None:
            return torch.full((1, 1), half, dtype=torch.int32).expand(num_out, self._num_groups)
        zero = part.read()
        if self.is_gptq:
            ones = sum(1 << shift for shift in range(0, 32, scheme.bits))
            zero = unpacked(zero + ones if self.adds_one else zero, scheme.bits).T
        elif part.dtype == "I32":
            zero = unpacked(zero.T, scheme.bits)[:, :num_out].T
        else:
            zero = zero.view(-1, zero.shape[-1] if zero.dim() else 1).expand(num_out, -1).int() + half
        if scheme.is_symmetric and bool((zero != half).any()):
            raise wrong(
                part,
                f"config.json says that weights are symmetric, and a zero point is {int(zero[zero != half][0])}, not "
                f"{half}; if checkpoint_format is 'gptq' and was 'gptq_v2', or the reverse, correct it there",
            )
        return zero.int()

    def group_of(self) -> Tensor | None:
        """Returns the group of each input; None if groups are of neighbours, all of the same size."""
        num_in, groups = self.shape[1], self._num_groups
        part = self.parts.get("g_idx" if self.is_gptq else "weight_g_idx")
        neighbours = torch.arange(num_in) // self.group
        found = neighbours if part is None else part.read().long()
        if bool(((found < 0) | (found >= groups)).any()):
            raise wrong(part or self.tensor, f"it names a group that is not among the {groups} of the weight")
        return None if num_in == groups * self.group and bool((found == neighbours).all()) else found

    @property
    def _num_groups(self) -> int:
        return -(-self.shape[1] // self.group)

    def read(self) -> Tensor:
        """Returns the weight [out, in] in float32."""
        codes, scale = self.codes(), self.scale()
        if self.scheme.is_float:
            return codes.float() * scale
        codes, zero, groups = codes.float(), self.zero().float(), self.group_of()
        if groups is not None:
            return codes.sub_(zero[:, groups]).mul_(scale[:, groups])
        grouped = codes.unflatten(1, (-1, self.group))
        weight: Tensor = grouped.sub_(zero[..., None]).mul_(scale[..., None]).flatten(1)
        return weight


def joined_weights(
    found: Mapping[str, FileTensor], shapes: Mapping[str, tuple[int, ...]], quantisation: Quantisation
) -> dict[str, FileTensor | QuantisedWeight]:
    """Returns the tensors of a folder, with those that make up a weight as one. `shapes` are of parameters, by name.

    Tensors for what weft leaves out are left out, and biases of zeros that GPTQ adds to linears without one.
    """
    joined: dict[str, FileTensor | QuantisedWeight] = dict(found)
    for name, tensor in found.items():
        owner, _, end = name.rpartition(".")
        if end in LEFT_OUT and quantisation.notes:
            del joined[name]
        if end not in PARTS or (end == "weight" and tensor.dtype not in ("I8", "F8_E4M3")):
            continue
        weight = f"{owner}.weight"
        if weight not in shapes or (end != "weight" and weight in found):
            raise wrong(tensor, "it is the weight of no linear of the config, or the second of one; remove it")
        parts = {part: found[f"{owner}.{part}"] for part in PARTS[end] if f"{owner}.{part}" in found}
        for part in (end, *parts):
            del joined[f"{owner}.{part}"]
        joined[weight] = quantised_weight(tensor, parts, shapes[weight], quantisation)
        bias = f"{owner}.bias"
        if end == "qweight" and bias in found and bias not in shapes and not bool(found[bias].read().any()):
            del joined[bias]
    return joined


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Returns the codes (uint8) in words [rows, words] of 32 bits, of which the lowest come first."""
    packed = words.contiguous().view(torch.uint8)
    return packed if bits == 8 else torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def quantised_weight(
    tensor: FileTensor, parts: Mapping[str, FileTensor], shape: tuple[int, ...], quantisation: Quantisation
) -> QuantisedWeight:
    """Returns the weight of a shape that tensors make up. Raises CheckpointError if they do not."""
    if len(shape) != 2:
        raise wrong(tensor, f"it is quantised, and the config needs a tensor of shape {shape}")
    num_out, num_in = shape
    wanted: list[str] = []
    for scheme in quantisation.schemes:
        groups = 1 if scheme.group_size is None else -(-num_in // scheme.group_size)
        needed = _tensors_of(scheme, quantisation, (num_out, num_in, groups), tensor.dtype)
        found = {"codes": tensor, **parts}
        forms = {name: (one.dtype, one.shape) for name, one in found.items()}
        differing = [name for name, allowed in needed.items() if forms.get(name) not in allowed]
        if not differing:
            _refuse_values(tensor, parts, [num_out, num_in], scheme)
            return QuantisedWeight((num_out, num_in), scheme, tensor, parts, quantisation.adds_one)
        own = found.get(differing[0])
        stated = "is missing" if own is None else f"is {own.dtype} {own.shape}"
        wanted.append(f"{differing[0]} {stated}, and should be {' or '.join(map(str, needed[differing[0]]))}")
    raise wrong(tensor, f"its tensors are not those of a weight {shape} by config.json: {'; '.join(wanted)}")


Allowed = list[tuple[str, tuple[int, ...]] | None]


def _tensors_of(
    scheme: Scheme, quantisation: Quantisation, sizes: tuple[int, int, int], dtype: str
) -> dict[str, Allowed]:
    """Returns the dtypes and shapes that the tensors of a weight may have; None among them: it may be missing."""
    num_out, num_in, groups = sizes
    packed = 32 // scheme.bits
    order: Allowed = [(kind, (num_in,)) for kind in INDICES]
    if quantisation.method == "gptq":
        return {
            "codes": [("I32", (num_in // packed, num_out))] if num_in % packed == 0 == num_out % packed else [],
            "qzeros": [("I32", (groups, num_out // packed))],
            "scales": [(kind, (groups, num_out)) for kind in SCALES],
            "g_idx": order if quantisation.has_order else [*order, None],
        }
    of_rows = [(num_out, groups)] if scheme.group_size is not None else [(num_out, 1), (1,), (1, 1), ()]
    scales: Allowed = [(kind, shape) for kind in SCALES for shape in of_rows]
    optional: Allowed = [None] if scheme.is_symmetric or scheme.is_float else []
    if dtype != "I32":
        zeros: Allowed = [(kind, shape) for kind in ("I8", "F8_E4M3", *SCALES) for shape in of_rows]
        codes: Allowed = [("F8_E4M3" if scheme.is_float else "I8", (num_out, num_in))]
        return {"codes": codes, "weight_scale": scales, "weight_zero_point": [*zeros, *optional]}
    return {
        "codes": [] if scheme.is_float else [("I32", (num_out, -(-num_in // packed)))],
        "weight_scale": scales,
        "weight_zero_point": [("I32", (-(-num_out // packed), groups)), *optional],
        "weight_shape": [(kind, (2,)) for kind in INDICES],
        "weight_g_idx": [*order, None],
    }


def _refuse_values(tensor: FileTensor, parts: Mapping[str, FileTensor], shape: list[int], scheme: Scheme) -> None:
    """Raise CheckpointError if small tensors contradict what the weight is."""
    if "weight_shape" in parts and parts["weight_shape"].read().tolist() != shape:
        raise wrong(tensor, f"weight_shape is {parts['weight_shape'].read().tolist()}, but the config needs {shape}")
    if scheme.is_float and "weight_zero_point" in parts and bool(parts["weight_zero_point"].read().float().any()):
        raise wrong(tensor, "it has floats and a zero point that is not 0; the folder is damaged")


def wrong(tensor: FileTensor, reason: str) -> CheckpointError:
    return CheckpointError(f"{tensor.file}: {tensor.name}: {reason}")

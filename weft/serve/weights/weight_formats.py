"""How the weights of linears are quantised: the formats that `weft serve --weights` names.

    fp8        float8 (e4m3), one scale of 32 bits for each row of outputs
    fp16       float16; for CPUs
    int8-row   8 bits, one scale of 32 bits for each row of outputs; for CPUs
    int8       8 bits in groups of 128 inputs, with a scale and a zero point of 16 bits each (`group_codes.py`)
    int4       4 bits in groups of 64
    int4-128   4 bits in groups of 128

Where the number of inputs is no multiple of the group, the group is their greatest common divisor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.errors import ConfigError, NumbersError
from weft.serve.weights.group_codes import GroupCodes, dequantise, joined_ranges, quantise, size_of_block, split_ranges

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # the largest number of e4m3
DEQUANTISED_WEIGHTS = 1 << 19  # that a CPU dequantises at a time


class WeightFormat(ABC):
    """How a weight [out, in] is kept: as some tensors of integers, its `parts`, each with a row for each output."""

    @abstractmethod
    def empty(self, num_out: int, num_in: int, device: torch.device | str) -> tuple[Tensor, ...]:
        """Room for a weight. Raises ConfigError if the format cannot keep weights of this shape."""

    @abstractmethod
    def quantise(self, weight: Tensor) -> tuple[Tensor, ...]: ...

    @abstractmethod
    def dequantise(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor: ...

    def product(self, hidden: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Return hidden @ weight.T, dequantised; on a CPU, as many outputs at a time as its cache holds."""
        num_out = max(1, DEQUANTISED_WEIGHTS // hidden.shape[-1]) if hidden.device.type == "cpu" else len(parts[0])
        some = zip(*(part.split(num_out) for part in parts), strict=True)
        products = [F.linear(hidden, self.dequantise(one, hidden.dtype)) for one in some]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


@dataclass(frozen=True)
class Grouped(WeightFormat):
    """Integers in groups of inputs."""

    bits: int
    group: int

    def size_of_group(self, num_in: int) -> int:
        return math.gcd(num_in, self.group)

    def empty(self, num_out: int, num_in: int, device: torch.device | str) -> tuple[Tensor, ...]:
        if num_in * self.bits % 8:
            raise ConfigError(f"int4 keeps two weights in a byte, and a layer has {num_in} inputs; use int8 or fp8")
        codes = torch.empty(num_out, num_in * self.bits // 8, dtype=torch.uint8, device=device)
        return codes, torch.empty(num_out, num_in // self.size_of_group(num_in), dtype=torch.int32, device=device)

    def quantise(self, weight: Tensor) -> tuple[Tensor, ...]:
        codes, scale, zero_point = quantise(weight, self.size_of_group(weight.shape[1]), self.bits)
        return codes, joined_ranges(scale, zero_point)

    def dequantise(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        codes, ranges = parts
        return dequantise(GroupCodes(codes, *split_ranges(ranges)), self.bits, dtype)

    def block(self, num_in: int) -> tuple[int, int, int]:
        """For kernels: bits, inputs of a block and groups of a block. In a block, codes of 4 bits are packed."""
        group = self.size_of_group(num_in)
        block = size_of_block(num_in, group)
        return (4, block, block // group) if self.bits == 4 else (8, group, 1)

    def kernel_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return codes and ranges, as kernels take them."""
        return parts[0], parts[1]


@dataclass(frozen=True)
class Half(WeightFormat):
    """float16."""

    def empty(self, num_out: int, num_in: int, device: torch.device | str) -> tuple[Tensor, ...]:
        return (torch.empty(num_out, num_in, dtype=torch.int16, device=device),)

    def quantise(self, weight: Tensor) -> tuple[Tensor, ...]:
        return (weight.to(torch.float16).view(torch.int16),)

    def dequantise(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return parts[0].view(torch.float16).to(dtype)


@dataclass(frozen=True)
class ScaledRows(WeightFormat):
    """Numbers of 8 bits up to a largest one, with a scale for each output."""

    code: ClassVar[torch.dtype]
    largest: ClassVar[float]

    def empty(self, num_out: int, num_in: int, device: torch.device | str) -> tuple[Tensor, ...]:
        codes = torch.empty(num_out, num_in, dtype=torch.uint8, device=device)
        return codes, torch.empty(num_out, 1, dtype=torch.int32, device=device)

    def quantise(self, weight: Tensor) -> tuple[Tensor, ...]:
        wide = weight.float()
        scale = (wide.abs().amax(1, keepdim=True) / self.largest).clamp(min=1e-30)
        numbers = wide / scale
        codes = numbers if self.code.is_floating_point else numbers.round()
        return codes.to(self.code).view(torch.uint8), scale.view(torch.int32)

    def dequantise(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        codes, scale = parts
        return codes.view(self.code).to(dtype) * scale.view(torch.float32).to(dtype)


@dataclass(frozen=True)
class RowInt8(ScaledRows):
    """Integers from -127 to 127, with a scale for each output."""

    code = torch.int8
    largest = 127.0


@dataclass(frozen=True)
class RowFp8(ScaledRows):
    """float8, with a scale for each output."""

    code = FP8
    largest = FP8_MAX

    def block(self, num_in: int) -> tuple[int, int, int]:
        """For kernels: bits, inputs of a block and no groups."""
        return 8, size_of_block(num_in), 0

    def kernel_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return parts[0], parts[1].view(torch.float32)[..., 0]

    def product(self, hidden: Tensor, parts: Sequence[Tensor]) -> Tensor:
        codes, scale = parts[0].view(FP8), parts[1].view(torch.float32)
        return F.linear(hidden, codes.to(hidden.dtype)) * scale.to(hidden.dtype).T

    def float8_product(self, hidden: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Return hidden @ weight.T by a GPU's product of float8: each row of inputs is rounded to it by its largest."""
        codes, scale = parts[0].view(FP8), parts[1].view(torch.float32)
        given = hidden.float().abs().amax(1, keepdim=True).clamp(min=1e-30) / FP8_MAX
        rounded = (hidden.float() / given).to(FP8)
        return torch._scaled_mm(rounded, codes.T, given, scale.T, out_dtype=hidden.dtype, use_fast_accum=True)


FORMATS: dict[str, WeightFormat] = {
    "fp8": RowFp8(),
    "fp16": Half(),
    "int8-row": RowInt8(),
    "int8": Grouped(8, 128),
    "int4": Grouped(4, 64),
    "int4-128": Grouped(4, 128),
}


CPU_FORMATS = ("fp16", "int8-row")  # that no kernel of a GPU reads
HEAD_FORMATS = tuple(name for name in FORMATS if name != "fp8")  # that --head names


def weight_format(name: str, device: torch.device | str = "cpu") -> WeightFormat:
    """Return the format of a name, for a device. Raises ConfigError."""
    if name not in FORMATS:
        raise ConfigError(f"--weights {name} is unknown; give one of {', '.join(FORMATS)}")
    if name in CPU_FORMATS and torch.device(device).type != "cpu":
        raise ConfigError(
            f"--weights {name} is for CPUs, and {device} has no products for it; leave it out, or give int8 or fp8"
        )
    return FORMATS[name]


def weight_bytes(format: WeightFormat, num_out: int, num_in: int) -> int:
    """Return bytes of a weight in a format."""
    return sum(part.numel() * part.itemsize for part in format.empty(num_out, num_in, "meta"))


def refuse_bad_weight(name: str, weight: Tensor) -> None:
    """Raise NumbersError if a weight [out, in] is NaN, infinite or too large for a scale of 16 bits."""
    bad = ~(weight.abs() < 65000)
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise NumbersError(
            f"{name}[{row}, {column}] is {float(weight[row, column])}, which cannot be kept in fewer bits; serve "
            f"without --weights, or an older checkpoint"
        )

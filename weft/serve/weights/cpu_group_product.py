"""Products with weights in groups of 4 or 8 bits on a CPU: no weight is decoded. ARM CPUs use `cpu_dynamic_product.py`.
Others use torch's product with 4-bit codes:

    code * scale + least = (code - 8) * scale + (least + 8 * scale)
    code of 8 bits = 16 * high + low: the sum of two products with 4-bit codes, of scales 16 * scale and scale

Inputs, scales, least values and results have the precision of bf16, sums that of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.serve.weights import cpu_dynamic_product
from weft.serve.weights.cpu_product import DTYPES, MEASURED_WEIGHTS, CpuWeight, most_rows, slower_than_decoding
from weft.serve.weights.group_codes import GroupCodes, decode, pack, unpack

GROUPS = (32, 64, 128, 256)  # inputs of a group that the product takes
OUTPUT_MULTIPLE = 16  # of the outputs of a product


@dataclass(frozen=True)
class GroupWeight:
    """A weight [out, in] as torch's product takes it: for each 4 bits of its codes, the codes and their ranges."""

    digits: tuple[tuple[Tensor, Tensor], ...]
    group: int
    num_out: int
    max_rows: int  # more are computed faster by the plain function

    def product(self, hidden: Tensor) -> Tensor:
        """hidden [rows, in] @ weight.T."""
        given = hidden.to(torch.bfloat16)
        (codes, ranges), *lower = self.digits
        out = torch._weight_int4pack_mm_for_cpu(given, codes, self.group, ranges)
        if lower:
            out = out.float()
            for codes, ranges in lower:
                out += torch._weight_int4pack_mm_for_cpu(given, codes, self.group, ranges)
        return (out if out.shape[1] == self.num_out else out[:, : self.num_out]).to(hidden.dtype)


def arranged(coded: GroupCodes, bits: int, dtype: torch.dtype) -> CpuWeight | None:
    """The weight for inputs of a dtype; None if it is decoded for each product (`refusal`)."""
    num_in, arrange = coded.codes.shape[1] * 8 // bits, arrangement()
    group = num_in // coded.scale.shape[1]
    if arrange is None or refusal(num_in, group, bits, dtype) is not None:
        return None
    return arrange(coded, bits, measured_rows(num_in, group, bits, dtype, torch.get_num_threads()))


def arrangement() -> Callable[[GroupCodes, int, int], CpuWeight] | None:
    """What puts a weight of codes of some bits in the order of this CPU's product, for at most so many rows; None if
    this torch has no product for it.
    """
    if cpu_dynamic_product.has_product():
        return cpu_dynamic_product.dynamic_weight
    return group_weight if has_product() else None


def group_weight(coded: GroupCodes, bits: int, max_rows: int) -> GroupWeight:
    """The weight that codes [out, in * bits / 8] stand for. Outputs are filled up to a multiple of 16."""
    num_out, group = len(coded.codes), coded.codes.shape[1] * 8 // bits // coded.scale.shape[1]
    codes, scale, least = unpack(coded.codes, bits, group), coded.scale.float(), coded.least.float()
    padding = (0, 0, 0, -num_out % OUTPUT_MULTIPLE)
    codes, scale, least = (F.pad(one, padding) for one in (codes, scale, least))
    if bits == 4:
        digits = (_digits(codes, scale, least + 8 * scale),)
    else:
        high = _digits(codes >> 4, 16 * scale, least + (8 * 16 + 8) * scale)
        digits = (high, _digits(codes & 15, scale, torch.zeros_like(least)))  # type: ignore[assignment]
    return GroupWeight(digits, group, num_out, max_rows)


def arranged_bytes(num_out: int, num_in: int, group: int, bits: int) -> int:
    """Bytes of a `GroupWeight`: 4 bits for each weight and two numbers of 16 bits for each group, for each digit."""
    rows = num_out + -num_out % OUTPUT_MULTIPLE
    return bits // 4 * rows * (num_in // 2 + 4 * num_in // group)


def _digits(codes: Tensor, scale: Tensor, middle: Tensor) -> tuple[Tensor, Tensor]:
    """(codes - 8) * scale + middle, as torch's product takes it."""
    ranges = torch.stack([scale, middle], dim=-1).transpose(0, 1)  # [groups, out, 2]
    return torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1), ranges.to(torch.bfloat16).contiguous()


def refusal(num_in: int, group: int, bits: int, dtype: torch.dtype) -> str | None:
    """Why weights with so many inputs in groups are decoded for products of one row; None if they are not."""
    if dtype not in DTYPES:
        return f"products with codes take no inputs in {dtype}"
    if group not in GROUPS:
        return f"products with codes take groups of 32, 64 or 128 inputs, and a layer of {num_in} inputs has {group}"
    if arrangement() is None:
        return "this torch has no products with 4-bit codes for this CPU"
    if not measured_rows(num_in, group, bits, dtype, torch.get_num_threads()):
        return slower_than_decoding(num_in)
    return None


@cache
def has_product() -> bool:
    """Has this torch the product, and does it give what it should on this CPU?"""
    codes, one = torch.arange(OUTPUT_MULTIPLE * 32).view(OUTPUT_MULTIPLE, 32) % 16, torch.ones(OUTPUT_MULTIPLE, 1)
    try:
        coded = GroupCodes(pack(codes.to(torch.uint8), 4, 32), one.half(), one.half())
        found = group_weight(coded, 4, 1).product(torch.eye(32))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return torch.equal(found.T, codes + 1.0)


@cache
def measured_rows(num_in: int, group: int, bits: int, dtype: torch.dtype, threads: int) -> int:
    """The most rows for which a product with codes is faster than the plain function; 0 if it is for none.

    It is measured once, with as many outputs as make a million weights. `threads` are those in use.
    """
    num_out = max(OUTPUT_MULTIPLE, MEASURED_WEIGHTS // num_in)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2**bits, (num_out, num_in), dtype=torch.uint8, generator=generator)
    ranges = torch.ones(num_out, num_in // group, dtype=torch.float16)
    coded = GroupCodes(pack(codes, bits, group), ranges, ranges)
    arrange = arrangement()
    assert arrange is not None
    weight = arrange(coded, bits, 1)
    return most_rows(weight.product, lambda hidden: F.linear(hidden, decode(coded, bits, dtype)), num_in, dtype)

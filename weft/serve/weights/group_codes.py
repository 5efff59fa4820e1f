"""Numbers in 4 or 8 bits: groups of neighbours along the last dim share a scale and a zero point, each of 16 bits.

    code = round((x - zero point) / scale), half to even        x' = code * scale + zero point

The zero point is the number of code 0: a group's least number, rounded down. The scale is rounded up, so that every
number of a group lies between the first and the last code, and |x - x'| is at most half a scale. A group of equal
16-bit numbers is kept exactly. Where 16 bits do not reach, finite numbers become the first or the last code; a group
with an infinite one is dequantised to NaN.

Two codes of 4 bits lie in a byte: of each block of 128 numbers, the first half lies in the low halves of bytes, so that
a kernel which reads them gets neighbours. A block has at most two groups, one in the low and one in the high halves,
and where the numbers are no multiple of 128, their greatest common divisor.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
LOWEST = -65504.0  # of float16


class GroupCodes(NamedTuple):
    """Codes uint8 [..., numbers * bits / 8]; scale and zero point float16 [..., groups]."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor


def quantise(values: Tensor, group: int, bits: int) -> GroupCodes:
    """Return the codes of numbers [..., n], where n is a multiple of `group`."""
    grouped = values.unflatten(-1, (-1, group))
    scale, least = group_range(grouped, bits)
    return GroupCodes(pack(codes_of(grouped, scale, least, bits).flatten(-2), bits, group), scale, least)


def dequantise(coded: GroupCodes, bits: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers [..., n] that codes stand for."""
    group = coded.codes.shape[-1] * 8 // bits // coded.scale.shape[-1]
    grouped = unpack(coded.codes, bits, group).unflatten(-1, (-1, group)).to(dtype)
    numbers: Tensor = grouped * coded.scale[..., None].to(dtype) + coded.zero_point[..., None].to(dtype)
    return numbers.flatten(-2)


def joined_ranges(scale: Tensor, least: Tensor) -> Tensor:
    """Scales and zero points (float16) side by side in numbers of 32 bits, so that a kernel loads both at once."""
    return torch.stack([scale, least], dim=-1).view(torch.int32)[..., 0]


def split_ranges(ranges: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and zero points (float16) of `joined_ranges`."""
    scale, least = ranges[..., None].view(torch.float16).unbind(-1)
    return scale, least


def group_range(grouped: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the scale and zero point (float16) of groups [..., group]; a scale of 0 if all numbers are equal."""
    wide = grouped.to(torch.promote_types(grouped.dtype, torch.float32))
    lowest, highest = wide.aminmax(dim=-1)
    least = _not_above(lowest)
    last = highest.new_full((), 2**bits - 1)  # by a number that is no tensor, torch does not divide exactly on GPUs
    return -_not_above(-(highest - least.to(wide.dtype)) / last), least


def codes_of(grouped: Tensor, scale: Tensor, least: Tensor, bits: int) -> Tensor:
    """Return the codes (uint8) of groups [..., group], one in each element."""
    wide = grouped.to(torch.promote_types(grouped.dtype, torch.float32))
    divisor = torch.where(scale > 0, scale, 1).to(wide.dtype)[..., None]
    return ((wide - least.to(wide.dtype)[..., None]) / divisor).round_().clamp_(0, 2**bits - 1).to(torch.uint8)


def size_of_block(number: int, group: int = BLOCK) -> int:
    """Return the size of the blocks in which codes of 4 bits are packed."""
    return math.gcd(number, BLOCK, 2 * group)


def pack(codes: Tensor, bits: int, group: int) -> Tensor:
    """Return codes end to end in bytes."""
    if bits == 8:
        return codes
    return pack_halves(codes.unflatten(-1, (-1, size_of_block(codes.shape[-1], group)))).flatten(-2)


def unpack(packed: Tensor, bits: int, group: int) -> Tensor:
    """Return packed codes, one in each element."""
    if bits == 8:
        return packed
    return unpack_halves(packed.unflatten(-1, (-1, size_of_block(2 * packed.shape[-1], group) // 2))).flatten(-2)


def pack_halves(codes: Tensor) -> Tensor:
    """Return codes of 4 bits in bytes: those of the first half of the last dim lie low, those of the second
    half high.
    """
    low, high = codes.chunk(2, dim=-1)
    return low | (high << 4)


def unpack_halves(packed: Tensor) -> Tensor:
    """Return the codes that `pack_halves` packed, one in each element."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _not_above(values: Tensor) -> Tensor:
    """Return the largest numbers of float16 that are not above these; for finite ones below all, the lowest."""
    half = values.to(torch.float16)
    bits = half.view(torch.int16)
    below = torch.where(half > 0, bits - 1, torch.where(half < 0, bits + 1, -32767)).view(torch.float16)
    found = torch.where(half.to(values.dtype) > values, below, half)
    return torch.where(values > -torch.inf, found.clamp(min=LOWEST), found)

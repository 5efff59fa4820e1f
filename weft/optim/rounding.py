"""Random rounding to bf16, and 8-bit codes with a scale for each block of elements.

Rounding to nearest loses every change smaller than half a step of the format, as most updates of an optimizer are.
Random rounding keeps them in the mean: a value is rounded up with a probability equal to its distance from the lower
neighbour. The random bits are a function of (seed, position), so a resumed run repeats them.

8-bit codes. First moments have a sign: m = ±(code / 127)² · scale. Second moments are squares over a wide range: v =
(code / 255)⁴ · scale, with a code of at least 1 where v is not 0, because updates divide by it. The scale is the
largest value of the block. A value between two codes gets the upper one with a probability that is linear in the value,
not in its root, so a sum over many steps has the same mean as without rounding. (Only second moments below 255⁻⁴ of
their block's largest are raised, to that value.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.sharding.layout import CODE_BLOCK

SIGNED_LEVELS, SQUARE_LEVELS = 127.0, 255.0
_BITS = 16
_KEY_FACTOR = 0x9E3779B1 - (1 << 32)  # spreads a small key over 32 bits
_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)))  # shifts and factors of a 32-bit hash (lowbias32)


def random_bits(seed: Tensor, numel: int) -> Tensor:
    """Return 32 random bits for each of `numel` positions [numel] (int32).

    `seed` [] (int64) holds a key in its high 32 bits and the first position in its low 32 bits.
    """
    key = (seed >> 32).to(torch.int32) * _KEY_FACTOR
    mixed = (torch.arange(numel, dtype=torch.int32, device=seed.device) + seed.to(torch.int32)) ^ key
    for shift, factor in _ROUNDS:
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    return mixed ^ _shifted(mixed, 16)


def _shifted(bits: Tensor, shift: int) -> Tensor:
    """Shifts to the right, and fills up with zeros."""
    return (bits >> shift) & ((1 << (32 - shift)) - 1)


def sixteen_bits(bits: Tensor, which: int) -> Tensor:
    """Return one of three 16-bit fields of `bits`, 0 to 65535 [numel] (int32).

    `which` is 0 for the low, 1 for the high and 2 for the middle bits. The third overlaps the others. That is fine:
    they round different numbers, and each rounding is unbiased.
    """
    return _shifted(bits, (0, _BITS, _BITS // 2)[which]) & 0xFFFF


def to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bf16 randomly, with 16 random bits per element [numel]. Values that are not finite are kept."""
    low = values.float()
    rounded = ((low.view(torch.int32) + bits) & -65536).view(torch.float32)
    return torch.where(torch.isfinite(low), rounded, low).to(torch.bfloat16)


def signed_codes(values: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Encode first moments as int8 codes [numel] and scales [blocks]."""
    blocks, scales = _blocks(values)
    parts = blocks.abs() / scales.clamp(min=1e-38).unsqueeze(1)
    low = (parts.sqrt() * SIGNED_LEVELS).floor().clamp(max=SIGNED_LEVELS - 1)
    below, above = (low / SIGNED_LEVELS).square(), ((low + 1) / SIGNED_LEVELS).square()
    codes = (low + _rounds_up(parts, below, above, bits)) * blocks.sign()
    return codes.to(torch.int8).view(-1)[: values.numel()], scales


def from_signed_codes(codes: Tensor, scales: Tensor) -> Tensor:
    """Decode first moments [numel], in float32."""
    parts = codes.float() / SIGNED_LEVELS
    return parts * parts.abs() * _per_element(scales, codes.numel())


def square_codes(values: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Encode second moments as uint8 codes [numel] and scales [blocks]."""
    blocks, scales = _blocks(values)
    parts = blocks / scales.clamp(min=1e-38).unsqueeze(1)
    low = (parts.sqrt().sqrt() * SQUARE_LEVELS).floor().clamp(max=SQUARE_LEVELS - 1)
    below, above = (low / SQUARE_LEVELS).square().square(), ((low + 1) / SQUARE_LEVELS).square().square()
    codes = low + _rounds_up(parts, below, above, bits)
    codes = torch.where(blocks > 0, codes.clamp(min=1.0), codes)
    return codes.to(torch.uint8).view(-1)[: values.numel()], scales


def from_square_codes(codes: Tensor, scales: Tensor) -> Tensor:
    """Decode second moments [numel], in float32."""
    return (codes.float() / SQUARE_LEVELS).square().square() * _per_element(scales, codes.numel())


def _blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return values as [blocks, CODE_BLOCK], padded with zeros, and the largest magnitude of each block [blocks]."""
    missing = -values.numel() % CODE_BLOCK
    blocks = torch.nn.functional.pad(values.float(), (0, missing)).view(-1, CODE_BLOCK)
    return blocks, blocks.abs().amax(1)


def _rounds_up(values: Tensor, below: Tensor, above: Tensor, bits: Tensor) -> Tensor:
    """Return 1 where a value between `below` and `above` is rounded up, else 0 [blocks, CODE_BLOCK].

    The 16 random bits stand for the middle of their interval, so the mean over all of them is the value, with an error
    of 2⁻¹⁷ of the distance.
    """
    missing = -bits.numel() % CODE_BLOCK
    fraction = (torch.nn.functional.pad(bits, (0, missing)).view(values.shape).float() + 0.5) / (1 << _BITS)
    return ((values - below) / (above - below) + fraction).floor().clamp(0, 1)


def _per_element(scales: Tensor, numel: int) -> Tensor:
    return scales.repeat_interleave(CODE_BLOCK)[:numel]

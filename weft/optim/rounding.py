"""Numbers in few bits: random rounding to bf16, and 8-bit codes with a scale for each block of elements.

Rounding to nearest loses every change that is smaller than half a step of the format, which most updates of an
optimizer are. Random rounding keeps them in the mean: a value goes up with the probability of its distance from below.
The draws are a function of (seed, position), so that a resumed run repeats them.

Codes. First moments have a sign: m = ±(code / 127)² · scale. Second moments are squares over a wide range:
v = (code / 255)⁴ · scale, with a code of at least 1 where v is not 0, because it divides. The scale is the block's
largest. A value between those of two codes gets the upper one with the probability of its distance from the lower, as a
value and not as a root: a sum over many steps then has the mean that it has without rounding. (Only second moments
below 255⁻⁴ of their block's largest are raised, to that.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.sharding.layout import CODE_BLOCK

SIGNED_LEVELS, SQUARE_LEVELS = 127.0, 255.0
_DRAW_BITS = 16
_KEY_FACTOR = 0x9E3779B1 - (1 << 32)  # spreads a small key over 32 bits
_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)))  # shifts and factors of a hash of 32 bits (lowbias32)


def draws(seed: Tensor, numel: int) -> Tensor:
    """32 random bits for each of `numel` positions [numel] (int32), from a seed [] (int64): a key and, in its low 32
    bits, the first position.
    """
    key = (seed >> 32).to(torch.int32) * _KEY_FACTOR
    mixed = (torch.arange(numel, dtype=torch.int32, device=seed.device) + seed.to(torch.int32)) ^ key
    for shift, factor in _ROUNDS:
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    return mixed ^ _shifted(mixed, 16)


def _shifted(bits: Tensor, shift: int) -> Tensor:
    """To the right, filled with zeros."""
    return (bits >> shift) & ((1 << (32 - shift)) - 1)


def sixteen(bits: Tensor, which: int) -> Tensor:
    """One of three draws, 0 to 65535 [numel] (int32): the low bits, the high ones, or those in the middle.

    The third shares its bits with the others: what is rounded by them are different numbers, and each is fair.
    """
    return _shifted(bits, (0, _DRAW_BITS, _DRAW_BITS // 2)[which]) & 0xFFFF


def to_bf16(values: Tensor, draw: Tensor) -> Tensor:
    """Float32 to bf16, up or down at random [numel]; what is not finite stays so."""
    low = values.float()
    rounded = ((low.view(torch.int32) + draw) & -65536).view(torch.float32)
    return torch.where(torch.isfinite(low), rounded, low).to(torch.bfloat16)


def signed_codes(values: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
    """First moments as int8 codes [numel] and scales [blocks]."""
    blocks, scales = _blocks(values)
    parts = blocks.abs() / scales.clamp(min=1e-38).unsqueeze(1)
    low = (parts.sqrt() * SIGNED_LEVELS).floor().clamp(max=SIGNED_LEVELS - 1)
    below, above = (low / SIGNED_LEVELS).square(), ((low + 1) / SIGNED_LEVELS).square()
    codes = (low + _goes_up(parts, below, above, draw)) * blocks.sign()
    return codes.to(torch.int8).view(-1)[: values.numel()], scales


def from_signed_codes(codes: Tensor, scales: Tensor) -> Tensor:
    """Their values [numel], in float32."""
    parts = codes.float() / SIGNED_LEVELS
    return parts * parts.abs() * _spread(scales, codes.numel())


def square_codes(values: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
    """Second moments as uint8 codes [numel] and scales [blocks]."""
    blocks, scales = _blocks(values)
    parts = blocks / scales.clamp(min=1e-38).unsqueeze(1)
    low = (parts.sqrt().sqrt() * SQUARE_LEVELS).floor().clamp(max=SQUARE_LEVELS - 1)
    below, above = (low / SQUARE_LEVELS).square().square(), ((low + 1) / SQUARE_LEVELS).square().square()
    codes = low + _goes_up(parts, below, above, draw)
    codes = torch.where(blocks > 0, codes.clamp(min=1.0), codes)
    return codes.to(torch.uint8).view(-1)[: values.numel()], scales


def from_square_codes(codes: Tensor, scales: Tensor) -> Tensor:
    """Their values [numel], in float32."""
    return (codes.float() / SQUARE_LEVELS).square().square() * _spread(scales, codes.numel())


def _blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """[blocks, CODE_BLOCK], the last one filled up with zeros, and the largest of each [blocks]."""
    missing = -values.numel() % CODE_BLOCK
    blocks = torch.nn.functional.pad(values.float(), (0, missing)).view(-1, CODE_BLOCK)
    return blocks, blocks.abs().amax(1)


def _goes_up(values: Tensor, below: Tensor, above: Tensor, draw: Tensor) -> Tensor:
    """1 where a value between two others is rounded up, else 0, by a draw for each [blocks, CODE_BLOCK].

    A draw stands for the middle of its interval; so the mean over all draws is the value, but for 2⁻¹⁷ of the distance.
    """
    missing = -draw.numel() % CODE_BLOCK
    fraction = (torch.nn.functional.pad(draw, (0, missing)).view(values.shape).float() + 0.5) / (1 << _DRAW_BITS)
    return ((values - below) / (above - below) + fraction).floor().clamp(0, 1)


def _spread(scales: Tensor, numel: int) -> Tensor:
    return scales.repeat_interleave(CODE_BLOCK)[:numel]

"""`update` of `update.py` as one Triton kernel for GPUs: every byte is read and written once, in every format.

It does the same arithmetic in the same order; before rounding, results differ from the plain function by the last bit
of a float32. A program handles whole blocks of `CODE_BLOCK` elements, so 8-bit codes need no second pass for their
scales. The kernel that torch.compile made of the plain function took nearly twice as long for bf16, and several passes
for codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.optim.update import update
from weft.sharding.layout import CODE_BLOCK

_BLOCKS = 8  # code blocks per program


@triton.jit
def _first(program, SIZE: tl.constexpr):
    """The index of a program's first row, in int64 because it may exceed 2^31 elements."""
    return program.to(tl.int64) * SIZE


@triton.jit
def _random_bits(seed_ptr, place):
    """Equals `rounding.random_bits`."""
    seed = tl.load(seed_ptr)
    key = (seed >> 32).to(tl.uint32) * 0x9E3779B1
    mixed = (place.to(tl.uint32) + seed.to(tl.uint32)) ^ key
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 15)) * 0x846CA68B
    return mixed ^ (mixed >> 16)


@triton.jit
def _rounded(values, bits):
    """Equals `rounding.to_bf16`."""
    up = ((values.to(tl.uint32, bitcast=True) + bits) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.where(tl.abs(values) < float("inf"), up, values.to(tl.bfloat16))


@triton.jit
def _put(ptr, place, inside, values, bits):
    if ptr.dtype.element_ty == tl.bfloat16:
        tl.store(ptr + place, _rounded(values, bits & 0xFFFF), mask=inside)
    else:
        tl.store(ptr + place, values, mask=inside)


@triton.jit
def _put_codes(ptr, scale_ptr, place, inside, row, last_row, values, bits, LEVELS: tl.constexpr, ROOT: tl.constexpr):
    """Equals `rounding.signed_codes`, and with ROOT = 4 `rounding.square_codes`."""
    size = tl.abs(tl.where(inside, values, 0.0))
    scale = tl.max(size, 1)
    part = size * (1.0 / tl.maximum(scale, 1e-38))[:, None]
    root = tl.sqrt(part)
    if ROOT == 4:
        root = tl.sqrt(root)
    low = tl.minimum(tl.floor(root * LEVELS), LEVELS - 1)
    below, above = low * (1 / LEVELS), (low + 1) * (1 / LEVELS)
    below, above = below * below, above * above
    if ROOT == 4:
        below, above = below * below, above * above
    fraction = ((bits & 0xFFFF).to(tl.float32) + 0.5) * (1 / 65536)
    up = tl.floor((part - below) / (above - below) + fraction)
    code = low + tl.minimum(tl.maximum(up, 0.0), 1.0)
    if ROOT == 4:
        code = tl.where(size > 0, tl.maximum(code, 1.0), code)
        tl.store(ptr + place, code.to(tl.int32).to(tl.uint8), mask=inside)
    else:
        tl.store(ptr + place, tl.where(values < 0, -code, code).to(tl.int32).to(tl.int8), mask=inside)
    tl.store(scale_ptr + row, scale, mask=row < last_row)


@triton.jit
def _update(
    weight_ptr,
    gradient_ptr,
    first_ptr,
    second_ptr,
    first_scale_ptr,
    second_scale_ptr,
    whole_ptr,
    scale_ptr,
    constants_ptr,
    seed_ptr,
    numel,
    HAS_CODES: tl.constexpr,
    HAS_WHOLE: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    first_row = _first(tl.program_id(0), BLOCKS)
    begin, last_row = first_row * WIDTH, tl.cdiv(numel, WIDTH) - first_row
    row = tl.arange(0, BLOCKS)
    place = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]  # [BLOCKS, WIDTH], relative to `begin`
    inside = place < numel - begin
    weight_ptr, gradient_ptr, whole_ptr = weight_ptr + begin, gradient_ptr + begin, whole_ptr + begin
    first_ptr, second_ptr = first_ptr + begin, second_ptr + begin
    if HAS_CODES:
        first_scale_ptr, second_scale_ptr = first_scale_ptr + first_row, second_scale_ptr + first_row
    scale = tl.load(scale_ptr).to(tl.float32)
    weight = tl.load(weight_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if tl.abs(scale) < float("inf"):
        keep, new1 = tl.load(constants_ptr).to(tl.float32), tl.load(constants_ptr + 1).to(tl.float32)
        beta2, new2 = tl.load(constants_ptr + 2).to(tl.float32), tl.load(constants_ptr + 3).to(tl.float32)
        epsilon, size = tl.load(constants_ptr + 4).to(tl.float32), tl.load(constants_ptr + 5).to(tl.float32)
        correction = 1.0 / tl.load(constants_ptr + 6).to(tl.float32)
        scaled = tl.load(gradient_ptr + place, mask=inside, other=0.0).to(tl.float32) * scale
        first = tl.load(first_ptr + place, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(second_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if HAS_CODES:
            first, second = first * (1 / 127), second * (1 / 255)
            second = second * second
            first = first * tl.abs(first) * tl.load(first_scale_ptr + row, mask=row < last_row, other=0.0)[:, None]
            second = second * second * tl.load(second_scale_ptr + row, mask=row < last_row, other=0.0)[:, None]
        first = first + new1 * (scaled - first)
        second = beta2 * second + new2 * scaled * scaled
        new = weight * keep - size * first / (tl.sqrt(second) * correction + epsilon)
        bits = _random_bits(seed_ptr, begin + place)  # removed by the compiler if nothing is rounded
        if HAS_WHOLE:
            tl.store(whole_ptr + place, new.to(whole_ptr.dtype.element_ty), mask=inside)
        _put(weight_ptr, place, inside, new, bits)
        if HAS_CODES:
            _put_codes(first_ptr, first_scale_ptr, place, inside, row, last_row, first, bits >> 16, 127.0, 2)
            _put_codes(second_ptr, second_scale_ptr, place, inside, row, last_row, second, bits >> 8, 255.0, 4)
        else:
            _put(first_ptr, place, inside, first, bits >> 16)
            _put(second_ptr, place, inside, second, bits >> 8)
    elif HAS_WHOLE:
        tl.store(whole_ptr + place, weight.to(whole_ptr.dtype.element_ty), mask=inside)


def update_by_kernel(
    weight: Tensor,
    gradient: Tensor,
    state: tuple[Tensor, ...],
    whole: Tensor | None,
    scale: Tensor,
    constants: Tensor,
    seed: Tensor,
) -> None:
    """Equals `update.update`; see there for the arguments. float64 uses the plain function."""
    if weight.dtype == torch.float64:
        update(weight, gradient, state, whole, scale, constants, seed)
        return
    has_codes = len(state) == 4
    first, second = (state[0], state[2]) if has_codes else state
    first_scale, second_scale = (state[1], state[3]) if has_codes else (constants, constants)
    _update[(triton.cdiv(weight.numel(), CODE_BLOCK * _BLOCKS),)](
        weight,
        gradient,
        first,
        second,
        first_scale,
        second_scale,
        weight if whole is None else whole,
        scale,
        constants,
        seed,
        weight.numel(),
        HAS_CODES=has_codes,
        HAS_WHOLE=whole is not None,
        BLOCKS=_BLOCKS,
        WIDTH=CODE_BLOCK,
    )

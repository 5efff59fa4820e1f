"""Adds the keys and values of decodes to the cache of 4 bits (`four_bits.py`), as one Triton kernel.

A program handles one key head of one request: its value is coded into the page, its key goes to the tail, and if the
page is full now, its keys are coded. The bits are those of the plain functions. A step that is computed again writes
the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

_LOWEST = tl.constexpr(-65504.0)  # of float16
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: a number of float32 this large has no bits behind the point


@triton.jit
def _not_above(values):
    """Return the largest numbers of float16 that are not above these; for finite ones below all, the lowest."""
    near = values.to(tl.float16)
    bits = near.to(tl.int16, bitcast=True)
    below = tl.where(near > 0, bits - 1, tl.where(near < 0, bits + 1, -32767)).to(tl.int16)
    found = tl.where(near.to(tl.float32) > values, below.to(tl.float16, bitcast=True), near)
    is_below_all = (values < _LOWEST) & (values > float("-inf"))
    return tl.where(is_below_all, _LOWEST, found).to(tl.float16)


@triton.jit
def _scale(lowest, highest):
    """Return the scale and the zero point (float16) of a group, from its lowest and highest numbers."""
    least = _not_above(lowest)
    return -_not_above(tl.div_rn(-(highest - least.to(tl.float32)), tl.full(highest.shape, 15.0, tl.float32))), least


@triton.jit
def _codes(numbers, scale, least):
    """Return the codes of numbers, rounded half to even."""
    wide = scale.to(tl.float32)
    codes = tl.div_rn(numbers - least.to(tl.float32), tl.where(wide > 0, wide, 1.0) + numbers * 0.0)
    codes = (codes + _ROUND) - _ROUND
    return tl.minimum(tl.maximum(codes, 0.0), 15.0).to(tl.int32)


@triton.jit
def value_ranges(low, high, exists, NUM_GROUPS: tl.constexpr, AXIS: tl.constexpr):
    """Return the lowest and highest numbers of both halves of the channels of values: low, low, high, high."""
    low_lowest = tl.min(tl.where(exists, low, float("inf")), AXIS)
    low_highest = tl.max(tl.where(exists, low, float("-inf")), AXIS)
    high_lowest = tl.min(tl.where(exists, high, float("inf")), AXIS)
    high_highest = tl.max(tl.where(exists, high, float("-inf")), AXIS)
    if NUM_GROUPS == 1:
        low_lowest, low_highest = tl.minimum(low_lowest, high_lowest), tl.maximum(low_highest, high_highest)
        high_lowest, high_highest = low_lowest, low_highest
    return low_lowest, low_highest, high_lowest, high_highest


@triton.jit
def keep_page_of_keys(low, high, code_ptr, range_ptr, PAGE: tl.constexpr, HALF_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Code the keys of a full page [PAGE, WIDTH], given as both halves of their channels."""
    channel, place = tl.arange(0, WIDTH), tl.arange(0, PAGE)
    exists = channel < HALF_DIM
    low_scale, low_least = _scale(tl.min(low, 0), tl.max(low, 0))
    high_scale, high_least = _scale(tl.min(high, 0), tl.max(high, 0))
    ranges = range_ptr + 2 * channel
    tl.store(ranges, low_scale, mask=exists)
    tl.store(ranges + 1, low_least, mask=exists)
    tl.store(ranges + 2 * HALF_DIM, high_scale, mask=exists)
    tl.store(ranges + 2 * HALF_DIM + 1, high_least, mask=exists)
    both = _codes(low, low_scale[None, :], low_least[None, :])
    both |= _codes(high, high_scale[None, :], high_least[None, :]) << 4
    places = code_ptr + place[:, None] * HALF_DIM + channel[None, :]
    tl.store(places, both.to(tl.uint8), mask=exists[None, :] & (place >= 0)[:, None])


@triton.jit
def _keep_value(
    low, high, code_ptr, range_ptr, token, PAGE: tl.constexpr, HALF_DIM: tl.constexpr, WIDTH: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
):  # fmt: skip
    """Code both halves of a value into a page, as the token of this number."""
    channel, one = tl.arange(0, WIDTH), tl.zeros([1], tl.int32)
    exists = channel < HALF_DIM
    low_lowest, low_highest, high_lowest, high_highest = value_ranges(low, high, exists, NUM_GROUPS, 0)
    low_scale, low_least = _scale(one + low_lowest, one + low_highest)  # of one element
    high_scale, high_least = _scale(one + high_lowest, one + high_highest)
    ranges = range_ptr + 2 * token + one
    tl.store(ranges, low_scale)
    tl.store(ranges + 1, low_least)
    if NUM_GROUPS == 2:
        tl.store(ranges + 2 * PAGE, high_scale)
        tl.store(ranges + 2 * PAGE + 1, high_least)
    half_page: tl.constexpr = PAGE // 2
    shift = token // half_page * 4
    kept = 240 >> shift  # the half of a byte of the other token
    place = code_ptr + channel * half_page + token % half_page
    old = tl.load(place, mask=exists, other=0).to(tl.int32)
    tl.store(place, ((old & kept) | (_codes(low, low_scale, low_least) << shift)).to(tl.uint8), mask=exists)
    place += HALF_DIM * half_page
    old = tl.load(place, mask=exists, other=0).to(tl.int32)
    tl.store(place, ((old & kept) | (_codes(high, high_scale, high_least) << shift)).to(tl.uint8), mask=exists)


@triton.jit
def _keep_keys(
    low_key, high_key, tail_ptr, code_ptr, range_ptr, token_stride, PAGE: tl.constexpr, HALF_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Code a page of keys, from all tokens but one in the tail and the two halves of the last one."""
    channel, tokens = tl.arange(0, WIDTH), tl.arange(0, PAGE)
    exists = channel < HALF_DIM
    places = tail_ptr + tokens[:, None] * token_stride + channel[None, :]
    older = (tokens < PAGE - 1)[:, None] & exists[None, :]
    low_keys = tl.where(older, tl.load(places, mask=older, other=0.0), low_key[None, :]).to(tl.float32)
    high_keys = tl.where(older, tl.load(places + HALF_DIM, mask=older, other=0.0), high_key[None, :]).to(tl.float32)
    keep_page_of_keys(low_keys, high_keys, code_ptr, range_ptr, PAGE, HALF_DIM, WIDTH)


@triton.jit(  # these are parts of the arrays of a step, and begin anywhere
    do_not_specialize=["position_stride", "slot_stride", "row_stride"],
    do_not_specialize_on_alignment=["position_ptr", "slot_ptr", "row_ptr"],
)
def _append(
    key_ptr, value_ptr, key_code_ptr, key_range_ptr, value_code_ptr, value_range_ptr, tail_ptr, position_ptr, slot_ptr,
    row_ptr, position_stride, slot_stride, row_stride,
    PAGE: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    request, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = HEAD_DIM // 2
    channel = tl.arange(0, WIDTH)
    exists = channel < half
    slot = tl.load(slot_ptr + request * slot_stride).to(tl.int64)
    position = tl.load(position_ptr + request * position_stride)
    row = tl.load(row_ptr + request * row_stride).to(tl.int64)
    block, token = (slot // PAGE) * NUM_KEY_HEADS + key_head, (position % PAGE).to(tl.int32)
    given = (request * NUM_KEY_HEADS + key_head) * HEAD_DIM + channel

    low = tl.load(value_ptr + given, mask=exists, other=0.0).to(tl.float32)
    high = tl.load(value_ptr + given + half, mask=exists, other=0.0).to(tl.float32)
    codes, ranges = value_code_ptr + block * half * PAGE, value_range_ptr + block * 2 * NUM_GROUPS * PAGE
    _keep_value(low, high, codes, ranges, token, PAGE, half, WIDTH, NUM_GROUPS)

    low_key = tl.load(key_ptr + given, mask=exists, other=0.0)
    high_key = tl.load(key_ptr + given + half, mask=exists, other=0.0)
    stride: tl.constexpr = NUM_KEY_HEADS * HEAD_DIM
    page = tail_ptr + (row * 2 + position // PAGE % 2) * PAGE * stride + key_head * HEAD_DIM
    tl.store(page + token * stride + channel, low_key, mask=exists)
    tl.store(page + token * stride + half + channel, high_key, mask=exists)
    if token == PAGE - 1:
        codes, ranges = key_code_ptr + block * PAGE * half, key_range_ptr + block * 2 * HEAD_DIM
        _keep_keys(low_key, high_key, page, codes, ranges, stride, PAGE, half, WIDTH)


def append_by_kernel(
    keys: Tensor,
    values: Tensor,
    pages: Sequence[Tensor],
    tails: Tensor,
    positions: Tensor,
    slots: Tensor,
    rows: Tensor,
) -> None:
    """Add keys and values [requests, key heads, head_dim] of one token each; see `four_bits.py` for the pages."""
    num_requests, num_key_heads, head_dim = keys.shape
    assert keys.is_contiguous() and values.is_contiguous(), "the heads of all tokens lie end to end"  # noqa: PT018
    _append[(num_requests, num_key_heads)](
        keys,
        values,
        *pages,
        tails,
        positions,
        slots,
        rows,
        positions.stride(0),
        slots.stride(0),
        rows.stride(0),
        PAGE=tails.shape[2],
        NUM_KEY_HEADS=num_key_heads,
        HEAD_DIM=head_dim,
        NUM_GROUPS=pages[3].shape[2],
        WIDTH=max(16, triton.next_power_of_2(head_dim // 2)),
        num_warps=4,
    )

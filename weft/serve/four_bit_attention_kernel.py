"""Decode attention over the cache of 4 bits (`four_bit_cache.py`) as a Triton kernel, which decodes what it reads.

A program handles the queries that share one key head of one request, over a part of its pages, as in
`decode_attention_kernel.py`. Codes go into the products as they are:

    query . key      =  sum over channels of (query * scale) * code  +  query . least
    weights . value  =  sum over tokens of (weight * scale) * code   +  weights . least

A byte of keys has two channels, half a head apart, and a byte of values two tokens, half a page apart, so that each
half of the bytes is one operand of a product. The page that a request writes has its keys as they are, in the tail.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.serve.decode_attention_kernel import _LOG2E, _sum_of_parts, number_of_parts
from weft.serve.unpacking_kernel import four_bit_numbers

_WARPS = 2
_STAGES = 5


@triton.jit
def _half_of_values(
    first,
    second,
    codes,
    range_ptr,
    num_valid,
    NUM_GROUPS: tl.constexpr,
    DTYPE: tl.constexpr,
    BY_PTX: tl.constexpr,
):
    """Of half the channels of a page's values: the sum of weight * scale * code [rows, channels], and the terms
    weight * least [rows, 32], to be added up over tokens. `first` and `second` are the weights of the page's halves.
    """
    token = tl.arange(0, 32)
    has_first, has_second = token < num_valid, token + 32 < num_valid
    scale_first = tl.load(range_ptr + token, mask=has_first, other=0.0).to(tl.float32)
    scale_second = tl.load(range_ptr + 32 + token, mask=has_second, other=0.0).to(tl.float32)
    least_ptr = range_ptr + NUM_GROUPS * 64
    least_first = tl.load(least_ptr + token, mask=has_first, other=0.0).to(tl.float32)
    least_second = tl.load(least_ptr + 32 + token, mask=has_second, other=0.0).to(tl.float32)
    low, high = four_bit_numbers(codes, DTYPE, BY_PTX)
    mixed = tl.dot((first * scale_first[None, :]).to(DTYPE), tl.trans(low))
    mixed = tl.dot((second * scale_second[None, :]).to(DTYPE), tl.trans(high), mixed)
    return mixed, first * least_first[None, :] + second * least_second[None, :]


@triton.jit
def _add_page(
    highest,
    total,
    low,
    high,
    low_least,
    high_least,
    first_scores,
    second_scores,
    code_ptr,
    range_ptr,
    num_valid,
    HALF_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    DTYPE: tl.constexpr,
    BY_PTX: tl.constexpr,
):
    """Add the values of a page to a running softmax. Scores are those of the two halves of the page.

    `low` and `high` are the sums over the halves of the channels without least values. Sums of least values and the
    softmax's denominator are kept for each place in half a page, and added up at the end.
    """
    above = tl.maximum(highest, tl.maximum(tl.max(first_scores, 1), tl.max(second_scores, 1)))
    safe = tl.where(above == float("-inf"), 0.0, above)
    kept = tl.exp2(highest - safe)[:, None]
    first, second = tl.exp2(first_scores - safe[:, None]), tl.exp2(second_scores - safe[:, None])
    token, channel = tl.arange(0, 32), tl.arange(0, WIDTH)
    inside, place = (channel < HALF_DIM)[:, None], channel[:, None] * 32 + token[None, :]
    low_codes = tl.load(code_ptr + place, mask=inside, other=0)  # [WIDTH, 32]
    high_codes = tl.load(code_ptr + HALF_DIM * 32 + place, mask=inside, other=0)
    low_added, low_terms = _half_of_values(first, second, low_codes, range_ptr, num_valid, NUM_GROUPS, DTYPE, BY_PTX)
    high_range_ptr = range_ptr + (NUM_GROUPS - 1) * 64
    high_added, high_terms = _half_of_values(
        first, second, high_codes, high_range_ptr, num_valid, NUM_GROUPS, DTYPE, BY_PTX
    )
    total = total * kept + first + second
    low, high = low * kept + low_added, high * kept + high_added
    return above, total, low, high, low_least * kept + low_terms, high_least * kept + high_terms


@triton.jit
def _page_scores(
    low_query,
    high_query,
    code_ptr,
    range_ptr,
    HALF_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    BY_PTX: tl.constexpr,
):
    """The scores of both halves of a page whose keys are coded: [rows, 32] each."""
    channel, token = tl.arange(0, WIDTH), tl.arange(0, 32)
    exists = channel < HALF_DIM
    ranges = range_ptr + channel
    low_scale = tl.load(ranges, mask=exists, other=0.0).to(tl.float32)
    high_scale = tl.load(ranges + HALF_DIM, mask=exists, other=0.0).to(tl.float32)
    low_least = tl.load(ranges + 2 * HALF_DIM, mask=exists, other=0.0).to(tl.float32)
    high_least = tl.load(ranges + 3 * HALF_DIM, mask=exists, other=0.0).to(tl.float32)
    low_scaled = (low_query * low_scale[None, :]).to(DTYPE)
    high_scaled = (high_query * high_scale[None, :]).to(DTYPE)
    least = tl.sum(low_query * low_least[None, :] + high_query * high_least[None, :], 1)[:, None]
    place = code_ptr + token[:, None] * HALF_DIM + channel[None, :]
    first_codes = tl.load(place, mask=exists[None, :], other=0)  # [32, WIDTH]
    second_codes = tl.load(place + 32 * HALF_DIM, mask=exists[None, :], other=0)
    low, high = four_bit_numbers(first_codes, DTYPE, BY_PTX)
    first = tl.dot(high_scaled, tl.trans(high), tl.dot(low_scaled, tl.trans(low))) + least
    low, high = four_bit_numbers(second_codes, DTYPE, BY_PTX)
    second = tl.dot(high_scaled, tl.trans(high), tl.dot(low_scaled, tl.trans(low))) + least
    return first, second


@triton.jit
def _tail_scores(
    low_query,
    high_query,
    page_ptr,
    num_valid,
    token_stride,
    HALF_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The scores of both halves of a page whose keys are as they are: of `num_valid` tokens, -inf of others."""
    channel, token = tl.arange(0, WIDTH), tl.arange(0, 32)
    exists = (channel < HALF_DIM)[None, :]
    place = page_ptr + token[:, None] * token_stride + channel[None, :]
    other_place = place + 32 * token_stride
    low, high = low_query.to(DTYPE), high_query.to(DTYPE)
    loaded = (token < num_valid)[:, None] & exists
    low_keys = tl.trans(tl.load(place, mask=loaded, other=0.0))
    high_keys = tl.trans(tl.load(place + HALF_DIM, mask=loaded, other=0.0))
    first = tl.dot(high, high_keys, tl.dot(low, low_keys))
    loaded = (token + 32 < num_valid)[:, None] & exists
    low_keys = tl.trans(tl.load(other_place, mask=loaded, other=0.0))
    high_keys = tl.trans(tl.load(other_place + HALF_DIM, mask=loaded, other=0.0))
    second = tl.dot(high, high_keys, tl.dot(low, low_keys))
    first = tl.where((token < num_valid)[None, :], first, float("-inf"))
    return first, tl.where((token + 32 < num_valid)[None, :], second, float("-inf"))


@triton.jit
def _since(first, second, oldest):
    """Scores of tokens of a page from the one numbered `oldest` on, -inf of others."""
    token = tl.arange(0, 32)
    first = tl.where((token >= oldest)[None, :], first, float("-inf"))
    return first, tl.where((token + 32 >= oldest)[None, :], second, float("-inf"))


@triton.jit
def _store(out, log_out, low, high, highest, total, inside, is_row, HALF_DIM: tl.constexpr, NUM_PARTS: tl.constexpr):
    """Write the result of a part, and the logarithm of its softmax's denominator if there are others."""
    divisor = tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out, (low / divisor).to(out.dtype.element_ty), mask=inside)
    tl.store(out + HALF_DIM, (high / divisor).to(out.dtype.element_ty), mask=inside)
    if NUM_PARTS > 1:
        tl.store(log_out, tl.where(total > 0, highest + tl.log2(total), float("-inf")), mask=is_row)


@triton.jit
def _parts(
    query_ptr, key_code_ptr, key_range_ptr, value_code_ptr, value_range_ptr, tail_ptr, table_ptr, length_ptr, row_ptr,
    mixed_ptr, log_ptr, factor, query_stride, table_stride, length_stride, row_stride,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_GROUPS: tl.constexpr,
    WINDOW: tl.constexpr, NUM_PARTS: tl.constexpr, GROUP_ROWS: tl.constexpr, WIDTH: tl.constexpr, BY_PTX: tl.constexpr,
):  # fmt: skip
    request, key_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = NUM_HEADS // NUM_KEY_HEADS
    half: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    length = tl.load(length_ptr + request * length_stride)
    own = (length - 1) // 64  # the page whose keys are in the tail
    oldest = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    size = tl.cdiv(own + 1 - oldest // 64, NUM_PARTS)
    begin = oldest // 64 + part * size
    end = tl.minimum(begin + size, own + 1)

    rows, channel = tl.arange(0, GROUP_ROWS), tl.arange(0, WIDTH)
    heads, inside = key_head * group + rows, (rows < group)[:, None] & (channel < half)[None, :]
    query_place = query_ptr + request * query_stride + heads[:, None] * HEAD_DIM + channel[None, :]
    low_query = tl.load(query_place, mask=inside, other=0.0).to(tl.float32) * factor
    high_query = tl.load(query_place + half, mask=inside, other=0.0).to(tl.float32) * factor
    highest, total = tl.full([GROUP_ROWS], float("-inf"), tl.float32), tl.zeros([GROUP_ROWS, 32], tl.float32)
    low, high = tl.zeros([GROUP_ROWS, WIDTH], tl.float32), tl.zeros([GROUP_ROWS, WIDTH], tl.float32)
    low_least, high_least = tl.zeros([GROUP_ROWS, 32], tl.float32), tl.zeros([GROUP_ROWS, 32], tl.float32)

    for page in range(begin, tl.minimum(end, own)):
        block = tl.load(table_ptr + request * table_stride + page).to(tl.int64) * NUM_KEY_HEADS + key_head
        codes, ranges = key_code_ptr + block * 64 * half, key_range_ptr + block * 2 * HEAD_DIM
        first, second = _page_scores(low_query, high_query, codes, ranges, half, WIDTH, dtype, BY_PTX)
        if WINDOW > 0:
            first, second = _since(first, second, oldest - page * 64)
        codes, ranges = value_code_ptr + block * HEAD_DIM * 32, value_range_ptr + block * 2 * NUM_GROUPS * 64
        highest, total, low, high, low_least, high_least = _add_page(
            highest, total, low, high, low_least, high_least, first, second, codes, ranges, 64,
            half, WIDTH, NUM_GROUPS, dtype, BY_PTX,
        )  # fmt: skip
    if (begin <= own) & (end == own + 1):
        block = tl.load(table_ptr + request * table_stride + own).to(tl.int64) * NUM_KEY_HEADS + key_head
        row = tl.load(row_ptr + request * row_stride).to(tl.int64)
        page_ptr = tail_ptr + ((row * 2 + own % 2) * 64 * NUM_KEY_HEADS + key_head) * HEAD_DIM
        num_valid, stride = length - own * 64, NUM_KEY_HEADS * HEAD_DIM
        first, second = _tail_scores(low_query, high_query, page_ptr, num_valid, stride, half, WIDTH, dtype)
        if WINDOW > 0:
            first, second = _since(first, second, oldest - own * 64)
        codes, ranges = value_code_ptr + block * HEAD_DIM * 32, value_range_ptr + block * 2 * NUM_GROUPS * 64
        highest, total, low, high, low_least, high_least = _add_page(
            highest, total, low, high, low_least, high_least, first, second, codes, ranges, num_valid,
            half, WIDTH, NUM_GROUPS, dtype, BY_PTX,
        )  # fmt: skip

    low, high = low + tl.sum(low_least, 1)[:, None], high + tl.sum(high_least, 1)[:, None]
    row = (request * NUM_PARTS + part) * NUM_HEADS + heads
    out = mixed_ptr + row[:, None] * HEAD_DIM + channel[None, :]
    _store(out, log_ptr + row, low, high, highest, tl.sum(total, 1), inside, rows < group, half, NUM_PARTS)


def four_bit_attention_by_kernel(
    query: Tensor,
    pages: Sequence[Tensor],
    tails: Tensor,
    tables: Tensor,
    lengths: Tensor,
    rows: Tensor,
    window: int | None,
) -> Tensor:
    """Attention of one query for each request [requests, heads, head_dim]; see `four_bit_cache.py` for the pages."""
    num_requests, num_heads, head_dim = query.shape
    num_key_heads, num_groups = tails.shape[3], pages[3].shape[3]
    num_parts = number_of_parts(num_requests, num_key_heads)
    assert query.stride()[1:] == (head_dim, 1), "the heads of a query lie end to end"
    out = query.new_empty(num_requests, num_heads, head_dim)
    parts, logs = out, out
    if num_parts > 1:
        parts = query.new_empty(num_requests, num_parts, num_heads, head_dim, dtype=torch.float32)
        logs = query.new_empty(num_requests, num_parts, num_heads, dtype=torch.float32)
    _parts[(num_requests, num_key_heads, num_parts)](
        query,
        *pages,
        tails,
        tables,
        lengths,
        rows,
        parts,
        logs,
        head_dim**-0.5 * _LOG2E,
        query.stride(0),
        tables.stride(0),
        lengths.stride(0),
        rows.stride(0),
        NUM_HEADS=num_heads,
        NUM_KEY_HEADS=num_key_heads,
        HEAD_DIM=head_dim,
        NUM_GROUPS=num_groups,
        WINDOW=window or 0,
        NUM_PARTS=num_parts,
        GROUP_ROWS=max(16, triton.next_power_of_2(num_heads // num_key_heads)),  # tensor cores need 16 rows
        WIDTH=max(16, triton.next_power_of_2(head_dim // 2)),
        BY_PTX=query.is_cuda and torch.version.hip is None,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    if num_parts > 1:
        width = triton.next_power_of_2(head_dim)
        _sum_of_parts[(num_requests, num_heads)](
            parts, logs, out, NUM_HEADS=num_heads, HEAD_DIM=head_dim, NUM_PARTS=num_parts, WIDTH=width, num_warps=4
        )
    return out

"""Decode attention over the cache of 4 bits (`four_bits.py`) as a Triton kernel, which dequantises what it reads.

A program handles the queries that share one key head of one request, over a part of its pages, as in
`decode_attention_kernel.py`. Codes go into the products as they are:

    key . query      =  sum over channels of code * (scale * query)  +  least . query
    value . weights  =  sum over tokens of code * (scale * weight)   +  least . weights

A byte of keys has two channels, half a head apart, and a byte of values two tokens, half a page apart, so that each
half of the bytes is one operand of a product. The page that a request writes has its keys as they are, in the tail.

Codes are the first operand of a product, which fills the tensor cores: these take 16 rows of the first and 8 columns of
the second, and few queries share a key head. So scores are [tokens, queries], and sums of values [channels, queries].
A program is one warp, because warps would have to wait for each other several times for every page. Programs that are
on a multiprocessor together hide each other's waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.serve.attention.decode_attention_kernel import LOG2E, empty_parts, number_of_parts, sum_of_parts
from weft.serve.weights.shared_steps_kernel import four_bit_numbers, two_ranges

_PROGRAMS = 1024  # as many as fit into a GPU at once
_WARPS = 1
_STAGES = 3


@triton.jit
def _ranges(range_ptr, exists):
    """Return the scales and zero points of groups. The two are loaded as one number of 32 bits."""
    return two_ranges(tl.load(range_ptr, mask=exists, other=0), False)


@triton.jit
def _scaled_weights(first, second, range_ptr, num_valid, HALF_PAGE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the weights of both halves of a page times the scales of values, and the sum of both halves' weights times
    their zero points.
    """
    token = tl.arange(0, HALF_PAGE)
    first_scale, first_least = _ranges(range_ptr + token, token < num_valid)
    second_scale, second_least = _ranges(range_ptr + HALF_PAGE + token, token + HALF_PAGE < num_valid)
    terms = first * first_least[:, None] + second * second_least[:, None]
    return (first * first_scale[:, None]).to(DTYPE), (second * second_scale[:, None]).to(DTYPE), terms


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
    HALF_PAGE: tl.constexpr,
    HALF_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    DTYPE: tl.constexpr,
    BY_PTX: tl.constexpr,
):
    """Add the values of a page to a running softmax. Scores are those of the two halves of the page.

    `low` and `high` are the sums over the halves of the channels without zero points. Sums of zero points and the
    softmax's denominator are kept for each place in half a page, and added up at the end.
    """
    above = tl.maximum(highest, tl.maximum(tl.max(first_scores, 0), tl.max(second_scores, 0)))
    safe = tl.where(above == float("-inf"), 0.0, above)
    kept = tl.exp2(highest - safe)[None, :]
    first, second = tl.exp2(first_scores - safe[None, :]), tl.exp2(second_scores - safe[None, :])
    token, channel = tl.arange(0, HALF_PAGE), tl.arange(0, WIDTH)
    inside, place = (channel < HALF_DIM)[:, None], channel[:, None] * HALF_PAGE + token[None, :]
    low_codes = tl.load(code_ptr + place, mask=inside, other=0)  # [WIDTH, HALF_PAGE]
    high_codes = tl.load(code_ptr + HALF_DIM * HALF_PAGE + place, mask=inside, other=0)
    first_scaled, second_scaled, low_terms = _scaled_weights(first, second, range_ptr, num_valid, HALF_PAGE, DTYPE)
    first_codes, second_codes = four_bit_numbers(low_codes, DTYPE, BY_PTX)
    low = tl.dot(second_codes, second_scaled, tl.dot(first_codes, first_scaled, low * kept))
    high_terms = low_terms
    if NUM_GROUPS == 2:
        range_ptr += 2 * HALF_PAGE
        first_scaled, second_scaled, high_terms = _scaled_weights(first, second, range_ptr, num_valid, HALF_PAGE, DTYPE)
    first_codes, second_codes = four_bit_numbers(high_codes, DTYPE, BY_PTX)
    high = tl.dot(second_codes, second_scaled, tl.dot(first_codes, first_scaled, high * kept))
    total = total * kept + first + second
    return above, total, low, high, low_least * kept + low_terms, high_least * kept + high_terms


@triton.jit
def _page_scores(
    low_query,
    high_query,
    code_ptr,
    range_ptr,
    HALF_PAGE: tl.constexpr,
    HALF_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    BY_PTX: tl.constexpr,
):
    """Return the scores of both halves of a page whose keys are codes: [HALF_PAGE, queries] each."""
    channel, token = tl.arange(0, WIDTH), tl.arange(0, HALF_PAGE)
    exists = channel < HALF_DIM
    low_scale, low_least = _ranges(range_ptr + channel, exists)
    high_scale, high_least = _ranges(range_ptr + HALF_DIM + channel, exists)
    low_scaled = (low_query * low_scale[:, None]).to(DTYPE)
    high_scaled = (high_query * high_scale[:, None]).to(DTYPE)
    least = tl.sum(low_query * low_least[:, None] + high_query * high_least[:, None], 0)[None, :]
    place = code_ptr + token[:, None] * HALF_DIM + channel[None, :]
    first_codes = tl.load(place, mask=exists[None, :], other=0)  # [HALF_PAGE, WIDTH]
    second_codes = tl.load(place + HALF_PAGE * HALF_DIM, mask=exists[None, :], other=0)
    low, high = four_bit_numbers(first_codes, DTYPE, BY_PTX)
    first = tl.dot(high, high_scaled, tl.dot(low, low_scaled)) + least
    low, high = four_bit_numbers(second_codes, DTYPE, BY_PTX)
    second = tl.dot(high, high_scaled, tl.dot(low, low_scaled)) + least
    return first, second


@triton.jit
def _tail_scores(
    low_query,
    high_query,
    page_ptr,
    num_valid,
    token_stride,
    HALF_PAGE: tl.constexpr,
    HALF_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return the scores of both halves of a page whose keys are in the tail: of `num_valid` tokens, -inf of others."""
    channel, token = tl.arange(0, WIDTH), tl.arange(0, HALF_PAGE)
    exists = (channel < HALF_DIM)[None, :]
    place = page_ptr + token[:, None] * token_stride + channel[None, :]
    other_place = place + HALF_PAGE * token_stride
    low, high = low_query.to(DTYPE), high_query.to(DTYPE)
    loaded = (token < num_valid)[:, None] & exists
    low_keys, high_keys = tl.load(place, mask=loaded, other=0.0), tl.load(place + HALF_DIM, mask=loaded, other=0.0)
    first = tl.dot(high_keys, high, tl.dot(low_keys, low))
    loaded = (token + HALF_PAGE < num_valid)[:, None] & exists
    low_keys = tl.load(other_place, mask=loaded, other=0.0)
    high_keys = tl.load(other_place + HALF_DIM, mask=loaded, other=0.0)
    second = tl.dot(high_keys, high, tl.dot(low_keys, low))
    first = tl.where((token < num_valid)[:, None], first, float("-inf"))
    return first, tl.where((token + HALF_PAGE < num_valid)[:, None], second, float("-inf"))


@triton.jit
def _since(first, second, oldest, HALF_PAGE: tl.constexpr):
    """Return the scores of a page's tokens from number `oldest` on, -inf of others."""
    token = tl.arange(0, HALF_PAGE)
    first = tl.where((token >= oldest)[:, None], first, float("-inf"))
    return first, tl.where((token + HALF_PAGE >= oldest)[:, None], second, float("-inf"))


@triton.jit
def _store(out, log_out, low, high, highest, total, inside, is_row, HALF_DIM: tl.constexpr, NUM_PARTS: tl.constexpr):
    """Write the result of a part, and the logarithm of its softmax's denominator if there are others."""
    divisor = tl.where(total > 0, total, 1.0)[None, :]
    tl.store(out, (low / divisor).to(out.dtype.element_ty), mask=inside)
    tl.store(out + HALF_DIM, (high / divisor).to(out.dtype.element_ty), mask=inside)
    if NUM_PARTS > 1:
        tl.store(log_out, tl.where(total > 0, highest + tl.log2(total), float("-inf")), mask=is_row)


@triton.jit(  # steps with prompts have tables of any width, and lengths that begin anywhere
    do_not_specialize=["table_stride", "length_stride", "row_stride"],
    do_not_specialize_on_alignment=["table_ptr", "length_ptr", "row_ptr"],
)
def _parts(
    query_ptr, key_code_ptr, key_range_ptr, value_code_ptr, value_range_ptr, tail_ptr, table_ptr, length_ptr, row_ptr,
    mixed_ptr, log_ptr, factor, query_stride, table_stride, length_stride, row_stride,
    PAGE: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    NUM_GROUPS: tl.constexpr, WINDOW: tl.constexpr, NUM_PARTS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    BY_PTX: tl.constexpr,
):  # fmt: skip
    request, key_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = NUM_HEADS // NUM_KEY_HEADS
    half: tl.constexpr = HEAD_DIM // 2
    half_page: tl.constexpr = PAGE // 2
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    length = tl.load(length_ptr + request * length_stride)
    own = (length - 1) // PAGE  # the page whose keys are in the tail
    oldest = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    size = tl.cdiv(own + 1 - oldest // PAGE, NUM_PARTS)
    begin = oldest // PAGE + part * size
    end = tl.minimum(begin + size, own + 1)

    columns, channel = tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
    heads, inside = key_head * group + columns, (columns < group)[None, :] & (channel < half)[:, None]
    query_place = query_ptr + request * query_stride + heads[None, :] * HEAD_DIM + channel[:, None]
    low_query = tl.load(query_place, mask=inside, other=0.0).to(tl.float32) * factor
    high_query = tl.load(query_place + half, mask=inside, other=0.0).to(tl.float32) * factor
    highest, total = tl.full([COLUMNS], float("-inf"), tl.float32), tl.zeros([half_page, COLUMNS], tl.float32)
    low, high = tl.zeros([WIDTH, COLUMNS], tl.float32), tl.zeros([WIDTH, COLUMNS], tl.float32)
    low_least, high_least = tl.zeros([half_page, COLUMNS], tl.float32), tl.zeros([half_page, COLUMNS], tl.float32)

    table_ptr += request * table_stride
    next_block = tl.load(table_ptr + tl.minimum(begin, own))  # a page ahead, so that codes are loaded further ahead
    for page in range(begin, tl.minimum(end, own)):
        block = next_block.to(tl.int64) * NUM_KEY_HEADS + key_head
        next_block = tl.load(table_ptr + page + 1)
        codes, ranges = key_code_ptr + block * PAGE * half, key_range_ptr + block * HEAD_DIM
        first, second = _page_scores(low_query, high_query, codes, ranges, half_page, half, WIDTH, dtype, BY_PTX)
        if WINDOW > 0:
            first, second = _since(first, second, oldest - page * PAGE, half_page)
        codes, ranges = value_code_ptr + block * half * PAGE, value_range_ptr + block * NUM_GROUPS * PAGE
        highest, total, low, high, low_least, high_least = _add_page(
            highest, total, low, high, low_least, high_least, first, second, codes, ranges, PAGE,
            half_page, half, WIDTH, NUM_GROUPS, dtype, BY_PTX,
        )  # fmt: skip
    if (begin <= own) & (end == own + 1):
        block = tl.load(table_ptr + own).to(tl.int64) * NUM_KEY_HEADS + key_head
        row = tl.load(row_ptr + request * row_stride).to(tl.int64)
        page_ptr = tail_ptr + ((row * 2 + own % 2) * PAGE * NUM_KEY_HEADS + key_head) * HEAD_DIM
        num_valid, stride = length - own * PAGE, NUM_KEY_HEADS * HEAD_DIM
        first, second = _tail_scores(low_query, high_query, page_ptr, num_valid, stride, half_page, half, WIDTH, dtype)
        if WINDOW > 0:
            first, second = _since(first, second, oldest - own * PAGE, half_page)
        codes, ranges = value_code_ptr + block * half * PAGE, value_range_ptr + block * NUM_GROUPS * PAGE
        highest, total, low, high, low_least, high_least = _add_page(
            highest, total, low, high, low_least, high_least, first, second, codes, ranges, num_valid,
            half_page, half, WIDTH, NUM_GROUPS, dtype, BY_PTX,
        )  # fmt: skip

    low, high = low + tl.sum(low_least, 0)[None, :], high + tl.sum(high_least, 0)[None, :]
    row = (request * NUM_PARTS + part) * NUM_HEADS + heads
    out = mixed_ptr + row[None, :] * HEAD_DIM + channel[:, None]
    _store(out, log_ptr + row, low, high, highest, tl.sum(total, 0), inside, columns < group, half, NUM_PARTS)


def four_bit_attention_by_kernel(
    query: Tensor,
    pages: Sequence[Tensor],
    tails: Tensor,
    tables: Tensor,
    lengths: Tensor,
    rows: Tensor,
    window: int | None,
) -> Tensor:
    """Return the attention of one query for each request [requests, heads, head_dim]; see `four_bits.py` for
    the pages.
    """
    num_requests, num_heads, head_dim = query.shape
    num_key_heads, num_groups = tails.shape[3], pages[3].shape[2]
    key_codes, key_ranges, value_codes, value_ranges = pages
    num_parts = number_of_parts(num_requests, num_key_heads, _PROGRAMS)
    assert query.stride()[1:] == (head_dim, 1), "the heads of a query lie end to end"
    out = query.new_empty(num_requests, num_heads, head_dim)
    parts, logs = empty_parts(query, out, num_parts)
    _parts[(num_requests, num_key_heads, num_parts)](
        query,
        key_codes,
        key_ranges.view(torch.int32),
        value_codes,
        value_ranges.view(torch.int32),
        tails,
        tables,
        lengths,
        rows,
        parts,
        logs,
        head_dim**-0.5 * LOG2E,
        query.stride(0),
        tables.stride(0),
        lengths.stride(0),
        rows.stride(0),
        PAGE=tails.shape[2],
        NUM_HEADS=num_heads,
        NUM_KEY_HEADS=num_key_heads,
        HEAD_DIM=head_dim,
        NUM_GROUPS=num_groups,
        WINDOW=window or 0,
        NUM_PARTS=num_parts,
        COLUMNS=max(8, triton.next_power_of_2(num_heads // num_key_heads)),  # tensor cores need 8
        WIDTH=max(16, triton.next_power_of_2(head_dim // 2)),
        BY_PTX=query.is_cuda and torch.version.hip is None,
        num_warps=2 * _WARPS if tails.shape[2] > 64 else _WARPS,  # a page of 128 tokens is too much for one
        num_stages=_STAGES,
    )
    if num_parts > 1:
        width = triton.next_power_of_2(head_dim)
        sum_of_parts[(num_requests, num_heads)](
            parts, logs, out, NUM_HEADS=num_heads, HEAD_DIM=head_dim, NUM_PARTS=num_parts, WIDTH=width, num_warps=4
        )
    return out

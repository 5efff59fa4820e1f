"""Prompts over the cache of 4 bits (`four_bits.py`) as Triton kernels: what they add to it, and their attention.

A chunk of a prompt lies in pages, of which the first and the last may be partly its own. The kernels take the pages of
all chunks of a step together (`PagedBatch.prompt_pages`):

    1. values are coded, and the keys of pages that are full now,
    2. queries attend to the pages before their own, dequantised where they are read, and to the keys of their own
       page as they are: in the tail those of earlier chunks, in the step's keys those of this one,
    3. the keys of the pages that a request still writes go to its tail.

Where all chunks are short, as those that check drafts are, their tokens attend as decodes do
(`four_bit_attention_kernel.py`): a request's pages are then read by many programs at once.

Memory never holds dequantised pages, and the host waits for nothing. The bits that are kept are those of the plain
functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.serve.attention.attend import A100, shared_bytes
from weft.serve.attention.batch import PagedBatch
from weft.serve.attention.decode_attention_kernel import LOG2E, rescaled
from weft.serve.attention.four_bit_append_kernel import _codes, _scale, keep_page_of_keys, value_ranges
from weft.serve.attention.four_bit_attention_kernel import _ranges, four_bit_attention_by_kernel
from weft.serve.weights.shared_steps_kernel import four_bit_numbers

_SHORT = 16  # tokens of a chunk whose tokens attend as decodes do; less than a page, so that a tail has all its pages
_ROWS = 128  # of a program's products: queries, each of some heads
_WARPS, _STAGES = 8, 3


@triton.jit
def _page(page_ptr, page_stride, table_ptr, table_stride, row_ptr, row_stride):
    """Return a page of a chunk: its request, number, first token among all tokens of chunks, where the chunk's tokens
    begin and end in the page, its block, and its tail.
    """
    request = tl.load(page_ptr).to(tl.int64)
    number = tl.load(page_ptr + page_stride)
    first = tl.load(page_ptr + 2 * page_stride).to(tl.int64)
    begin, end = tl.load(page_ptr + 3 * page_stride), tl.load(page_ptr + 4 * page_stride)
    block = tl.load(table_ptr + request * table_stride + number).to(tl.int64)
    row = tl.load(row_ptr + request * row_stride).to(tl.int64)
    return request, number, first, begin, end, block, row * 2 + number % 2


@triton.jit
def _raw_keys(key_ptr, tail_ptr, place, first, begin, end, token_stride, inside):
    """Return half of the channels of a page's keys as they are: those of earlier chunks are in the tail, those of this
    chunk among the step's keys.
    """
    earlier, own = place < begin, (place >= begin) & (place < end)
    old = tl.load(tail_ptr + place[:, None] * token_stride, mask=earlier[:, None] & inside, other=0.0)
    new = tl.load(key_ptr + (first + place - begin)[:, None] * token_stride, mask=own[:, None] & inside, other=0.0)
    return tl.where(earlier[:, None], old, new)


@triton.jit
def _value_codes(low, high, range_ptr, is_own, exists, PAGE: tl.constexpr, NUM_GROUPS: tl.constexpr):
    """Return the codes of both halves of the channels of values [tokens, channels], and write scales and zero
    points.
    """
    low_lowest, low_highest, high_lowest, high_highest = value_ranges(low, high, exists, NUM_GROUPS, 1)
    low_scale, low_least = _scale(low_lowest, low_highest)
    high_scale, high_least = _scale(high_lowest, high_highest)
    tl.store(range_ptr, low_scale, mask=is_own)
    tl.store(range_ptr + 1, low_least, mask=is_own)
    if NUM_GROUPS == 2:
        tl.store(range_ptr + 2 * PAGE, high_scale, mask=is_own)
        tl.store(range_ptr + 2 * PAGE + 1, high_least, mask=is_own)
    low_codes = _codes(low, low_scale[:, None], low_least[:, None])
    return low_codes, _codes(high, high_scale[:, None], high_least[:, None])


@triton.jit
def _keep_values(
    value_ptr, code_ptr, range_ptr, first, begin, end, token_stride,
    PAGE: tl.constexpr, HALF_DIM: tl.constexpr, WIDTH: tl.constexpr, NUM_GROUPS: tl.constexpr,
):  # fmt: skip
    """Code the values of a page's tokens from `begin` to `end`. A byte has two tokens, half a page apart."""
    half_page: tl.constexpr = PAGE // 2
    token, channel = tl.arange(0, half_page), tl.arange(0, WIDTH)
    exists = (channel < HALF_DIM)[None, :]
    later = token + half_page
    is_first, is_second = (token >= begin) & (token < end), (later >= begin) & (later < end)
    places = value_ptr + (first - begin + token)[:, None] * token_stride + channel[None, :]
    inside = is_first[:, None] & exists
    low = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(places + HALF_DIM, mask=inside, other=0.0).to(tl.float32)
    first_low, first_high = _value_codes(low, high, range_ptr + 2 * token, is_first, exists, PAGE, NUM_GROUPS)
    places, inside = places + half_page * token_stride, is_second[:, None] & exists
    low = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(places + HALF_DIM, mask=inside, other=0.0).to(tl.float32)
    second_low, second_high = _value_codes(low, high, range_ptr + 2 * later, is_second, exists, PAGE, NUM_GROUPS)
    places = code_ptr + channel[None, :] * half_page + token[:, None]
    written = (is_first | is_second)[:, None] & exists
    # Codes of tokens that are not the chunk's stay.
    kept = tl.where(is_first, 0, 15) | tl.where(is_second, 0, 240)
    old = tl.load(places, mask=written, other=0).to(tl.int32) & kept[:, None]
    new = tl.where(is_first[:, None], first_low, 0) | tl.where(is_second[:, None], second_low << 4, 0)
    tl.store(places, (old | new).to(tl.uint8), mask=written)
    places += HALF_DIM * half_page
    old = tl.load(places, mask=written, other=0).to(tl.int32) & kept[:, None]
    new = tl.where(is_first[:, None], first_high, 0) | tl.where(is_second[:, None], second_high << 4, 0)
    tl.store(places, (old | new).to(tl.uint8), mask=written)


@triton.jit
def _code(
    key_ptr, value_ptr, key_code_ptr, key_range_ptr, value_code_ptr, value_range_ptr, tail_ptr, table_ptr, row_ptr,
    page_ptr, table_stride, row_stride, page_stride,
    PAGE: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Code the values of a page, and its keys if it is full."""
    key_head = tl.program_id(1)
    half: tl.constexpr = HEAD_DIM // 2
    stride: tl.constexpr = NUM_KEY_HEADS * HEAD_DIM
    page_ptr += tl.program_id(0)
    _, _, first, begin, end, block, tail = _page(page_ptr, page_stride, table_ptr, table_stride, row_ptr, row_stride)
    block = block * NUM_KEY_HEADS + key_head
    codes, ranges = value_code_ptr + block * half * PAGE, value_range_ptr + block * 2 * NUM_GROUPS * PAGE
    _keep_values(
        value_ptr + key_head * HEAD_DIM, codes, ranges, first, begin, end, stride, PAGE, half, WIDTH, NUM_GROUPS
    )
    if end == PAGE:
        channel, place = tl.arange(0, WIDTH), tl.arange(0, PAGE)
        inside = (channel < half)[None, :]
        keys = key_ptr + key_head * HEAD_DIM + channel[None, :]
        tails = tail_ptr + (tail * PAGE * NUM_KEY_HEADS + key_head) * HEAD_DIM + channel[None, :]
        low = _raw_keys(keys, tails, place, first, begin, end, stride, inside).to(tl.float32)
        high = _raw_keys(keys + half, tails + half, place, first, begin, end, stride, inside).to(tl.float32)
        codes, ranges = key_code_ptr + block * PAGE * half, key_range_ptr + block * 2 * HEAD_DIM
        keep_page_of_keys(low, high, codes, ranges, PAGE, half, WIDTH)


@triton.jit
def _keep_tails(
    key_ptr, tail_ptr, table_ptr, row_ptr, page_ptr, table_stride, row_stride, page_stride,
    PAGE: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy the chunk's keys of a page to the tail, if the page is one that the tail has after this step."""
    key_head = tl.program_id(1)
    stride: tl.constexpr = NUM_KEY_HEADS * HEAD_DIM
    page_ptr += tl.program_id(0)
    if tl.load(page_ptr + 5 * page_stride) == 0:
        return
    _, _, first, begin, end, _, tail = _page(page_ptr, page_stride, table_ptr, table_stride, row_ptr, row_stride)
    place, channel = tl.arange(0, PAGE), tl.arange(0, WIDTH)
    inside = ((place >= begin) & (place < end))[:, None] & (channel < HEAD_DIM)[None, :]
    of_head = key_head * HEAD_DIM + channel[None, :]
    keys = tl.load(key_ptr + (first + place - begin)[:, None] * stride + of_head, mask=inside, other=0.0)
    tl.store(tail_ptr + (tail * PAGE + place)[:, None] * stride + of_head, keys, mask=inside)


@triton.jit
def _dequantised_keys(code_ptr, range_ptr, place, WIDTH: tl.constexpr, HALF_DIM: tl.constexpr, DTYPE: tl.constexpr,
                  BY_PTX: tl.constexpr):  # fmt: skip
    """Return both halves of the channels of a page's keys, at places in the page."""
    channel = tl.arange(0, WIDTH)
    exists = channel < HALF_DIM
    low_scale, low_least = _ranges(range_ptr + channel, exists)
    high_scale, high_least = _ranges(range_ptr + HALF_DIM + channel, exists)
    codes = tl.load(code_ptr + place[:, None] * HALF_DIM + channel[None, :], mask=exists[None, :], other=0)
    low, high = four_bit_numbers(codes, DTYPE, BY_PTX)
    low = (low.to(tl.float32) * low_scale[None, :] + low_least[None, :]).to(DTYPE)
    return low, (high.to(tl.float32) * high_scale[None, :] + high_least[None, :]).to(DTYPE)


@triton.jit
def _add_values(
    mixed, first_weights, second_weights, code_ptr, range_ptr, end,
    HALF_PAGE: tl.constexpr, HALF_DIM: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr, BY_PTX: tl.constexpr,
):  # fmt: skip
    """Add half of the channels of a page's first `end` values, by the weights of both halves of the page."""
    token, channel = tl.arange(0, HALF_PAGE), tl.arange(0, WIDTH)
    first_scale, first_least = _ranges(range_ptr + token, token < end)
    second_scale, second_least = _ranges(range_ptr + HALF_PAGE + token, token + HALF_PAGE < end)
    place = code_ptr + token[:, None] + channel[None, :] * HALF_PAGE
    codes = tl.load(place, mask=(channel < HALF_DIM)[None, :], other=0)  # [HALF_PAGE, WIDTH]
    first, second = four_bit_numbers(codes, DTYPE, BY_PTX)
    first = (first.to(tl.float32) * first_scale[:, None] + first_least[:, None]).to(DTYPE)
    second = (second.to(tl.float32) * second_scale[:, None] + second_least[:, None]).to(DTYPE)
    return tl.dot(second_weights, second, tl.dot(first_weights, first, mixed))


@triton.jit
def _add_page(
    highest, total, low, high, scores, code_ptr, range_ptr, end,
    PAGE: tl.constexpr, HALF_DIM: tl.constexpr, WIDTH: tl.constexpr, NUM_GROUPS: tl.constexpr, ROWS: tl.constexpr,
    DTYPE: tl.constexpr, BY_PTX: tl.constexpr,
):  # fmt: skip
    """Add a page to a running softmax. Scores [ROWS, PAGE] are in turn of the first and of the second half of the page,
    so that a thread has both of a byte.
    """
    half_page: tl.constexpr = PAGE // 2
    highest, weights, kept = rescaled(highest, scores)
    total = total * kept + tl.sum(weights, 1)
    first, second = tl.split(tl.reshape(weights.to(DTYPE), [ROWS, half_page, 2]))
    low = _add_values(low * kept[:, None], first, second, code_ptr, range_ptr, end, half_page, HALF_DIM, WIDTH, DTYPE, BY_PTX)  # noqa: E501  # fmt: skip
    code_ptr += HALF_DIM * half_page
    range_ptr += (NUM_GROUPS - 1) * PAGE
    high = _add_values(high * kept[:, None], first, second, code_ptr, range_ptr, end, half_page, HALF_DIM, WIDTH, DTYPE, BY_PTX)  # noqa: E501  # fmt: skip
    return highest, total, low, high


@triton.jit
def _scores(low_query, high_query, low_keys, high_keys, factor):
    """Return the products of queries with keys, of which each has its channels in two halves."""
    return tl.dot(high_query, tl.trans(high_keys), tl.dot(low_query, tl.trans(low_keys))) * factor


@triton.jit
def _seen(scores, distance, WINDOW: tl.constexpr):
    """Return the scores of keys that lie 0 or more tokens before their queries, and in the window; -inf of others."""
    seen = distance >= 0
    if WINDOW > 0:
        seen = seen & (distance < WINDOW)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _own_scores(
    low_query, high_query, key_ptr, tail_ptr, at, place, first, begin, end, factor,
    NUM_KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the scores of queries at places `at` of a page with the page's keys up to their own."""
    half: tl.constexpr = HEAD_DIM // 2
    stride: tl.constexpr = NUM_KEY_HEADS * HEAD_DIM
    channel = tl.arange(0, WIDTH)
    keys, tails, exists = key_ptr + channel[None, :], tail_ptr + channel[None, :], (channel < half)[None, :]
    low_keys = _raw_keys(keys, tails, place, first, begin, end, stride, exists)
    high_keys = _raw_keys(keys + half, tails + half, place, first, begin, end, stride, exists)
    scores = _scores(low_query, high_query, low_keys, high_keys, factor)
    return _seen(scores, at[:, None] - place[None, :], WINDOW)


@triton.jit
def _attend(
    query_ptr, key_ptr, key_code_ptr, key_range_ptr, value_code_ptr, value_range_ptr, tail_ptr, table_ptr, row_ptr,
    page_ptr, out_ptr, factor, query_stride, table_stride, row_stride, page_stride,
    PAGE: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    NUM_GROUPS: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    BY_PTX: tl.constexpr,
):  # fmt: skip
    """The attention of some queries of a page, of the heads that share a key head."""
    num_tiles: tl.constexpr = PAGE // QUERIES
    ROWS: tl.constexpr = QUERIES * GROUP  # noqa: N806
    tile, key_head = tl.program_id(0) % num_tiles, tl.program_id(1)
    group: tl.constexpr = NUM_HEADS // NUM_KEY_HEADS
    half: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    page_ptr += tl.program_id(0) // num_tiles
    request, own, first, begin, end, own_block, tail = _page(
        page_ptr, page_stride, table_ptr, table_stride, row_ptr, row_stride
    )
    end = tl.minimum(end, (tile + 1) * QUERIES)
    if (end <= tile * QUERIES) | (begin >= end):
        return
    rows, channel = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at, head = tile * QUERIES + rows // GROUP, rows % GROUP  # a query's place in the page
    is_row = (at >= begin) & (at < end) & (head < group)
    inside = is_row[:, None] & (channel < half)[None, :]
    token, of_head = first + at - begin, (key_head * group + head) * HEAD_DIM
    query_place = query_ptr + (token * query_stride + of_head)[:, None] + channel[None, :]
    low_query = tl.load(query_place, mask=inside, other=0.0)
    high_query = tl.load(query_place + half, mask=inside, other=0.0)
    highest, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    low, high = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    column = tl.arange(0, PAGE)
    place = column // 2 + column % 2 * (PAGE // 2)  # see `_add_page`
    oldest = tl.maximum(own * PAGE + tl.maximum(begin, tile * QUERIES) + 1 - WINDOW, 0) if WINDOW > 0 else 0
    table_ptr += request * table_stride
    for page in range(oldest // PAGE, own):
        block = tl.load(table_ptr + page).to(tl.int64) * NUM_KEY_HEADS + key_head
        codes, ranges = key_code_ptr + block * PAGE * half, key_range_ptr + block * HEAD_DIM
        low_keys, high_keys = _dequantised_keys(codes, ranges, place, WIDTH, half, dtype, BY_PTX)
        scores = _scores(low_query, high_query, low_keys, high_keys, factor)
        if WINDOW > 0:
            scores = _seen(scores, (own - page) * PAGE + at[:, None] - place[None, :], WINDOW)
        codes, ranges = value_code_ptr + block * half * PAGE, value_range_ptr + block * NUM_GROUPS * PAGE
        highest, total, low, high = _add_page(
            highest, total, low, high, scores, codes, ranges, PAGE, PAGE, half, WIDTH, NUM_GROUPS, ROWS, dtype, BY_PTX
        )
    scores = _own_scores(
        low_query, high_query, key_ptr + key_head * HEAD_DIM,
        tail_ptr + (tail * PAGE * NUM_KEY_HEADS + key_head) * HEAD_DIM, at, place, first, begin, end, factor,
        NUM_KEY_HEADS, HEAD_DIM, WINDOW, WIDTH,
    )  # fmt: skip
    block = own_block * NUM_KEY_HEADS + key_head
    codes, ranges = value_code_ptr + block * half * PAGE, value_range_ptr + block * NUM_GROUPS * PAGE
    highest, total, low, high = _add_page(
        highest, total, low, high, scores, codes, ranges, end, PAGE, half, WIDTH, NUM_GROUPS, ROWS, dtype, BY_PTX
    )
    divisor = tl.where(total > 0, total, 1.0)[:, None]
    out = out_ptr + (token * NUM_HEADS * HEAD_DIM + of_head)[:, None] + channel[None, :]
    tl.store(out, (low / divisor).to(dtype), mask=inside)
    tl.store(out + half, (high / divisor).to(dtype), mask=inside)


class Launch(NamedTuple):
    """How the attention is launched: the queries of a program, each of the heads that share a key head."""

    queries: int
    num_warps: int
    num_stages: int


def launch_of(page: int, group: int, shared: int) -> Launch:
    """Return how the attention is launched: with `group` heads for a key head, on a GPU with so much shared memory."""
    rows, num_stages = (_ROWS, _STAGES) if shared >= A100 else (_ROWS // 2, 1)
    queries = min(page, max(1, rows // group))
    return Launch(queries, min(_WARPS, max(1, queries * group // 16)), num_stages)


def attend_prompts_by_kernel(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Sequence[Tensor],
    tails: Tensor,
    batch: PagedBatch,
    window: int | None,
) -> Tensor:
    """Add the keys and values [tokens, key heads, head_dim] of a batch's prompts to the cache; the attention of their
    queries [tokens, heads, head_dim]. See `four_bits.py` for the pages and tails.
    """
    num_key_heads, page, head_dim = tails.shape[3], tails.shape[2], tails.shape[4]
    chunks, tables, rows = batch.prompt_pages, batch.tables, batch.rows
    assert keys.is_contiguous() and values.is_contiguous(), "the heads of all tokens lie end to end"  # noqa: PT018
    strides = (tables.stride(0), rows.stride(0), chunks.stride(0))
    grid = (chunks.shape[1], num_key_heads)
    sizes = {"PAGE": page, "NUM_KEY_HEADS": num_key_heads, "HEAD_DIM": head_dim}
    half_width = max(16, triton.next_power_of_2(head_dim // 2))
    _code[grid](
        keys, values, *pages, tails, tables, rows, chunks, *strides,
        **sizes, NUM_GROUPS=pages[3].shape[2], WIDTH=half_width, num_warps=4,
    )  # fmt: skip
    is_short = max(batch.prompt_queries) <= _SHORT
    out = None if is_short else _attend_chunks(query, keys, pages, tails, batch, window)
    width = max(16, triton.next_power_of_2(head_dim))
    _keep_tails[grid](keys, tails, tables, rows, chunks, *strides, **sizes, WIDTH=width, num_warps=4)
    if out is None:
        requests, lengths = batch.prompt_tokens
        out = four_bit_attention_by_kernel(query, pages, tails, tables[requests], lengths, rows[requests], window)
    return out


def _attend_chunks(
    query: Tensor, keys: Tensor, pages: Sequence[Tensor], tails: Tensor, batch: PagedBatch, window: int | None
) -> Tensor:
    """Return the attention of chunks. Tails must still have the keys of earlier chunks."""
    _, num_heads, head_dim = query.shape
    num_key_heads, page = tails.shape[3], tails.shape[2]
    chunks, tables, rows = batch.prompt_pages, batch.tables, batch.rows
    assert query.stride()[1:] == (head_dim, 1), "the heads of a query lie end to end"
    out = query.new_empty(query.shape)
    key_codes, key_ranges, value_codes, value_ranges = pages
    group = triton.next_power_of_2(num_heads // num_key_heads)
    launch = launch_of(page, group, shared_bytes(query.device))
    _attend[(chunks.shape[1] * (page // launch.queries), num_key_heads)](
        query,
        keys,
        key_codes,
        key_ranges.view(torch.int32),
        value_codes,
        value_ranges.view(torch.int32),
        tails,
        tables,
        rows,
        chunks,
        out,
        head_dim**-0.5 * LOG2E,
        query.stride(0),
        tables.stride(0),
        rows.stride(0),
        chunks.stride(0),
        PAGE=page,
        NUM_HEADS=num_heads,
        NUM_KEY_HEADS=num_key_heads,
        HEAD_DIM=head_dim,
        NUM_GROUPS=value_ranges.shape[2],
        WINDOW=window or 0,
        QUERIES=launch.queries,
        GROUP=group,
        WIDTH=max(16, triton.next_power_of_2(head_dim // 2)),
        BY_PTX=query.is_cuda and torch.version.hip is None,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out

"""Loki (`choice.py`) as Triton kernels: keys and queries along its axes, and which tokens a decode attends to.

The first kernel turns the queries and the key of a decode to the axes, and writes key and value to their pages. A
program multiplies those of one key head of one token with some of the axes. One launch does the work of about a dozen.

The second kernel scores all tokens by the first dims of their keys, for each query. Pages keep these dims a second
time, those of a key head end to end, because memory is read in long pieces. The third kernel takes for each token the
highest score relative to the best of a query, by the queries of a key head, and finds the lowest score that is chosen,
two bits of it at a time, by counting how many scores are at least as high; it then writes where the chosen tokens lie,
in their order. `decode_attention_kernel.py` attends to these. All shapes follow from the batch and the cache alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.serve.attention.decode_attention_kernel import number_of_parts

_COLUMNS = 32  # axes of a program that turns
_TOKENS = 64  # that the kernel that scores loads at a time
_WARPS, _STAGES, _PROGRAMS = 1, 1, 2048  # of the kernel that scores
_CHUNK, _CHOOSING_WARPS = 8192, 16  # scores that the choosing kernel loads at a time, and its warps


@triton.jit
def _scores(
    query_ptr, first_ptr, table_ptr, length_ptr, score_ptr, best_ptr, query_stride, table_stride, length_stride,
    score_stride, NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NUM_DIMS: tl.constexpr, WINDOW: tl.constexpr, NUM_PARTS: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The scores of the tokens of a part by the queries of a key head, and the best of each query."""
    key_head, part, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group: tl.constexpr = NUM_HEADS // NUM_KEY_HEADS
    length = tl.load(length_ptr + request * length_stride)
    oldest = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    size = tl.cdiv(tl.cdiv(length, NUM_PARTS), TOKENS) * TOKENS
    begin, end = part * size, tl.minimum(part * size + size, length)
    queries, dims, places = tl.arange(0, COLUMNS), tl.arange(0, WIDTH), tl.arange(0, TOKENS)
    is_query, is_dim = queries < group, dims < NUM_DIMS
    heads = key_head * group + queries
    query_place = request * query_stride + heads[None, :] * HEAD_DIM + dims[:, None]
    query = tl.load(query_ptr + query_place, mask=is_query[None, :] & is_dim[:, None], other=0.0)  # [WIDTH, COLUMNS]
    target = score_ptr + (request * NUM_HEADS + heads)[None, :] * score_stride
    best = tl.full([COLUMNS], float("-inf"), tl.float32)
    table_ptr += request * table_stride
    next_block = tl.load(table_ptr + (begin + places) // BLOCK_SIZE, mask=begin + places < end, other=0)
    for start in range(begin, end, TOKENS):
        token, following = start + places, start + TOKENS + places
        valid, block = token < end, next_block.to(tl.int64)
        next_block = tl.load(table_ptr + following // BLOCK_SIZE, mask=following < end, other=0)
        row = (block * NUM_KEY_HEADS + key_head) * BLOCK_SIZE + token % BLOCK_SIZE
        loaded = valid[:, None] & is_dim[None, :]
        key = tl.load(first_ptr + row[:, None] * NUM_DIMS + dims[None, :], mask=loaded, other=0.0)
        scores = tl.dot(key, query).to(tl.float32)  # keys are first, as they fill the tensor cores
        counted = (valid & (token >= oldest))[:, None]
        best = tl.maximum(best, tl.max(tl.where(counted, scores, float("-inf")), 0))
        tl.store(target + token[:, None], scores, mask=is_query[None, :] & valid[:, None])
    tl.store(best_ptr + (request * NUM_HEADS + heads) * NUM_PARTS + part, best, mask=is_query)


@triton.jit
def _joint_scores(
    score_ptr, best, score_stride, token, oldest, length, NEWEST: tl.constexpr, GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
):  # fmt: skip
    """Return the joint scores of a group of queries, as integers of the same order.

    Tokens that are always chosen have the highest integer, and places without a token the lowest.
    """
    valid = (token >= oldest) & (token < length)
    joint = tl.full(token.shape, float("-inf"), tl.float32)
    for member in tl.static_range(GROUP):
        own = tl.load(score_ptr + member * score_stride + token, mask=valid, other=float("-inf"))
        own_best = tl.max(tl.where(tl.arange(0, MEMBERS) == member, best, float("-inf")), 0)
        joint = tl.maximum(joint, own - own_best)
    joint = tl.where((token >= length - NEWEST) | (token == oldest), float("inf"), joint)
    bits = joint.to(tl.int32, bitcast=True)
    return tl.where(valid, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -2147483648)


@triton.jit
def _lowest_chosen(order_ptr, number, begin, length, CHUNK: tl.constexpr):
    """Return the largest integer that `number` scores reach; how many scores are above it, and how many reach it."""
    place, lowest = tl.arange(0, CHUNK), -2147483648
    for digit in range(16):
        step = 1 << (30 - 2 * digit)
        one, two = lowest + step, lowest + step + step
        three = two + step
        counts = tl.zeros([CHUNK], tl.int32)  # of scores that reach one, two and three steps: ten bits each
        for start in range(begin, length, CHUNK):
            order = tl.load(order_ptr + start + place)
            counts += (order >= one).to(tl.int32)
            counts += tl.where(order >= two, 1 << 10, 0)
            counts += tl.where(order >= three, 1 << 20, 0)
        # One sum of all three, of 21 bits each, takes less time than three sums.
        wide = (counts & 1023).to(tl.int64) + (((counts >> 10) & 1023).to(tl.int64) << 21)
        reached = tl.sum(wide + ((counts >> 20).to(tl.int64) << 42), 0)
        steps = ((reached & 2097151) >= number).to(tl.int32) + (((reached >> 21) & 2097151) >= number).to(tl.int32)
        steps += ((reached >> 42) >= number).to(tl.int32)
        lowest += tl.where(steps > 0, step, 0) + tl.where(steps > 1, step, 0) + tl.where(steps > 2, step, 0)
    counts = tl.zeros([CHUNK], tl.int32)
    for start in range(begin, length, CHUNK):
        order = tl.load(order_ptr + start + place)
        counts += (order > lowest).to(tl.int32) + tl.where(order >= lowest, 1 << 10, 0)
    found = tl.sum((counts & 1023).to(tl.int64) + ((counts >> 10).to(tl.int64) << 21), 0)
    return lowest, (found & 2097151).to(tl.int32), (found >> 21).to(tl.int32)


@triton.jit
def _choose(
    score_ptr, best_ptr, table_ptr, length_ptr, chosen_ptr, count_ptr, share, table_stride, length_stride, score_stride,
    chosen_stride, NUM_KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, NUM_PARTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NEWEST: tl.constexpr, DENSE_BELOW: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Write the slots of the tokens with the highest scores, of equal scores the first, and how many they are."""
    request, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, place = request * NUM_KEY_HEADS + key_head, tl.arange(0, CHUNK)
    length = tl.load(length_ptr + request * length_stride)
    oldest = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    span, begin = length - oldest, oldest // CHUNK * CHUNK
    number = tl.maximum(tl.ceil(share * span.to(tl.float32)).to(tl.int32), NEWEST + 1)
    number = tl.where(span < DENSE_BELOW, span, tl.minimum(number, span))
    scores, members = score_ptr + row * GROUP * score_stride, tl.arange(0, MEMBERS)
    best_place = (row * GROUP + members)[:, None] * NUM_PARTS + tl.arange(0, NUM_PARTS)[None, :]
    best = tl.max(tl.load(best_ptr + best_place, mask=(members < GROUP)[:, None], other=float("-inf")), 1)
    orders = scores.to(tl.pointer_type(tl.int32))  # joint scores take the place of the first query's
    for start in range(begin, length, CHUNK):
        token = start + place
        joint = _joint_scores(scores, best, score_stride, token, oldest, length, NEWEST, GROUP, MEMBERS)
        tl.store(orders + token, joint)
    tl.debug_barrier()  # they are read again
    lowest, num_above, num_reached = _lowest_chosen(orders, number, begin, length, CHUNK)
    num_equal = number - num_above  # of those with the lowest score, so many are chosen
    num_seen, num_written = 0, 0
    for start in range(begin, length, CHUNK):
        order, token = tl.load(orders + start + place), start + place
        taken = order >= lowest
        if num_reached > number:  # of equal scores, the first
            equal = (order == lowest).to(tl.int32)
            taken = (order > lowest) | ((equal > 0) & (num_seen + tl.cumsum(equal, 0) <= num_equal))
            num_seen += tl.sum(equal, 0)
        taken = taken & (token >= oldest) & (token < length)
        block = tl.load(table_ptr + request * table_stride + token // BLOCK_SIZE, mask=taken, other=0)
        target = num_written + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(chosen_ptr + row * chosen_stride + target, block * BLOCK_SIZE + token % BLOCK_SIZE, mask=taken)
        num_written += tl.sum(taken.to(tl.int32), 0)
    tl.store(count_ptr + row, number)


def chosen_slots_by_kernel(
    query: Tensor,
    first: Tensor,
    tables: Tensor,
    lengths: Tensor,
    window: int | None,
    choice: tuple[float, int, int, int],
) -> tuple[Tensor, Tensor]:
    """Return the slots [requests, key heads, most] of the tokens that each key head's queries attend to, and their
    number.

    `first` are the dims of keys by which tokens are scored, in pages: [blocks, key heads, block_size, dims]. `choice`:
    share of the tokens, newest tokens, length below which all tokens are chosen, and the most tokens that can be
    chosen.
    """
    share, newest, dense_below, most = choice
    (num_requests, num_heads, head_dim), (_, num_key_heads, block_size, num_dims) = query.shape, first.shape
    assert query.stride()[1:] == (head_dim, 1), "the heads of a query lie end to end"
    num_parts = number_of_parts(num_requests, num_key_heads, _PROGRAMS)
    width = triton.cdiv(tables.shape[1] * block_size, _CHUNK) * _CHUNK  # chunks are whole
    scores = torch.empty(num_requests, num_heads, width, dtype=torch.float32, device=query.device)
    best = torch.empty(num_requests, num_heads, num_parts, dtype=torch.float32, device=query.device)
    chosen = torch.empty(num_requests, num_key_heads, most, dtype=torch.int32, device=query.device)
    counts = torch.empty(num_requests, num_key_heads, dtype=torch.int32, device=query.device)
    _scores[(num_key_heads, num_parts, num_requests)](
        query, first, tables, lengths, scores, best, query.stride(0), tables.stride(0), lengths.stride(0), width,
        NUM_HEADS=num_heads, NUM_KEY_HEADS=num_key_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, NUM_DIMS=num_dims,
        WINDOW=window or 0, NUM_PARTS=num_parts,
        COLUMNS=max(8, triton.next_power_of_2(num_heads // num_key_heads)),  # tensor cores need 8
        WIDTH=max(16, triton.next_power_of_2(num_dims)), TOKENS=_TOKENS, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    assert width < min(1024 * _CHUNK, 1 << 21), "counts have ten bits each, and 21 all together"
    _choose[(num_requests, num_key_heads)](
        scores, best, tables, lengths, chosen, counts, share, tables.stride(0), lengths.stride(0), width, most,
        NUM_KEY_HEADS=num_key_heads, GROUP=num_heads // num_key_heads, NUM_PARTS=num_parts, BLOCK_SIZE=block_size,
        NEWEST=newest, DENSE_BELOW=dense_below, WINDOW=window or 0, CHUNK=_CHUNK,
        MEMBERS=triton.next_power_of_2(num_heads // num_key_heads), num_warps=_CHOOSING_WARPS,
    )  # fmt: skip
    return chosen, counts


@triton.jit
def _turn_and_store(
    query_ptr, key_ptr, value_ptr, axes_ptr, slot_ptr, turned_ptr, key_page_ptr, value_page_ptr, first_ptr,
    query_stride, NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NUM_DIMS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The rows of a program are the queries that share a key head, and behind them the key."""
    token, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group: tl.constexpr = NUM_HEADS // NUM_KEY_HEADS
    rows, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_dim, is_column = dims < HEAD_DIM, columns < HEAD_DIM
    heads, key_place = key_head * group + rows, (token * NUM_KEY_HEADS + key_head) * HEAD_DIM
    is_query, is_key = (rows < group)[:, None], (rows == group)[:, None]
    query_place = token * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    given = tl.load(query_ptr + query_place, mask=is_query & is_dim[None, :], other=0.0).to(tl.float32)
    key_places = key_ptr + key_place + dims[None, :] + rows[:, None] * 0
    given += tl.load(key_places, mask=is_key & is_dim[None, :], other=0.0).to(tl.float32)
    axes_place = (key_head * HEAD_DIM + dims[:, None]) * HEAD_DIM + columns[None, :]
    axes = tl.load(axes_ptr + axes_place, mask=is_dim[:, None] & is_column[None, :], other=0.0)
    turned = tl.dot(given, axes, input_precision="ieee").to(turned_ptr.dtype.element_ty)  # [ROWS, COLUMNS]
    turned_place = (token * NUM_HEADS + heads[:, None]) * HEAD_DIM + columns[None, :]
    tl.store(turned_ptr + turned_place, turned, mask=is_query & is_column[None, :])
    slot = tl.load(slot_ptr + token)
    page_place = (slot * NUM_KEY_HEADS + key_head) * HEAD_DIM + columns
    tl.store(key_page_ptr + page_place[None, :] + rows[:, None] * 0, turned, mask=is_key & is_column[None, :])
    first_place = (
        (slot // BLOCK_SIZE * NUM_KEY_HEADS + key_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    ) * NUM_DIMS + columns
    is_first = is_key & (columns < NUM_DIMS)[None, :]
    tl.store(first_ptr + first_place[None, :] + rows[:, None] * 0, turned, mask=is_first)
    value = tl.load(value_ptr + key_place + columns, mask=is_column, other=0.0)
    tl.store(value_page_ptr + page_place, value, mask=is_column)


def turn_and_store_by_kernel(
    query: Tensor, keys: Tensor, values: Tensor, axes: Tensor, slots: Tensor, pages: Sequence[Tensor]
) -> Tensor:
    """Return queries [tokens, heads, head_dim] along the axes [key heads, head_dim, head_dim] (float32) of their key
    heads.

    Keys [tokens, key heads, head_dim] along the axes, values, and the first dims of these keys go to the slots of
    `pages`: [blocks, block_size, key heads, head_dim] twice, and [blocks, key heads, block_size, dims].
    """
    (num_tokens, num_heads, head_dim), num_key_heads = query.shape, keys.shape[1]
    assert query.stride()[1:] == (head_dim, 1), "the heads of a query lie end to end"
    assert all(one.is_contiguous() for one in (keys, values, axes))
    turned = query.new_empty(num_tokens, num_heads, head_dim)
    width = max(16, triton.next_power_of_2(head_dim))
    columns = min(_COLUMNS, width)
    _turn_and_store[(num_tokens, num_key_heads, width // columns)](
        query, keys, values, axes, slots, turned, *pages, query.stride(0), NUM_HEADS=num_heads,
        NUM_KEY_HEADS=num_key_heads, HEAD_DIM=head_dim, BLOCK_SIZE=pages[0].shape[1], NUM_DIMS=pages[2].shape[-1],
        ROWS=max(16, triton.next_power_of_2(num_heads // num_key_heads + 1)), WIDTH=width, COLUMNS=columns,
        num_warps=4,
    )  # fmt: skip
    return turned

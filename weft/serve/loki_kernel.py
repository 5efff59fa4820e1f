"""Which tokens a decode of Loki attends to (`loki_cache.py`), as Triton kernels.

The first kernel scores all tokens by the first dims of their keys. The second finds the lowest score that is chosen,
two bits of it at a time, by counting how many scores are at least as high; it then writes where the chosen tokens lie,
in their order. `decode_attention_kernel.py` attends to these. All shapes follow from the batch and the cache alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.serve.decode_attention_kernel import number_of_parts

_TOKENS = 64  # that the first kernel loads at a time
_CHUNK = 4096  # scores that the second kernel loads at a time


@triton.jit
def _scores(
    query_ptr, key_ptr, table_ptr, length_ptr, score_ptr, query_stride, table_stride, length_stride, score_stride,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NUM_DIMS: tl.constexpr, NEWEST: tl.constexpr, WINDOW: tl.constexpr, NUM_PARTS: tl.constexpr,
    GROUP_ROWS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The highest score of a token by the queries of a key head; inf of tokens that are always chosen, -inf of none."""
    request, key_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = NUM_HEADS // NUM_KEY_HEADS
    length = tl.load(length_ptr + request * length_stride)
    oldest = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    size = tl.cdiv(tl.cdiv(length, NUM_PARTS), TOKENS) * TOKENS
    rows, columns = tl.arange(0, GROUP_ROWS), tl.arange(0, WIDTH)
    is_row, is_dim = rows < group, columns < NUM_DIMS
    query_place = request * query_stride + (key_head * group + rows)[:, None] * HEAD_DIM + columns[None, :]
    query = tl.load(query_ptr + query_place, mask=is_row[:, None] & is_dim[None, :], other=0.0)
    for start in range(part * size, tl.minimum(part * size + size, length), TOKENS):
        token = start + tl.arange(0, TOKENS)
        valid = token < length
        block = tl.load(table_ptr + request * table_stride + token // BLOCK_SIZE, mask=valid, other=0)
        row = (block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE) * NUM_KEY_HEADS + key_head
        loaded = valid[:, None] & is_dim[None, :]
        key = tl.load(key_ptr + row[:, None] * HEAD_DIM + columns[None, :], mask=loaded, other=0.0)
        scores = tl.dot(query, tl.trans(key)).to(tl.float32)
        highest = tl.max(tl.where(is_row[:, None], scores, float("-inf")), 0)
        highest = tl.where((token >= length - NEWEST) | (token == oldest), float("inf"), highest)
        highest = tl.where(token < oldest, float("-inf"), highest)
        tl.store(score_ptr + (request * NUM_KEY_HEADS + key_head) * score_stride + token, highest, mask=valid)


@triton.jit
def _ordered(score_ptr, place, oldest, length):
    """Scores as integers of the same order, and which of them are of tokens that can be chosen."""
    valid = (place >= oldest) & (place < length)
    bits = tl.load(score_ptr + place, mask=valid, other=0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), valid


@triton.jit
def _choose(
    score_ptr, table_ptr, length_ptr, chosen_ptr, count_ptr, share, table_stride, length_stride, score_stride,
    chosen_stride, NUM_KEY_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, NEWEST: tl.constexpr,
    DENSE_BELOW: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the slots of the tokens with the highest scores, of equal scores the first, and how many they are."""
    request, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, place = request * NUM_KEY_HEADS + key_head, tl.arange(0, CHUNK)
    length = tl.load(length_ptr + request * length_stride)
    oldest = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    span = length - oldest
    number = tl.maximum(tl.ceil(share * span.to(tl.float32)).to(tl.int32), NEWEST + 1)
    number = tl.where(span < DENSE_BELOW, span, tl.minimum(number, span))
    scores = score_ptr + row * score_stride
    lowest = -2147483648  # the largest integer so far that `number` scores reach
    for digit in range(16):
        step = 1 << (30 - 2 * digit)
        one, two = lowest + step, lowest + step + step
        counts = tl.zeros([CHUNK], tl.int32)  # of scores that reach one, two and three steps: ten bits each
        for start in range(oldest // CHUNK * CHUNK, length, CHUNK):
            order, valid = _ordered(scores, start + place, oldest, length)
            reached = (order >= one).to(tl.int32) + ((order >= two).to(tl.int32) << 10)
            counts += tl.where(valid, reached + ((order >= two + step).to(tl.int32) << 20), 0)
        steps = (tl.sum(counts & 1023, 0) >= number).to(tl.int32)
        steps += (tl.sum((counts >> 10) & 1023, 0) >= number).to(tl.int32)
        steps += (tl.sum(counts >> 20, 0) >= number).to(tl.int32)
        lowest += tl.where(steps > 0, step, 0) + tl.where(steps > 1, step, 0) + tl.where(steps > 2, step, 0)
    above = tl.zeros([CHUNK], tl.int32)
    for start in range(oldest // CHUNK * CHUNK, length, CHUNK):
        order, valid = _ordered(scores, start + place, oldest, length)
        above += (valid & (order > lowest)).to(tl.int32)
    num_equal = number - tl.sum(above, 0)  # of those with the lowest score, so many are chosen
    num_seen, num_written = 0, 0
    for start in range(oldest // CHUNK * CHUNK, length, CHUNK):
        order, valid = _ordered(scores, start + place, oldest, length)
        equal = (valid & (order == lowest)).to(tl.int32)
        is_first = (equal > 0) & (num_seen + tl.cumsum(equal, 0) <= num_equal)
        taken = (valid & (order > lowest)) | is_first
        token = start + place
        block = tl.load(table_ptr + request * table_stride + token // BLOCK_SIZE, mask=taken, other=0)
        target = num_written + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(chosen_ptr + row * chosen_stride + target, block * BLOCK_SIZE + token % BLOCK_SIZE, mask=taken)
        num_seen += tl.sum(equal, 0)
        num_written += tl.sum(taken.to(tl.int32), 0)
    tl.store(count_ptr + row, number)


def chosen_slots_by_kernel(
    query: Tensor,
    keys: Tensor,
    tables: Tensor,
    lengths: Tensor,
    block_size: int,
    window: int | None,
    choice: tuple[int, float, int, int, int],
) -> tuple[Tensor, Tensor]:
    """The slots [requests, key heads, most] of the tokens that each key head's queries attend to, and how many.

    `choice`: dims by which tokens are scored, share of the tokens, newest tokens, length below which all tokens are
    chosen, and the most tokens that can be chosen.
    """
    num_dims, share, newest, dense_below, most = choice
    (num_requests, num_heads, head_dim), num_key_heads = query.shape, keys.shape[1]
    assert query.stride()[1:] == (head_dim, 1), "the heads of a query lie end to end"
    num_parts = number_of_parts(num_requests, num_key_heads)
    width = tables.shape[1] * block_size
    scores = torch.empty(num_requests, num_key_heads, width, dtype=torch.float32, device=query.device)
    chosen = torch.empty(num_requests, num_key_heads, most, dtype=torch.int32, device=query.device)
    counts = torch.empty(num_requests, num_key_heads, dtype=torch.int32, device=query.device)
    _scores[(num_requests, num_key_heads, num_parts)](
        query, keys, tables, lengths, scores, query.stride(0), tables.stride(0), lengths.stride(0), width,
        NUM_HEADS=num_heads, NUM_KEY_HEADS=num_key_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, NUM_DIMS=num_dims,
        NEWEST=newest, WINDOW=window or 0, NUM_PARTS=num_parts,
        GROUP_ROWS=max(16, triton.next_power_of_2(num_heads // num_key_heads)),  # tensor cores need 16 rows
        WIDTH=max(16, triton.next_power_of_2(num_dims)), TOKENS=_TOKENS, num_warps=4, num_stages=5,
    )  # fmt: skip
    assert width < 1024 * _CHUNK, "counts have ten bits"
    _choose[(num_requests, num_key_heads)](
        scores, tables, lengths, chosen, counts, share, tables.stride(0), lengths.stride(0), width, most,
        NUM_KEY_HEADS=num_key_heads, BLOCK_SIZE=block_size, NEWEST=newest, DENSE_BELOW=dense_below, WINDOW=window or 0,
        CHUNK=_CHUNK, num_warps=16,
    )  # fmt: skip
    return chosen, counts

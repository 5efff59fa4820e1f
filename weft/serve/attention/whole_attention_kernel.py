"""All of a decode's attention in one Triton kernel: rotation of queries and keys, the cache's new entry, attention to
the cache, and the sum over the parts of a sequence.

A decode of one request is a chain of small kernels, each of which waits for the one before it. What does not depend on
that one is read while it runs: the keys and values of earlier tokens, the angles of the rotation, and the weights of
norms. The new token's key and value are used from registers, and written to the cache by the program that handles the
last part.

Every program of a sequence that has several parts writes its result and counts itself. The one that is last adds up the
results of all, in the order of the parts, so that sums do not depend on which was last. It sets the count back to 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.models.attention import RMSNorm
from weft.serve.attention.decode_attention_kernel import (
    LOG2E,
    TOKENS,
    VARYING,
    add_tokens,
    bounds,
    empty_parts,
    keys_and_values,
    number_of_parts,
    page_rows,
    rescaled,
)
from weft.serve.weights.shared_steps_kernel import early_launch, wait_for_results

_ADDED = 16  # parts that are added up at a time
# Programs, warps of each, and registers of a thread, for one request and for more: the fastest of some on an H200 that
# are no slower than kernels one by one, for a model of 8B with 40 to 20,000 tokens in the cache.
_LAUNCH_FOR_ONE, _LAUNCH = (256, 8, 104), (512, 4, 128)


@triton.jit
def _rotated(heads, turn, weight, eps, HEAD_DIM: tl.constexpr, HAS_NORMS: tl.constexpr):
    """Return heads, normed and rotated: from [2, heads, WIDTH], the second with halves exchanged, times `turn` [2, 1,
    WIDTH], which are cosines and signed sines. A sum over the first dimension lies in one thread. `weight` is the
    norm's.
    """
    wide = heads.to(tl.float32)
    if HAS_NORMS:  # rounded as the model's own norm does
        factor = tl.rsqrt(tl.sum(tl.sum(wide * wide, 2), 0) / (2 * HEAD_DIM) + eps)[None, :, None]
        wide = ((wide * factor).to(heads.dtype).to(tl.float32) * weight).to(heads.dtype).to(tl.float32)
    return tl.sum(wide * turn, 0).to(heads.dtype)


@triton.jit
def _turn(cos_ptr, sin_ptr, position, copy, column, HEAD_DIM: tl.constexpr):
    """Return what heads and heads with halves exchanged are multiplied by: [2, 1, WIDTH]."""
    half: tl.constexpr = HEAD_DIM // 2
    angle = position.to(tl.int64) * HEAD_DIM + column % half
    cos, sin = tl.load(cos_ptr + angle).to(tl.float32), tl.load(sin_ptr + angle).to(tl.float32)
    return tl.where(copy == 0, cos, tl.where(column < half, -sin, sin))


@triton.jit
def _new_token(
    heads_at, key_head, is_last, exchanged, turn, query_weight, key_weight, query_eps, key_eps,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_NORMS: tl.constexpr,
    GROUP_ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the queries, the key and the value of a new token: [GROUP_ROWS, WIDTH] each. Key and value are in all
    rows, so that they lie in registers as queries do; they are 0 if this is not the last part.
    """
    group: tl.constexpr = NUM_HEADS // NUM_KEY_HEADS
    row, column = tl.arange(0, GROUP_ROWS)[None, :, None], tl.arange(0, WIDTH)[None, None, :]
    rows, columns = tl.arange(0, GROUP_ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    queries_at = heads_at + (key_head * group + row) * HEAD_DIM + exchanged
    queries = tl.load(queries_at, mask=(row < group) & (column < HEAD_DIM), other=0.0)
    num_columns = tl.where(is_last, HEAD_DIM, 0)
    key_at = heads_at + (NUM_HEADS + key_head) * HEAD_DIM
    keys = tl.load(key_at + 0 * row + exchanged, mask=(row >= 0) & (column < num_columns), other=0.0)
    value_at = key_at + NUM_KEY_HEADS * HEAD_DIM + 0 * rows + columns
    value = tl.load(value_at, mask=(rows >= 0) & (columns < num_columns), other=0.0)
    query = _rotated(queries, turn, query_weight, query_eps, HEAD_DIM, HAS_NORMS)
    return query, _rotated(keys, turn, key_weight, key_eps, HEAD_DIM, HAS_NORMS), value


@triton.jit
def _tile(
    key_ptr, value_ptr, table_at, start, end, key_head, columns,
    NUM_KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Return the keys and values of some tokens in the cache [TOKENS, WIDTH]."""
    token = start + tl.arange(0, TOKENS)
    row = page_rows(table_at, token, token < end, key_head, NUM_KEY_HEADS, BLOCK_SIZE)
    return keys_and_values(key_ptr, value_ptr, row, token < end, columns, HEAD_DIM)


@triton.jit
def _with_tile(
    query, key, value, start, end, oldest, highest, total, mixed, scale, TOKENS: tl.constexpr, WINDOW: tl.constexpr
):
    """Return the running softmax with the tokens of a tile."""
    token = start + tl.arange(0, TOKENS)
    valid = token < end
    if WINDOW > 0:
        valid = valid & (token >= oldest)
    scores = tl.dot(query, tl.trans(key)).to(tl.float32) * scale
    scores = tl.where(valid[None, :], scores, float("-inf"))
    return add_tokens(highest, total, mixed, scores, value)


@triton.jit
def _add_parts(
    mixed_ptr, log_ptr, out_ptr, request, first_head, num_used, group,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_PARTS: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """The results of the heads of a key head, from the first `num_used` parts of a sequence."""
    head, columns = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    first_row = request * NUM_PARTS * NUM_HEADS + first_head
    highest, total = tl.full([HEADS], float("-inf"), tl.float32), tl.zeros([HEADS], tl.float32)
    out = tl.zeros([HEADS, WIDTH], tl.float32)
    for start in range(0, num_used, ADDED):
        part = start + tl.arange(0, ADDED)
        row = first_row + head[:, None] + part[None, :] * NUM_HEADS  # [HEADS, ADDED]
        exists = (head < group)[:, None] & (part < num_used)[None, :]
        inside = exists[:, :, None] & (columns < HEAD_DIM)[None, None, :]
        place = row[:, :, None] * HEAD_DIM + columns[None, None, :]
        mixed = tl.load(mixed_ptr + place, mask=inside, other=0.0, cache_modifier=".cg")
        logs = tl.load(log_ptr + row, mask=exists, other=float("-inf"), cache_modifier=".cg")
        highest, weights, kept = rescaled(highest, logs)
        total = total * kept + tl.sum(weights, 1)
        out = out * kept[:, None] + tl.sum(mixed * weights[:, :, None], 1)
    out_at = out_ptr + (request * NUM_HEADS + first_head + head[:, None]) * HEAD_DIM + columns[None, :]
    inside = (head < group)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(out_at, (out / tl.where(total > 0, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _store(
    mixed, total, highest, mixed_ptr, log_ptr, count_ptr, out_ptr, request, key_head, part, num_used,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_PARTS: tl.constexpr,
    GROUP_ROWS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Write the result of a sequence that is one part, or that of a part; the last program adds up all parts."""
    group: tl.constexpr = NUM_HEADS // NUM_KEY_HEADS
    rows, columns, first_head = tl.arange(0, GROUP_ROWS)[:, None], tl.arange(0, WIDTH)[None, :], key_head * group
    inside = (rows < group) & (columns < HEAD_DIM)
    if num_used == 1:
        place = (request * NUM_HEADS + first_head + rows) * HEAD_DIM + columns
        tl.store(out_ptr + place, mixed.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        row = (request * NUM_PARTS + part) * NUM_HEADS + first_head + rows
        tl.store(mixed_ptr + row * HEAD_DIM + columns, mixed, mask=inside)
        log_total = tl.where(total > 0, highest + tl.log2(total), float("-inf"))
        tl.store(log_ptr + row, log_total[:, None], mask=rows < group)
        tl.debug_barrier()  # all threads have written before one of them counts the program
        count_at = count_ptr + request * NUM_KEY_HEADS + key_head
        if tl.atomic_add(count_at, 1, sem="acq_rel") == num_used - 1:
            tl.store(count_at, 0)
            _add_parts(
                mixed_ptr, log_ptr, out_ptr, request, first_head, num_used, group,
                NUM_HEADS, HEAD_DIM, NUM_PARTS, HEADS, WIDTH, ADDED,
            )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _whole_attention(
    projected_ptr, query_norm_ptr, key_norm_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr,
    key_ptr, value_ptr, table_ptr, length_ptr, mixed_ptr, log_ptr, count_ptr, out_ptr,
    scale, query_eps, key_eps, position_stride, slot_stride, table_stride, length_stride,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_NORMS: tl.constexpr, WINDOW: tl.constexpr, NUM_PARTS: tl.constexpr, GROUP_ROWS: tl.constexpr,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, ADDED: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    request, key_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(length_ptr + request * length_stride)
    begin, end, num_used = bounds(length, part, WINDOW, NUM_PARTS, TOKENS)
    if part >= num_used:
        return
    newest, oldest = length - 1, length - WINDOW
    rows, columns = tl.arange(0, GROUP_ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    table_at = table_ptr + request * table_stride
    is_last, end = newest < end, tl.minimum(end, newest)  # the newest token is of the last part, and not in the cache
    key, value = _tile(
        key_ptr, value_ptr, table_at, begin, end, key_head, columns, NUM_KEY_HEADS, HEAD_DIM, BLOCK_SIZE, TOKENS
    )
    copy, column = tl.arange(0, 2)[:, None, None], tl.arange(0, WIDTH)[None, None, :]
    exchanged = tl.where(copy == 0, column, column + HEAD_DIM // 2) % HEAD_DIM
    turn = _turn(cos_ptr, sin_ptr, tl.load(position_ptr + request * position_stride), copy, column, HEAD_DIM)
    slot = tl.load(slot_ptr + request * slot_stride).to(tl.int64) * NUM_KEY_HEADS + key_head
    query_weight, key_weight = turn, turn
    if HAS_NORMS:
        query_weight = tl.load(query_norm_ptr + exchanged).to(tl.float32)
        key_weight = tl.load(key_norm_ptr + exchanged).to(tl.float32)
    wait_for_results(IS_EARLY)

    query, new_key, new_value = _new_token(
        projected_ptr + request * (NUM_HEADS + 2 * NUM_KEY_HEADS) * HEAD_DIM, key_head, is_last, exchanged, turn,
        query_weight, key_weight, query_eps, key_eps,
        NUM_HEADS, NUM_KEY_HEADS, HEAD_DIM, HAS_NORMS, GROUP_ROWS, WIDTH,
    )  # fmt: skip
    is_written = (rows == 0) & (columns < tl.where(is_last, HEAD_DIM, 0))
    new_place = slot * HEAD_DIM + 0 * rows + columns
    tl.store(key_ptr + new_place, new_key, mask=is_written)
    tl.store(value_ptr + new_place, new_value, mask=is_written)
    score = tl.sum(query.to(tl.float32) * new_key.to(tl.float32), 1) * scale
    highest = tl.where(is_last, score, float("-inf"))
    total = tl.full([GROUP_ROWS], 1.0, tl.float32) * tl.where(is_last, 1.0, 0.0)
    mixed = new_value.to(tl.float32)
    highest, total, mixed = _with_tile(
        query, key, value, begin, end, oldest, highest, total, mixed, scale, TOKENS, WINDOW
    )
    for start in range(begin + TOKENS, end, TOKENS):
        key, value = _tile(
            key_ptr, value_ptr, table_at, start, end, key_head, columns, NUM_KEY_HEADS, HEAD_DIM, BLOCK_SIZE, TOKENS
        )
        highest, total, mixed = _with_tile(
            query, key, value, start, end, oldest, highest, total, mixed, scale, TOKENS, WINDOW
        )
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    _store(
        mixed, total, highest, mixed_ptr, log_ptr, count_ptr, out_ptr, request, key_head, part, num_used,
        NUM_HEADS, NUM_KEY_HEADS, HEAD_DIM, NUM_PARTS, GROUP_ROWS, HEADS, WIDTH, ADDED,
    )  # fmt: skip


def whole_attention_by_kernel(
    projected: Tensor,
    sizes: tuple[int, int, int],
    norms: tuple[RMSNorm, RMSNorm] | None,
    rotary: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    block_size: int,
    window: int | None,
    counts: Tensor,
) -> Tensor:
    """Equals `fused.rotate_and_store` and then `plain.decode_attention`: [requests, heads, head_dim].

    `counts` [at least requests * key heads] are zeros (int32), and zeros again afterwards. Kernels that may run at the
    same time need counts of their own.
    """
    num_heads, num_key_heads, head_dim = sizes
    num_requests, group = len(projected), num_heads // num_key_heads
    num_programs, num_warps, num_registers = _LAUNCH_FOR_ONE if num_requests == 1 else _LAUNCH
    num_parts = number_of_parts(num_requests, num_key_heads, num_programs)
    out = projected.new_empty(num_requests, num_heads, head_dim)
    parts, logs = empty_parts(out, out, num_parts)
    strides = [one.stride(0) for one in (positions, slots, tables, lengths)]
    _whole_attention[(num_requests, num_key_heads, num_parts)](
        projected,
        *((projected, projected) if norms is None else (norms[0].weight, norms[1].weight)),
        *rotary,
        *(positions, slots, keys, values, tables, lengths, parts, logs, counts, out),
        head_dim**-0.5 * LOG2E,
        *((0.0, 0.0) if norms is None else (norms[0].eps, norms[1].eps)),
        *strides,
        *(num_heads, num_key_heads, head_dim, block_size),
        HAS_NORMS=norms is not None,
        WINDOW=window or 0,
        NUM_PARTS=num_parts,
        GROUP_ROWS=max(16, triton.next_power_of_2(group)),  # tensor cores need 16 rows
        WIDTH=max(16, triton.next_power_of_2(head_dim)),
        TOKENS=TOKENS,
        HEADS=triton.next_power_of_2(group),
        ADDED=min(_ADDED, num_parts),
        num_warps=num_warps,
        num_stages=3,
        **({"maxnreg": num_registers} if projected.is_cuda and torch.version.hip is None else {}),
        **early_launch(projected),
    )
    return out

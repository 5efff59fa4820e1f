"""`decode_attention` of `plain.py` as Triton kernels for GPUs, which read each key and value once.

A program handles the queries that share one key head of one request, over a part of its tokens: with few requests, the
sequence is split into parts so that all of the GPU works. A part's result and the logarithm of its softmax denominator
go to memory, and a second kernel adds the parts up. How many programs there are follows from the batch's size alone, so
the launch is the same in every step and can be recorded in a CUDA graph. A short sequence has fewer parts than
programs; the other programs end at once.

With chosen slots (`loki_kernel.py`), a request's tokens are those in the slots that its key head has chosen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.serve.weights.shared_steps_kernel import early_launch, wait_for_results

TOKENS = 64  # that are loaded at a time
_PROGRAMS = 512  # as many as keep a GPU busy
_MAX_PARTS = 64
LOG2E = 1.4426950408889634
LN2 = tl.constexpr(0.6931471805599453)
VARYING = ("table_stride", "length_stride")  # from step to step: a kernel is not compiled again for some of them


@triton.jit
def _length(length_ptr, key_head, IS_CHOSEN: tl.constexpr, IS_EARLY: tl.constexpr):
    """Return the tokens of a request. They are an input of the step, so they are known before kernels before this one
    end; how many were chosen is not.
    """
    if IS_CHOSEN:
        wait_for_results(IS_EARLY)
        length = tl.load(length_ptr + key_head)
    else:
        length = tl.load(length_ptr)
        wait_for_results(IS_EARLY)
    return length


@triton.jit
def bounds(length, part, WINDOW: tl.constexpr, NUM_PARTS: tl.constexpr, TOKENS: tl.constexpr):
    """Return the first token of a part of a sequence, the one after its last, and the number of parts with tokens."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // TOKENS * TOKENS
    size = tl.maximum(tl.cdiv(tl.cdiv(length - first, NUM_PARTS), TOKENS), 1) * TOKENS
    begin = first + part * size
    return begin, tl.minimum(begin + size, length), tl.cdiv(length - first, size)


@triton.jit
def rescaled(highest, scores):
    """Do one step of a running softmax. Return the highest score of each row [rows] with the new scores [rows,
    columns], the weights of these, and the factor for the sums of earlier ones.
    """
    above = tl.maximum(highest, tl.max(scores, 1))
    safe = tl.where(above == float("-inf"), 0.0, above)
    return above, tl.exp2(scores - safe[:, None]), tl.exp2(highest - safe)


@triton.jit
def add_tokens(highest, total, mixed, scores, value):
    """Add tokens to a running softmax: their scores [rows, tokens] and values [tokens, WIDTH]."""
    highest, weights, kept = rescaled(highest, scores)
    total = total * kept + tl.sum(weights, 1)
    return highest, total, mixed * kept[:, None] + tl.dot(weights.to(value.dtype), value)


@triton.jit
def page_rows(table_ptr, token, valid, key_head, NUM_KEY_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the rows of the cache [slots * key heads] that hold tokens, by the block table of their request."""
    block = tl.load(table_ptr + token // BLOCK_SIZE, mask=valid, other=0)
    return (block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE) * NUM_KEY_HEADS + key_head


@triton.jit
def keys_and_values(key_ptr, value_ptr, row, valid, columns, HEAD_DIM: tl.constexpr):
    """Load the keys and values in rows of the cache, [tokens, WIDTH] each. `columns` are [1, WIDTH]."""
    place, loaded = row[:, None] * HEAD_DIM + columns, valid[:, None] & (columns < HEAD_DIM)
    return tl.load(key_ptr + place, mask=loaded, other=0.0), tl.load(value_ptr + place, mask=loaded, other=0.0)


@triton.jit(do_not_specialize=VARYING)
def _parts(
    query_ptr, key_ptr, value_ptr, table_ptr, length_ptr, chosen_ptr, mixed_ptr, log_ptr, scale,
    query_stride, table_stride, length_stride, chosen_stride,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, NUM_PARTS: tl.constexpr, GROUP_ROWS: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, IS_CHOSEN: tl.constexpr, OUT_WIDTH: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    request, key_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = NUM_HEADS // NUM_KEY_HEADS
    length = _length(length_ptr + request * length_stride, key_head, IS_CHOSEN, IS_EARLY)
    begin, end, num_used = bounds(length, part, WINDOW, NUM_PARTS, TOKENS)
    if part >= num_used and (NUM_PARTS > 1 or OUT_WIDTH == HEAD_DIM):
        return
    rows, columns = tl.arange(0, GROUP_ROWS), tl.arange(0, WIDTH)
    heads = key_head * group + rows
    inside = (rows < group)[:, None] & (columns < HEAD_DIM)[None, :]
    query_place = request * query_stride + heads[:, None] * HEAD_DIM + columns[None, :]
    query = tl.load(query_ptr + query_place, mask=inside, other=0.0)
    highest = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    mixed = tl.zeros([GROUP_ROWS, WIDTH], tl.float32)
    for start in range(begin, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        valid = token < end
        if IS_CHOSEN:
            chosen = chosen_ptr + (request * NUM_KEY_HEADS + key_head) * chosen_stride
            row = tl.load(chosen + token, mask=valid, other=0).to(tl.int64) * NUM_KEY_HEADS + key_head
        else:
            row = page_rows(table_ptr + request * table_stride, token, valid, key_head, NUM_KEY_HEADS, BLOCK_SIZE)
        key, value = keys_and_values(key_ptr, value_ptr, row, valid, columns[None, :], HEAD_DIM)
        scores = tl.dot(query, tl.trans(key)).to(tl.float32) * scale
        if WINDOW > 0:
            valid = valid & (token >= length - WINDOW)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        highest, total, mixed = add_tokens(highest, total, mixed, scores, value)

    # Without parts, row and place are those of the result.
    row = (request * NUM_PARTS + part) * NUM_HEADS + heads
    mixed = (mixed / tl.where(total > 0, total, 1.0)[:, None]).to(mixed_ptr.dtype.element_ty)
    log_total = tl.where(total > 0, highest + tl.log2(total), float("-inf"))
    if NUM_PARTS > 1:
        tl.store(mixed_ptr + row[:, None] * HEAD_DIM + columns[None, :], mixed, mask=inside)
        tl.store(log_ptr + row, log_total, mask=rows < group)
    else:
        tl.store(mixed_ptr + row[:, None] * OUT_WIDTH + columns[None, :], mixed, mask=inside)
        if OUT_WIDTH > HEAD_DIM:
            tl.store(mixed_ptr + row * OUT_WIDTH + HEAD_DIM, log_total * LN2, mask=rows < group)


@triton.jit(do_not_specialize=["length_stride"])
def _sum_of_used_parts(
    mixed_ptr, log_ptr, length_ptr, out_ptr, length_stride,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    NUM_PARTS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, IS_CHOSEN: tl.constexpr,
    OUT_WIDTH: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    length = _length(length_ptr + request * length_stride, key_head, IS_CHOSEN, IS_EARLY)
    _, _, num_used = bounds(length, 0, WINDOW, NUM_PARTS, TOKENS)
    if num_used > 0 or OUT_WIDTH > HEAD_DIM:
        _add_parts(
            mixed_ptr, log_ptr, out_ptr, request, head, num_used, NUM_HEADS, HEAD_DIM, NUM_PARTS, WIDTH, OUT_WIDTH
        )


@triton.jit
def _add_parts(
    mixed_ptr, log_ptr, out_ptr, request, head, num_used,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_PARTS: tl.constexpr, WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
):  # fmt: skip
    """The result of one head from the first `num_used` parts of its sequence.

    There are some, unless the result has room for the logarithm of its softmax denominator.
    """
    parts, columns = tl.arange(0, NUM_PARTS), tl.arange(0, WIDTH)
    row, is_used, inside = (request * NUM_PARTS + parts) * NUM_HEADS + head, parts < num_used, columns < HEAD_DIM
    logs = tl.load(log_ptr + row, mask=is_used, other=float("-inf"))
    place, mask = row[:, None] * HEAD_DIM + columns[None, :], is_used[:, None] & inside[None, :]
    mixed = tl.load(mixed_ptr + place, mask=mask, other=0.0)
    highest = tl.max(logs, 0)
    if OUT_WIDTH > HEAD_DIM:
        highest = tl.where(num_used > 0, highest, 0.0)
    weights = tl.exp2(logs - highest)
    total = tl.sum(weights, 0)
    row_ptr = out_ptr + (request * NUM_HEADS + head) * OUT_WIDTH
    if OUT_WIDTH > HEAD_DIM:
        tl.store(row_ptr + HEAD_DIM, (highest + tl.log2(total)) * LN2)
        total = tl.where(num_used > 0, total, 1.0)
    out = tl.sum(mixed * weights[:, None], 0) / total
    tl.store(row_ptr + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def sum_of_parts(
    mixed_ptr,
    log_ptr,
    out_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Of sequences whose parts all have tokens."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _add_parts(mixed_ptr, log_ptr, out_ptr, request, head, NUM_PARTS, NUM_HEADS, HEAD_DIM, NUM_PARTS, WIDTH, HEAD_DIM)


def empty_parts(query: Tensor, out: Tensor, num_parts: int) -> tuple[Tensor, Tensor]:
    """Return room for the results and the logarithms of parts of sequences; one part is the result `out`."""
    if num_parts == 1:
        return out, out
    num_requests, num_heads, head_dim = query.shape
    shape = (num_requests, num_parts, num_heads)
    return out.new_empty(*shape, head_dim, dtype=torch.float32), out.new_empty(shape, dtype=torch.float32)


def number_of_parts(num_requests: int, num_key_heads: int, num_programs: int | None = None) -> int:
    """Return the number of parts of a sequence, a power of two."""
    number = (num_programs or _PROGRAMS) // (num_requests * num_key_heads)
    return max(1, min(_MAX_PARTS, int(triton.next_power_of_2(number))))


def decode_attention_by_kernel(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    block_size: int,
    window: int | None,
    chosen: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Equals `plain.decode_attention`; see there for the arguments. Without `out`, all requests have tokens.

    With `chosen` slots [requests, key heads, most], `lengths` [requests, key heads] says how many of them there are.
    If `out` is [requests, heads, head_dim + 1], the last are the logarithms of softmax denominators. Then, a request
    without tokens gets zeros and minus infinity.
    """
    (num_requests, num_heads, head_dim), num_key_heads = query.shape, keys.shape[1]
    num_parts = number_of_parts(num_requests, num_key_heads)
    assert query.stride()[1:] == (head_dim, 1), "the heads of a query lie end to end"
    out = query.new_empty(query.shape) if out is None else out
    parts, logs = empty_parts(query, out, num_parts)
    sizes = {
        "NUM_HEADS": num_heads,
        "NUM_KEY_HEADS": num_key_heads,
        "HEAD_DIM": head_dim,
        "WINDOW": window or 0,
        "NUM_PARTS": num_parts,
        "WIDTH": max(16, triton.next_power_of_2(head_dim)),
        "TOKENS": TOKENS,
        "IS_CHOSEN": chosen is not None,
        "OUT_WIDTH": out.shape[-1],
        **early_launch(query),
    }
    _parts[(num_requests, num_key_heads, num_parts)](
        query,
        keys,
        values,
        tables,
        lengths,
        lengths if chosen is None else chosen,
        parts,
        logs,
        head_dim**-0.5 * LOG2E,
        query.stride(0),
        tables.stride(0),
        lengths.stride(0),
        0 if chosen is None else chosen.stride(1),
        BLOCK_SIZE=block_size,
        GROUP_ROWS=max(16, triton.next_power_of_2(num_heads // num_key_heads)),  # tensor cores need 16 rows
        num_warps=4,
        num_stages=3,
        **sizes,
    )
    if num_parts > 1:
        _sum_of_used_parts[num_requests, num_heads](parts, logs, lengths, out, lengths.stride(0), num_warps=4, **sizes)
    return out


@triton.jit
def _add_up(
    part_ptr, out_ptr, rank_stride, NUM_RANKS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row, rank_stride = tl.program_id(0).to(tl.int64), tl.cast(rank_stride, tl.int64)
    part_ptr += row * (HEAD_DIM + 1)
    columns = tl.arange(0, WIDTH)
    inside = columns < HEAD_DIM
    highest = tl.load(part_ptr + HEAD_DIM)
    for rank in tl.static_range(1, NUM_RANKS):
        highest = tl.maximum(highest, tl.load(part_ptr + rank * rank_stride + HEAD_DIM))
    mixed, total = tl.zeros([WIDTH], tl.float32), 0.0
    for rank in tl.static_range(NUM_RANKS):
        weight = tl.exp(tl.load(part_ptr + rank * rank_stride + HEAD_DIM) - highest)
        total += weight
        mixed += weight * tl.load(part_ptr + rank * rank_stride + columns, mask=inside, other=0.0)
    tl.store(out_ptr + row * HEAD_DIM + columns, (mixed / total).to(out_ptr.dtype.element_ty), mask=inside)


def add_up_by_kernel(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Equals `attend.add_up`; see there for the arguments."""
    num_ranks, num_tokens, num_heads, width = parts.shape
    assert parts.is_contiguous() and parts.dtype == torch.float32, "parts lie end to end"  # noqa: PT018
    out = torch.empty(num_tokens, num_heads, width - 1, dtype=dtype, device=parts.device)
    if num_tokens:
        sizes = {"NUM_RANKS": num_ranks, "HEAD_DIM": width - 1, "WIDTH": triton.next_power_of_2(width - 1)}
        _add_up[(num_tokens * num_heads,)](parts, out, parts.stride(0), num_warps=1, **sizes)
    return out

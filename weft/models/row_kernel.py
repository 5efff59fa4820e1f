"""The operations of `row_operations.py` as Triton kernels: every byte is read once and written once.

They compute in float32 and round results once. Nothing is summed by atomic additions, so results do not depend on the
order in which programs run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WIDTH = 2048  # the number of columns that a program handles at a time
_ROWS = 4  # the number of rows that a program copies: one alone is not enough work
_NUM_WARPS = 4


@triton.jit
def _take(
    tokens_ptr,
    sources_ptr,
    rows_ptr,
    num_pairs,
    num_rows,
    width,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    pair = tl.load(sources_ptr + row, mask=row < num_rows, other=num_pairs)
    is_used = (pair < num_pairs)[:, None] & (column < width)
    values = tl.load(tokens_ptr + (pair // K * width)[:, None] + column, mask=is_used, other=0.0)
    tl.store(rows_ptr + (row * width)[:, None] + column, values, mask=(row < num_rows)[:, None] & (column < width))


@triton.jit
def _sum(
    rows_ptr,
    places_ptr,
    weights_ptr,
    out_ptr,
    num_rows,
    width,
    K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(K):
        place = tl.load(places_ptr + token * K + choice)
        end = tl.where(place < num_rows, width, 0)
        row = tl.load(rows_ptr + place * width + column, mask=column < end, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            row *= tl.load(weights_ptr + token * K + choice).to(tl.float32)
        total += row
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _spread(
    gradient_ptr,
    rows_ptr,
    weights_ptr,
    sources_ptr,
    for_rows_ptr,
    for_weights_ptr,
    num_pairs,
    num_rows,
    width,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pair = tl.load(sources_ptr + row, mask=row < num_rows, other=num_pairs)
    is_used = pair < num_pairs
    weight = tl.load(weights_ptr + pair, mask=is_used, other=0.0).to(tl.float32)[:, None]
    total = tl.zeros([ROWS], tl.float32)
    for low in range(0, width, BLOCK):
        column = (low + tl.arange(0, BLOCK))[None, :]
        place, inside = (row * width)[:, None] + column, (row < num_rows)[:, None] & (column < width)
        values = tl.load(rows_ptr + place, mask=inside, other=0.0).to(tl.float32)
        token = (pair // K * width)[:, None] + column
        gradient = tl.load(gradient_ptr + token, mask=is_used[:, None] & (column < width), other=0.0).to(tl.float32)
        total += tl.sum(gradient * values, 1)
        tl.store(for_rows_ptr + place, (gradient * weight).to(for_rows_ptr.dtype.element_ty), mask=inside)
    tl.store(for_weights_ptr + pair, total, mask=is_used)


@triton.jit
def _gated(gradient_ptr, gate_up_ptr, out_ptr, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    start = row * 2 * inner + column
    gradient = tl.load(gradient_ptr + row * inner + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + start + inner, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    of_gate = gradient * up * share * (1 + gate * (1 - share))
    of_up = gradient * gate * share
    tl.store(out_ptr + start, of_gate.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + start + inner, of_up.to(out_ptr.dtype.element_ty), mask=inside)


def _block(width: int) -> int:
    return min(_WIDTH, int(triton.next_power_of_2(width)))


def take_rows(tokens: Tensor, sources: Tensor, k: int, is_padded: bool) -> Tensor:
    num_tokens, width = tokens.shape
    rows = tokens.new_empty(len(sources), width)
    grid = (triton.cdiv(len(rows), _ROWS), triton.cdiv(width, _block(width)))
    _take[grid](
        tokens.contiguous(),
        sources,
        rows,
        num_tokens * k,
        len(rows),
        width,
        K=k,
        ROWS=_ROWS,
        BLOCK=_block(width),
        num_warps=2 * _NUM_WARPS,
    )
    return rows


def sum_rows(rows: Tensor, places: Tensor, weights: Tensor | None, k: int, is_padded: bool) -> Tensor:
    num_rows, width = rows.shape
    out = rows.new_empty(len(places) // k, width)
    grid = (len(out), triton.cdiv(width, _block(width)))
    _sum[grid](
        rows.contiguous(),
        places,
        out if weights is None else weights.contiguous(),
        out,
        num_rows,
        width,
        K=k,
        HAS_WEIGHTS=weights is not None,
        BLOCK=_block(width),
        num_warps=_NUM_WARPS,
    )
    return out


def spread_rows(
    gradient: Tensor, rows: Tensor, weights: Tensor, sources: Tensor, places: Tensor, is_padded: bool
) -> tuple[Tensor, Tensor]:
    for_rows = rows.new_empty(rows.shape)
    for_weights = weights.new_zeros(weights.shape) if is_padded else weights.new_empty(weights.shape)
    _spread[(triton.cdiv(len(rows), _ROWS),)](
        gradient.contiguous(),
        rows.contiguous(),
        weights.contiguous(),
        sources,
        for_rows,
        for_weights,
        weights.numel(),
        len(rows),
        rows.shape[1],
        K=weights.shape[1],
        ROWS=_ROWS,
        BLOCK=_block(rows.shape[1]),
        num_warps=2 * _NUM_WARPS,
    )
    return for_rows, for_weights


def gated_gradient(gradient: Tensor, gate_up: Tensor) -> Tensor:
    num_rows, inner = gradient.shape
    out = gate_up.new_empty(gate_up.shape)
    grid = (num_rows, triton.cdiv(inner, _block(inner)))
    _gated[grid](gradient.contiguous(), gate_up.contiguous(), out, inner, BLOCK=_block(inner), num_warps=_NUM_WARPS)
    return out

"""Steps of a block as Triton kernels for GPUs: each reads its input from memory once and writes it once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.models.attention import RMSNorm
from weft.serve.weights.packed_token_kernel import with_bias_and_gate
from weft.serve.weights.shared_steps_kernel import early_launch, wait_for_results

_COLUMNS = 2048  # of a weight that are read at a time
_HEADS = 8  # that a program rotates


@triton.jit
def _norm(hidden_ptr, weight_ptr, normed_ptr, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr, IS_EARLY: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64) * SIZE, tl.arange(0, WIDTH)
    inside = columns < SIZE
    wait_for_results(IS_EARLY)
    hidden = tl.load(hidden_ptr + row + columns, mask=inside, other=0.0)
    wide = hidden.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)).to(hidden.dtype)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    normed = (weight.to(tl.float32) * normed.to(tl.float32)).to(hidden.dtype)
    tl.store(normed_ptr + row + columns, normed, mask=inside)


def norm_by_kernel(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Equals an RMSNorm with this weight, of any number of rows in fp16 or bf16."""
    size = hidden.shape[-1]
    out = torch.empty_like(hidden)
    width = triton.next_power_of_2(size)
    num_warps = min(16, max(1, width // 512))
    early = early_launch(hidden)
    _norm[(len(hidden),)](hidden, weight, out, eps, SIZE=size, WIDTH=width, num_warps=num_warps, **early)
    return out


@triton.jit
def _gated(gate_up_ptr, out_ptr, SIZE: tl.constexpr, WIDTH: tl.constexpr, IS_EARLY: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < SIZE
    wait_for_results(IS_EARLY)
    gate = tl.load(gate_up_ptr + row * 2 * SIZE + columns, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * SIZE + SIZE + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, (silu * up.to(tl.float32)).to(gate.dtype), mask=inside)


def gated_by_kernel(gate_up: Tensor) -> Tensor:
    """Equals `plain_gate` (`serve/weights/steps.py`), of any number of rows in fp16 or bf16."""
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(len(gate_up), size)
    width = min(1024, triton.next_power_of_2(size))
    grid = (len(gate_up), triton.cdiv(size, width))
    _gated[grid](gate_up, out, SIZE=size, WIDTH=width, num_warps=4, **early_launch(gate_up))
    return out


@triton.jit
def _rotate_and_store(
    projected_ptr, query_norm_ptr, key_norm_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr,
    query_ptr, key_ptr, value_ptr, query_eps, key_eps, position_stride, slot_stride,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_NORMS: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """A program handles HEADS heads of q, k and v of one token, in halves."""
    token, head = tl.program_id(0).to(tl.int64), (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    half: tl.constexpr = HEAD_DIM // 2
    columns = tl.arange(0, WIDTH)[None, :]  # of one half of a head
    key_head, value_head = head - NUM_HEADS, head - NUM_HEADS - NUM_KEY_HEADS
    inside = (columns < half) & (value_head < NUM_KEY_HEADS)
    wait_for_results(IS_EARLY)
    start = projected_ptr + (token * (NUM_HEADS + 2 * NUM_KEY_HEADS) + head) * HEAD_DIM + columns
    first, second = tl.load(start, mask=inside, other=0.0), tl.load(start + half, mask=inside, other=0.0)
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORMS:
        square = (tl.sum(wide_first * wide_first, 1) + tl.sum(wide_second * wide_second, 1)) / HEAD_DIM
        factor = tl.rsqrt(square[:, None] + tl.where(key_head >= 0, key_eps, query_eps))
        of_query, of_key = inside & (key_head < 0), inside & (key_head >= 0)
        weight_first = tl.load(query_norm_ptr + columns, mask=of_query, other=0.0)
        weight_first += tl.load(key_norm_ptr + columns, mask=of_key, other=0.0)
        weight_second = tl.load(query_norm_ptr + half + columns, mask=of_query, other=0.0)
        weight_second += tl.load(key_norm_ptr + half + columns, mask=of_key, other=0.0)
        wide_first = (wide_first * factor).to(first.dtype).to(tl.float32) * weight_first.to(tl.float32)
        wide_second = (wide_second * factor).to(first.dtype).to(tl.float32) * weight_second.to(tl.float32)
        wide_first, wide_second = wide_first.to(first.dtype).to(tl.float32), wide_second.to(first.dtype).to(tl.float32)
    table = tl.load(position_ptr + token * position_stride).to(tl.int64) * HEAD_DIM + columns
    cos = tl.load(cos_ptr + table, mask=columns < half, other=0.0).to(tl.float32)  # both halves have the same angles
    sin = tl.load(sin_ptr + table, mask=columns < half, other=0.0).to(tl.float32)
    rotated_first = (wide_first * cos - wide_second * sin).to(first.dtype)
    rotated_second = (wide_second * cos + wide_first * sin).to(first.dtype)
    query_place = query_ptr + (token * NUM_HEADS + head) * HEAD_DIM + columns
    tl.store(query_place, rotated_first, mask=inside & (key_head < 0))
    tl.store(query_place + half, rotated_second, mask=inside & (key_head < 0))
    slot = tl.load(slot_ptr + token * slot_stride).to(tl.int64) * NUM_KEY_HEADS
    key_place = key_ptr + (slot + key_head) * HEAD_DIM + columns
    tl.store(key_place, rotated_first, mask=inside & (key_head >= 0) & (value_head < 0))
    tl.store(key_place + half, rotated_second, mask=inside & (key_head >= 0) & (value_head < 0))
    value_place = value_ptr + (slot + value_head) * HEAD_DIM + columns
    tl.store(value_place, first, mask=inside & (value_head >= 0))
    tl.store(value_place + half, second, mask=inside & (value_head >= 0))


def rotate_and_store_by_kernel(
    projected: Tensor,
    sizes: tuple[int, int, int],
    norms: tuple[RMSNorm, RMSNorm] | None,
    rotary: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Equals `rotate_by_angles` (`serve/weights/steps.py`) with the angles of the positions, in fp16 or bf16."""
    num_heads, num_key_heads, head_dim = sizes
    query = projected.new_empty(len(projected), num_heads, head_dim)
    query_norm, key_norm = (projected, projected) if norms is None else (norms[0].weight, norms[1].weight)
    query_eps, key_eps = (0.0, 0.0) if norms is None else (norms[0].eps, norms[1].eps)
    _rotate_and_store[(len(projected), triton.cdiv(num_heads + 2 * num_key_heads, _HEADS))](
        projected,
        query_norm,
        key_norm,
        *rotary,
        positions,
        slots,
        query,
        keys,
        values,
        query_eps,
        key_eps,
        positions.stride(0),
        slots.stride(0),
        NUM_HEADS=num_heads,
        NUM_KEY_HEADS=num_key_heads,
        HEAD_DIM=head_dim,
        HAS_NORMS=norms is not None,
        HEADS=_HEADS,
        WIDTH=triton.next_power_of_2(head_dim // 2),
        num_warps=1,
        **early_launch(projected),
    )
    return query


@triton.jit
def _row_linear(
    row_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    norm_ptr,
    out_ptr,
    eps,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """A program gives ROWS results. The norm's factor is the same for all of the row, so it is applied at the end.

    Weights are loaded one step ahead, the first of them before the row is known.
    """
    outs, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    exists = outs < NUM_OUT
    start = weight_ptr + outs.to(tl.int64)[:, None] * NUM_IN + columns[None, :]
    total, gate = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([COLUMNS], tl.float32)
    mask = exists[:, None] & (columns < NUM_IN)[None, :]
    next_gate = tl.load(start, mask=mask, other=0.0)
    next_weight = next_gate
    if IS_GATED:
        next_weight = tl.load(start + NUM_OUT * NUM_IN, mask=mask, other=0.0)
    wait_for_results(IS_EARLY)
    for low in range(0, NUM_IN, COLUMNS):
        inside = low + columns < NUM_IN
        row = tl.load(row_ptr + low + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += row * row
            row = row * tl.load(norm_ptr + low + columns, mask=inside, other=0.0).to(tl.float32)
        gate_weight, weight = next_gate, next_weight
        mask = exists[:, None] & (low + COLUMNS + columns < NUM_IN)[None, :]
        next_gate = tl.load(start + low + COLUMNS, mask=mask, other=0.0)
        next_weight = next_gate
        if IS_GATED:
            next_weight = tl.load(start + NUM_OUT * NUM_IN + low + COLUMNS, mask=mask, other=0.0)
            gate += gate_weight.to(tl.float32) * row[None, :]
        total += weight.to(tl.float32) * row[None, :]
    result, gate_result = tl.sum(total, 1), tl.sum(gate, 1)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / NUM_IN + eps)
        result, gate_result = result * factor, gate_result * factor
    result = with_bias_and_gate(result, gate_result, bias_ptr, outs, exists, NUM_OUT, HAS_BIAS, IS_GATED)
    if HAS_RESIDUAL:
        result += tl.load(residual_ptr + outs, mask=exists, other=0.0).to(tl.float32)
    tl.store(out_ptr + outs, result.to(out_ptr.dtype.element_ty), mask=exists)


def row_linear_by_kernel(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    norm: RMSNorm | None = None,
    is_gated: bool = False,
) -> Tensor:
    """Equals `PlainLinear` (`linear.py`) with a norm or a residual, for one token [1, in] in fp16 or bf16.

    Every weight is read once, as fast as the memory gives it. The norm of the token is not rounded in between.
    """
    num_out, num_in = weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
    out = hidden.new_empty(1, num_out)
    rows, num_warps = _row_tile(num_out, num_in, is_gated)
    _row_linear[(triton.cdiv(num_out, rows),)](
        hidden,
        weight,
        hidden if bias is None else bias,
        hidden if residual is None else residual,
        hidden if norm is None else norm.weight,
        out,
        0.0 if norm is None else norm.eps,
        NUM_IN=num_in,
        NUM_OUT=num_out,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_NORM=norm is not None,
        IS_GATED=is_gated,
        ROWS=rows,
        COLUMNS=min(_COLUMNS, triton.next_power_of_2(num_in)),
        num_warps=num_warps,
        **early_launch(hidden),
    )
    return out


def _row_tile(num_out: int, num_in: int, is_gated: bool) -> tuple[int, int]:
    """Return how many results a program computes, and its warps: the fastest of some on an H200, for a model of 8B."""
    if num_in > 4 * _COLUMNS or is_gated:
        return 1, 8
    return (1, 4) if num_out <= 4096 else (2, 8)

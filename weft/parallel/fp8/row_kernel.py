"""The operations of `operations.py` on rows as Triton kernels.

They compute in float32 and round to fp8 once. Programs that make scales hold a whole row. A program that transposes
reads and writes one tile; programs with neighbouring numbers have the same columns, which stay in the cache while many
rows are gathered from few tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.parallel.fp8.operations import DTYPE

_TILE = 128  # the rows and columns that a program transposes
_TURN_WARPS = 8
_WARP_COLUMNS = 512  # the columns of a row that a warp handles
_GROUP_BLOCK = 1024  # the rows of a group that are handled at a time


@triton.jit
def _scale_of(largest):
    bits = tl.maximum(largest / 448.0, 8.673617379884035e-19).to(tl.int32, bitcast=True)  # 2^-60 at least
    return ((bits + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)


@triton.jit
def _quantise(rows_ptr, values_ptr, scale_ptr, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    wide = tl.load(rows_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = _scale_of(tl.max(tl.abs(wide), 0))
    tl.store(values_ptr + row * width + column, (wide * (1.0 / scale)).to(tl.float8e4nv), mask=inside)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _gated(gate_up_ptr, values_ptr, scale_ptr, inner, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < inner
    start = row * 2 * inner + column
    gate = tl.load(gate_up_ptr + start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + start + inner, mask=inside, other=0.0).to(tl.float32)
    gated = gate * tl.sigmoid(gate) * up
    scale = _scale_of(tl.max(tl.abs(gated), 0))
    tl.store(values_ptr + row * inner + column, (gated * (1.0 / scale)).to(tl.float8e4nv), mask=inside)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _gated_gradient(
    gradient_ptr,
    gate_up_ptr,
    weights_ptr,
    values_ptr,
    scale_ptr,
    of_weights_ptr,
    inner,
    BLOCK: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < inner
    start = row * 2 * inner + column
    gradient = tl.load(gradient_ptr + row * inner + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + start + inner, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    tl.store(of_weights_ptr + row, tl.sum(gradient * gate * share * up, 0))
    gradient *= tl.load(weights_ptr + row)
    of_gate = gradient * up * share * (1 + gate * (1 - share))
    of_up = gradient * gate * share
    scale = _scale_of(tl.max(tl.maximum(tl.abs(of_gate), tl.abs(of_up)), 0))
    tl.store(values_ptr + start, (of_gate * (1.0 / scale)).to(tl.float8e4nv), mask=inside)
    tl.store(values_ptr + start + inner, (of_up * (1.0 / scale)).to(tl.float8e4nv), mask=inside)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _factors(
    left_ptr, right_ptr, ends_ptr, factors_ptr, largest_ptr, num_rows, NUM_GROUPS: tl.constexpr, BLOCK: tl.constexpr
):
    group = tl.program_id(0)
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_ptr + group, mask=group < NUM_GROUPS, other=num_rows)
    used = tl.where(group < NUM_GROUPS, end, 0)  # no row behind the last group is read
    highest = tl.zeros([BLOCK], tl.float32)
    for low in range(start, used, BLOCK):
        row = low + tl.arange(0, BLOCK)
        left = tl.load(left_ptr + row, mask=row < end, other=0.0)
        highest = tl.maximum(highest, tl.abs(left * tl.load(right_ptr + row, mask=row < end, other=0.0)))
    largest = tl.maximum(tl.max(highest, 0), 1.1754943508222875e-38)
    if group < NUM_GROUPS:
        tl.store(largest_ptr + group, largest)
    for low in range(start, end, BLOCK):
        row = low + tl.arange(0, BLOCK)
        left = tl.load(left_ptr + row, mask=row < used, other=0.0)
        product = left * tl.load(right_ptr + row, mask=row < used, other=0.0)
        tl.store(factors_ptr + row, product / largest, mask=row < end)


@triton.jit
def _turn(
    rows_ptr,
    sources_ptr,
    factors_ptr,
    out_ptr,
    num_pairs,
    num_rows,
    width,
    K: tl.constexpr,
    HAS_SOURCES: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    TILE: tl.constexpr,
):
    first = tl.program_id(2).to(tl.int64) * num_rows  # of the group
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_used = row < num_rows
    taken = first + row
    if HAS_SOURCES:
        pair = tl.load(sources_ptr + first + row, mask=is_used, other=num_pairs)
        is_used = pair < num_pairs
        taken = pair // K
    if HAS_FACTORS:
        factor = tl.load(factors_ptr + first + row, mask=row < num_rows, other=0.0)
        is_used &= factor != 0
    inside = is_used[:, None] & (column < width)[None, :]
    values = tl.load(rows_ptr + (taken * width)[:, None] + column[None, :], mask=inside, other=0.0)
    if HAS_FACTORS:
        values = (values.to(tl.float32) * factor[:, None]).to(tl.float8e4nv)
    place = first * width + column.to(tl.int64)[:, None] * num_rows + row[None, :]
    tl.store(out_ptr + place, tl.trans(values), mask=(column < width)[:, None] & (row < num_rows)[None, :])


def _launch(width: int) -> dict[str, int]:
    block = int(triton.next_power_of_2(width))
    return {"BLOCK": block, "num_warps": min(16, max(1, block // _WARP_COLUMNS))}


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    values, scale = rows.new_empty(rows.shape, dtype=DTYPE), rows.new_empty(len(rows), dtype=torch.float32)
    _quantise[(len(rows),)](rows.contiguous(), values, scale, rows.shape[1], **_launch(rows.shape[1]))
    return values, scale


def quantise_gated(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, inner = len(gate_up), gate_up.shape[1] // 2
    values = gate_up.new_empty(num_rows, inner, dtype=DTYPE)
    scale = gate_up.new_empty(num_rows, dtype=torch.float32)
    _gated[(num_rows,)](gate_up.contiguous(), values, scale, inner, **_launch(inner))
    return values, scale


def quantise_gated_gradient(gradient: Tensor, gate_up: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, inner = gradient.shape
    values = gate_up.new_empty(gate_up.shape, dtype=DTYPE)
    scale, of_weights = (gate_up.new_empty(num_rows, dtype=torch.float32) for _ in range(2))
    _gated_gradient[(num_rows,)](
        gradient.contiguous(),
        gate_up.contiguous(),
        weights.contiguous(),
        values,
        scale,
        of_weights,
        inner,
        **_launch(inner),
    )
    return values, scale, of_weights


def row_factors(left: Tensor, right: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    factors, largest = torch.empty_like(left), left.new_empty(len(ends))
    _factors[(len(ends) + 1,)](
        left.contiguous(),
        right.contiguous(),
        ends.contiguous(),
        factors,
        largest,
        len(left),
        NUM_GROUPS=len(ends),
        BLOCK=_GROUP_BLOCK,
    )
    return factors, largest


def turn_rows(rows: Tensor, sources: Tensor | None, k: int, factors: Tensor | None, num_groups: int) -> Tensor:
    width, all_rows = rows.shape[1], len(rows) if sources is None else len(sources)
    num_rows = all_rows // num_groups
    out = rows.new_empty(num_groups, width, num_rows, dtype=DTYPE)
    is_copied = factors is None  # bytes of fp8 are moved, and need no conversion
    assert not is_copied or rows.dtype == DTYPE
    _turn[(triton.cdiv(num_rows, _TILE), triton.cdiv(width, _TILE), num_groups)](
        rows.contiguous().view(torch.uint8) if is_copied else rows.contiguous(),
        rows if sources is None else sources,
        rows if factors is None else factors.contiguous(),
        out.view(torch.uint8) if is_copied else out,
        len(rows) * k,
        num_rows,
        width,
        K=k,
        HAS_SOURCES=sources is not None,
        HAS_FACTORS=factors is not None,
        TILE=_TILE,
        num_warps=_TURN_WARPS,
    )
    return out

"""Products of the rows of experts in fp8 as Triton kernels, for which torch has slower ones.

Rows are sorted by group, and groups begin and end at multiples of a tile, so that no tile has rows of two groups.
A program computes one tile of the result, or one after another. Tiles that run at the same time share rows and weights,
which are read from the cache. Tensor cores add up in float32 with fewer bits (as torch's `use_fast_accum`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

TILE = 128  # of rows; groups begin and end at multiples of it
WIDEST = 256  # of columns
_DEPTH = 128  # numbers that are summed over at a time


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched; `num_programs` = 0 is one for each tile."""

    columns: int
    num_warps: int
    num_stages: int
    num_programs: int = 0
    neighbours: int = 16


ROWS_LAUNCH = Launch(256, 8, 3)
WEIGHTS_LAUNCH = Launch(256, 8, 3)


@triton.jit
def _place(tile, num_row_tiles, num_column_tiles, NEIGHBOURS: tl.constexpr):
    """The row and column of a tile: neighbouring tiles are beside each other in blocks of so many rows."""
    width = NEIGHBOURS * num_column_tiles
    first = tile // width * NEIGHBOURS
    height = min(num_row_tiles - first, NEIGHBOURS)
    return first + tile % width % height, tile % width // height


@triton.jit
def _rows_tile(
    tile,
    left,
    right,
    out,
    left_scale_ptr,
    right_scale_ptr,
    groups_ptr,
    num_row_tiles,
    num_columns,
    depth,
    NUM_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    row_tile, column_tile = _place(tile, num_row_tiles, num_columns // COLUMNS, NEIGHBOURS)
    row, column = row_tile * ROWS, column_tile * COLUMNS
    group = tl.load(groups_ptr + row_tile)
    if group < NUM_GROUPS:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for low in tl.range(0, depth, DEPTH):
            a = left.load([row, low])
            b = right.load([group * num_columns + column, low])
            total = tl.dot(a, b.T, total)
        of_row = tl.load(left_scale_ptr + row + tl.arange(0, ROWS))
        of_column = tl.load(right_scale_ptr + group * num_columns + column + tl.arange(0, COLUMNS))
        out.store([row, column], (total * of_row[:, None] * of_column[None, :]).to(tl.bfloat16))


@triton.jit
def _rows_product(
    left,
    right,
    out,
    left_scale_ptr,
    right_scale_ptr,
    groups_ptr,
    num_row_tiles,
    num_columns,
    depth,
    NUM_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
):
    if NUM_PROGRAMS == 0:
        _rows_tile(
            tl.program_id(0),
            left,
            right,
            out,
            left_scale_ptr,
            right_scale_ptr,
            groups_ptr,
            num_row_tiles,
            num_columns,
            depth,
            NUM_GROUPS,
            ROWS,
            COLUMNS,
            DEPTH,
            NEIGHBOURS,
        )
    else:
        num_tiles = num_row_tiles * (num_columns // COLUMNS)
        for tile in tl.range(tl.program_id(0), num_tiles, NUM_PROGRAMS, flatten=True):
            _rows_tile(
                tile,
                left,
                right,
                out,
                left_scale_ptr,
                right_scale_ptr,
                groups_ptr,
                num_row_tiles,
                num_columns,
                depth,
                NUM_GROUPS,
                ROWS,
                COLUMNS,
                DEPTH,
                NEIGHBOURS,
            )


@triton.jit
def _weights_tile(
    index,
    left,
    right,
    out,
    scale_ptr,
    ends_ptr,
    num_left,
    num_right,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    of_group = num_left // ROWS * (num_right // COLUMNS)
    group = index // of_group
    row_tile, column_tile = _place(index % of_group, num_left // ROWS, num_right // COLUMNS, NEIGHBOURS)
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_ptr + group)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for low in tl.range(start, end, DEPTH):
        a = left.load([row_tile * ROWS, low])
        b = right.load([column_tile * COLUMNS, low])
        total = tl.dot(a, b.T, total)
    total *= tl.load(scale_ptr + group)
    out.store([group * num_left + row_tile * ROWS, column_tile * COLUMNS], total.to(tl.bfloat16))


@triton.jit
def _weights_product(
    left,
    right,
    out,
    scale_ptr,
    ends_ptr,
    num_left,
    num_right,
    NUM_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
):
    if NUM_PROGRAMS == 0:
        _weights_tile(
            tl.program_id(0),
            left,
            right,
            out,
            scale_ptr,
            ends_ptr,
            num_left,
            num_right,
            ROWS,
            COLUMNS,
            DEPTH,
            NEIGHBOURS,
        )
    else:
        num_tiles = NUM_GROUPS * (num_left // ROWS) * (num_right // COLUMNS)
        for index in tl.range(tl.program_id(0), num_tiles, NUM_PROGRAMS, flatten=True):
            _weights_tile(
                index,
                left,
                right,
                out,
                scale_ptr,
                ends_ptr,
                num_left,
                num_right,
                ROWS,
                COLUMNS,
                DEPTH,
                NEIGHBOURS,
            )


def _options(launch: Launch) -> dict[str, int | bool]:
    return {
        "ROWS": TILE,
        "COLUMNS": launch.columns,
        "DEPTH": _DEPTH,
        "NEIGHBOURS": launch.neighbours,
        "NUM_PROGRAMS": launch.num_programs,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
    }


def takes(*sizes: int) -> bool:
    """Do the kernels take matrices of these sizes?"""
    return all(size % WIDEST == 0 for size in sizes)


def fp8_rows_mm(left: Tensor, scale: Tensor, right: Tensor, scales: Tensor, ends: Tensor) -> Tensor:
    """Returns left [rows, k] times right [groups, n, k] of their group transposed, times scales [rows], [groups, n]."""
    (num_rows, depth), (num_groups, num_columns, _) = left.shape, right.shape
    tiles = torch.arange(0, num_rows, TILE, device=left.device, dtype=torch.int32)
    groups = torch.searchsorted(ends, tiles, right=True, out_int32=True)
    out = left.new_empty(num_rows, num_columns, dtype=torch.bfloat16)
    launch = ROWS_LAUNCH
    num_tiles = len(tiles) * (num_columns // launch.columns)
    _rows_product[(launch.num_programs or num_tiles,)](
        TensorDescriptor.from_tensor(left, [TILE, _DEPTH]),
        TensorDescriptor.from_tensor(right.view(-1, depth), [launch.columns, _DEPTH]),
        TensorDescriptor.from_tensor(out, [TILE, launch.columns]),
        scale,
        scales,
        groups,
        len(tiles),
        num_columns,
        depth,
        NUM_GROUPS=num_groups,
        **_options(launch),
    )
    return out


def fp8_weights_mm(left: Tensor, right: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    """Returns for each group its part of left [m, rows] times that of right [n, rows] transposed, times its scale."""
    num_left, num_right, num_groups = len(left), len(right), len(ends)
    out = left.new_empty(num_groups, num_left, num_right, dtype=torch.bfloat16)
    launch = WEIGHTS_LAUNCH
    num_tiles = num_groups * (num_left // TILE) * (num_right // launch.columns)
    _weights_product[(launch.num_programs or num_tiles,)](
        TensorDescriptor.from_tensor(left, [TILE, _DEPTH]),
        TensorDescriptor.from_tensor(right, [launch.columns, _DEPTH]),
        TensorDescriptor.from_tensor(out.view(-1, num_right), [TILE, launch.columns]),
        scale,
        ends,
        num_left,
        num_right,
        NUM_GROUPS=num_groups,
        **_options(launch),
    )
    return out

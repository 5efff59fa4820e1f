"""Products of the rows of experts in fp8 as Triton kernels, for which torch has slower ones.

Rows are sorted by group, and groups begin and end at multiples of a tile, so that no tile has rows of two groups.
A program computes one tile of the result. Tiles that run at the same time share rows and weights, which are read from
the cache. Two programs run on a processor, so that one multiplies while the other writes. Tensor cores add up in
float32 with fewer bits (as torch's `use_fast_accum`), which `benchmarks/expert_fp8.py` holds against float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

TILE = 128  # rows and columns of a tile, and the numbers that are summed over at a time
_NEIGHBOURS = 16  # tiles of rows that have the same columns before the next columns come
_LAUNCH = {"num_warps": 4, "num_stages": 3}


@triton.jit
def _place(tile, num_row_tiles, num_column_tiles, NEIGHBOURS: tl.constexpr):
    """The row and column of a tile: neighbouring tiles are beside each other in blocks of so many rows."""
    width = NEIGHBOURS * num_column_tiles
    first = tile // width * NEIGHBOURS
    height = min(num_row_tiles - first, NEIGHBOURS)
    return first + tile % width % height, tile % width // height


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
    TILE: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    row_tile, column_tile = _place(tl.program_id(0), num_row_tiles, num_columns // TILE, NEIGHBOURS)
    row, column = row_tile * TILE, column_tile * TILE
    group = tl.load(groups_ptr + row_tile)
    if group < NUM_GROUPS:
        total = tl.zeros([TILE, TILE], tl.float32)
        for low in range(0, depth, TILE):
            a = left.load([row, low])
            b = right.load([group * num_columns + column, low])
            total = tl.dot(a, b.T, total)
        of_row = tl.load(left_scale_ptr + row + tl.arange(0, TILE))
        of_column = tl.load(right_scale_ptr + group * num_columns + column + tl.arange(0, TILE))
        out.store([row, column], (total * of_row[:, None] * of_column[None, :]).to(tl.bfloat16))


@triton.jit
def _weights_product(
    left,
    right,
    out,
    scale_ptr,
    ends_ptr,
    num_left,
    num_right,
    TILE: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    of_group = num_left // TILE * (num_right // TILE)
    group = tl.program_id(0) // of_group
    row_tile, column_tile = _place(tl.program_id(0) % of_group, num_left // TILE, num_right // TILE, NEIGHBOURS)
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_ptr + group)
    total = tl.zeros([TILE, TILE], tl.float32)
    for low in range(start, end, TILE):
        a = left.load([row_tile * TILE, low])
        b = right.load([column_tile * TILE, low])
        total = tl.dot(a, b.T, total)
    total *= tl.load(scale_ptr + group)
    out.store([group * num_left + row_tile * TILE, column_tile * TILE], total.to(tl.bfloat16))


def takes(*sizes: int) -> bool:
    """Do the kernels take matrices of these sizes?"""
    return all(size % TILE == 0 for size in sizes)


def _tiled(matrix: Tensor) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [TILE, TILE])


def fp8_rows_mm(left: Tensor, scale: Tensor, right: Tensor, scales: Tensor, ends: Tensor) -> Tensor:
    """Returns left [rows, k] times right [groups, n, k] of their group transposed, times scales [rows], [groups, n]."""
    (num_rows, depth), (num_groups, num_columns, _) = left.shape, right.shape
    tiles = torch.arange(0, num_rows, TILE, device=left.device, dtype=torch.int32)
    groups = torch.searchsorted(ends, tiles, right=True, out_int32=True)
    out = left.new_empty(num_rows, num_columns, dtype=torch.bfloat16)
    _rows_product[(len(tiles) * (num_columns // TILE),)](
        _tiled(left),
        _tiled(right.view(-1, depth)),
        _tiled(out),
        scale,
        scales,
        groups,
        len(tiles),
        num_columns,
        depth,
        NUM_GROUPS=num_groups,
        TILE=TILE,
        NEIGHBOURS=_NEIGHBOURS,
        **_LAUNCH,
    )
    return out


def fp8_weights_mm(left: Tensor, right: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    """Returns for each group its part of left [m, rows] times that of right [n, rows] transposed, times its scale."""
    num_left, num_right, num_groups = len(left), len(right), len(ends)
    out = left.new_empty(num_groups, num_left, num_right, dtype=torch.bfloat16)
    _weights_product[(num_groups * (num_left // TILE) * (num_right // TILE),)](
        _tiled(left),
        _tiled(right),
        _tiled(out.view(-1, num_right)),
        scale,
        ends,
        num_left,
        num_right,
        TILE=TILE,
        NEIGHBOURS=_NEIGHBOURS,
        **_LAUNCH,
    )
    return out

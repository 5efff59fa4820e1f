"""Which rows of which expert a program of a Triton kernel computes.

Rows are sorted by expert, and a tile has some rows of one expert. The choice of experts is known on the device alone,
so there are as many tiles as any choice needs; some have no rows.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class ExpertRows(NamedTuple):
    """Rows that are sorted by expert; expert i's end before row `ends[i]`. They are rows of tokens: row r is that of
    token sources[r] // k. Where `is_single`, each row is one expert's alone: that of row r is `ends[r]`.
    """

    ends: Tensor
    sources: Tensor | None
    k: int
    num_rows: int
    num_experts: int
    is_single: bool = False

    @property
    def rows_each(self) -> int:
        """Rows of an expert, in the mean, as a power of two."""
        mean: int = triton.next_power_of_2(triton.cdiv(self.num_rows, self.num_experts))
        return mean

    def num_tiles(self, tile: int) -> int:
        """Tiles of at most `tile` rows, as many as any choice of experts needs."""
        return min(self.num_rows, self.num_experts + self.num_rows // tile)


@triton.jit
def rows_of_tile(end_ptr, tile, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr, IS_SINGLE: tl.constexpr):
    """The expert of a tile, and its first row and the row behind its last; both are equal for a tile too many."""
    if IS_SINGLE:
        expert, begin, end = tl.load(end_ptr + tile).to(tl.int32), tile, tile + 1
    else:
        number = tl.arange(0, EXPERTS)
        exists = number < num_experts
        ends = tl.load(end_ptr + number, mask=exists, other=0)
        begins = tl.load(end_ptr + number - 1, mask=exists & (number > 0), other=0)
        num_tiles = tl.cdiv(ends - begins, ROWS)
        last = tl.cumsum(num_tiles, 0)
        expert = tl.sum((exists & (last <= tile)).to(tl.int32), 0)
        is_own = number == expert
        first = tl.sum(tl.where(is_own, last - num_tiles, 0), 0)
        begin = tl.sum(tl.where(is_own, begins, 0), 0) + (tile - first) * ROWS
        end = tl.minimum(tl.sum(tl.where(is_own, ends, 0), 0), begin + ROWS)
        end = tl.where(expert < num_experts, end, begin)
        expert = tl.minimum(expert, num_experts - 1)
    return expert, begin, end

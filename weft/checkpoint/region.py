"""Which part of a global tensor a piece holds, and which parts two pieces share. Pure: no files, no torch.

Tensor axes cut a tensor into rectangles; the shard axis then cuts the flattened rectangle into ranges. A region is
therefore a rectangle and, inside it, a row-major range. Loading one layout from another is the overlap of two
regions: runs of elements that are contiguous in both pieces, so that a copy moves runs and never single elements.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from weft.errors import CheckpointError

MAX_ELEMENTS = 2**63 - 1
MAX_DIMS = 16
# Rectangles are compared pair by pair; more than this is no mesh, but a manifest that wants to keep us busy.
MAX_RECTANGLES = 4096


@dataclass(frozen=True)
class Region:
    """The rectangle of size `block` at `offsets` in a tensor of `shape`, and in it the flat range [start, stop)."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    block: tuple[int, ...]
    start: int
    stop: int

    def __post_init__(self) -> None:
        dims = len(self.shape)
        if dims > MAX_DIMS or len(self.offsets) != dims or len(self.block) != dims:
            raise CheckpointError(f"{self}: shape, offsets and block need the same length, {MAX_DIMS} dims at most")
        if min(self.shape, default=1) < 0 or prod(max(size, 1) for size in self.shape) > MAX_ELEMENTS:
            raise CheckpointError(f"{self}: sizes must be 0 or more and their product below 2**63")
        inside = all(
            min(offset, size) >= 0 and offset + size <= whole
            for whole, offset, size in zip(self.shape, self.offsets, self.block, strict=True)
        )
        if not inside:
            raise CheckpointError(f"{self}: the rectangle reaches outside the shape")
        if not 0 <= self.start <= self.stop <= prod(self.block):
            raise CheckpointError(f"{self}: the range must lie in the rectangle's {prod(self.block)} elements")

    @staticmethod
    def whole(shape: tuple[int, ...]) -> "Region":
        """The whole tensor."""
        return Region.flat(shape, 0, prod(shape))

    @staticmethod
    def flat(shape: tuple[int, ...], start: int, stop: int) -> "Region":
        """The row-major range [start, stop) of the whole tensor."""
        return Region(tuple(shape), (0,) * len(shape), tuple(shape), start, stop)

    @property
    def size(self) -> int:
        """The number of elements held."""
        return self.stop - self.start


def overlap(stored: Region, wanted: Region) -> npt.NDArray[np.int64]:
    """Rows (offset in the stored piece, offset in the wanted piece, length): runs contiguous in both. [runs, 3]

    Runs come in row-major order, so both offsets increase. An array and not a list, because a tensor that is cut
    by columns has as many runs as rows.
    """
    if stored.shape != wanted.shape:
        raise CheckpointError(f"the piece belongs to shape {stored.shape}, wanted is shape {wanted.shape}")
    low = [max(a, b) for a, b in zip(stored.offsets, wanted.offsets, strict=True)]
    common = [
        min(a + size_a, b + size_b) - at
        for a, size_a, b, size_b, at in zip(
            stored.offsets, stored.block, wanted.offsets, wanted.block, low, strict=True
        )
    ]
    if stored.size == 0 or wanted.size == 0 or min(common, default=1) <= 0:
        return np.empty((0, 3), np.int64)
    # Trailing dims that both pieces hold whole are contiguous in both, and so is a part of the next dim.
    outer = max(len(common) - 1, 0)
    while outer > 0 and common[outer] == stored.block[outer] == wanted.block[outer]:
        outer -= 1
    length = prod(common[outer:])
    firsts = []
    for region in (stored, wanted):
        strides = [prod(region.block[dim + 1 :]) for dim in range(len(common))]
        corner = sum((at - o) * stride for at, o, stride in zip(low, region.offsets, strides, strict=True))
        first = np.array([corner - region.start], np.int64)
        for dim in range(outer):
            first = (first[:, None] + np.arange(common[dim], dtype=np.int64) * strides[dim]).ravel()
        firsts.append(first)
    # The flat ranges cut runs short at either end, or away.
    skip = np.maximum(0, np.maximum(-firsts[0], -firsts[1]))
    end = np.minimum(length, np.minimum(stored.size - firsts[0], wanted.size - firsts[1]))
    runs = np.stack([firsts[0] + skip, firsts[1] + skip, end - skip], axis=1)
    return runs[runs[:, 2] > 0]


def covers(shape: tuple[int, ...], regions: Iterable[Region]) -> bool:
    """Whether the regions hold every element of the tensor exactly once.

    The rectangles must tile the tensor and the ranges must tile each rectangle, as every mesh cuts it; then the
    check needs no element-wise work. Regions without elements do not count.
    """
    ranges_of: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    for region in regions:
        if region.shape != tuple(shape):
            return False
        if region.size:
            ranges_of[region.offsets, region.block].append((region.start, region.stop))
    for (_, block), ranges in ranges_of.items():
        ranges.sort()
        stops = [0, *(stop for _, stop in ranges)]
        if [*(start for start, _ in ranges), prod(block)] != stops:
            return False
    if sum(prod(block) for _, block in ranges_of) != prod(shape) or len(ranges_of) > MAX_RECTANGLES:
        return False
    # The volumes add up, so the rectangles tile the tensor unless two of them overlap.
    low = np.array([offsets for offsets, _ in ranges_of], np.int64).reshape(len(ranges_of), len(shape))
    high = low + np.array([block for _, block in ranges_of], np.int64).reshape(low.shape)
    for index in range(1, len(low)):
        if np.any(np.all((low[:index] < high[index]) & (low[index] < high[:index]), axis=1)):
            return False
    return True

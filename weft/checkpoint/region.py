"""Regions: which part of a global tensor a piece holds, and which elements two pieces share. No files, no torch.

Tensor axes split a dim into intervals: one for a plain matrix, several for a fused one, where a rank holds its rows of
q, of k and of v, stacked. The local block is the product of the stacked intervals of all dims. The shard axis then
splits the flattened block into ranges. Loading another layout copies the overlap of two regions: runs of elements
that are contiguous in both pieces, so that a copy moves runs and never single elements.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt

from weft.errors import CheckpointError

Intervals = tuple[tuple[int, int], ...]  # (begin, end) pairs of one dim, as stacked in the local block

MAX_ELEMENTS = 2**63 - 1
MAX_DIMS = 16
# Blocks and intervals are compared pair by pair. No mesh has more than this, but a malicious manifest might.
MAX_BLOCKS = 4096
MAX_INTERVALS = 4096


@dataclass(frozen=True)
class Region:
    """The flat range [start, stop) of a rank's local block of a tensor of `shape`.

    `intervals` has for each dim the (begin, end) pairs that the local block stacks, in its order. Empty intervals are
    removed and adjacent ones are merged, so that equal blocks compare equal.
    """

    shape: tuple[int, ...]
    intervals: tuple[Intervals, ...]
    start: int
    stop: int

    def __post_init__(self) -> None:
        dims = len(self.shape)
        if dims > MAX_DIMS or len(self.intervals) != dims:
            raise CheckpointError(
                f"a region has {dims} dims and intervals for {len(self.intervals)}; they must be as many, "
                f"and {MAX_DIMS} dims at most"
            )
        if min(self.shape, default=1) < 0 or prod(max(size, 1) for size in self.shape) > MAX_ELEMENTS:
            raise CheckpointError(f"shape {self.shape}: sizes must be 0 or more and their product below 2**63")
        joined = tuple(_merged_intervals(self.shape, dim, intervals) for dim, intervals in enumerate(self.intervals))
        object.__setattr__(self, "intervals", joined)
        num_elements = prod(self.local_shape)
        if not 0 <= self.start <= self.stop <= num_elements:
            raise CheckpointError(
                f"the range must lie in the local block {self.local_shape} of {num_elements} elements, "
                f"[{self.start}, {self.stop}) does not"
            )

    @staticmethod
    def whole(shape: tuple[int, ...]) -> "Region":
        """The region of a whole tensor."""
        return Region.flat(shape, 0, prod(shape))

    @staticmethod
    def flat(shape: tuple[int, ...], start: int, stop: int) -> "Region":
        """The row-major range [start, stop) of the whole tensor."""
        return Region(tuple(shape), tuple(((0, size),) for size in shape), start, stop)

    @staticmethod
    def block(shape: tuple[int, ...], intervals: tuple[Intervals, ...]) -> "Region":
        """The region of a whole local block."""
        return Region(tuple(shape), intervals, 0, prod(_local_shape(intervals)))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the local block. The piece is a flat range of this block."""
        return _local_shape(self.intervals)

    @property
    def size(self) -> int:
        """The number of elements of the region."""
        return self.stop - self.start


def overlap(stored: Region, wanted: Region) -> npt.NDArray[np.int64]:
    """The runs of elements that two pieces share and that are contiguous in both, as rows (offset in the stored piece,
    offset in the wanted piece, length). [runs, 3]

    The result is an array, not a list, because a tensor that is split by columns has as many runs as rows. The runs of
    one interval follow each other, so that most have the same distance as the one before.
    """
    if stored.shape != wanted.shape:
        raise CheckpointError(f"the piece belongs to shape {stored.shape}, wanted is shape {wanted.shape}")
    shared = [_shared_segments(stored, wanted, dim) for dim in range(len(stored.shape))] or [
        np.array([[0, 0, 1]], np.int64)
    ]
    if stored.size == 0 or wanted.size == 0 or not all(len(segments) for segments in shared):
        return np.empty((0, 3), np.int64)
    # Trailing dims that both pieces hold whole, in the same order, are contiguous, as is a segment of the dim before.
    outer = len(shared) - 1
    while outer > 0 and shared[outer][0, 2] == stored.local_shape[outer] == wanted.local_shape[outer]:
        outer -= 1
    firsts = []
    for side, region in enumerate((stored, wanted)):
        strides = [prod(region.local_shape[dim + 1 :]) for dim in range(len(shared))]
        first = np.array([-region.start], np.int64)
        for dim in range(outer):
            first = (first[:, None] + _positions(shared[dim], side) * strides[dim]).ravel()
        firsts.append((shared[outer][:, side, None] * strides[outer] + first).ravel())  # [segments, rows] flattened
    length = np.repeat(shared[outer][:, 2] * strides[outer], len(first))
    # The flat ranges shorten runs at either end, or remove them.
    skip = np.maximum(0, np.maximum(-firsts[0], -firsts[1]))
    end = np.minimum(length, np.minimum(stored.size - firsts[0], wanted.size - firsts[1]))
    runs = np.stack([firsts[0] + skip, firsts[1] + skip, end - skip], axis=1)
    return runs[runs[:, 2] > 0]


def covers(shape: tuple[int, ...], regions: Iterable[Region]) -> bool:
    """Whether the regions hold every element of the tensor exactly once.

    The blocks must tile the tensor and the ranges must tile each block, as those of every mesh do. So the check needs
    no element-wise work. Regions without elements are ignored.
    """
    ranges_of: dict[tuple[Intervals, ...], list[tuple[int, int]]] = defaultdict(list)
    for region in regions:
        if region.shape != tuple(shape):
            return False
        if region.size:
            ranges_of[region.intervals].append((region.start, region.stop))
    sizes = [prod(_local_shape(block)) for block in ranges_of]
    for size, ranges in zip(sizes, ranges_of.values(), strict=True):
        ranges.sort()
        stops = [0, *(stop for _, stop in ranges)]
        if [*(start for start, _ in ranges), size] != stops:
            return False
    # If the volumes add up, the blocks tile the tensor unless two of them overlap.
    return sum(sizes) == prod(shape) and len(sizes) <= MAX_BLOCKS and _disjoint(list(ranges_of))


def _merged_intervals(shape: tuple[int, ...], dim: int, intervals: Intervals) -> Intervals:
    """Check the intervals of one dim, remove empty ones and merge adjacent ones; one empty one if all are empty."""
    if not 0 < len(intervals) <= MAX_INTERVALS:
        raise CheckpointError(f"dim {dim} has {len(intervals)} intervals, it needs 1 to {MAX_INTERVALS}")
    for begin, end in intervals:
        if not 0 <= begin <= end <= shape[dim]:
            raise CheckpointError(f"interval ({begin}, {end}) of dim {dim} reaches outside the shape {shape}")
    held = [(begin, end) for begin, end in intervals if begin < end]
    for one, other in pairwise(sorted(held)):
        if one[1] > other[0]:
            raise CheckpointError(f"intervals {one} and {other} of dim {dim} overlap; each row is held once")
    joined: list[tuple[int, int]] = []
    for begin, end in held:
        if joined and joined[-1][1] == begin:
            begin = joined.pop()[0]
        joined.append((begin, end))
    return tuple(joined) or ((0, 0),)


def _local_shape(intervals: tuple[Intervals, ...]) -> tuple[int, ...]:
    return tuple(sum(end - begin for begin, end in dim) for dim in intervals)


def _shared_segments(stored: Region, wanted: Region, dim: int) -> npt.NDArray[np.int64]:
    """The segments of one dim that both blocks hold, as rows (index in the stored block, index in the wanted block,
    length). [segments, 3]

    For dim 0, only segments that the flat ranges reach: a rank needs few rows of a large tensor that many ranks share.
    """
    spans = []
    for region in (stored, wanted):
        begin, end = np.array(region.intervals[dim], np.int64).T
        local = np.cumsum(end - begin) - (end - begin)
        shift = begin - local  # add it to an index in the local block to get the global index
        if dim == 0:
            stride = max(prod(region.local_shape[1:]), 1)
            begin = np.maximum(begin, region.start // stride + shift)
            end = np.minimum(end, -(-region.stop // stride) + shift)
        spans.append((begin, end, shift))
    (begin_a, end_a, shift_a), (begin_b, end_b, shift_b) = spans
    begin = np.maximum(begin_a, begin_b[:, None])  # [wanted intervals, stored intervals]
    length = np.minimum(end_a, end_b[:, None]) - begin
    row, column = np.nonzero(length > 0)
    begin = begin[row, column]
    segments = np.stack([begin - shift_a[column], begin - shift_b[row], length[row, column]], axis=1)
    if not len(segments):
        return segments
    # Segments that follow each other in both blocks are contiguous in both, wherever they are in the tensor.
    follows = np.all(segments[:-1, :2] + segments[:-1, 2:] == segments[1:, :2], axis=1)
    heads = np.flatnonzero(np.concatenate([[True], ~follows]))
    return np.column_stack([segments[heads, :2], np.add.reduceat(segments[:, 2], heads)])


def _positions(segments: npt.NDArray[np.int64], side: int) -> npt.NDArray[np.int64]:
    """Every index of the segments on one side. [positions]"""
    length = segments[:, 2]
    before = np.cumsum(length) - length
    return np.repeat(segments[:, side] - before, length) + np.arange(length.sum(), dtype=np.int64)


def _disjoint(blocks: list[tuple[Intervals, ...]]) -> bool:
    """Whether no two blocks overlap. Two blocks overlap if they share a part of every dim."""
    overlaps = np.ones((len(blocks), len(blocks)), bool)
    for of_dim in zip(*blocks, strict=True):
        numbers = {intervals: number for number, intervals in enumerate(dict.fromkeys(of_dim))}
        if len(numbers) == 1:
            continue
        if sum(len(intervals) for intervals in numbers) > MAX_INTERVALS:
            return False
        number = [numbers[intervals] for intervals in of_dim]
        overlaps &= _overlapping(list(numbers))[np.ix_(number, number)]
    return int(overlaps.sum()) == len(blocks)  # each overlaps only itself


def _overlapping(sets: list[Intervals]) -> npt.NDArray[np.bool_]:
    """Which pairs of these sets of intervals overlap. [sets, sets]"""
    pairs = sorted((begin, end, number) for number, intervals in enumerate(sets) for begin, end in intervals)
    begin, end, owner = np.array(pairs, np.int64).T
    after = np.arange(1, len(pairs) + 1)
    inside = np.searchsorted(begin, end) - after  # how many later intervals begin before this one ends
    later = _positions(np.stack([after, after, inside], axis=1), 0)
    overlaps = np.eye(len(sets), dtype=bool)
    overlaps[np.repeat(owner, inside), owner[later]] = True
    return overlaps | overlaps.T

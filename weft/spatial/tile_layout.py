"""The layout of a tensor in the whole image: which dims are rows and columns, and which pixels each rank holds.

A tensor carries its layout as an attribute. A tensor without one is whole, and the same on every rank. Recompute gives
a block new tensors without attributes; `LayoutNotes` recognises them by their memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from weft.comm import Axis
from weft.inspection.annotations import Annotation
from weft.inspection.nested_tensors import tensors_in
from weft.inspection.parameter_cut import Interval
from weft.inspection.rng import TileRng
from weft.spatial.ownership import Line

Shape = tuple[int, ...]
CollectiveCall = tuple[str, str, int]  # axis, operation, bytes
Needs = Callable[[Interval], Interval]


@dataclass(frozen=True)
class Grid:
    """The axes of the tiles as one rank sees them.

    In a dry run, `note` records the collectives of backward, and `layer` each operation that needs neighbouring pixels:
    the layouts of its input and output, and what outputs need along rows and columns.

    If batch norms take statistics over ranks with other samples too, `samples` has all ranks with other pixels or
    samples, and `batch` those with other samples.
    """

    rows: Axis
    columns: Axis
    tile: Axis
    rng: TileRng | None = None
    note: Callable[[list[CollectiveCall]], None] | None = None
    layer: Callable[[TileLayout, TileLayout, tuple[Needs, Needs]], None] | None = None
    samples: Axis | None = None
    batch: Axis | None = None

    def line(self, axis: Axis, size: int) -> Line:
        """Return a dim of which every rank holds what it owns."""
        return Line.of(size, axis.degree)


@dataclass(frozen=True)
class TileLayout:
    """The part of the whole image that a tensor holds. `dims` are those of rows and columns, counted from the end."""

    rows: Line
    columns: Line
    dims: tuple[int, int] = (-2, -1)

    @staticmethod
    def of(grid: Grid, sizes: tuple[int, int], dims: tuple[int, int] = (-2, -1)) -> TileLayout:
        """Return the layout in which every rank holds what it owns."""
        return TileLayout(grid.line(grid.rows, sizes[0]), grid.line(grid.columns, sizes[1]), dims)

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and columns of the whole image."""
        return self.rows.size, self.columns.size

    def held(self, grid: Grid) -> tuple[Interval, Interval]:
        """Return the rows and columns that this rank holds."""
        return self.rows.held[grid.rows.index], self.columns.held[grid.columns.index]

    def owned(self, grid: Grid) -> tuple[Interval, Interval]:
        """Return the rows and columns that this rank owns."""
        return self.rows.owned[grid.rows.index], self.columns.owned[grid.columns.index]

    def whole_shape(self, shape: Shape) -> Shape:
        """Return the shape of the whole tensor, given the shape of this rank's part."""
        found = list(shape)
        for dim, size in zip(self.dims, self.sizes, strict=True):
            found[dim] = size
        return tuple(found)

    def at(self, dims: tuple[int, int]) -> TileLayout:
        """Return the layout of the same pixels in other dims."""
        return replace(self, dims=dims)


@dataclass(frozen=True)
class BatchShare:
    """A rank's samples of a batch of `num_samples`, along the first dim, as whole images."""

    num_samples: int

    def whole_shape(self, shape: Shape) -> Shape:
        """Return the shape with all samples."""
        return (self.num_samples, *shape[1:])


_LAYOUT = Annotation[TileLayout | BatchShare | None]("layout")


def layout_of(tensor: Tensor) -> TileLayout | BatchShare | None:
    """Return the layout of a tensor; None if every rank holds the same whole tensor."""
    return _LAYOUT.get(tensor)


def set_layout(tensor: Tensor, layout: TileLayout | BatchShare | None) -> Tensor:
    """Set the layout of a tensor and return the tensor."""
    _LAYOUT.set(tensor, layout)
    return tensor


class LayoutNotes:
    """Layouts by memory address, for as long as the memory is allocated."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], tuple[StorageWeakRef, TileLayout | BatchShare]] = {}

    def record(self, value: Any) -> None:
        """Record the layouts of all tensors in a value."""
        for tensor in tensors_in(value):
            if (layout := layout_of(tensor)) is not None:
                self._found[_memory(tensor)] = StorageWeakRef(tensor.untyped_storage()), layout

    def restore(self, value: Any) -> None:
        """Set the recorded layout of each tensor that has none, found by its memory."""
        for tensor in tensors_in(value):
            if layout_of(tensor) is None and (known := self._found.get(_memory(tensor))) is not None:
                set_layout(tensor, known[1])

    def __deepcopy__(self, memo: Any) -> LayoutNotes:
        return LayoutNotes()  # a copy has other memory, and weak references to storages must not be copied

    def forget(self) -> None:
        """Drop the records of memory that was freed."""
        self._found = {key: one for key, one in self._found.items() if not one[0].expired()}


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()

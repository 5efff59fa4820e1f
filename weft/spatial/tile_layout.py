"""Where in the whole image a tensor lies: which dims are rows and columns, and which pixels each rank holds.

A tensor carries its place as an attribute. One without is the same whole tensor on every rank. What a checkpointed
block is given again in backward has lost its attributes: `Notes` knows it by its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from weft.comm import Axis
from weft.inspection.parameter_cut import Interval
from weft.inspection.rng import TileRng
from weft.spatial.ownership import Line

_ATTRIBUTE = "_weft_place"
Shape = tuple[int, ...]
Call = tuple[str, str, int]  # axis, operation, bytes
Needs = Callable[[Interval], Interval]


@dataclass(frozen=True)
class Grid:
    """The axes of the tiles as one rank sees them.

    A dry run's `note` takes what backward will say, and its `layer` each operation that looks at neighbours: where its
    input and output lie, and what outputs need along rows and columns.

    Where batch norms take statistics over ranks with other samples too, `samples` are all ranks with other pixels or
    samples, and `batch` those with other samples.
    """

    rows: Axis
    columns: Axis
    tile: Axis
    rng: TileRng | None = None
    note: Callable[[list[Call]], None] | None = None
    layer: Callable[[Place, Place, tuple[Needs, Needs]], None] | None = None
    samples: Axis | None = None
    batch: Axis | None = None

    def line(self, axis: Axis, size: int) -> Line:
        """A dim of which every rank holds what it owns."""
        return Line.of(size, axis.degree)


@dataclass(frozen=True)
class Place:
    """A tensor's part of the whole image. `dims` are those of rows and columns, counted from the end."""

    rows: Line
    columns: Line
    dims: tuple[int, int] = (-2, -1)

    @staticmethod
    def of(grid: Grid, sizes: tuple[int, int], dims: tuple[int, int] = (-2, -1)) -> Place:
        """Where every rank holds what it owns."""
        return Place(grid.line(grid.rows, sizes[0]), grid.line(grid.columns, sizes[1]), dims)

    @property
    def sizes(self) -> tuple[int, int]:
        """Of the whole image."""
        return self.rows.size, self.columns.size

    def held(self, grid: Grid) -> tuple[Interval, Interval]:
        """The rows and columns that this rank holds."""
        return self.rows.held[grid.rows.index], self.columns.held[grid.columns.index]

    def owned(self, grid: Grid) -> tuple[Interval, Interval]:
        """The rows and columns that this rank owns."""
        return self.rows.owned[grid.rows.index], self.columns.owned[grid.columns.index]

    def whole_shape(self, shape: Shape) -> Shape:
        """The shape of the whole of which a tensor of `shape` is this rank's part."""
        found = list(shape)
        for dim, size in zip(self.dims, self.sizes, strict=True):
            found[dim] = size
        return tuple(found)

    def at(self, dims: tuple[int, int]) -> Place:
        """The same pixels in other dims."""
        return replace(self, dims=dims)


@dataclass(frozen=True)
class Share:
    """A rank's samples of a batch of `num_samples`, along the first dim: whole images."""

    num_samples: int

    def whole_shape(self, shape: Shape) -> Shape:
        """The shape with all samples."""
        return (self.num_samples, *shape[1:])


def place_of(tensor: Tensor) -> Place | Share | None:
    """Where a tensor lies; None where every rank holds the same whole tensor."""
    return tensor.__dict__.get(_ATTRIBUTE)


def put(tensor: Tensor, place: Place | Share | None) -> Tensor:
    """Let a tensor lie at a place."""
    tensor.__dict__[_ATTRIBUTE] = place
    return tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


class Notes:
    """Places by memory, for as long as the memory lives."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], tuple[StorageWeakRef, Place | Share]] = {}

    def take_down(self, value: Any) -> None:
        """Note the places of all tensors in a value."""
        for tensor in tensors_in(value):
            if (place := place_of(tensor)) is not None:
                self._found[_memory(tensor)] = StorageWeakRef(tensor.untyped_storage()), place

    def restore(self, value: Any) -> None:
        """Give tensors that have none the places that were noted for their memory."""
        for tensor in tensors_in(value):
            if place_of(tensor) is None and (known := self._found.get(_memory(tensor))) is not None:
                put(tensor, known[1])

    def __deepcopy__(self, memo: Any) -> Notes:
        return Notes()  # of other memory; and weak references to storages are not to be copied

    def forget(self) -> None:
        """Drop what is about memory that is gone."""
        self._found = {key: one for key, one in self._found.items() if not one[0].expired()}


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()

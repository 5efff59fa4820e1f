"""Tiles with more than their own pixels, fetched once for several layers: whoever uses the tile later finds them too.

So a shortcut around the layers of a group holds as much as they do, and their sum needs no exchange of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from weft.inspection.parameter_cut import Interval
from weft.spatial.halo import Halo, fetch
from weft.spatial.ownership import Line, meet
from weft.spatial.tile_layout import Grid, Place, place_of, put

_ATTRIBUTE = "_weft_wide"


def widen(
    grid: Grid, value: Tensor, place: Place, rows: Sequence[Interval], columns: Sequence[Interval]
) -> tuple[Tensor, Place]:
    """A tile with the pixels that each rank needs, beside those it holds, where any of them needs some."""
    found = Place(_hull(place.rows, rows), _hull(place.columns, columns), place.dims)
    if found == place:
        return value, place
    wide = put(fetch(value, Halo.of(grid, place, found.rows.held, found.columns.held)), found)
    value.__dict__[_ATTRIBUTE] = wide, value._version
    return wide, found


def widest(tensor: Tensor) -> Tensor:
    """A tile with what has been fetched for it, unless it was changed since."""
    while True:
        wide, version = tensor.__dict__.get(_ATTRIBUTE, (tensor, -1))
        if version != tensor._version or place_of(tensor) is None:
            return tensor
        tensor = wide


def forget(tensors: Iterable[Tensor]) -> None:
    """Keep what was fetched for tiles no longer than the block that they were given to: recompute fetches again."""
    for tensor in tensors:
        tensor.__dict__.pop(_ATTRIBUTE, None)


def _hull(line: Line, needs: Sequence[Interval]) -> Line:
    found = []
    for held, need in zip(line.held, needs, strict=True):
        begin, end = meet(need, (0, line.size))
        found.append((min(held[0], begin), max(held[1], end)) if end > begin else held)
    return Line(line.size, tuple(found))

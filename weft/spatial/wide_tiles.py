"""Tiles with extra pixels, fetched once for several layers: later users of the tile find them too.

So a shortcut around the layers of a group holds as many pixels as they do, and their sum needs no exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from weft.inspection.annotations import Annotation
from weft.inspection.parameter_cut import Interval
from weft.spatial.halo import Halo, fetch
from weft.spatial.ownership import Line, meet
from weft.spatial.tile_layout import Grid, TileLayout, layout_of, set_layout

# On a tile: its widened version, and the version counter of the tile at the time.
_WIDENED = Annotation[tuple[Tensor, int]]("widened")


def widen(
    grid: Grid, value: Tensor, layout: TileLayout, rows: Sequence[Interval], columns: Sequence[Interval]
) -> tuple[Tensor, TileLayout]:
    """Return a tile that also has the pixels that each rank needs, and its layout; unchanged if no rank needs any."""
    found = TileLayout(_hull(layout.rows, rows), _hull(layout.columns, columns), layout.dims)
    if found == layout:
        return value, layout
    wide = set_layout(fetch(value, Halo.of(grid, layout, found.rows.held, found.columns.held)), found)
    _WIDENED.set(value, (wide, value._version))
    return wide, found


def widest(tensor: Tensor) -> Tensor:
    """Return the widened version of a tile if there is one and the tile has not changed since."""
    while True:
        wide, version = _WIDENED.get(tensor) or (tensor, -1)
        if version != tensor._version or layout_of(tensor) is None:
            return tensor
        tensor = wide


def forget(tensors: Iterable[Tensor]) -> None:
    """Drop the widened versions of tiles after the block that they were given to: recompute fetches them again."""
    for tensor in tensors:
        _WIDENED.pop(tensor)


def _hull(line: Line, needs: Sequence[Interval]) -> Line:
    found = []
    for held, need in zip(line.held, needs, strict=True):
        begin, end = meet(need, (0, line.size))
        found.append((min(held[0], begin), max(held[1], end)) if end > begin else held)
    return Line(line.size, tuple(found))

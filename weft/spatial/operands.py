"""Brings the operands of one operation to the same pixels; and the rules for operations on each pixel by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from weft.inspection.nested_tensors import map_tensors, tensors_in
from weft.spatial.arguments import SHAPED_AS_FIRST, is_in_place, plain_name
from weft.spatial.halo import Halo, fetch, widest
from weft.spatial.hand_over import own_part, to_tile
from weft.spatial.tile_layout import BatchShare, Grid, TileLayout, layout_of, set_layout
from weft.spatial.windows import Extra, Unsupported

Rule = Callable[..., Any]


class RuleContext(Protocol):
    """The part of the view that rules use."""

    grid: Grid

    def extra(self) -> Extra:
        """Return how many pixels beside its own a rank computes in the current operation."""


def common_layout(tensors: Sequence[Tensor], name: str) -> TileLayout:
    """Return the layout of the pixels that every rank holds of all operands."""
    layouts = [layout for tensor in tensors if isinstance(layout := layout_of(tensor), TileLayout)]
    first = layouts[0]
    for other in layouts[1:]:
        if other.sizes == first.sizes and other.dims != first.dims:
            raise Unsupported("takes images together whose rows and columns are in different dims")
        if other.sizes != first.sizes:
            raise Unsupported(f"takes images of {_size(first)} and of {_size(other)} pixels together")
        first = TileLayout(first.rows.common(other.rows), first.columns.common(other.columns), first.dims)
    return first


def _size(layout: TileLayout) -> str:
    return f"{layout.sizes[0]} × {layout.sizes[1]}"


def bring(grid: Grid, tensor: Tensor, target: TileLayout) -> Tensor:
    """Return the pixels of the target layout of a tile, or of a whole tensor."""
    tensor = widest(tensor)
    layout = layout_of(tensor)
    if layout is None:
        return to_tile(tensor, target, grid)
    assert isinstance(layout, TileLayout)
    if layout == target:
        return tensor
    return fetch(tensor, Halo.of(grid, layout, target.rows.held, target.columns.held))


def set_layouts(value: Any, layout: TileLayout | BatchShare | None) -> Any:
    """Set the layout of every tensor in a result."""
    for tensor in tensors_in(value):
        set_layout(tensor, layout)
    return value


def pointwise(context: RuleContext, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    """Rule for operations on each pixel by itself: operands are brought to the same pixels."""
    tensors = [*tensors_in(args), *tensors_in(kwargs)]
    if plain_name(name) in SHAPED_AS_FIRST and not isinstance(layout_of(args[0]), TileLayout):
        return func(*args, **kwargs)
    is_change = is_in_place(name, kwargs)
    if is_change:
        target = layout_of(args[0])
        if not isinstance(target, TileLayout):
            raise Unsupported("changes a tensor that is not in tiles")
    else:
        target = common_layout([widest(tensor) for tensor in tensors], name)
    first, rest = args[:1], args[1:]
    if not is_change:  # else the tensor itself is changed, and none with more of its pixels
        first = map_tensors(partial(bring, context.grid, target=target), first)
    if plain_name(name) != "prelu":  # its weight has one element per channel
        rest, kwargs = map_tensors(partial(bring, context.grid, target=target), (rest, kwargs))
    return set_layouts(func(*first, *rest, **kwargs), target)


def random_operation(context: RuleContext, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    """Rule for random operations: each rank draws numbers for its own pixels.

    The shared random state stays the same on all ranks.
    """
    value = args[0]
    target = layout_of(value)
    if isinstance(target, TileLayout):  # extra pixels are drawn by the rank that owns them
        value = own_part(value, target, context.grid)
        target = TileLayout.of(context.grid, target.sizes, target.dims)
    args = (value, *args[1:])
    if context.grid.rng is not None:
        context.grid.rng.per_rank()
    try:
        return set_layouts(func(*args, **kwargs), target)
    finally:
        if context.grid.rng is not None:
            context.grid.rng.shared()

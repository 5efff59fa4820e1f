"""Operands of one operation, brought to the same pixels; and the rules for operations on each pixel by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from weft.spatial.arguments import is_in_place
from weft.spatial.halo import Halo, fetch
from weft.spatial.hand_over import own_part, to_tile
from weft.spatial.names import SHAPED_AS_FIRST, plain_name
from weft.spatial.tile_layout import Grid, Place, Share, place_of, put, tensors_in
from weft.spatial.wide_tiles import widest
from weft.spatial.windows import Extra, Unsupported

Rule = Callable[..., Any]


class Looks(Protocol):
    """What rules ask of the view they run in."""

    grid: Grid

    def extra(self) -> Extra:
        """How many pixels beside its own a rank is to compute of the operation under way."""


def common_place(tensors: Sequence[Tensor], name: str) -> Place:
    """Where operands can meet: the pixels that every rank holds of all of them."""
    places = [place for tensor in tensors if isinstance(place := place_of(tensor), Place)]
    first = places[0]
    for other in places[1:]:
        if other.sizes == first.sizes and other.dims != first.dims:
            raise Unsupported("takes images together whose rows and columns are in different dims")
        if other.sizes != first.sizes:
            raise Unsupported(f"takes images of {_size(first)} and of {_size(other)} pixels together")
        first = Place(first.rows.common(other.rows), first.columns.common(other.columns), first.dims)
    return first


def _size(place: Place) -> str:
    return f"{place.sizes[0]} × {place.sizes[1]}"


def bring(grid: Grid, tensor: Tensor, target: Place) -> Tensor:
    """The pixels of a target place of a tile, or of a whole tensor."""
    tensor = widest(tensor)
    place = place_of(tensor)
    if place is None:
        return to_tile(tensor, target, grid)
    assert isinstance(place, Place)
    if place == target:
        return tensor
    return fetch(tensor, Halo.of(grid, place, target.rows.held, target.columns.held))


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Nested tuples, lists and dicts with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(change, item) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(change, item) for key, item in value.items()}
    return value


def put_all(value: Any, place: Place | Share | None) -> Any:
    """Let every tensor of a result lie at a place."""
    for tensor in tensors_in(value):
        put(tensor, place)
    return value


def pointwise(looks: Looks, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    """Each pixel by itself: operands are brought to the same pixels."""
    tensors = [*tensors_in(args), *tensors_in(kwargs)]
    if plain_name(name) in SHAPED_AS_FIRST and not isinstance(place_of(args[0]), Place):
        return func(*args, **kwargs)
    if is_in_place(name, kwargs):
        target = place_of(args[0])
        if not isinstance(target, Place):
            raise Unsupported("changes a tensor that is not in tiles")
    else:
        target = common_place([widest(tensor) for tensor in tensors], name)
    if plain_name(name) == "prelu":  # its weight is one for each channel
        args = (bring(looks.grid, args[0], target), *args[1:])
    else:
        args, kwargs = map_tensors(lambda tensor: bring(looks.grid, tensor, target), (args, kwargs))
    return put_all(func(*args, **kwargs), target)


def draws(looks: Looks, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    """Pixels of other tiles are drawn apart; what all ranks draw later they draw alike."""
    value = args[0]
    target = place_of(value)
    if isinstance(target, Place):  # pixels held beside the own ones are drawn by who owns them
        value = own_part(value, target, looks.grid)
        target = Place.of(looks.grid, target.sizes, target.dims)
    args = (value, *args[1:])
    if looks.grid.rng is not None:
        looks.grid.rng.per_rank()
    try:
        return put_all(func(*args, **kwargs), target)
    finally:
        if looks.grid.rng is not None:
            looks.grid.rng.shared()

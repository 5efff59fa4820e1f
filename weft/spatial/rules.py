"""What each of torch's functions means on a tile. A function that has no rule here is refused by name.

A rule is called as the function is, with tensors of which some are tiles, and sizes as those of whole images: the
model's code sees whole shapes. It gives the tile of what the function would give for the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft.spatial import norms, pools, resize, shapes, windows
from weft.spatial.names import DRAWS, POINTWISE, plain_name
from weft.spatial.operands import Looks, Rule, common_place, draws, pointwise
from weft.spatial.tile_layout import Place, place_of, put, tensors_in
from weft.spatial.wide_tiles import widest
from weft.spatial.windows import NeedsWhole, Unsupported


def _layer(
    operation: Callable[..., tuple[Tensor, Place | None]], *settings: Any, has_extra: bool = False, **fixed: Any
) -> Rule:
    """A rule of an operation in this room: the tile, its place, and the function's other arguments."""

    def rule(looks: Looks, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
        value = widest(args[0])
        place = place_of(value)
        if not isinstance(place, Place):
            raise Unsupported("has weights in tiles")
        more = {"extra": looks.extra()} if has_extra else {}
        return put(*operation(looks.grid, value, place, *settings, *args[1:], **{**kwargs, **more, **fixed}))

    return rule


def _norm(operation: Callable[..., Tensor]) -> Rule:
    def rule(looks: Looks, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
        value = args[0]
        place = place_of(value)
        assert isinstance(place, Place)
        if place.dims != (-2, -1):
            raise Unsupported("wants rows and columns in the last two dims")
        return put(operation(looks.grid, value, place, *args[1:], **kwargs), place)

    return rule


def padded(looks: Looks, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    def called(input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
        return put(*resize.pad(looks.grid, input, common_place([input], name), pad, mode, value))

    return called(*args, **kwargs)


def layer_norm(looks: Looks, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    def called(value: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        place, num_dims = common_place([value], name), len(normalized_shape)
        among = [dim >= -num_dims for dim in place.dims]
        if not any(among):
            return put(func(value, normalized_shape, weight, bias, eps), place)
        if not all(among) or place.dims != (-2, -1):
            raise Unsupported("takes statistics over rows or columns alone")
        return put(norms.layer_norm(looks.grid, value, place, num_dims, weight, bias, eps), place)

    return called(*args, **kwargs)


def linear(looks: Looks, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    """Products along a last dim that is not rows or columns."""
    value = args[0]
    place = place_of(value)
    if plain_name(name) == "rmatmul":
        raise Unsupported("multiplies a matrix by images")
    others = [*tensors_in(args[1:]), *tensors_in(kwargs)]
    if not isinstance(place, Place) or any(place_of(other) is not None for other in others if other is not value):
        raise Unsupported("multiplies images by images")
    if -1 in place.dims:
        raise NeedsWhole("it multiplies along rows or columns")
    if name not in ("linear",) and any(other.dim() != 2 for other in others):
        raise Unsupported("multiplies by more than one matrix")
    return put(func(*args, **kwargs), place)


RULES: dict[str, Rule] = {
    **dict.fromkeys(POINTWISE, pointwise),
    **dict.fromkeys(DRAWS, draws),
    **shapes.RULES,
    **dict.fromkeys(("linear", "matmul", "rmatmul"), linear),
    **dict.fromkeys(("conv2d", "conv3d"), _layer(windows.convolution, has_extra=True)),
    **dict.fromkeys(("conv_transpose2d", "conv_transpose3d"), _layer(windows.transposed_convolution, has_extra=True)),
    **{f"max_pool{n}d": _layer(pools.max_pool, n, has_extra=True) for n in (2, 3)},
    **{f"max_pool{n}d_with_indices": _layer(pools.max_pool, n, return_indices=True) for n in (2, 3)},
    **{f"avg_pool{n}d": _layer(pools.average_pool, n, has_extra=True) for n in (2, 3)},
    **{f"adaptive_avg_pool{n}d": _layer(resize.adaptive_average_pool) for n in (2, 3)},
    **{f"adaptive_max_pool{n}d": _layer(resize.adaptive_max_pool) for n in (2, 3)},
    "interpolate": _layer(resize.interpolate, has_extra=True),
    "pad": padded,
    "pixel_shuffle": _layer(resize.pixel_shuffle),
    "pixel_unshuffle": _layer(resize.pixel_unshuffle),
    "batch_norm": _norm(norms.batch_norm),
    "group_norm": _norm(norms.group_norm),
    "instance_norm": _norm(norms.instance_norm),
    "layer_norm": layer_norm,
}

"""A rule for each of torch's functions on tiles. A function without a rule is refused by name.

A rule is called with the function's arguments, in which some tensors are tiles and sizes are those of whole images: the
model's code sees whole shapes. It returns the tile of what the function would return for the whole image.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft.inspection.nested_tensors import tensors_in
from weft.spatial import norms, pools, resize, shapes, windows
from weft.spatial.arguments import DRAWS, POINTWISE, plain_name
from weft.spatial.halo import widest
from weft.spatial.operands import Rule, RuleContext, common_layout, pointwise, random_operation
from weft.spatial.tile_layout import TileLayout, layout_of, set_layout
from weft.spatial.windows import NeedsWhole, Unsupported


def _layer(
    operation: Callable[..., tuple[Tensor, TileLayout | None]], *settings: Any, has_extra: bool = False, **fixed: Any
) -> Rule:
    """Return a rule that calls `operation` with the grid, the tile, its layout, and the function's other arguments."""

    def rule(context: RuleContext, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
        value = widest(args[0])
        layout = layout_of(value)
        if not isinstance(layout, TileLayout):
            raise Unsupported("has weights in tiles")
        more = {"extra": context.extra()} if has_extra else {}
        return set_layout(*operation(context.grid, value, layout, *settings, *args[1:], **{**kwargs, **more, **fixed}))

    return rule


def _norm(operation: Callable[..., Tensor]) -> Rule:
    def rule(context: RuleContext, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
        value = args[0]
        layout = layout_of(value)
        assert isinstance(layout, TileLayout)
        if layout.dims != (-2, -1):
            raise Unsupported("wants rows and columns in the last two dims")
        return set_layout(operation(context.grid, value, layout, *args[1:], **kwargs), layout)

    return rule


def padded(context: RuleContext, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    def called(input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
        return set_layout(*resize.pad(context.grid, input, common_layout([input], name), pad, mode, value))

    return called(*args, **kwargs)


def layer_norm(context: RuleContext, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    def called(value: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        layout, num_dims = common_layout([value], name), len(normalized_shape)
        among = [dim >= -num_dims for dim in layout.dims]
        if not any(among):
            return set_layout(func(value, normalized_shape, weight, bias, eps), layout)
        if not all(among) or layout.dims != (-2, -1):
            raise Unsupported("takes statistics over rows or columns alone")
        return set_layout(norms.layer_norm(context.grid, value, layout, num_dims, weight, bias, eps), layout)

    return called(*args, **kwargs)


def linear(context: RuleContext, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    """Products along a last dim that is not rows or columns."""
    value = args[0]
    layout = layout_of(value)
    if plain_name(name) == "rmatmul":
        raise Unsupported("multiplies a matrix by images")
    others = [*tensors_in(args[1:]), *tensors_in(kwargs)]
    if not isinstance(layout, TileLayout) or any(
        layout_of(other) is not None for other in others if other is not value
    ):
        raise Unsupported("multiplies images by images")
    if -1 in layout.dims:
        raise NeedsWhole("it multiplies along rows or columns")
    if name not in ("linear",) and any(other.dim() != 2 for other in others):
        raise Unsupported("multiplies by more than one matrix")
    return set_layout(func(*args, **kwargs), layout)


RULES: dict[str, Rule] = {
    **dict.fromkeys(POINTWISE, pointwise),
    **dict.fromkeys(DRAWS, random_operation),
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

"""Rules for operations along dims and on shapes. Dims other than rows and columns are changed on the tile itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.spatial import resize
from weft.spatial.arguments import PARAMETERS, Arguments, argument, is_in_place, number, plain_name
from weft.spatial.halo import note_copy, widest
from weft.spatial.hand_over import own_part, sum_over
from weft.spatial.operands import Rule, RuleContext, bring, common_layout, pointwise, set_layouts
from weft.spatial.tile_layout import TileLayout, layout_of, set_layout
from weft.spatial.windows import NeedsWhole, Unsupported


def tiled_dims(layout: TileLayout, num_dims: int) -> list[int]:
    """Return the dims of rows and columns, counted from the front."""
    return [dim + num_dims for dim in layout.dims]


def dims_of(value: Any, num_dims: int) -> list[int]:
    """Return a dim, or several, counted from the front."""
    values = [number(one) for one in (value if isinstance(value, (tuple, list)) else [value])]
    return [dim + num_dims if dim < 0 else dim for dim in values]


def permuted_layout(layout: TileLayout, num_dims: int, order: Sequence[int | None]) -> TileLayout:
    """Return the layout after the old dims are put in this order; None is a new dim."""
    found = [order.index(dim) - len(order) for dim in tiled_dims(layout, num_dims)]
    return layout.at((found[0], found[1]))


# name -> (the parameter with the dim, its default)
ALONG: dict[str, tuple[str, Any]] = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp"), ("dim", None)),
    **dict.fromkeys(("narrow", "index_select", "select"), ("dim", None)),
    **dict.fromkeys(("chunk", "split", "tensor_split", "unbind"), ("dim", 0)),
    **dict.fromkeys(("flip", "roll"), ("dims", None)),
    **dict.fromkeys(("glu", "sort", "topk"), ("dim", -1)),
    "normalize": ("dim", 1),
}
REDUCTIONS = frozenset(
    ("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "logsumexp", "prod", "all", "any")
)
JOINS = frozenset(["cat", "concat", "concatenate", "stack"])
REMOVES = frozenset(["unbind", "select"])


def along(context: RuleContext, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    """Rule for operations along dims that are not rows or columns."""
    layout, num_dims = common_layout([args[0]], name), args[0].dim()
    given = argument(name, (args, kwargs), *ALONG[plain_name(name)])
    dims = dims_of(given, num_dims) if given is not None else []
    if not dims or set(dims) & set(tiled_dims(layout, num_dims)):
        raise Unsupported("works along rows or columns")
    if plain_name(name) in REMOVES:
        layout = permuted_layout(layout, num_dims, [dim for dim in range(num_dims) if dim not in dims])
    return set_layouts(func(*args, **kwargs), layout)


def reduced_dims(name: str, args: Any, kwargs: Any) -> list[int]:
    """Return the dims of a reduction: all, if none is given."""
    given = argument(name, (args, kwargs), "dim")
    is_all = given is None or (isinstance(given, (tuple, list)) and not given)
    return list(range(args[0].dim())) if is_all else dims_of(given, args[0].dim())


def refuse_along_samples(name: str, call: Arguments, num_samples: int) -> None:
    """Refuse an operation on a share of the batch that combines samples, or selects some of them."""
    args, kwargs = call
    if name not in PARAMETERS or not args:
        return
    dims: list[int] = []
    if name in ALONG:
        given, num_dims = argument(name, call, *ALONG[name]), args[0].dim()
        dims = [0] if given is None else dims_of(given, num_dims)
    elif name in REDUCTIONS and not isinstance(kwargs.get("other"), Tensor):
        dims = reduced_dims(name, args, kwargs)
    elif name in JOINS:
        dims = dims_of(argument(name, call, "dim", 0), args[0][0].dim() + (name == "stack"))
    elif name == "squeeze" and num_samples == 1:
        given = argument(name, call, "dim")
        dims = [0] if given is None else dims_of(given, args[0].dim())
    elif name == "getitem":
        first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        dims = [] if first is Ellipsis or (isinstance(first, slice) and first == slice(None)) else [0]
    if 0 in dims:
        raise Unsupported("works along samples, of which each rank has a share")


def reduction(context: RuleContext, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    """Rule for reductions over dims that are not rows or columns; sums and means may also go over both."""
    value, name = args[0], plain_name(name)
    if isinstance(kwargs.get("other"), Tensor):
        return pointwise(context, func, name, args, kwargs)
    layout, num_dims = common_layout([value], name), value.dim()
    keepdim = bool(argument(name, (args, kwargs), "keepdim", False))
    dims = reduced_dims(name, args, kwargs)
    tiled = tiled_dims(layout, num_dims)
    if not set(dims) & set(tiled):
        kept = [dim for dim in range(num_dims) if dim not in dims or keepdim]
        return set_layouts(func(*args, **kwargs), permuted_layout(layout, num_dims, kept))
    if name not in ("sum", "mean") or not set(tiled) <= set(dims):
        raise Unsupported(f"works along {'rows and columns' if set(tiled) <= set(dims) else 'rows or columns'}")
    dtype = kwargs.get("dtype")
    total = own_part(value, layout, context.grid).sum(dims, keepdim=keepdim, dtype=dtype)
    total = sum_over(total, context.grid.tile, context.grid)
    shape = layout.whole_shape(tuple(value.shape))
    return total if name == "sum" else total / math.prod(shape[dim] for dim in dims)


def joined(context: RuleContext, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    """Rule for torch.cat and torch.stack. Joining images along rows or columns is refused."""
    tensors, given = args[0], argument(name, (args, kwargs), "dim", 0)
    layout, is_stack = common_layout([widest(tensor) for tensor in tensors], name), plain_name(name) == "stack"
    num_dims = next(tensor.dim() for tensor in tensors if layout_of(tensor) is not None)
    (dim,) = dims_of(given, num_dims + is_stack)
    if is_stack:
        found = permuted_layout(layout, num_dims, [*range(dim), None, *range(dim, num_dims)])
    elif dim in tiled_dims(layout, num_dims):
        raise Unsupported("joins images along rows or columns")
    else:
        found = layout
    return set_layouts(func([bring(context.grid, tensor, layout) for tensor in tensors], dim), found)


def unsqueezed(context: RuleContext, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    value, given = args
    layout, num_dims = common_layout([value], name), value.dim()
    (dim,) = dims_of(given, num_dims + 1)
    return set_layout(
        func(*args, **kwargs), permuted_layout(layout, num_dims, [*range(dim), None, *range(dim, num_dims)])
    )


def squeezed(context: RuleContext, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    value, given = args[0], argument(name, (args, kwargs), "dim")
    if is_in_place(name, kwargs):
        raise Unsupported("changes the shape of a tensor in place")
    layout, num_dims = common_layout([value], name), value.dim()
    whole = layout.whole_shape(tuple(value.shape))
    dims = range(num_dims) if given is None else dims_of(given, num_dims)
    gone = [dim for dim in dims if whole[dim] == 1]
    kept = [dim for dim in range(num_dims) if dim not in gone]
    return set_layout(value.view([value.shape[dim] for dim in kept]), permuted_layout(layout, num_dims, kept))


def permuted(context: RuleContext, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    value, *rest = args
    layout, num_dims = common_layout([value], name), value.dim()
    if plain_name(name) == "permute":
        order = dims_of(rest[0], num_dims)
    elif plain_name(name) in ("movedim", "moveaxis"):
        order = _movedim(num_dims, dims_of(rest[0], num_dims), dims_of(rest[1], num_dims))
    else:
        order = list(range(num_dims))
        first, second = dims_of(rest[:2], num_dims)
        order[first], order[second] = order[second], order[first]
    return set_layout(func(*args, **kwargs), permuted_layout(layout, num_dims, order))


def _movedim(num_dims: int, sources: list[int], targets: list[int]) -> list[int]:
    rest = iter([dim for dim in range(num_dims) if dim not in sources])
    at = dict(zip(targets, sources, strict=True))
    return [at[dim] if dim in at else next(rest) for dim in range(num_dims)]


# --- shapes


def whole_shape(value: Tensor) -> torch.Size:
    """Return the shape of the whole tensor of which a tensor is a part."""
    layout = layout_of(value)
    shape = tuple(value.shape)
    return torch.Size(shape if layout is None else layout.whole_shape(shape))


def shape_of(context: RuleContext, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    """Rule for shapes: the model's code sees those of whole images."""
    shape = whole_shape(args[0])
    if name in ("numel", "nelement"):
        return shape.numel()
    if name == "__len__":
        return shape[0]
    dim = None if name == "shape" else argument(name, (args, kwargs), "dim")
    return shape if dim is None else shape[dim]


def reshaped(context: RuleContext, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    """Rule for view, reshape, flatten and unflatten that keep rows and columns; others need whole images."""
    value = args[0]
    layout, num_dims = common_layout([value], name), value.dim()
    if "dtype" in kwargs:
        raise Unsupported("looks at pixels as another dtype")
    whole = whole_shape(value)
    with torch.device("meta"):  # let torch compute the target shape
        target = tuple(func(torch.empty(whole), *args[1:], **kwargs).shape)
    local, found = list(target), []
    for dim, size in zip(tiled_dims(layout, num_dims), layout.sizes, strict=True):
        before = math.prod(whole[:dim])
        at = [i for i in range(len(target)) if math.prod(target[:i]) == before and target[i] == size]
        if not at:
            raise NeedsWhole("it folds rows or columns into other dims")
        local[at[-1]] = value.shape[dim]
        found.append(at[-1] - len(target))
    out = value.view(local) if plain_name(name) == "view" else value.reshape(local)
    return set_layout(out, layout.at((found[0], found[1])))


def expanded(context: RuleContext, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    value, given = args
    if plain_name(name) == "expand_as":
        layout = common_layout([value, given], name)
        return set_layout(bring(context.grid, value, layout).expand(bring(context.grid, given, layout).shape), layout)
    layout, sizes = common_layout([value], name), list(given)
    for dim in layout.dims:
        sizes[dim] = -1
    return set_layout(value.expand(sizes), layout)


def indexed(context: RuleContext, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    """Rule for value[...]: whole dims, single indices and slices. Slices of rows and columns crop the image."""
    value, given = args
    layout, num_dims = common_layout([value], name), value.dim()
    items = list(given) if isinstance(given, tuple) else [given]
    if not all(item is None or item is Ellipsis or type(item) in (int, slice) for item in items):
        raise Unsupported("takes pixels by an index that is no number or slice")
    num_given = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = items.index(Ellipsis)
    items[at : at + 1] = [slice(None)] * (num_dims - num_given)
    order: list[int | None] = []
    parts: list[slice | None] = [None, None]
    dim, tiled = 0, tiled_dims(layout, num_dims)
    for position, item in enumerate(items):
        if item is None:
            order.append(None)
            continue
        if dim in tiled:
            if isinstance(item, int):
                raise Unsupported("takes a single row or column")
            if item != slice(None):
                parts[tiled.index(dim)] = item
            items[position] = slice(None)
        if not isinstance(item, int):
            order.append(dim)
        dim += 1
    image = value
    if any(parts):
        value, layout = resize.crop(context.grid, value, layout, parts)
    found = set_layout(value[tuple(items)], permuted_layout(layout, num_dims, order))
    note_copy(found, image)
    return found


RULES: dict[str, Rule] = {
    **dict.fromkeys(ALONG, along),
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(JOINS, joined),
    **dict.fromkeys(("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis"), permuted),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten"), reshaped),
    **dict.fromkeys(("shape", "size", "numel", "nelement", "len"), shape_of),
    **dict.fromkeys(("expand", "expand_as"), expanded),
    "unsqueeze": unsqueezed,
    "squeeze": squeezed,
    "getitem": indexed,
}

"""What each of torch's functions means on a tile. A function that has no rule here is refused by name.

A rule is called as the function is, with tensors of which some are tiles, and sizes as those of whole images: the
model's code sees whole shapes. It gives the tile of what the function would give for the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.spatial import norms, resize, windows
from weft.spatial.halo import Halo, fetch
from weft.spatial.hand_over import own_part, sum_over, to_tile
from weft.spatial.place import Grid, Place, Share, place_of, put, tensors_in
from weft.spatial.windows import Extra, NeedsWhole, Unsupported

Rule = Callable[..., Any]


class Looks(Protocol):
    """What rules ask of the view they run in."""

    grid: Grid

    def extra(self) -> Extra:
        """How many pixels beside its own a rank is to compute of the operation under way."""


POINTWISE = frozenset(
    """relu relu6 leaky_relu prelu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh softplus softsign sigmoid
    tanh tanhshrink logsigmoid threshold softshrink hardshrink abs absolute neg negative positive exp exp2 expm1 log log2
    log10 log1p sqrt rsqrt square pow float_power sin cos tan asin acos atan sinh cosh erf erfc reciprocal sign sgn
    round floor ceil trunc frac nan_to_num isnan isinf isfinite logit add sub subtract mul multiply div divide
    true_divide floor_divide remainder fmod rsub radd rmul rdiv rtruediv rpow maximum minimum fmax fmin clamp clip
    clamp_min clamp_max where lerp addcmul addcdiv atan2 hypot eq ne lt le gt ge logical_and logical_or logical_xor
    logical_not bitwise_and bitwise_or bitwise_xor bitwise_not and or xor invert iadd isub imul itruediv ipow
    masked_fill float double half bfloat16 int long bool to type type_as contiguous clone detach cpu cuda zeros_like
    ones_like empty_like full_like copy fill zero real data requires_grad dropout2d dropout3d feature_dropout
    feature_alpha_dropout""".split()
)
DRAWS = frozenset("dropout alpha_dropout rand_like randn_like bernoulli normal uniform rrelu".split())
# What looks at a tensor, or makes another of its kind, and computes nothing.
META = frozenset(
    """dim ndimension ndim stride is_contiguous element_size storage_offset untyped_storage data_ptr register_hook
    is_floating_point is_complex is_signed get_device device dtype layout grad_fn is_leaf requires_grad is_cuda is_cpu
    is_meta is_sparse is_quantized is_nested is_mkldnn is_mps is_xla is_mtia is_xpu is_ipu is_maia is_vulkan names itemsize
    nbytes retain_grad new_empty new_zeros new_ones new_full new_tensor hash repr format result_type can_cast is_tensor
    version _version _is_view _base _backward_hooks _cdata has_names is_inference is_conj is_neg output_nr retains_grad
    is_same_size volatile""".split()
)


def plain_name(name: str) -> str:
    """`add` for add, add_ and __add__."""
    return name.strip("_") if name not in META else name


# --- operands


def common_place(tensors: Sequence[Tensor], name: str) -> Place:
    """Where operands can meet: the pixels that every rank holds of all of them."""
    places = [place for tensor in tensors if isinstance(place := place_of(tensor), Place)]
    first = places[0]
    for other in places[1:]:
        if other.sizes != first.sizes or other.dims != first.dims:
            raise Unsupported(f"takes images of {_size(first)} and of {_size(other)} pixels together")
        first = Place(first.rows.common(other.rows), first.columns.common(other.columns), first.dims)
    return first


def _size(place: Place) -> str:
    return f"{place.sizes[0]} × {place.sizes[1]}"


def bring(grid: Grid, tensor: Tensor, target: Place) -> Tensor:
    """The pixels of a target place of a tile, or of a whole tensor."""
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
    is_in_place = kwargs.get("inplace", False) or (name.endswith("_") and not name.startswith("__"))
    is_in_place = is_in_place or (name.startswith("__i") and name != "__invert__")
    if is_in_place:
        target = place_of(args[0])
        if not isinstance(target, Place):
            raise Unsupported("changes a tensor that is not in tiles")
    else:
        target = common_place(tensors, name)
    if plain_name(name) == "prelu":  # its weight is one for each channel
        args = (bring(looks.grid, args[0], target), *args[1:])
    else:
        args, kwargs = map_tensors(lambda tensor: bring(looks.grid, tensor, target), (args, kwargs))
    return put_all(func(*args, **kwargs), target)


def draws(looks: Looks, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    """Pixels of other tiles are drawn apart; what all ranks draw later they draw alike."""
    value = args[0] if args else kwargs.pop("input")
    target = place_of(value)
    if isinstance(target, Place):  # pixels held beside the own ones are drawn by who owns them
        value = own_part(value, target, looks.grid)
        target = Place.of(looks.grid, target.sizes, target.dims)
    args = (value, *args[1:])
    if looks.grid.draws is not None:
        looks.grid.draws.apart()
    try:
        return put_all(func(*args, **kwargs), target)
    finally:
        if looks.grid.draws is not None:
            looks.grid.draws.alike()


# --- dims


def tiled_dims(place: Place, num_dims: int) -> list[int]:
    """The dims of rows and columns, counted from the front."""
    return [dim + num_dims for dim in place.dims]


def dims_of(value: Any, num_dims: int) -> list[int]:
    """A dim, or several, counted from the front."""
    values = [value] if isinstance(value, int) else list(value)
    return [dim + num_dims if dim < 0 else dim for dim in values]


def moved(place: Place, num_dims: int, order: Sequence[int | None]) -> Place:
    """A place whose old dims stand in this order; None is a new dim."""
    found = [order.index(dim) - len(order) for dim in tiled_dims(place, num_dims)]
    return place.at((found[0], found[1]))


# name -> (position of the dim among the arguments, its keyword, what it is if not given)
ALONG: dict[str, tuple[int, str, Any]] = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp"), (1, "dim", None)),
    **{"glu": (1, "dim", -1), "normalize": (2, "dim", 1), "chunk": (2, "dim", 0), "split": (2, "dim", 0)},
    **{"tensor_split": (2, "dim", 0), "narrow": (1, "dim", None), "index_select": (1, "dim", None)},
    **{"flip": (1, "dims", None), "roll": (2, "dims", None), "sort": (1, "dim", -1), "topk": (2, "dim", -1)},
    **{"unbind": (1, "dim", 0), "select": (1, "dim", None)},
}
REDUCTIONS = frozenset("sum mean amax amin max min argmax argmin var std logsumexp prod all any norm".split())
REMOVES = frozenset(["unbind", "select"])


def along(looks: Looks, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    """Work along dims that are not rows or columns."""
    position, keyword, default = ALONG[plain_name(name)]
    place, num_dims = common_place([args[0]], name), args[0].dim()
    given = args[position] if len(args) > position else kwargs.get(keyword, default)
    dims = dims_of(given, num_dims) if given is not None else []
    if not dims or set(dims) & set(tiled_dims(place, num_dims)):
        raise Unsupported("works along rows or columns")
    if plain_name(name) in REMOVES:
        place = moved(place, num_dims, [dim for dim in range(num_dims) if dim not in dims])
    return put_all(func(*args, **kwargs), place)


def reduction(looks: Looks, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    """Over dims that are not rows or columns; or, of sums and means, over both."""
    value, name = args[0], plain_name(name)
    if name in ("max", "min") and len(args) > 1 and isinstance(args[1], Tensor):
        return pointwise(looks, func, name, args, kwargs)
    place, num_dims = common_place([value], name), value.dim()
    position = 2 if name == "norm" else 1
    given = args[position] if len(args) > position else kwargs.get("dim")
    keepdim = bool(args[position + 1] if len(args) > position + 1 else kwargs.get("keepdim", False))
    dims = list(range(num_dims)) if given is None or given == () else dims_of(given, num_dims)
    tiled = tiled_dims(place, num_dims)
    if not set(dims) & set(tiled):
        kept = [dim for dim in range(num_dims) if dim not in dims or keepdim]
        return put_all(func(*args, **kwargs), moved(place, num_dims, kept))
    if name not in ("sum", "mean") or not set(tiled) <= set(dims):
        raise Unsupported(f"works along {'rows and columns' if set(tiled) <= set(dims) else 'rows or columns'}")
    dtype = kwargs.get("dtype")
    total = own_part(value, place, looks.grid).sum(dims, keepdim=keepdim, dtype=dtype)
    total = sum_over(total, looks.grid.tile, looks.grid)
    shape = place.whole_shape(tuple(value.shape))
    return total if name == "sum" else total / math.prod(shape[dim] for dim in dims)


def joined(looks: Looks, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    """torch.cat and torch.stack, along dims that are not rows or columns."""
    tensors = args[0] if args else kwargs["tensors"]
    given = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    place, is_stack = common_place(tensors, name), plain_name(name) == "stack"
    num_dims = next(tensor.dim() for tensor in tensors if place_of(tensor) is not None)
    (dim,) = dims_of(given, num_dims + is_stack)
    if is_stack:
        found = moved(place, num_dims, [*range(dim), None, *range(dim, num_dims)])
    elif dim in tiled_dims(place, num_dims):
        raise Unsupported("joins images along rows or columns")
    else:
        found = place
    return put_all(func([bring(looks.grid, tensor, place) for tensor in tensors], dim), found)


def unsqueezed(looks: Looks, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    value, given = args[0], args[1] if len(args) > 1 else kwargs["dim"]
    place, num_dims = common_place([value], name), value.dim()
    (dim,) = dims_of(given, num_dims + 1)
    return put(func(*args, **kwargs), moved(place, num_dims, [*range(dim), None, *range(dim, num_dims)]))


def squeezed(looks: Looks, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    value, given = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
    place, num_dims = common_place([value], name), value.dim()
    whole = place.whole_shape(tuple(value.shape))
    dims = range(num_dims) if given is None else dims_of(given, num_dims)
    gone = [dim for dim in dims if whole[dim] == 1]
    kept = [dim for dim in range(num_dims) if dim not in gone]
    return put(value.view([value.shape[dim] for dim in kept]), moved(place, num_dims, kept))


def permuted(looks: Looks, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    value, rest = args[0], [*args[1:], *kwargs.values()]
    place, num_dims = common_place([value], name), value.dim()
    if plain_name(name) == "permute":
        order = dims_of(rest[0] if isinstance(rest[0], (tuple, list)) else rest, num_dims)
    elif plain_name(name) == "movedim":
        order = _movedim(num_dims, dims_of(rest[0], num_dims), dims_of(rest[1], num_dims))
    else:
        order = list(range(num_dims))
        first, second = dims_of(rest[:2], num_dims)
        order[first], order[second] = order[second], order[first]
    return put(func(*args, **kwargs), moved(place, num_dims, order))


def _movedim(num_dims: int, sources: list[int], targets: list[int]) -> list[int]:
    rest = iter([dim for dim in range(num_dims) if dim not in sources])
    at = dict(zip(targets, sources, strict=True))
    return [at[dim] if dim in at else next(rest) for dim in range(num_dims)]


# --- shapes


def whole_shape(value: Tensor) -> torch.Size:
    """The shape of the whole of which a tensor is a part."""
    place = place_of(value)
    shape = tuple(value.shape)
    return torch.Size(shape if place is None else place.whole_shape(shape))


def shape_of(looks: Looks, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    """The model's code sees whole images."""
    shape = whole_shape(args[0])
    if name in ("numel", "nelement"):
        return shape.numel()
    if name == "__len__":
        return shape[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return shape if dim is None else shape[dim]


def reshaped(looks: Looks, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    """view, reshape, flatten and unflatten that leave rows and columns as they are; others need whole images."""
    value = args[0]
    place, num_dims = common_place([value], name), value.dim()
    if plain_name(name) in ("view", "reshape") and len(args) > 1 and isinstance(args[1], torch.dtype):
        raise Unsupported("looks at pixels as another dtype")
    whole = whole_shape(value)
    with torch.device("meta"):  # let torch say what it means
        target = tuple(func(torch.empty(whole), *args[1:], **kwargs).shape)
    local, found = list(target), []
    for dim, size in zip(tiled_dims(place, num_dims), place.sizes, strict=True):
        before = math.prod(whole[:dim])
        at = [i for i in range(len(target)) if math.prod(target[:i]) == before and target[i] == size]
        if not at:
            raise NeedsWhole("it folds rows or columns into other dims")
        local[at[-1]] = value.shape[dim]
        found.append(at[-1] - len(target))
    out = value.view(local) if plain_name(name) == "view" else value.reshape(local)
    return put(out, place.at((found[0], found[1])))


def expanded(looks: Looks, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    value = args[0]
    place = common_place([value], name)
    if name == "expand_as":
        sizes = list(whole_shape(args[1]))
    else:
        sizes = list(args[1] if isinstance(args[1], (tuple, list)) else args[1:])
    for dim in place.dims:
        sizes[dim] = -1
    return put(value.expand(sizes), place)


def taken(looks: Looks, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
    """value[...]: whole dims, single indices and slices; slices of rows and columns cut the image."""
    value, given = args
    place, num_dims = common_place([value], name), value.dim()
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
    dim, tiled = 0, tiled_dims(place, num_dims)
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
    if any(parts):
        value, place = resize.crop(looks.grid, value, place, parts)
    return put(value[tuple(items)], moved(place, num_dims, order))


# --- layers


def _layer(operation: Callable[..., tuple[Tensor, Place | None]], *settings: Any, has_extra: bool = False) -> Rule:
    """A rule of an operation in this room: the tile, its place, and the function's other arguments."""

    def rule(looks: Looks, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
        value = args[0] if args else kwargs.pop("input")
        place = place_of(value)
        if not isinstance(place, Place):
            raise Unsupported("has weights in tiles")
        more = {"extra": looks.extra()} if has_extra else {}
        return put(*operation(looks.grid, value, place, *settings, *args[1:], **kwargs, **more))

    return rule


def _norm(operation: Callable[..., Tensor]) -> Rule:
    def rule(looks: Looks, func: Rule, name: str, args: Any, kwargs: Any) -> Any:
        value = args[0] if args else kwargs.pop("input")
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


def layer_norm(
    looks: Looks, func: Rule, name: str, args: Any, kwargs: Any
) -> Any:
    def called(
        value: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> Tensor:
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
    value = args[0] if args else kwargs["input"]
    place = place_of(value)
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
    **dict.fromkeys(ALONG, along),
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), joined),
    **dict.fromkeys(("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis"), permuted),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten"), reshaped),
    **dict.fromkeys(("shape", "size", "numel", "nelement", "len"), shape_of),
    **dict.fromkeys(("expand", "expand_as"), expanded),
    **dict.fromkeys(("linear", "matmul", "rmatmul"), linear),
    **{"unsqueeze": unsqueezed, "squeeze": squeezed, "getitem": taken, "layer_norm": layer_norm},
    **dict.fromkeys(("conv2d", "conv3d"), _layer(windows.convolution, has_extra=True)),
    **dict.fromkeys(
        ("conv_transpose2d", "conv_transpose3d"), _layer(windows.transposed_convolution, has_extra=True)
    ),
    **{f"max_pool{n}d": _layer(windows.max_pool, n, has_extra=True) for n in (2, 3)},
    **{f"avg_pool{n}d": _layer(windows.average_pool, n, has_extra=True) for n in (2, 3)},
    **{f"adaptive_avg_pool{n}d": _layer(resize.adaptive_average_pool) for n in (2, 3)},
    **{f"adaptive_max_pool{n}d": _layer(resize.adaptive_max_pool) for n in (2, 3)},
    **{"interpolate": _layer(resize.interpolate, has_extra=True), "upsample": _layer(resize.interpolate)},
    **{"pad": padded, "pixel_shuffle": _layer(resize.pixel_shuffle), "pixel_unshuffle": _layer(resize.pixel_unshuffle)},
    **{"batch_norm": _norm(norms.batch_norm), "group_norm": _norm(norms.group_norm)},
    **{"instance_norm": _norm(norms.instance_norm)},
}

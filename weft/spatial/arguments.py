"""Brings the arguments of torch's functions into one form before any rule reads them.

torch takes a dim as `dim` or `axis`, several dims as a tuple or one by one, and an input under five names. `normalise`
returns the names of the signatures below, with leading arguments as positional ones. An argument that is not among them
is refused by name: a rule that does not know it would compute something else.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.spatial.windows import Unsupported


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


POINTWISE = _set(
    """relu relu6 leaky_relu prelu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh softplus softsign sigmoid
    tanh tanhshrink logsigmoid threshold softshrink hardshrink abs absolute neg negative positive exp exp2 expm1 log
    log2 log10 log1p sqrt rsqrt square pow float_power sin cos tan asin acos atan sinh cosh erf erfc reciprocal sign sgn
    round floor ceil trunc frac nan_to_num isnan isinf isfinite logit add sub subtract mul multiply div divide
    true_divide floor_divide remainder fmod rsub radd rmul rdiv rtruediv rpow maximum minimum fmax fmin clamp clip
    clamp_min clamp_max where lerp addcmul addcdiv atan2 hypot eq ne lt le gt ge logical_and logical_or logical_xor
    logical_not bitwise_and bitwise_or bitwise_xor bitwise_not and or xor invert iadd isub imul itruediv ipow
    masked_fill float double half bfloat16 int long bool to type type_as contiguous clone detach cpu cuda zeros_like
    ones_like empty_like full_like copy fill zero real data requires_grad dropout2d dropout3d feature_dropout
    feature_alpha_dropout"""
)
DRAWS = _set("dropout alpha_dropout rand_like randn_like bernoulli normal uniform rrelu")
SHAPED_AS_FIRST = _set("to type type_as")  # other tensors among their arguments give only a dtype and a device
# Methods that inspect a tensor, or make a new one like it, and compute nothing.
META = _set(
    """dim ndimension stride is_contiguous element_size storage_offset untyped_storage data_ptr register_hook
    retain_grad is_floating_point is_complex is_signed get_device new_empty new_zeros new_ones new_full new_tensor
    hash repr format result_type is_tensor is_same_size"""
)


def plain_name(name: str) -> str:
    """Return `add` for add, add_ and __add__."""
    return name.strip("_")


# torch's own aliases, of every function that its argument parser reads; `self` and `tensor` as in signatures.
ALIASES = {
    "axis": "dim",
    "keepdims": "keepdim",
    **dict.fromkeys(("self", "tensor", "x", "a", "x1"), "input"),
    "x2": "other",
}
_CONVOLUTION = "input weight bias stride padding"
_POOL = "input kernel_size stride padding"
_NORM = "input running_mean running_var weight bias"
_FIRST = "input dim"  # of many functions along a dim
_OVER = "input dim keepdim * dtype"

# Names of positional parameters; after * those that are keyword-only.
_SIGNATURES: dict[str, str] = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin"), f"{_FIRST} * dtype _stacklevel"),
    **dict.fromkeys(("cumsum", "cumprod"), f"{_FIRST} * dtype"),
    "logcumsumexp": _FIRST,
    "narrow": "input dim start length",
    "index_select": "input dim index",
    "select": "input dim index",
    "chunk": "input chunks dim",
    "split": "input split_size dim",
    "tensor_split": "input indices_or_sections dim * sections indices tensor_indices_or_sections",
    "glu": _FIRST,
    "normalize": "input p dim eps",
    "flip": "input dims",
    "roll": "input shifts dims",
    "sort": "input * dim descending stable",
    "topk": "input k dim largest sorted",
    "unbind": _FIRST,
    **dict.fromkeys(("sum", "mean", "prod"), _OVER),
    **dict.fromkeys(("amax", "amin", "argmax", "argmin", "logsumexp", "all", "any"), "input dim keepdim"),
    **dict.fromkeys(("max", "min"), "input dim keepdim * other"),
    **dict.fromkeys(("var", "std"), "input dim unbiased keepdim * correction"),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), "tensors dim"),
    "unsqueeze": _FIRST,
    "squeeze": _FIRST,
    "permute": "input dims",
    **dict.fromkeys(("transpose", "swapdims"), "input dim0 dim1"),
    "swapaxes": "input axis0 axis1",
    **dict.fromkeys(("movedim", "moveaxis"), "input source destination"),
    "view": "input size * dtype",
    "reshape": "input shape",
    "flatten": "input start_dim end_dim",
    "unflatten": "input dim sizes",
    "expand": "input size * implicit",
    "expand_as": "input other",
    "shape": "input",
    "size": _FIRST,
    **dict.fromkeys(("numel", "nelement", "len"), "input"),
    "getitem": "input index",
    "linear": "input weight bias",
    **dict.fromkeys(("matmul", "rmatmul"), "input other"),
    **dict.fromkeys(("conv2d", "conv3d"), f"{_CONVOLUTION} dilation groups"),
    **dict.fromkeys(("conv_transpose2d", "conv_transpose3d"), f"{_CONVOLUTION} output_padding groups dilation"),
    **dict.fromkeys(("max_pool2d", "max_pool3d"), f"{_POOL} dilation ceil_mode return_indices"),
    **{f"max_pool{n}d_with_indices": f"{_POOL} dilation ceil_mode * return_indices" for n in (2, 3)},
    **dict.fromkeys(("avg_pool2d", "avg_pool3d"), f"{_POOL} ceil_mode count_include_pad divisor_override"),
    **dict.fromkeys(("adaptive_avg_pool2d", "adaptive_avg_pool3d"), "input output_size"),
    **{f"adaptive_max_pool{n}d": "input output_size return_indices" for n in (2, 3)},
    "interpolate": "input size scale_factor mode align_corners recompute_scale_factor antialias",
    "pad": "input pad mode value",
    "pixel_shuffle": "input upscale_factor",
    "pixel_unshuffle": "input downscale_factor",
    "batch_norm": f"{_NORM} training momentum eps",
    "instance_norm": f"{_NORM} use_input_stats momentum eps",
    "group_norm": "input num_groups weight bias eps",
    "layer_norm": "input normalized_shape weight bias eps",
}
PARAMETERS: dict[str, tuple[str, ...]] = {
    name: tuple(text.partition("*")[0].split()) for name, text in _SIGNATURES.items()
}
_KNOWN = {name: frozenset(text.replace("*", " ").split()) for name, text in _SIGNATURES.items()}
# Functions that also take the numbers of their last parameter one by one.
_ONE_BY_ONE = frozenset(("flip", "permute", "view", "reshape", "expand", "squeeze"))
_INPUTS = ("input", *(alias for alias, name in ALIASES.items() if name == "input"))
# torch's own functions of the same names take the weights first, and a flag for cuDNN.
_WEIGHTS_FIRST = {
    "batch_norm": (F.batch_norm, "training"),
    "instance_norm": (F.instance_norm, "use_input_stats"),
}

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def normalise(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """Return the arguments of a call in the form that its rule expects. Unknown arguments are refused."""
    plain, named = plain_name(name), dict(kwargs)
    if named.pop("out", None) is not None:
        raise Unsupported("writes its result into another tensor (out=)")
    if plain not in PARAMETERS:  # pixel by pixel: arguments mean the same in any order
        return _with_first(plain, args, named)
    if plain in _WEIGHTS_FIRST and func is not _WEIGHTS_FIRST[plain][0]:
        args, named = (), _bind(_weights_first(plain), args, named)
    if plain in ("group_norm", "layer_norm"):
        args = args[: len(PARAMETERS[plain])]
    for key in ("cudnn_enabled", "cudnn_enable"):
        named.pop(key, None)
    given = _bind(_parameters(plain, args), _gathered(plain, args), named)
    if unknown := sorted(given.keys() - _KNOWN[plain]):
        raise Unsupported(f"has an argument that weft does not know for it: {unknown[0]}")
    parameters = PARAMETERS[plain]
    first = next((i for i, parameter in enumerate(parameters) if parameter not in given), len(parameters))
    return tuple(given[one] for one in parameters[:first]), {
        key: value for key, value in given.items() if key not in parameters[:first]
    }


def argument(name: str, call: Arguments, parameter: str, default: Any = None) -> Any:
    """Return one argument of a call that `normalise` returned."""
    args, kwargs = call
    positional = dict(zip(PARAMETERS[plain_name(name)], args, strict=False))
    return positional.get(parameter, kwargs.get(parameter, default))


def number(value: Any) -> int:
    """Return a dim as an int, from any kind of integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise Unsupported(f"takes a dim that is no whole number: {type(value).__name__}") from None


def is_in_place(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function changes its first argument."""
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return bool(kwargs.get("inplace", False)) or name.endswith("_")


def _with_first(plain: str, args: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
    if not args and plain != "where":
        found = next((key for key in _INPUTS if key in named), None)
        if found is not None:
            args = (named.pop(found),)
    return args, named


def _weights_first(plain: str) -> tuple[str, ...]:
    flag = _WEIGHTS_FIRST[plain][1]
    return ("input", "weight", "bias", "running_mean", "running_var", flag, "momentum", "eps", "cudnn_enabled")


def _parameters(plain: str, args: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the names of positional parameters, for functions with several signatures."""
    second = args[1] if len(args) > 1 else None
    if plain in ("var", "std") and isinstance(second, bool):
        return ("input", "unbiased")
    if plain in ("max", "min") and isinstance(second, Tensor):
        return ("input", "other")
    if plain == "view" and isinstance(second, torch.dtype):
        return ("input", "dtype")
    if plain == "sort":
        return ("input", "dim", "descending")
    if plain in ("softmax", "log_softmax", "softmin", "cumsum", "cumprod"):
        return ("input", "dim", "dtype")
    return PARAMETERS[plain]


def _gathered(plain: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if plain not in _ONE_BY_ONE or len(args) < 2 or isinstance(args[1], (tuple, list, torch.dtype)):
        return args
    return (args[0], args[1:]) if len(args) > 2 or plain != "squeeze" else args


def _bind(parameters: tuple[str, ...], args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return every argument by the name of its parameter."""
    if len(args) > len(parameters):
        raise Unsupported(f"has {len(args)} arguments, and weft knows {len(parameters)} of it: {', '.join(parameters)}")
    found = dict(zip(parameters, args, strict=False))
    for key, value in named.items():
        own = key if key in parameters else ALIASES.get(key, key)
        if own in found:
            raise Unsupported(f"has its argument {own} twice")
        found[own] = value
    return found

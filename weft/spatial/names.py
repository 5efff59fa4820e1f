"""Names of torch's functions, grouped by their rule on tiles.

Function, method and operator of one name have one rule.
"""

from __future__ import annotations


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

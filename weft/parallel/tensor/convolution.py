"""Splits convolutions by channels over `x` and `y`: Conv1d, Conv2d and Conv3d with groups = 1.

    gathered  weight [out / x, in / y, ...]    O = sum over y, gathered over x    dI = sum over x, gathered over y
    column    weight [out / x, in / y, ...]    O = sum over y, out over x         dI = sum over x, gathered over y
    row       weight [out / y, in / x, ...]    O = sum over x, gathered over y    dI = sum over y, in over x

Every rank holds the values between layers whole (`Pairing.is_whole`): a norm, a pool or a flatten sees all channels. A
column and a row with only channel-wise operations between them are a pair, which needs no communication over x in
between. Bytes of one call, with I and O the whole input and output of a layer:

    gathered    over x: O forward (all-gather), I/y backward       over y: O/x forward, I backward (all-gather)
    column      over x: I/y backward                               over y: O/x forward, I backward (all-gather)
    row         over x: O/y forward                                over y: O forward (all-gather), I/x backward

These are all-reduces, except those marked all-gather. Input channels that y does not divide (such as those of RGB
images) are split unevenly, and their dI is an all-reduce. An input that requires no gradient has no communication in
backward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from weft.comm import Axis
from weft.parallel.tensor.operations import enter, gather, leave, own_part


def gathered(module: Any, x: Axis, y: Axis, value: Tensor) -> Tensor:
    """Forward of a convolution without a partner: computes this rank's output channels, and gathers them over x."""
    return gather(column(module, x, y, value), x, _channel_dim(module))


def column(module: Any, x: Axis, y: Axis, value: Tensor) -> Tensor:
    """Returns this rank's output channels [batch, out / x, ...] of a whole input."""
    value = enter(own_part(value, y, _channel_dim(module)), x)  # [batch, in / y, ...]
    return _add_bias(leave(module._conv_forward(value, module.weight, None), y), module)


def row(module: Any, x: Axis, y: Axis, value: Tensor) -> Tensor:
    """Returns all output channels of an input of which this rank has its channels [batch, in / x, ...]."""
    out = leave(module._conv_forward(enter(value, y), module.weight, None), x)  # [batch, out / y, ...]
    return gather(_add_bias(out, module), y, _channel_dim(module))


def _add_bias(value: Tensor, module: Any) -> Tensor:
    return value if module.bias is None else value + module.bias.view(-1, *(1 for _ in module.kernel_size))


def _channel_dim(module: Any) -> int:
    return -1 - len(module.kernel_size)  # from the end: inputs may have no batch dim

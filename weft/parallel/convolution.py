"""Convolutions over `x`: channels as a linear's features. For Conv1d, Conv2d and Conv3d with groups = 1, and y = 1.

    gathered  weight [out / x, in, ...]    input whole               output gathered along channels    dI = sum over x
    column    weight [out / x, in, ...]    input whole               output has out / x channels       dI = sum over x
    row       weight [out, in / x, ...]    input has in / x channels output = sum over x               dI is our part

A column and a row with only element-wise work between them are a pair: nothing is said in between. Bytes of one call,
with I and O the whole input and output: gathered O forward (all-gather) and I backward (all-reduce); a pair O of the
row forward and I of the column backward (all-reduces). An input that needs no gradient says nothing backward.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from weft.comm import Axis
from weft.parallel.tensor_ops import enter, gather, leave

Kind = Literal["gathered", "column", "row"]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_convolution(module: nn.Module) -> bool:
    """Whether the channels of a module can be split: a plain convolution in which every output sees every input."""
    return type(module) in CONVOLUTIONS and getattr(module, "groups", None) == 1


def refuse(name: str, module: Any, kind: Kind, degree: int) -> str | None:
    """Why the convolution cannot be split over x = `degree`, and what to change; None where it can."""
    if not is_convolution(module):
        what = f"{type(module).__name__}, groups = {getattr(module, 'groups', 'none')}"
        return (
            f"'{name}' ({what}) is not a plain nn.Conv1d, nn.Conv2d or nn.Conv3d with groups = 1, so its channels "
            f"cannot be split; use tensor.x = 1"
        )
    size, what = (module.in_channels, "input") if kind == "row" else (module.out_channels, "output")
    if size % degree:
        divisors = ", ".join(str(number) for number in range(1, size + 1) if size % number == 0)
        return f"tensor.x = {degree} does not divide the {size} {what} channels of '{name}'; use one of {divisors}"
    return None


def gathered(module: Any, axis: Axis, value: Tensor) -> Tensor:
    """The convolution of a whole input by our output channels, put together: the same on all ranks."""
    return gather(column(module, axis, value), axis, _channel_dim(module))


def column(module: Any, axis: Axis, value: Tensor) -> Tensor:
    """Our output channels of a whole input: [batch, out / x, ...]."""
    out: Tensor = module._conv_forward(enter(value, axis), module.weight, module.bias)
    return out


def row(module: Any, axis: Axis, value: Tensor) -> Tensor:
    """All output channels of an input of which we have our channels [batch, in / x, ...]; the bias is added once."""
    out = leave(module._conv_forward(value, module.weight, None), axis)
    return out if module.bias is None else out + module.bias.view(-1, *(1 for _ in module.kernel_size))


def _channel_dim(module: Any) -> int:
    return -1 - len(module.kernel_size)  # from the end: inputs may come without a batch

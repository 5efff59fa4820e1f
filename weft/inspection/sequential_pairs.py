"""Finds pairs of layers in an `nn.Sequential` that can be split without a numerical check.

The modules between the two layers must not mix features. For linears these are element-wise modules, for convolutions
also pools and dropout of channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from weft.inspection.split_probe import linear_sizes

ELEMENT_WISE = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.LeakyReLU,
    nn.ELU,
    nn.Dropout,
    nn.Identity,
    nn.Softplus,
)
CHANNEL_WISE = (  # modules that may lie between two convolutions, because they do not mix channels
    *ELEMENT_WISE,
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)


def sequential_pairs(
    module: nn.Module, is_layer: Callable[[nn.Module], bool], between: tuple[type[nn.Module], ...]
) -> Iterator[tuple[str, str]]:
    """Yields pairs of names of layers with only modules of the classes `between` between them.

    No layer is in two pairs, and a layer that the chain calls twice is in none.
    """
    open_name: str | None = None
    chain = {name: child for name, child in module._modules.items() if child is not None}  # with repeated modules
    places = [id(child) for child in chain.values()]
    for name, child in chain.items():
        if is_layer(child) and places.count(id(child)) == 1:
            if open_name is not None and linear_sizes(chain[open_name])[1] == linear_sizes(child)[0]:
                yield open_name, name
                open_name = None
            else:
                open_name = name
        elif type(child) not in between:  # a subclass may do anything
            open_name = None


def reason_not_splittable(module: Any) -> str:
    """Returns why a convolution's channels are not split."""
    if module.transposed:
        return "a transposed convolution"
    if module.groups != 1:
        return f"a convolution with groups = {module.groups}, whose outputs do not see every input"
    return "not an nn.Conv1d, nn.Conv2d or nn.Conv3d itself with a weight of its own"

"""Pairs that need no probe: layers of an `nn.Sequential` with only modules between them that mix no features.

For linears these are element-wise modules, for convolutions also pools and dropout of channels.
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
CHANNEL_WISE = (  # what may stand between two convolutions: it never mixes channels
    *ELEMENT_WISE,
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)


def sequential_couples(
    module: nn.Module, is_layer: Callable[[nn.Module], bool], between: tuple[type[nn.Module], ...]
) -> Iterator[tuple[str, str]]:
    """Layers of a chain with only such modules between them, each used once."""
    open_name: str | None = None
    chain = {name: child for name, child in module._modules.items() if child is not None}  # repeated ones too
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


def why_not_split(name: str, module: Any) -> str:
    """The reason why a convolution's channels cannot be split, and what to change."""
    if module.transposed:
        what = "is transposed, and weft splits the channels of plain ones only"
    elif module.groups != 1:
        what = (
            f"has groups = {module.groups}, so an output does not see every input, and weft splits only where it does"
        )
    else:
        what = "is not an nn.Conv1d, nn.Conv2d or nn.Conv3d itself with a weight of its own"
    return (
        f"the convolution '{name}' ({type(module).__name__}) {what}; use a plain convolution with groups = 1, or "
        f"tensor.x = tensor.y = 1 (`shard` splits the state of any layer)"
    )

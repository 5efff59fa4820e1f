"""The layers that K-FAC preconditions, and what it takes of them: rows of inputs and of gradients of outputs.

A layer's weight is a matrix [outputs, inputs] that multiplies each row of inputs. Of a `nn.Linear`, a row is one vector
of its input; of a `nn.Conv2d`, one patch of the image (im2col). A trained bias is one more column of the matrix, whose
input is always 1. A convolution with groups is a batch of matrices, one for each group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn import functional

_KINDS = (nn.Linear, nn.Conv2d)


@dataclass(frozen=True)
class FactorSizes:
    """The sizes of a layer's factors: `groups` matrices A of inputs × inputs, and as many G of outputs × outputs."""

    groups: int
    outputs: int
    inputs: int

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """The shape of the input factors A."""
        return (self.groups, self.inputs, self.inputs)

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """The shape of the output factors G."""
        return (self.groups, self.outputs, self.outputs)

    @property
    def input_numel(self) -> int:
        """The elements of A."""
        return self.groups * self.inputs**2

    @property
    def numel(self) -> int:
        """The elements of both factors."""
        return self.groups * (self.inputs**2 + self.outputs**2)

    @property
    def inverse_cost(self) -> int:
        """The work of both inverses, up to a constant."""
        return self.groups * (self.inputs**3 + self.outputs**3)


@dataclass(frozen=True)
class KfacLayer(FactorSizes):
    """A layer with `groups` matrices of [outputs, inputs]; `inputs` counts the column of a trained bias."""

    name: str
    module: nn.Module
    has_bias: bool

    @property
    def weight_name(self) -> str:
        """The name of its weight in the model."""
        return f"{self.name}.weight" if self.name else "weight"

    @property
    def bias_name(self) -> str:
        """The name of its bias in the model."""
        return f"{self.name}.bias" if self.name else "bias"

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of the parameters that K-FAC updates."""
        return (self.weight_name, self.bias_name) if self.has_bias else (self.weight_name,)

    def input_rows(self, given: Tensor) -> Tensor:
        """Returns the rows of inputs of one forward, [groups, rows, inputs]."""
        module = self.module
        if isinstance(module, nn.Conv2d):
            given = given if given.dim() == 4 else given.unsqueeze(0)
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            padded = functional.pad(given, module._reversed_padding_repeated_twice, mode=mode)
            patches = functional.unfold(padded, module.kernel_size, module.dilation, 0, module.stride)
            rows = _group_rows(patches, self.groups)
        else:
            rows = given.reshape(1, -1, given.shape[-1])
        return torch.cat([rows, rows.new_ones(*rows.shape[:2], 1)], dim=2) if self.has_bias else rows

    def output_rows(self, gradient: Tensor) -> Tensor:
        """Returns the rows of the gradient of one forward's output, [groups, rows, outputs]."""
        if isinstance(self.module, nn.Conv2d):
            gradient = gradient if gradient.dim() == 4 else gradient.unsqueeze(0)
            return _group_rows(gradient.flatten(2), self.groups)
        return gradient.reshape(1, -1, gradient.shape[-1])

    def to_matrix(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Joins values of the layer's parameters, by name, to [groups, outputs, inputs]."""
        matrix = parts[self.weight_name].reshape(self.groups, self.outputs, -1)
        if not self.has_bias:
            return matrix
        return torch.cat([matrix, parts[self.bias_name].reshape(self.groups, self.outputs, 1)], dim=2)

    def from_matrix(self, matrix: Tensor) -> dict[str, Tensor]:
        """Returns the inverse of `to_matrix`, with flat values."""
        if not self.has_bias:
            return {self.weight_name: matrix.reshape(-1)}
        return {self.weight_name: matrix[..., :-1].reshape(-1), self.bias_name: matrix[..., -1].reshape(-1)}


def _group_rows(channels: Tensor, groups: int) -> Tensor:
    """Reshapes [samples, groups · channels, positions] to [groups, samples · positions, channels]."""
    rows: Tensor = channels.unflatten(1, (groups, -1)).permute(1, 0, 3, 2)
    return rows.flatten(1, 2)


def find_layers(
    model: nn.Module, trained: Collection[str], exclude: Collection[str] = (), max_size: int | None = None
) -> list[KfacLayer]:
    """Returns the model's linears and convolutions that K-FAC can precondition, in order. `trained` has names of
    parameters.

    Left out are layers whose weight is frozen or shared with another module, whose forward was replaced (a head that
    computes the loss), that have a factor of more than `max_size` rows, or whose name fits a pattern of `exclude`.
    """
    uses = Counter(id(one) for module in model.modules() for one in module._parameters.values() if one is not None)
    found = []
    for name, module in model.named_modules():
        if type(module) not in _KINDS or "forward" in module.__dict__:
            continue
        layer = _layer(name, module, trained)
        weight = module._parameters["weight"]
        if layer.weight_name not in trained or uses[id(weight)] > 1:
            continue
        if max_size is not None and max(layer.inputs, layer.outputs) > max_size:
            continue
        if not any(fnmatchcase(name, pattern) for pattern in exclude):
            found.append(layer)
    return found


def _layer(name: str, module: nn.Module, trained: Collection[str]) -> KfacLayer:
    has_bias = (f"{name}.bias" if name else "bias") in trained
    if isinstance(module, nn.Conv2d):
        inputs = module.in_channels // module.groups * module.kernel_size[0] * module.kernel_size[1]
        outputs = module.out_channels // module.groups
        return KfacLayer(module.groups, outputs, inputs + has_bias, name, module, has_bias)
    assert isinstance(module, nn.Linear)
    return KfacLayer(1, module.out_features, module.in_features + has_bias, name, module, has_bias)

"""Rounds the unsplit model in other ways, without changing what it computes: its noise is how far the results then are.

Three things change, each by a random number of the run: the order of the samples in a batch; every parameter, by one
unit in its last place; and in backward the gradient of each result of a module, by one unit in the last place of each
element. The last one measures sums whose terms cancel. For example, the bias of attention keys, or of a convolution
before batch norm, has no gradient in theory: in floating point it is a unit in the last place of the terms, whatever
their sum. AdamW makes steps of it in some direction, which nothing determines.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from weft.inspection.nested_tensors import tensors_in

NUM_RUNS = 3  # runs of the unsplit model, each rounded in another way
ULP = 2.0**-52  # relative distance of neighbouring float64 numbers


class RoundedOtherwise:
    """A context in which a model's backward is rounded in another way; its parameters are moved when it is made."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model, self._rng = model, torch.Generator().manual_seed(seed)
        self._handles: list[RemovableHandle] = []
        with torch.no_grad():
            for parameter in filter(Tensor.is_floating_point, model.parameters()):
                parameter.copy_(self._moved(parameter))

    def order(self, count: int) -> Tensor:
        """Returns a random order of so many samples."""
        return torch.randperm(count, generator=self._rng)

    def __enter__(self) -> None:
        for module in self._model.modules():
            self._handles.append(module.register_forward_hook(self._hook_result))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook_result(self, module: nn.Module, args: Any, result: Any) -> None:
        for tensor in tensors_in(result):
            if tensor.requires_grad and not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                tensor.register_hook(self._moved)

    def _moved(self, value: Tensor) -> Tensor:
        """Returns each element, one unit in its last place away at random."""
        signs = torch.randint(0, 2, value.shape, generator=self._rng).to(value.device) * 2 - 1
        return value * (1 + ULP * signs)

"""Makes a layer that communicates one operation, which a rank of `branch` runs or skips as a whole.

The forward of a layer that `x` splits has collectives, and functions whose backward has some. A watch of operations
(`pipeline/trace_watch.py`) would see what is inside. Behind `as_operations` it sees one operation on the layer's inputs
and parameters. All ranks of `x` have the same index on `branch`, so they skip the layer together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from weft.inspection.nested_tensors import tensors_in
from weft.inspection.tensor_splits import Pairing


def split_layers(pairing: Pairing) -> tuple[str, ...]:
    """Returns the names of the modules whose forwards communicate, without those that lie in another one."""
    parents = {split.parent for split in pairing.splits.values() if split.parent is not None}
    names = {*pairing.splits, *pairing.embeddings, *parents}
    return tuple(sorted(name for name in names if not any(name.startswith(f"{other}.") for other in names)))


def as_operations(model: nn.Module, names: Iterable[str]) -> None:
    """Make the forward of each named module one operation. Names that the model does not have are passed over."""
    modules = dict(model.named_modules())
    for module in (modules[name] for name in names if name in modules):
        setattr(module, "forward", _OneOperation(module))  # noqa: B010 (a method to mypy)


class _OneOperation:
    """A module's forward, which a watch sees as one operation."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._forward = module, module.forward
        self.__name__ = f"split {type(module).__name__}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parameters = tuple(self._module.parameters())
        given = [*parameters, *tensors_in((args, kwargs))]
        if not has_torch_function(given):
            return self._forward(*args, **kwargs)
        return handle_torch_function(_WholeForward(self.__name__, self._forward), given, parameters, args, kwargs)


class _WholeForward:
    """The operation: parameters are among its arguments so that a watch sees them."""

    def __init__(self, name: str, forward: Any) -> None:
        self.__name__, self._forward = name, forward

    def __call__(self, parameters: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

"""Calls a model with its parameters and buffers replaced by other tensors.

torch.func.functional_call does the same, but does not restore a module that is registered in two places.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns an example's positional and keyword arguments: it is a tuple, or a mapping, or else one argument."""
    if isinstance(given, Mapping):
        return (), dict(given)
    return (given if isinstance(given, tuple) else (given,)), {}


def call_with(model: nn.Module, state: Mapping[str, Tensor], args: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Returns `model(*args, **kwargs)`, computed with the tensors of `state` (by name). `args` may be all arguments.

    A tied parameter is replaced everywhere it is used. The model's own tensors are back after the call.
    """
    args, by_name = arguments(args)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    others = {id(named[name]): other for name, other in state.items()}
    before = []
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            before.append((held, dict(held)))
            for name, tensor in held.items():
                held[name] = others.get(id(tensor), tensor)  # type: ignore[assignment]
    try:
        return model(*args, **by_name, **(kwargs or {}))
    finally:
        for held, was in before:
            held.clear()
            held.update(was)  # type: ignore[arg-type]

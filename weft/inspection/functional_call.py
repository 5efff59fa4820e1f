"""Calls a model with its parameters and buffers replaced by other tensors.

torch.func.functional_call does the same, but does not restore a module that is registered in two places.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def call_with(model: nn.Module, state: Mapping[str, Tensor], args: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Returns `model(*args, **kwargs)`, computed with the tensors of `state` (by name).

    A tied parameter is replaced everywhere it is used. The model's own tensors are back after the call.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    others = {id(named[name]): other for name, other in state.items()}
    before = []
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            before.append((held, dict(held)))
            for name, tensor in held.items():
                held[name] = others.get(id(tensor), tensor)  # type: ignore[assignment]
    try:
        return model(*(args if isinstance(args, tuple) else (args,)), **(kwargs or {}))
    finally:
        for held, was in before:
            held.clear()
            held.update(was)  # type: ignore[arg-type]

"""Calls a model with its parameters and buffers replaced by other tensors, and leaves nothing of the call behind.

torch.func.functional_call does the same, but does not restore a module that is registered in two places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from weft.inspection.nested_tensors import tensors_in


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


_REGISTERED = ("_parameters", "_buffers", "_modules")


@contextmanager
def no_fakes_left(model: nn.Module) -> Iterator[None]:
    """Put back attributes of modules that hold fake tensors after the context: a cache, a weight computed by a hook.

    Lists and dicts get back the elements that they had.
    """
    before = [
        (vars(module), {name: (one, _elements(one)) for name, one in _attributes(module)}) for module in model.modules()
    ]
    try:
        yield
    finally:
        for attributes, old in before:
            for name, value in list(attributes.items()):
                if name in _REGISTERED or not any(isinstance(one, FakeTensor) for one in tensors_in(value)):
                    continue
                if name not in old:
                    del attributes[name]
                    continue
                attributes[name], elements = old[name]
                if elements is not None:
                    attributes[name].clear()
                    (attributes[name].extend if isinstance(elements, list) else attributes[name].update)(elements)


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(module).items() if name not in _REGISTERED]


def _elements(value: Any) -> Any:
    return type(value)(value) if type(value) in (list, dict) else None

"""Calls a model in another mode, or with other tensors, and leaves nothing of the call behind.

torch.func.functional_call does the same, but does not restore a module that is registered in two places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

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


NUM_TOKENS = 4  # of the made-up sequence in `run_on_fakes`


def run_on_fakes(model: nn.Module, watch: TorchDispatchMode, training: bool, has_graph: bool = False) -> Any:
    """Returns the model's result for made-up tokens on fake tensors (shapes only), while `watch` sees every operation.

    Modules are in training or evaluation mode for it. With `has_graph`, autograd records. Raises whatever the model's
    code raises.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = training
        with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(has_graph):
            state = {
                name: torch.empty(t.shape, dtype=t.dtype, device="cpu", requires_grad=t.requires_grad)
                for name, t in (*model.named_parameters(), *model.named_buffers())
            }
            tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device="cpu")
            with no_fakes_left(model), watch:
                return call_with(model, state, (tokens,))
    finally:
        for module, was_training in modes:
            module.training = was_training


_REGISTERED = ("_parameters", "_buffers", "_modules")


@contextmanager
def no_fakes_left(model: nn.Module) -> Iterator[None]:
    """Put back attributes of modules that hold fake tensors after the context: a cache, a weight computed by a hook.

    Lists and dicts get back the elements that they had.
    """
    before = [
        (vars(module), {name: (one, _elements(one)) for name, one in vars(module).items() if name not in _REGISTERED})
        for module in model.modules()
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


def _elements(value: Any) -> Any:
    return type(value)(value) if type(value) in (list, dict) else None


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Set a model to training or evaluation mode inside the context. Afterwards each module has the mode it had.

    A user may keep some modules of a model that trains in evaluation mode, such as frozen batch norms. The model's
    `train` is called both times, because a model's own may do more than set the modes of modules.
    """
    modes = [(module, module.training) for module in model.modules()]
    was_training = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(was_training)
        for module, mode in modes:
            module.training = mode

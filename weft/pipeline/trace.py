"""The way of a forward through a model, recorded once on shapes: which module is called when, and on which tensors.

A model's *units* are its blocks and the other modules with parameters that hold no blocks (embedding, final norm,
head). What the code between them does to their results is recorded as operations. Every process records the same list,
so a tensor's number means the same everywhere, and a cut of the list into stages says which tensors cross the cut.
Nothing is computed: units run on fake tensors. Code between units that only looks at the model's inputs (positions,
masks) runs for real and is no event: every rank has the inputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.func import functional_call
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves, tree_map

from weft.blocks import find_units
from weft.errors import PlanError

END = "the end of the forward"
_PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.device}  # where no tensor can be


@dataclass(frozen=True)
class Event:
    """A unit's call, or an operation between units. Tensors are numbered; parameters are those of no unit."""

    name: str
    is_call: bool
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    parameters: frozenset[str] = frozenset()
    result: Any = field(default=None, compare=False, repr=False)  # as fake tensors


@dataclass(frozen=True)
class Value:
    """What is known of a numbered tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Trace:
    """The events of one forward in order, the end last; and the tensors between them, the parameters first."""

    events: tuple[Event, ...]
    values: tuple[Value, ...]
    parameters: Mapping[str, int]
    fakes: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)  # the parameters, as shapes


class Numbers:
    """The numbers of tensors by identity. A tensor that nobody holds has none: another may take its place."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def __setitem__(self, tensor: Tensor, number: int) -> None:
        self._found[id(tensor)] = weakref.ref(tensor), number

    def __contains__(self, tensor: Tensor) -> bool:
        reference, _ = self._found.get(id(tensor), (None, 0))
        return reference is not None and reference() is tensor

    def __getitem__(self, tensor: Tensor) -> int:
        assert tensor in self
        return self._found[id(tensor)][1]

    def clear(self) -> None:
        self._found.clear()


class Watch(TorchFunctionMode):
    """Sees every operation of the code between units; subclasses say what becomes of it. Inside a unit it is off."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = Numbers()
        self._is_on = False

    @contextmanager
    def watching(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """While a model's own code runs with these parameters."""
        self.numbers.clear()
        self.begin(parameters)
        self.switch(True)
        try:
            yield
        finally:
            self.switch(False)

    def switch(self, on: bool) -> None:
        """On in the code between units, off inside them."""
        if on and not self._is_on:
            _push_mode(self)
        elif self._is_on and not on:
            _pop_mode()
        self._is_on = on

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in(args) + tensors_in(kwargs) if kwargs else tensors_in(args)
        numbered = [tensor for tensor in tensors if tensor in self.numbers]
        if not numbered:
            return func(*args, **kwargs)
        return self.operation(func, args, kwargs, numbered)  # torch has switched this mode off meanwhile

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        raise NotImplementedError

    def operation(self, func: Any, args: Any, kwargs: Any, numbered: list[Tensor]) -> Any:
        raise NotImplementedError


def operation_name(func: Any) -> str:
    """What an operation is called, the same in every process; an attribute by its own name."""
    name = str(getattr(func, "__name__", type(func).__name__))
    return str(func.__self__.__name__) if name == "__get__" else name


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a nested value, in order."""
    if isinstance(value, Tensor):
        return [value]
    kind = type(value)
    if kind not in (tuple, list, dict):
        return [] if kind in _PLAIN else [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    found = []
    for item in value.values() if kind is dict else value:
        if isinstance(item, Tensor):
            found.append(item)
        elif type(item) not in _PLAIN:
            found += tensors_in(item)
    return found


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A nested value with its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(map_tensors(change, item) for item in value)
    if kind is dict:
        return {key: map_tensors(change, item) for key, item in value.items()}
    if kind in _PLAIN:
        return value
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, value)


class _Recorder(Watch):
    """Numbers tensors and writes events."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.values: list[Value] = []
        self.lineage: dict[int, frozenset[str]] = {}  # number -> parameters that it comes from, where from nothing else

    def find(self, value: Any) -> list[int]:
        return [self.numbers[tensor] for tensor in tensors_in(value) if tensor in self.numbers]

    def number(self, tensor: Tensor) -> int:
        self.numbers[tensor] = len(self.values)
        self.values.append(Value(tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
        return len(self.values) - 1

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            self.lineage[self.number(parameter)] = frozenset([name])

    def operation(self, func: Any, args: Any, kwargs: Any, numbered: list[Tensor]) -> Any:
        inputs = [self.numbers[tensor] for tensor in numbered]
        result = func(*args, **kwargs)
        if tensors_in(result):
            self.write(operation_name(func), False, inputs, result)
        return result

    def write(self, name: str, is_call: bool, inputs: list[int], result: Any) -> None:
        inputs = list(dict.fromkeys(inputs))
        from_parameters = [self.lineage[number] for number in inputs if number in self.lineage]
        parameters = frozenset().union(*from_parameters) if from_parameters else frozenset()
        outputs = [self.number(tensor) for tensor in tensors_in(result)]
        if not is_call and len(from_parameters) == len(inputs):
            self.lineage.update(dict.fromkeys(outputs, parameters))
        self.events.append(Event(name, is_call, tuple(inputs), tuple(outputs), parameters, result))


def trace(
    model: nn.Module, args: Any, kwargs: Mapping[str, Any], dtype: torch.dtype, device: torch.device, y: int = 1
) -> Trace:
    """Records one forward of a model of which only the shapes matter; parameters count as of `dtype` on `device`.

    Over `y` > 1 ranks, what units hand on has a part of its features (its last dim), and so have other parameters.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = _Recorder()
    units = find_units(model)
    state = _fake_state(model, units, fake, dtype, device, y)
    inside: list[list[int] | None] = []  # the inputs of the unit under way

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        inside.append(None if inside else recorder.find((args, kwargs)))
        if inside[-1] is None:  # a unit inside a unit is not one
            return None
        recorder.switch(False)
        args, kwargs = tree_map(lambda leaf: _widen(recorder, fake, leaf, y), (args, kwargs))
        fake.__enter__()
        return args, kwargs

    def leave(name: str, _: nn.Module, __: Any, result: Any) -> Any:
        inputs = inside.pop()
        if inputs is None:
            return None
        result = tree_map(lambda leaf: _narrow(leaf, y), result)
        fake.__exit__(None, None, None)
        recorder.write(name, True, inputs, result)
        recorder.switch(True)
        return result

    handles = []
    for name, module in units.items():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(partial(leave, name)))
    try:
        with recorder.watching(state):
            output = functional_call(model, state, args, dict(kwargs))
            recorder.write(END, False, recorder.find(output), None)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        last = next((event.name for event in reversed(recorder.events) if event.is_call), "its start")
        raise PlanError(
            f"the model cannot be cut into stages: after '{last}' its forward depends on the values of a result "
            f"({error}), which not every rank has; use pipe = 1, or move that code into a block"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
        if any(inputs is not None for inputs in inside):
            fake.__exit__(None, None, None)
    return Trace(tuple(recorder.events), tuple(recorder.values), {name: i for i, name in enumerate(state)}, state)


def _fake_state(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    fake: FakeTensorMode,
    dtype: torch.dtype,
    device: torch.device,
    y: int,
) -> dict[str, Tensor]:
    """Parameters, and the buffers of units (which a forward may write), as shapes; parameters first."""
    in_units = {f"{name}.{key}" for name, module in units.items() for key in module.state_dict(keep_vars=True)}
    state: dict[str, Tensor] = {}
    with fake:
        for name, parameter in model.named_parameters():
            kind = dtype if parameter.is_floating_point() else parameter.dtype
            empty = torch.empty(parameter.shape, dtype=kind, device=device)
            empty = empty if name in in_units else _narrow(empty, y)
            state[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for name, module in units.items():
        for key, buffer in module.named_buffers():
            state[f"{name}.{key}"] = fake.from_tensor(buffer)
    return state


def _narrow(leaf: Any, y: int) -> Any:
    if y == 1 or not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.dim():
        return leaf
    return leaf[..., : leaf.shape[-1] // y]


def _widen(recorder: _Recorder, fake: FakeTensorMode, leaf: Any, y: int) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if y > 1 and leaf in recorder.numbers and leaf.is_floating_point():
        return torch.cat([leaf] * y, dim=-1)
    return fake.from_tensor(leaf)

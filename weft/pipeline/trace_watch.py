"""Watches a model's code between its units: tensors made so far have numbers, operations on them have names.

For branches, the FLOPs of each operation are counted too, and the bytes that it moves (`WorkCounter`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode

from weft.inspection.memory_traffic import bytes_of, is_view, tensors_of
from weft.inspection.nested_tensors import map_tensors, tensors_in
from weft.profiling.flops import count_product


class TracePurpose(NamedTuple):
    """What a trace is for: whether it looks inside of units, and what a refusal says."""

    inside: bool
    failure: str
    between: str
    remedy: str


FOR_STAGES = TracePurpose(False, "the model cannot be cut into stages", " between blocks", "use pipe = 1")
FOR_BRANCHES = TracePurpose(True, "the model cannot be split into branches", "", "use branch = 1")


class TensorNumbers:
    """Maps tensors to numbers by identity. A tensor that was freed has no number: another may have its id."""

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

    def get(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor; None if it has none."""
        reference, number = self._found.get(id(tensor), (None, 0))
        return number if reference is not None and reference() is tensor else None

    def __iter__(self) -> Iterator[Tensor]:
        alive = [reference() for reference, _ in self._found.values()]
        return iter([tensor for tensor in alive if tensor is not None])

    def clear(self) -> None:
        self._found.clear()


@dataclass(frozen=True)
class RecordedTensor:
    """Stands for a tensor among the recorded arguments of an operation."""

    shape: tuple[int, ...]


def recorded(arguments: Any) -> Any:
    """Returns the arguments of an operation without its tensors."""
    return map_tensors(lambda tensor: RecordedTensor(tuple(tensor.shape)), arguments)


class OperationWatch(TorchFunctionMode):
    """Sees every operation of the code between units; subclasses define what happens to it. Inside a unit it is off."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = TensorNumbers()
        self._is_on = False

    @contextmanager
    def watching(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Watch while a model's own code runs with these parameters."""
        self.numbers.clear()
        self.begin(parameters)
        self.switch(True)
        try:
            yield
        finally:
            self.switch(False)

    def switch(self, on: bool) -> None:
        """Turn the watch on in the code between units, and off inside them."""
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
            return self.without_results(func, args, kwargs)
        return self.operation(func, args, kwargs, numbered)  # torch has disabled this mode inside

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        raise NotImplementedError

    def operation(self, func: Any, args: Any, kwargs: Any, numbered: list[Tensor]) -> Any:
        raise NotImplementedError

    def without_results(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation whose arguments are the model's inputs, or nothing."""
        return func(*args, **kwargs)


def operation_name(func: Any) -> str:
    """Return the name of an operation, the same in every process. An attribute access has the attribute's name."""
    name = str(getattr(func, "__name__", type(func).__name__))
    return str(func.__self__.__name__) if name == "__get__" else name


def outcome(name: str, args: Any, result: Any) -> Any:
    """Return the result of an operation. For an assignment to a part of a tensor, it is that tensor."""
    return args[0] if name == "__setitem__" else result


def unseen_work(function: Any) -> str:
    """Returns in words what made a tensor of which only the forward, or nothing, is watched."""
    if not isinstance(function, BackwardCFunction):
        return "operations that weft does not see, as of torch.func,"
    is_hook = type(function).__name__.startswith("BackwardHook")
    return "a hook on gradients (register_full_backward_hook)" if is_hook else "a torch.autograd.Function"


class EventWork(NamedTuple):
    """The FLOPs of an event in forward and backward, and the bytes that its forward reads and writes."""

    flops: int = 0
    num_bytes: int = 0


class WorkCounter(TorchDispatchMode):
    """Adds the operations that run in this mode to the event whose index `event()` returns."""

    def __init__(self, event: Callable[[], int]) -> None:
        super().__init__()
        self.found: dict[int, EventWork] = {}
        self._event = event

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs, outputs = tensors_of((args, kwargs)), tensors_of(result)
        product = count_product(func, args, kwargs, result)
        flops = 0 if product is None else product.flops.all + product.flops.backward
        moved = 0 if is_view(func, inputs, outputs) else sum(map(bytes_of, (*inputs, *outputs)))
        before = self.found.get(self._event(), EventWork())
        self.found[self._event()] = EventWork(before.flops + flops, before.num_bytes + moved)
        return result

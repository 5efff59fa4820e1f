"""One stage of a model: the user's own model in which the modules of other stages are stand-ins.

A stage runs the model's own forward. A stand-in answers at once with the shapes that the trace recorded (fake tensors);
a module of the stage that is given such a tensor first takes the real one from the stage that made it, as a leaf whose
gradient goes back the same way; and once the stage has done its part, the forward is left. So any model becomes stages
without being edited or rewritten, and hooks, names and classes inside a stage are the model's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from weft.blocks import find_units
from weft.errors import PlanError
from weft.pipeline.partition import Route
from weft.pipeline.trace import END, Event, Watch, map_tensors, operation_name, tensors_in

Take = Callable[[int], Tensor]  # the real tensor of a number, from the stage that made it
_ABSENT = "_weft_absent"  # parameters that only other stages use, as shapes
FindRoute = Callable[[Any, Mapping[str, Any], bool], Route]


class Done(BaseException):
    """The stage has done its part of a forward. Not an Exception: the model's own code is not to catch it."""


class Elsewhere(nn.Module):
    """Stands for a module of another stage; what it has beside parameters and modules can still be asked."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["module_name"], self.__dict__["stands_for"] = name, module
        self.__dict__["walk"] = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["stands_for"], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        walk: Walk = self.__dict__["walk"]
        return walk.pass_by(self.__dict__["module_name"], is_call=True)


@dataclass
class Pass:
    """One micro-batch at one stage, from its forward to its backward."""

    route: Route
    total: Tensor | None = None  # the loss, where the stage is the last
    received: dict[int, Tensor] = field(default_factory=dict)  # leaves by number
    made: dict[int, Tensor] = field(default_factory=dict)  # what other stages take, by number


class Walk(Watch):
    """Leads one stage's forward through the events of its route."""

    def __init__(self, stage: int, model: nn.Module, units: Sequence[str], find_route: FindRoute) -> None:
        super().__init__()
        self.stage, self.model, self.find_route = stage, model, find_route
        self.now: Pass | None = None
        self._take: Take | None = None
        self._found: Route | None = None  # what `look` looks for
        self._place = 0
        model.register_forward_pre_hook(self._begin_model, with_kwargs=True)  # the last: it sees what the model will
        model.register_forward_hook(self._end_model)
        for name in units:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(_Enter(self, name), with_kwargs=True, prepend=True)
            module.register_forward_hook(_Leave(self))
        for module in model.modules():
            if isinstance(module, Elsewhere):
                module.__dict__["walk"] = self

    def forward(self, total: Callable[[], Tensor], route: Route, take: Take) -> Pass:
        """Runs the stage's part of `total()`, which calls the model once; `take` gives what other stages made."""
        self._take, self.now = take, Pass(route)
        try:
            result: Tensor | None = total()
        except Done:
            result = None
        finally:
            self.switch(False)
            self.numbers.clear()
        done, self.now, self._take = self.now, None, None
        done.total = result
        return done

    def look(self, total: Callable[[], Tensor]) -> Route:
        """The route that `total()` would take."""
        self._found, self.now = None, None
        with suppress(Done):
            total()
        route, self._found = self._found, None
        assert route is not None
        return route

    # --- the model's own forward

    def _begin_model(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self.now is None:
            self._found = self.find_route(args, kwargs, self.model.training)
            raise Done
        self._place = 0
        self.numbers.clear()
        if any(self.now.route.parameters):
            self._number_parameters(self.now.route)
        self.switch(True)

    def _number_parameters(self, route: Route) -> None:
        """Those that the code between units uses; of other stages', their shapes."""
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if name in route.parameters[self.stage]:
                self.numbers[parameter] = route.trace.parameters[name]
        for name, fake in self.model.__dict__.get(_ABSENT, {}).items():
            self.numbers[fake] = route.trace.parameters[name]

    def _end_model(self, _: nn.Module, __: Any, output: Any) -> Any:
        self.switch(False)
        self._next(END, is_call=False)
        return map_tensors(self._real, output)

    def operation(self, func: Any, args: Any, kwargs: Any, numbered: list[Tensor]) -> Any:
        name = operation_name(func)
        expected = self._expected()
        if expected is None or expected.name != name or not self._is_next(expected, numbered):
            # An operation that gives no tensor is no event.
            result = func(*args, **kwargs)
            if tensors_in(result):
                raise self._another_way(name)
            return result
        if not self._does():
            return self.pass_by(name, is_call=False)
        args, kwargs = map_tensors(self._real, (args, kwargs))
        result = func(*args, **kwargs)
        self._made(self._next(name, is_call=False), result)
        return result

    def pass_by(self, name: str, is_call: bool) -> Any:
        """An event of another stage: what the trace saw it give."""
        assert self.now is not None
        if self._place > self.now.route.last_event[self.stage]:
            raise Done
        event = self._next(name, is_call)
        for tensor, number in zip(tensors_in(event.result), event.outputs, strict=True):
            self.numbers[tensor] = number
        return event.result

    # --- a unit of this stage

    def enter(self, name: str, args: Any, kwargs: Any) -> Any:
        """Before a unit of the stage: it takes real tensors, and what it does inside is its own."""
        self.switch(False)
        expected = self._expected()
        if expected is None or expected.name != name:
            raise self._another_way(name)
        return map_tensors(self._real, (args, kwargs))

    def leave(self, name: str, result: Any) -> None:
        self._made(self._next(name, is_call=True), result)
        self.switch(True)

    @property
    def is_walking(self) -> bool:
        """Whether the model's own code is running (and not a unit alone, in backward, say)."""
        return self._is_on

    # --- inside

    def _expected(self) -> Event | None:
        assert self.now is not None
        events = self.now.route.trace.events
        return events[self._place] if self._place < len(events) else None

    def _is_next(self, event: Event, numbered: list[Tensor]) -> bool:
        """Whether the operation is the recorded one, and not another of that name that gives no tensor."""
        return {self.numbers[tensor] for tensor in numbered} == set(event.inputs)

    def _does(self) -> bool:
        assert self.now is not None
        return self.now.route.does(self.stage, self._place)

    def _next(self, name: str, is_call: bool) -> Event:
        event = self._expected()
        if event is None or event.name != name or event.is_call != is_call:
            raise self._another_way(name)
        self._place += 1
        return event

    def _made(self, event: Event, result: Any) -> None:
        assert self.now is not None
        tensors = tensors_in(result)
        if len(tensors) != len(event.outputs):
            raise self._another_way(event.name)
        for tensor, number in zip(tensors, event.outputs, strict=True):
            self.numbers[tensor] = number
            if number in self.now.route.crossing[self.stage]:
                self.now.made[number] = tensor

    def _real(self, tensor: Tensor) -> Tensor:
        """What is made elsewhere, taken from there."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        assert self.now is not None
        assert self._take is not None
        number = self.numbers[tensor]
        if number not in self.now.received:
            self.now.received[number] = self._take(number)
        return self.now.received[number]

    def _another_way(self, name: str) -> PlanError:
        event = self._expected()
        return PlanError(
            f"stage {self.stage}: the model's forward came to '{name}' where its trace has "
            f"'{event.name if event else 'nothing'}'; a pipeline needs a forward that takes the same way for inputs of "
            f"the same shapes, on every rank"
        )


class _Enter:
    def __init__(self, walk: Walk, name: str) -> None:
        self.walk, self.name = walk, name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.walk.is_walking:  # called by itself, or inside another unit
            return None
        module.__dict__["_weft_walking"] = self.name
        return self.walk.enter(self.name, args, kwargs)


class _Leave:
    def __init__(self, walk: Walk) -> None:
        self.walk = walk

    def __call__(self, module: nn.Module, _: Any, result: Any) -> None:
        name = module.__dict__.pop("_weft_walking", None)
        if name is not None:
            self.walk.leave(name, result)


# --- building


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters are on the meta device: names, modules and ties without room."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def stage_model(
    whole: nn.Module, route: Route, stage_of: Mapping[str, int], stage: int
) -> tuple[nn.Module, dict[str, str]]:
    """A stage's model from the skeleton of the whole, and what its parameters are called in the whole.

    Tied parameters are held by every stage that uses them.
    """
    names = {id(parameter): name for name, parameter in whole.named_parameters()}
    model = skeleton(whole)
    theirs = dict(model.named_parameters(remove_duplicate=False))
    used = route.parameters[stage]
    for name, module in find_units(model).items():
        if stage_of.get(name) != stage:
            stand_in = Elsewhere(name, module)
            parent, _, leaf = name.rpartition(".")
            model.get_submodule(parent)._modules[leaf] = stand_in
            for key in [key for key, _ in module.named_parameters() if f"{name}.{key}" in used]:
                _put(stand_in, key, theirs[f"{name}.{key}"])
    in_units = tuple(f"{name}." for name in find_units(whole))
    for name in theirs:
        if not name.startswith(in_units) and name not in used:
            _take_away(model, name, route)
    whole_names = dict(whole.named_parameters(remove_duplicate=False))
    called = {name: names[id(whole_names[name])] for name, _ in model.named_parameters()}
    return model, called


def _put(stand_in: Elsewhere, key: str, parameter: Tensor) -> None:
    if "." in key:
        raise PlanError(
            f"the model's own code uses parameter '{stand_in.module_name}.{key}' of another stage from outside; "
            f"use pipe = 1, or put it into one stage (pipe.split)"
        )
    stand_in.register_parameter(key, nn.Parameter(parameter, requires_grad=parameter.requires_grad))


def _take_away(model: nn.Module, name: str, route: Route) -> None:
    """A parameter that only other stages use is seen as its shape."""
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    del module._parameters[leaf]
    module.__dict__[leaf] = model.__dict__.setdefault(_ABSENT, {})[name] = route.trace.fakes[name]

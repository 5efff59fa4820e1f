"""One stage at work: the user's own forward, in which the modules of other stages are stand-ins.

A stand-in answers at once with the shapes that the trace recorded (fake tensors); a module of the stage that is given
such a tensor first takes the real one from the stage that made it, as a leaf whose gradient goes back the same way; and
once the stage has done its part, the forward is left. So any model becomes stages without being edited or rewritten,
and hooks, names and classes inside a stage are the model's own.

Images in tiles: all this happens under the view of the rank's tile, and what is taken from another stage lies where the
trace says.

Random draws: what the objective and the model's own code draw without any result (noise, say) is the same in all
stages, which all run that code; units and operations on results draw from a state of their stage's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function

from weft.errors import PlanError
from weft.inspection.absent_module import AbsentModule
from weft.inspection.nested_tensors import copy_structure, map_tensors, tensors_in
from weft.pipeline.partition import Route
from weft.pipeline.stage_rng import Draws, is_random
from weft.pipeline.stand_in import ABSENT
from weft.pipeline.trace import END, Event
from weft.pipeline.trace_watch import Watch, operation_name, outcome
from weft.spatial.tile_layout import put
from weft.spatial.tiled_model import tiled_of

Take = Callable[[int], Tensor]  # the real tensor of a number, from the stage that made it
FindRoute = Callable[[Any, Mapping[str, Any], bool], Route]


class Done(BaseException):
    """The stage has done its part of a forward. Not an Exception: the model's own code is not to catch it."""


@dataclass
class Pass:
    """One micro-batch at one stage, from its forward to its backward."""

    route: Route
    total: Tensor | None = None  # the loss, where the stage is the last
    received: dict[int, Tensor] = field(default_factory=dict)  # leaves by number
    real: dict[int, Tensor] = field(default_factory=dict)  # what the model's own code has as shapes, by number
    made: dict[int, Tensor] = field(default_factory=dict)  # what other stages take, by number


class Walk(Watch):
    """Leads one stage's forward through the events of its route."""

    def __init__(
        self, stage: int, model: nn.Module, units: Sequence[str], find_route: FindRoute, device: torch.device
    ) -> None:
        super().__init__()
        self.stage, self.model, self.find_route = stage, model, find_route
        self.now: Pass | None = None
        self._take: Take | None = None
        self._found: Route | None = None  # what `look` looks for
        self._place, self._has_begun = 0, False
        self._draws = Draws(stage, device)
        self._tiled, self._view = tiled_of(model), ExitStack()
        model.register_forward_pre_hook(self._begin_model, with_kwargs=True)  # the last: it sees what the model will
        model.register_forward_hook(self._end_model)
        for name in units:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(_Enter(self, name), with_kwargs=True, prepend=True)
            module.register_forward_hook(_Leave(self))
        for module in model.modules():
            if isinstance(module, AbsentModule):
                module.set_result_function(partial(self.pass_by, is_call=True))

    def forward(self, total: Callable[[], Tensor], route: Route, take: Take) -> Pass:
        """Runs the stage's part of `total()`, which calls the model once; `take` gives what other stages made."""
        self._take, self.now, self._has_begun = take, Pass(route), False
        try:
            result: Tensor | None = total()
        except Done:
            result = None
        finally:
            self.switch(False)
            self._view.close()
            self._draws.end()
            self.numbers.clear()
        done, self.now, self._take = self.now, None, None
        done.total = result
        done.real.clear()
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
        if self._has_begun:
            raise PlanError(
                "the objective calls the model twice for one batch, which a pipeline does once; use pipe = 1"
            )
        self._place, self._has_begun = 0, True
        self._draws.apart()
        self.numbers.clear()
        if any(self.now.route.parameters):
            self._number_parameters(self.now.route)
        if self._tiled is not None:  # beneath this watch, which sees operations first
            self._view.enter_context(self._tiled.running((args, kwargs)))
        self.switch(True)

    def _number_parameters(self, route: Route) -> None:
        """Those that the code between units uses; of other stages', their shapes."""
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if name in route.parameters[self.stage]:
                self.numbers[parameter] = route.trace.parameters[name]
        for name, fake in self.model.__dict__.get(ABSENT, {}).items():
            self.numbers[fake] = route.trace.parameters[name]

    def _end_model(self, _: nn.Module, __: Any, output: Any) -> Any:
        self.switch(False)
        self._next(END, is_call=False)
        output = map_tensors(self._real, output)
        self._view.close()
        return output if self._tiled is None else self._tiled.finish(output)

    def operation(self, func: Any, args: Any, kwargs: Any, numbered: list[Tensor]) -> Any:
        name, event = operation_name(func), self._expected()
        if event is None or event.name != name or {self.numbers[tensor] for tensor in numbered} != set(event.inputs):
            # An operation that gives no tensor is no event.
            result = func(*args, **kwargs)
            if tensors_in(result):
                raise self._another_way(name)
            return result
        if not event.outputs:
            self._next(name, is_call=False)
            return func(*args, **kwargs)
        if not self._does():
            result = self.pass_by(name, is_call=False)
        else:
            real_args, real_kwargs = map_tensors(self._real, (args, kwargs))
            result = outcome(name, real_args, func(*real_args, **real_kwargs))
            self._made(self._next(name, is_call=False), result)
        if event.changed:  # whoever still holds the tensor has the changed one
            self._follow(numbered, event, result)
        return result

    def _follow(self, numbered: Sequence[Tensor], event: Event, result: Any) -> None:
        """Tensors that an operation in place has changed go by the number of its result, here as in the trace."""
        for tensor in numbered:
            if self.numbers[tensor] == event.inputs[0] and event.inputs[0] in event.changed:
                self.numbers[tensor] = event.outputs[0]
                if isinstance(result, Tensor) and not isinstance(result, FakeTensor) and self.now is not None:
                    self.now.real[event.outputs[0]] = result

    def without_results(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not is_random(operation_name(func)):
            return func(*args, **kwargs)
        self._draws.alike()
        try:
            return func(*args, **kwargs)
        finally:
            self._draws.apart()

    def pass_by(self, name: str, is_call: bool) -> Any:
        """An event of another stage: what the trace saw it give."""
        assert self.now is not None
        if self._place > self.now.route.last_event[self.stage]:
            raise Done
        event = self._next(name, is_call)
        for tensor, number in zip(tensors_in(event.result), event.outputs, strict=True):
            self.numbers[tensor] = number
        return copy_structure(event.result)

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
        if number not in self.now.real:
            with torch._C.DisableTorchFunction():
                taken = self.now.received[number] = self._take(number)
                real = _HandOn.apply(taken) if taken.requires_grad else taken
            self.now.real[number] = put(real, self.now.route.trace.values[number].place)
        return self.now.real[number]

    def _another_way(self, name: str) -> PlanError:
        event = self._expected()
        return PlanError(
            f"stage {self.stage}: the model's forward came to '{name}' where its trace has "
            f"'{event.name if event else 'nothing'}'; a pipeline needs a forward that takes the same way for inputs of "
            f"the same shapes, on every rank"
        )


class _HandOn(Function):
    """A leaf as what it is in the whole model: a result, which may be changed in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


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

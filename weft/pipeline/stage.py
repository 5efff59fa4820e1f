"""Runs one stage: the user's own forward, in which modules of other stages are stand-ins.

A stand-in returns at once fake tensors of the shapes that the trace recorded. A module of the stage that is given such
a tensor first takes the real one from the stage that made it; its gradient goes back the same way. Once the stage has
run its part, the forward is left. So any model is cut into stages without editing it, and hooks, names and
classes inside a stage are the model's own.

Images in tiles: all this happens under the view of the rank's tile, and a tensor from another stage has the layout that
the trace recorded.

Random numbers: what the objective and the model's own code draw without using results (noise, for example) is the same
in all stages, which all run that code. Units and operations on results draw from their stage's own random state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function

from weft.errors import PlanError
from weft.inspection.blocks import AbsentModule
from weft.inspection.nested_tensors import copy_structure, map_tensors, tensors_in
from weft.inspection.rng import RngState, rng_state, seed_rng, set_rng_state
from weft.pipeline.partition import Route
from weft.pipeline.stand_in import ABSENT_PARAMETERS
from weft.pipeline.trace import END, TraceEvent
from weft.pipeline.trace_watch import OperationWatch, operation_name, outcome
from weft.spatial.tile_layout import set_layout
from weft.spatial.tiled_model import tiled_of

# Returns the real tensor of a number, from the stage that made it, and whether its gradient goes back there.
Take = Callable[[int], tuple[Tensor, bool]]
FindRoute = Callable[[Any, Mapping[str, Any], bool], Route]


class StageDone(BaseException):
    """Raised when the stage has run its part of a forward.

    Not an Exception, so the model's own code does not catch it.
    """


@dataclass
class StagePass:
    """One micro-batch at one stage, from its forward to its backward."""

    route: Route
    total: Tensor | None = None  # the loss: the last stage's, and those of routers in this stage
    needs_gradient: list[int] = field(default_factory=list)  # tensors of other stages whose gradients go back to them
    gradients: dict[int, Tensor] = field(default_factory=dict)  # those gradients by number, after backward
    # Tensors of other stages that a checkpoint of the model's own needs again in backward, by number.
    kept: dict[int, Tensor] = field(default_factory=dict)
    # real tensors that the model's own code sees as fake ones, by number; only during the forward
    real: dict[int, Tensor] = field(default_factory=dict)
    made: dict[int, Tensor] = field(default_factory=dict)  # tensors that other stages take; only until they are sent
    # Where backward begins for them, without their values. Each root takes its gradient from `arrived` and frees it
    # after use; given to torch.autograd.backward, it would live until the whole backward ends.
    roots: dict[int, Tensor] = field(default_factory=dict)
    arrived: dict[int, Tensor] = field(default_factory=dict)

    def free_results(self) -> dict[int, Tensor]:
        """Return the tensors that other stages take, and keep only the roots of their backward."""
        made, self.made = self.made, {}
        numbers = [number for number, tensor in made.items() if tensor.requires_grad]
        self.roots = {number: _BackwardRoot.apply(made[number], self.arrived, number) for number in numbers}
        return made


class StageRunner(OperationWatch):
    """Runs a stage's forward through the events of its route."""

    def __init__(
        self, stage: int, model: nn.Module, units: Sequence[str], find_route: FindRoute, device: torch.device
    ) -> None:
        super().__init__()
        self.stage, self.model, self.find_route = stage, model, find_route
        self.now: StagePass | None = None
        self.recomputes: StagePass | None = None  # the micro-batch whose backward runs
        self._take: Take | None = None
        self._found: Route | None = None  # the result of `trace_route`
        self._place, self._has_begun = 0, False
        # The unit of this stage that the model's own code has called, and its name.
        self.running_unit: tuple[nn.Module, str] | None = None
        self._rng = StageRng(stage, device)
        self._tiled, self._view = tiled_of(model), ExitStack()
        # registered last: it sees the same inputs as the model
        model.register_forward_pre_hook(self._begin_model, with_kwargs=True)
        model.register_forward_hook(self._end_model)
        for name in units:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(_EnterUnit(self, name), with_kwargs=True, prepend=True)
            module.register_forward_hook(_LeaveUnit(self))
        for module in model.modules():
            if isinstance(module, AbsentModule):
                module.set_result_function(partial(self.recorded_result, is_call=True))

    def forward(self, total: Callable[[], Tensor], route: Route, take: Take) -> StagePass:
        """Run the stage's part of `total()`, which calls the model once.

        `take` returns tensors that other stages made.
        """
        self._take, self.now, self._has_begun = take, StagePass(route), False
        try:
            result: Tensor | None = total()
        except StageDone:
            result = None
        finally:
            self.switch(False)
            self._view.close()
            self._rng.end()
            self.numbers.clear()
        done, self.now, self._take = self.now, None, None
        done.total = result
        done.real.clear()
        return done

    def trace_route(self, total: Callable[[], Tensor]) -> Route:
        """Return the route that `total()` would take."""
        self._found, self.now = None, None
        with suppress(StageDone):
            total()
        route, self._found = self._found, None
        assert route is not None
        return route

    # --- the model's own forward

    def _begin_model(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self.now is None:
            self._found = self.find_route(args, kwargs, self.model.training)
            raise StageDone
        if self._has_begun:
            raise PlanError(
                "the objective calls the model twice for one batch, which a pipeline does once; use pipe = 1"
            )
        self._place, self._has_begun = 0, True
        self._rng.use_own()
        self.numbers.clear()
        if any(self.now.route.parameters):
            self._number_parameters(self.now.route)
        if self._tiled is not None:  # below this mode, which sees operations first
            self._view.enter_context(self._tiled.running((args, kwargs)))
        self.switch(True)

    def _number_parameters(self, route: Route) -> None:
        """Number the parameters that code between units uses. Parameters of other stages are fake tensors."""
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if name in route.parameters[self.stage]:
                self.numbers[parameter] = route.trace.parameters[name]
        for name, fake in (ABSENT_PARAMETERS.get(self.model) or {}).items():
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
            # An operation that returns no tensor is not an event.
            result = func(*args, **kwargs)
            if tensors_in(result):
                raise self._another_way(name)
            return result
        if not event.outputs:
            self._next(name, is_call=False)
            return func(*args, **kwargs)
        if not self._does():
            result = self.recorded_result(name, is_call=False)
        else:
            real_args, real_kwargs = map_tensors(self._real, (args, kwargs))
            result = outcome(name, real_args, func(*real_args, **real_kwargs))
            self._made(self._next(name, is_call=False), result)
        if event.changed:  # holders of the tensor see the changed one
            self._follow(numbered, event, result)
        return result

    def _follow(self, numbered: Sequence[Tensor], event: TraceEvent, result: Any) -> None:
        """Number tensors that an operation has changed in place as its result, which they now are, as the trace did."""
        for tensor in numbered:
            if self.numbers[tensor] == event.inputs[0] and event.inputs[0] in event.changed:
                self.numbers[tensor] = event.outputs[0]
                if isinstance(result, Tensor) and not isinstance(result, FakeTensor) and self.now is not None:
                    self.now.real[event.outputs[0]] = result

    def without_results(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not is_random(operation_name(func)):
            return func(*args, **kwargs)
        self._rng.use_shared()
        try:
            return func(*args, **kwargs)
        finally:
            self._rng.use_own()

    def recorded_result(self, name: str, is_call: bool) -> Any:
        """Return what the trace recorded as the result of an event of another stage."""
        if self.now is None and self.recomputes is not None:  # the user's own checkpoint, in backward
            return next(event.result for event in self.recomputes.route.trace.events if event.name == name)
        assert self.now is not None
        if self._place > self.now.route.last_event[self.stage]:
            raise StageDone
        event = self._next(name, is_call)
        for tensor, number in zip(tensors_in(event.result), event.outputs, strict=True):
            self.numbers[tensor] = number
        return copy_structure(event.result)

    # --- a unit of this stage

    def enter(self, name: str, args: Any, kwargs: Any) -> Any:
        """Replace fake tensors in the arguments of a unit of this stage by real ones, and stop watching. Called before
        the unit runs.
        """
        self.switch(False)
        expected = self._expected()
        if expected is None or expected.name != name:
            raise self._another_way(name)
        return map_tensors(self._real, (args, kwargs))

    def leave(self, name: str, result: Any) -> None:
        """Record the result of a unit of this stage, and watch again. Called after the unit has run."""
        self._made(self._next(name, is_call=True), result)
        self.switch(True)

    def received_again(self, name: str, args: Any, kwargs: Any) -> Any:
        """Called before a unit that the user's own checkpoint runs again in backward: return its real arguments."""
        if self.recomputes is None:
            return args, kwargs
        numbers = {
            id(tensor): number
            for event in self.recomputes.route.trace.events
            for tensor, number in zip(tensors_in(event.result), event.outputs, strict=True)
        }

        def real(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, FakeTensor):
                return tensor
            assert self.recomputes is not None
            found = self.recomputes.kept.get(numbers.get(id(tensor), -1))
            if found is None:
                raise PlanError(
                    f"stage {self.stage}: a checkpoint of the model's own (torch.utils.checkpoint) runs code of "
                    f"another stage again before '{name}'; let it wrap units of one stage, or use "
                    f"plan.memory.recompute instead"
                )
            return found

        return map_tensors(real, (args, kwargs))

    @property
    def is_walking(self) -> bool:
        """Whether the model's own code is running (and not a unit alone, for example in backward)."""
        return self._is_on

    # --- internal

    def _expected(self) -> TraceEvent | None:
        assert self.now is not None
        events = self.now.route.trace.events
        return events[self._place] if self._place < len(events) else None

    def _does(self) -> bool:
        assert self.now is not None
        return self.now.route.does(self.stage, self._place)

    def _next(self, name: str, is_call: bool) -> TraceEvent:
        event = self._expected()
        if event is None or event.name != name or event.is_call != is_call:
            raise self._another_way(name)
        self._place += 1
        return event

    def _made(self, event: TraceEvent, result: Any) -> None:
        """Number the tensors that an event has made, and keep those that other stages take."""
        assert self.now is not None
        tensors = tensors_in(result)
        if len(tensors) != len(event.outputs):
            raise self._another_way(event.name)
        for tensor, number in zip(tensors, event.outputs, strict=True):
            self.numbers[tensor] = number
            if number in self.now.route.crossing[self.stage]:
                self.now.made[number] = tensor

    def _real(self, tensor: Tensor) -> Tensor:
        """Return the real tensor for a fake one, taken from the stage that made it."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        assert self.now is not None
        assert self._take is not None
        number = self.numbers[tensor]
        if number not in self.now.real:
            with torch._C.DisableTorchFunction():
                self.now.real[number] = self._taken(number, self.now)
        return self.now.real[number]

    def _taken(self, number: int, now: StagePass) -> Tensor:
        """Return a tensor of another stage as a result of this one. Only operations that save it keep its value."""
        assert self._take is not None
        real, needs_gradient = self._take(number)
        if needs_gradient:
            now.needs_gradient.append(number)
            with torch.enable_grad():  # also in a checkpoint that runs its forward without
                real = _TakenResult.apply(torch.zeros((), requires_grad=True), real, now.gradients, number)
        if _in_checkpoint():
            now.kept[number] = real
        return set_layout(real, now.route.trace.values[number].layout)

    def _another_way(self, name: str) -> PlanError:
        event = self._expected()
        return PlanError(
            f"stage {self.stage}: the model's forward came to '{name}' where its trace has "
            f"'{event.name if event else 'nothing'}'; a pipeline needs a forward that takes the same way for inputs of "
            f"the same shapes, on every rank"
        )


def _in_checkpoint() -> bool:
    """Does a checkpoint of the model's own (torch.utils.checkpoint) surround the code that runs now?

    It runs its code again in backward: without gradients in forward, or with hooks on saved tensors.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    return hooks is not None or not torch.is_grad_enabled()


class _TakenResult(Function):
    """Makes a tensor of another stage a result, as it is in the whole model: a result may be changed in place.

    Backward stores its gradient under its number. No leaf holds the tensor, so it is freed if nothing saves it.
    """

    @staticmethod
    def forward(ctx: Any, start: Tensor, value: Tensor, gradients: dict[int, Tensor], number: int) -> Tensor:
        ctx.gradients, ctx.number = gradients, number
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None]:
        others = ctx.gradients.get(ctx.number)  # of other checkpoints that have used the tensor
        ctx.gradients[ctx.number] = gradients[0] if others is None else others + gradients[0]
        return None, None, None, None


class _BackwardRoot(Function):
    """Makes a number from a result of the stage. Its backward begins with the gradient that has arrived."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, arrived: dict[int, Tensor], number: int) -> Tensor:
        ctx.arrived, ctx.number = arrived, number
        return torch.zeros((), dtype=value.dtype, device=value.device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None, None]:
        return ctx.arrived.pop(ctx.number), None, None


class _EnterUnit:
    """A forward pre-hook of a unit of this stage."""

    def __init__(self, walk: StageRunner, name: str) -> None:
        self.walk, self.name = walk, name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.walk.is_walking:  # called by itself, inside another unit, or again in backward
            return self.walk.received_again(self.name, args, kwargs)
        self.walk.running_unit = module, self.name
        return self.walk.enter(self.name, args, kwargs)


class _LeaveUnit:
    """A forward hook of a unit of this stage."""

    def __init__(self, walk: StageRunner) -> None:
        self.walk = walk

    def __call__(self, module: nn.Module, _: Any, result: Any) -> None:
        running = self.walk.running_unit
        if running is not None and running[0] is module:
            self.walk.running_unit = None
            self.walk.leave(running[1], result)


class StageRng:
    """One stage's random states: one for its own part, and one that all stages share, for code that all run.

    All stages draw the same numbers from the shared one, in the same order.
    """

    def __init__(self, stage: int, device: torch.device) -> None:
        self.stage, self.device = stage, device
        self._shared: RngState | None = None
        self._own: RngState | None = None

    def use_own(self) -> None:
        """Switch to this stage's own state, and continue where it was in this forward."""
        if self._own is None:
            seed = int(torch.randint(0, 2**62, ()))
            self._shared = rng_state(self.device)
            seed_rng(seed + self.stage, self.device)
        else:
            self._shared = rng_state(self.device)
            set_rng_state(self._own, self.device)

    def use_shared(self) -> None:
        """Switch back to the state that all stages share."""
        assert self._shared is not None
        self._own = rng_state(self.device)
        set_rng_state(self._shared, self.device)
        self._shared = None

    def end(self) -> None:
        """End a forward: switch to the shared state, and give the next forward a new own state."""
        if self._shared is not None:
            self.use_shared()
        self._own = None


@cache
def is_random(name: str) -> bool:
    """Return whether an operation of this name draws random numbers."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else []
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in overloads)

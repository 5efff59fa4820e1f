"""Records one forward of a model on fake tensors: which modules are called in which order, and on which tensors.

A model's *units* are its blocks and the other modules with parameters that hold no blocks (embedding, final norm,
head). The code between units is recorded as operations on their results. Every process records the same list, so a
tensor's number means the same everywhere, and a cut of the list into stages determines which tensors cross the cut.
Nothing is computed: units run on fake tensors. Code between units that only uses the model's inputs (positions, masks)
runs on real tensors and is not recorded, since every rank has the inputs. A trace for branches records every operation
(`FOR_BRANCHES`), with its FLOPs and the bytes that it moves, as if no module was a unit.

A model in tiles is traced under the view of the rank's tile, which lies below this watch: tensors between units are
tiles, whose layouts other stages learn from the trace, and the collectives of each event are recorded for the costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from weft.errors import PlanError
from weft.inspection.blocks import find_blocks, find_units
from weft.inspection.callers import checkpoint_around, functional_call_around, transform_around
from weft.inspection.functional_call import call_with, no_fakes_left
from weft.inspection.nested_tensors import copy_structure, map_tensors, tensors_in
from weft.pipeline.trace_watch import (
    FOR_STAGES,
    EventWork,
    OperationWatch,
    TracePurpose,
    WorkCounter,
    operation_name,
    outcome,
    recorded,
    unseen_work,
)
from weft.profiling import RecordedCall
from weft.spatial.dry_run import CallRecorder
from weft.spatial.tile_layout import BatchShare, TileLayout, layout_of, set_layout
from weft.spatial.tiled_model import TiledModel

END = "the end of the forward"


@dataclass(frozen=True)
class TraceEvent:
    """A call of a unit, or an operation between units. Tensors are numbered; `parameters` are those outside of units.

    An event without outputs is an operation that uses shapes only (`mask.type_as(hidden)`): every stage runs it itself.
    """

    name: str
    is_call: bool
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    parameters: frozenset[str] = frozenset()
    changed: tuple[int, ...] = ()  # tensors made earlier and changed in place here
    result: Any = field(default=None, compare=False, repr=False)  # as fake tensors
    arguments: Any = field(default=None, compare=False, repr=False)  # (args, kwargs) of an operation in a branch


@dataclass(frozen=True)
class TracedTensor:
    """The properties of a numbered tensor."""

    shape: tuple[int, ...]  # of this rank's part
    dtype: torch.dtype
    needs_gradient: bool
    layout: TileLayout | BatchShare | None = None  # its layout in the whole image

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Trace:
    """The events of one forward in order, with the end last, and the numbered tensors, with the parameters first."""

    events: tuple[TraceEvent, ...]
    values: tuple[TracedTensor, ...]
    parameters: Mapping[str, int]
    # the parameters, and buffers of which operations are recorded, as fake tensors
    fakes: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    calls: tuple[RecordedCall, ...] = ()  # collectives of the rank's tiles
    inputs: tuple[int, ...] = ()  # the model's inputs, if operations on them are recorded
    work: Mapping[int, EventWork] = field(default_factory=dict, compare=False, repr=False)  # by event, if recorded

    @cached_property
    def parameter_numbers(self) -> dict[int, str]:
        """The names of the parameters by number, without buffers."""
        found = ((number, name) for name, number in self.parameters.items())
        return {number: name for number, name in found if isinstance(self.fakes[name], nn.Parameter)}


class _TraceRecorder(OperationWatch):
    """Numbers tensors and appends events."""

    def __init__(self, fake: FakeTensorMode, ledger: CallRecorder, purpose: TracePurpose) -> None:
        super().__init__()
        self.fake, self.ledger, self.purpose = fake, ledger, purpose
        self.events: list[TraceEvent] = []
        self.values: list[TracedTensor] = []
        # number -> parameters that a tensor is computed from, if from nothing else
        self.lineage: dict[int, frozenset[str]] = {}
        self.given: list[Tensor] = []  # the model's inputs as fake tensors, if operations on them are recorded
        self.inputs: list[int] = []  # their numbers
        self._names: dict[int, str] = {}  # number -> name of a parameter
        self._arguments: Any = None  # of the operation that is recorded
        self._functions: dict[int, Any] = {}  # number -> what autograd calls for a tensor, when it was numbered

    def find(self, value: Any) -> list[int]:
        self._refuse_functions(tensors_in(value))
        return [self.numbers[tensor] for tensor in tensors_in(value) if tensor in self.numbers]

    def _refuse_functions(self, tensors: Sequence[Tensor]) -> None:
        """Refuse results of the user's autograd.Function between units, of which only the forward is watched, and
        results of operations that are not watched at all (inside of torch.func.vmap).
        """
        purpose = self.purpose
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor):
                continue
            function = tensor.grad_fn
            is_known = tensor in self.numbers and function is self._functions[self.numbers[tensor]]
            if not is_known and (tensor not in self.numbers or isinstance(function, BackwardCFunction)):
                name = "" if function is None else f" ('{function.name().removesuffix('Backward')}')"
                what = unseen_work(function)
                way_out = f"call it inside of a block, or {purpose.remedy}" if purpose.between else purpose.remedy
                raise PlanError(
                    f"{purpose.failure}: its forward uses {what}{name}{purpose.between}, whose backward no rank could "
                    f"follow; {way_out}"
                )

    def refuse_transform(self, what: str) -> None:
        """Refuse what the forward runs inside of a transform of torch.func, whose tensors are not those numbered."""
        if transform := transform_around():
            raise PlanError(
                f"{self.purpose.failure}: its forward runs {what} inside of torch.func.{transform}, where weft cannot "
                f"follow tensors; run it outside of the transform, or {self.purpose.remedy}"
            )

    def without_results(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._refuse_functions(tensors_in((args, kwargs)))
        return func(*args, **kwargs)

    def number(self, tensor: Tensor) -> int:
        self.numbers[tensor] = len(self.values)
        self._functions[len(self.values)] = tensor.grad_fn
        with torch._C.DisableTorchFunction():  # a tile's own shape
            value = TracedTensor(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, layout_of(tensor))
        self.values.append(value)
        return len(self.values) - 1

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            number = self.number(parameter)
            self.lineage[number] = frozenset([name])
            if isinstance(parameter, nn.Parameter):  # not a buffer, which may change
                self._names[number] = name
        self.inputs = [self.number(tensor) for tensor in self.given]

    def operation(self, func: Any, args: Any, kwargs: Any, numbered: list[Tensor]) -> Any:
        if func is torch.autograd.grad:
            raise PlanError(
                f"{self.purpose.failure}: its forward computes gradients (torch.autograd.grad), which go back through "
                f"parts of the model on several ranks; {self.purpose.remedy}"
            )
        self.refuse_transform(f"'{operation_name(func)}'")
        if self.purpose.inside and checkpoint_around(trace.__code__):
            raise PlanError(
                f"{self.purpose.failure}: its forward runs '{operation_name(func)}' in a checkpoint of its own, whose "
                f"backward would compute again what other ranks computed; leave it out, or {self.purpose.remedy}"
            )
        self._refuse_functions(tensors_in((args, kwargs)))
        name, inputs = operation_name(func), [self.numbers[tensor] for tensor in numbered]
        versions = [(tensor, tensor._version) for tensor in (*self.numbers, *tensors_in((args, kwargs)))]
        if self.purpose.inside:
            self._arguments = recorded((args, kwargs))
        self.ledger.event = len(self.events)
        result = outcome(name, args, func(*args, **kwargs))
        self.ledger.event = None
        changed = [tensor for tensor, before in versions if tensor._version != before]
        if any(tensor not in self.numbers for tensor in changed):
            raise PlanError(
                f"{self.purpose.failure}: its forward writes a result into a tensor that is none ('{name}'), which not "
                f"every rank can follow; write into one made from a result (new_zeros, torch.cat)"
            )
        if written := [self._names[number] for tensor in changed if (number := self.numbers[tensor]) in self._names]:
            raise PlanError(
                f"{self.purpose.failure}: its forward changes '{written[0]}' in place ('{name}'), which not every rank "
                f"holds; change parameters after the optimizer's step, or {self.purpose.remedy}"
            )
        found = tensors_in(result)
        if found and not any(isinstance(tensor, FakeTensor) for tensor in found):
            self.write(name, False, inputs, None)
        elif found:
            result = map_tensors(self._as_fake, result)
            self.write(name, False, inputs, result, [self.numbers[tensor] for tensor in changed])
        return result

    def _as_fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor)

    def write(self, name: str, is_call: bool, inputs: list[int], result: Any, changed: Sequence[int] = ()) -> None:
        inputs = list(dict.fromkeys(inputs))
        from_parameters = [self.lineage[number] for number in inputs if number in self.lineage]
        parameters = frozenset().union(*from_parameters) if from_parameters else frozenset()
        outputs = [self.number(tensor) for tensor in tensors_in(result)]
        if not is_call and len(from_parameters) == len(inputs):
            self.lineage.update(dict.fromkeys(outputs, parameters))
        self.events.append(
            TraceEvent(
                name,
                is_call,
                tuple(inputs),
                tuple(outputs),
                parameters,
                tuple(dict.fromkeys(changed)),
                copy_structure(result),
                self._arguments,
            )
        )
        self.ledger.events_before = len(self.events)


@dataclass
class _UnitCall:
    """A call of a unit in progress: its numbered inputs, and the copies that it works on."""

    name: str
    inputs: list[int]
    copies: list[tuple[int, Tensor, int]] = field(default_factory=list)  # number, copy, the copy's version

    @property
    def changed(self) -> list[int]:
        return [number for number, copy, version in self.copies if copy._version != version]


class _UnitHooks:
    """Hooks on a model's units that record each unit's call as one event. Inside a unit, nothing is recorded."""

    def __init__(self, model: nn.Module, recorder: _TraceRecorder, y: int) -> None:
        self._recorder, self._blocks, self._y = recorder, find_blocks(model), y
        self._calls: list[_UnitCall | None] = []  # the units being called; None for a unit inside a unit
        self._handles: list[RemovableHandle] = []

    @property
    def unit(self) -> str | None:
        """The name of the unit being called."""
        return next((call.name for call in self._calls if call is not None), None)

    def install(self, units: Mapping[str, nn.Module]) -> None:
        for name, module in units.items():
            enter, begin = partial(self._enter, name), partial(self._begin, name)
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_pre_hook(begin))
            self._handles.append(module.register_forward_hook(self._leave))
            for inner, submodule in module.named_modules():
                if inner and not any(submodule is unit for unit in units.values()):
                    check = partial(self._check_inside, name, f"{name}.{inner}")
                    self._handles.append(submodule.register_forward_pre_hook(check, prepend=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self.unit is not None:
            self._recorder.fake.__exit__(None, None, None)

    def _check_inside(self, unit: str, name: str, *_: Any) -> None:
        if not self._calls:
            raise PlanError(
                f"the model cannot be cut into stages: its forward calls '{name}' outside of a call of '{unit}', which "
                f"a stage runs as one; call '{unit}' (not its .forward), or use pipe = 1"
            )

    def _enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        recorder = self._recorder
        if checkpoint_around() == "reentrant":
            raise PlanError(
                f"the model cannot be cut into stages: its forward runs '{name}' in a checkpoint with "
                f"use_reentrant=True, whose backward would run other stages too; use use_reentrant=False, or "
                f"plan.memory.recompute instead"
            )
        recorder.refuse_transform(f"'{name}'")
        if not self._calls and functional_call_around():
            raise PlanError(
                f"the model cannot be cut into stages: its forward runs '{name}' by torch.func.functional_call, with "
                f"parameters that only one stage has; call '{name}' itself, or use pipe = 1"
            )
        self._calls.append(None if self._calls else _UnitCall(name, recorder.find((args, kwargs))))
        call = self._calls[-1]
        if call is None:
            return None
        recorder.switch(False)
        recorder.ledger.event = len(recorder.events)

        def copy(tensor: Tensor) -> Tensor:
            is_split = self._y > 1 and tensor in recorder.numbers and tensor.is_floating_point()
            with torch._C.DisableTorchFunction():
                wide = torch.cat([tensor] * self._y, dim=-1) if is_split else recorder.fake.from_tensor(tensor)
                wide = set_layout(wide, layout_of(tensor))
            if tensor in recorder.numbers:
                call.copies.append((recorder.numbers[tensor], wide, wide._version))
            return wide

        args, kwargs = map_tensors(copy, (args, kwargs))
        recorder.fake.__enter__()
        return args, kwargs

    def _begin(self, name: str, *_: Any) -> None:
        if self._calls[-1] is not None and name in self._blocks:  # after hand-overs, which recompute does not repeat
            self._recorder.ledger.block = name

    def _leave(self, _: nn.Module, __: Any, result: Any) -> Any:
        call, recorder = self._calls.pop(), self._recorder
        if call is None:
            return None
        result = map_tensors(lambda tensor: _narrow(tensor, self._y), result)
        recorder.ledger.event, recorder.ledger.block = None, ""
        recorder.fake.__exit__(None, None, None)
        recorder.write(call.name, True, call.inputs, result, call.changed)
        recorder.switch(True)
        return result


def trace(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    y: int = 1,
    tiles: tuple[TiledModel, CallRecorder] | None = None,
    purpose: TracePurpose = FOR_STAGES,
) -> Trace:
    """Record one forward of a model on fake tensors.

    Parameters count as of `dtype` on `device`, and floating-point inputs are cast to `dtype`, as a parallel model does.
    If `y` > 1, units' outputs hold a part of their features (the last dim), and so do parameters outside of units. With
    `tiles` (`dry_stages`), the model is given this rank's tiles.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    tiled, ledger = tiles or (None, CallRecorder())
    recorder = _TraceRecorder(fake, ledger, purpose)
    args, kwargs = map_tensors(
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, (args, kwargs)
    )
    units = {} if purpose.inside else find_units(model)
    state = _fake_state(model, {"": model} if purpose.inside else units, fake, dtype, device, y)
    if purpose.inside:
        args, kwargs = map_tensors(fake.from_tensor, (args, kwargs))
        recorder.given = tensors_in((args, kwargs))
    work = WorkCounter(lambda: len(recorder.events))
    hooks = _UnitHooks(model, recorder, y)
    hooks.install(units)
    try:
        with (
            no_fakes_left(model),
            _in_tiles((args, kwargs), tiled, ledger),
            work if purpose.inside else nullcontext(),
            recorder.watching(state),
        ):
            output = call_with(model, {**state, **_other_buffers(model, state, device)}, args, kwargs)
            recorder.write(END, False, recorder.find(output), None)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        last = next((event.name for event in reversed(recorder.events) if event.is_call), "its start")
        where = f"inside '{hooks.unit}'" if hooks.unit else f"after '{last}'"
        raise PlanError(
            f"{purpose.failure}: {where} its forward depends on the values of a result ({error}), "
            f"which are not known beforehand; {purpose.remedy}, or compute it without a look at values"
        ) from error
    finally:
        hooks.remove()
    numbers = {name: number for number, name in enumerate(state)}
    events, values, inputs = tuple(recorder.events), tuple(recorder.values), tuple(recorder.inputs)
    return Trace(events, values, numbers, state, tuple(ledger.calls), inputs, work.found)


@contextmanager
def _in_tiles(given: Any, tiled: TiledModel | None, ledger: CallRecorder) -> Iterator[None]:
    """Enter the view of the rank's tile, if there is one. The ledger is notified of each tensor saved for backward."""

    def pack(tensor: Tensor) -> Tensor:
        ledger.saved()
        return tensor

    if tiled is None:
        yield
    else:
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor), tiled.running(given):
            yield


def _fake_state(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    fake: FakeTensorMode,
    dtype: torch.dtype,
    device: torch.device,
    y: int,
) -> dict[str, Tensor]:
    """Return parameters, and buffers of units (which a forward may write), as fake tensors; parameters first."""
    in_units = {_path(name, key) for name, module in units.items() for key in module.state_dict(keep_vars=True)}
    state: dict[str, Tensor] = {}
    with fake:
        for name, parameter in model.named_parameters():
            kind = dtype if parameter.is_floating_point() else parameter.dtype
            empty = torch.empty(parameter.shape, dtype=kind, device=device)
            empty = empty if name in in_units else _narrow(empty, y)
            state[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for name, module in units.items():
        for key, buffer in module.named_buffers():
            made = fake.from_tensor(buffer)
            with fake:
                state[_path(name, key)] = made.to(device)
    return state


def _path(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key


def _other_buffers(model: nn.Module, state: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return copies of the buffers outside of units, on the inputs' device: code between units reads or writes them."""
    others = {name: buffer for name, buffer in model.named_buffers() if name not in state and not buffer.is_meta}
    return {name: buffer.to(device, copy=True) for name, buffer in others.items()}


def _narrow(tensor: Tensor, y: int) -> Tensor:
    if y == 1 or not tensor.is_floating_point() or not tensor.dim():
        return tensor
    return tensor[..., : tensor.shape[-1] // y]

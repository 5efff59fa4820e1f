"""Runs a region's own forward on a rank of `branch`: operations of other ranks' branches are skipped.

A region is a model, or a block of it (`regions.py`).

A skipped operation returns at once a fake tensor of the shape that the trace recorded. Before an operation that needs
results of other ranks, all ranks exchange theirs (`schedule.py`), and the fake tensors stand for the exchanged ones.
Operations without parameters wait for the next exchange, also on all ranks, so that there are few exchanges.
Every forward must take the way that its trace took. It is traced anew for inputs of other shapes, and in evaluation.

Random numbers: before each random operation of a branch all ranks draw a seed, with which its rank runs the operation.
So all ranks draw the same numbers wherever all of them compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from weft.comm import Axis
from weft.errors import PlanError
from weft.inspection.nested_tensors import copy_structure, map_tensors, tensors_in
from weft.inspection.rng import rng_state, seed_rng, set_rng_state
from weft.parallel.branch.batch_dims import BatchDims, all_samples, find_batch_dims, with_sizes
from weft.parallel.branch.exchange import Exchanger, ShareExchanger, fork, gather_fork
from weft.parallel.branch.schedule import BranchExchange, BranchSchedule, make_schedule
from weft.pipeline.stage import is_random
from weft.pipeline.trace import END, TraceEvent
from weft.pipeline.trace_watch import OperationWatch, RecordedTensor, operation_name, outcome
from weft.pipeline.tracer import Tracer
from weft.sharding.units import Units, units_of


class Forms:
    """Fake tensors that stand for results which this rank does not compute, or not yet.

    `results` has the result of each event of a trace, without its graph: a skipped operation returns it. If ranks have
    different samples, results of branches have the samples of all ranks there, as the model's code sees them.
    `by_number` has each tensor of the trace with this rank's own samples.
    """

    def __init__(self, schedule: BranchSchedule) -> None:
        stand_ins: dict[int, Tensor] = {}
        trace, batch = schedule.trace, schedule.batch

        def detached(tensor: Tensor) -> Tensor:
            if id(tensor) not in stand_ins:
                stand_ins[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
            return stand_ins[id(tensor)]

        seen = trace if batch is None else batch.whole
        pairs = zip(schedule.ranks, trace.events, seen.events, strict=True)
        self.results = [map_tensors(detached, (own if rank is None else whole).result) for rank, own, whole in pairs]
        self.by_number = {number: trace.fakes[name] for name, number in trace.parameters.items()}
        for event in trace.events:
            self.by_number.update(zip(event.outputs, tensors_in(event.result), strict=bool(event.outputs)))


@dataclass
class _Deferred:
    """An operation that waits for results of other ranks. `numbers` are those of its tensors, None for constants."""

    place: int  # of its event
    func: Any
    args: Any
    kwargs: Any
    numbers: list[int | None]


@contextmanager
def _hidden_from_recompute() -> Iterator[None]:
    """Hide a trace from a recompute around it, which counts the tensors that a forward saves: a trace is made once."""
    with _disable_current_modes(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


class BranchRunner(OperationWatch):
    """Replaces the forward of a region of a model.

    `tracer` traces the region. `owners` has the rank of each branch's parameter, by its name in the region.
    """

    def __init__(
        self, model: nn.Module, region: str, tracer: Tracer, owners: Mapping[str, int], axis: Axis, device: torch.device
    ) -> None:
        super().__init__()
        self.model, self.region, self.module = model, region, model.get_submodule(region)
        self.tracer, self.owners, self.axis, self.device = tracer, owners, axis, device
        self._splits_batch = tracer.plan.branch.splits_batch
        self._forward: Callable[..., Any] = self.module.forward
        self._schedules: dict[int, tuple[BranchSchedule, Forms]] = {}
        self._place = 0
        self._now: BranchSchedule
        self._forms: Forms
        self._state: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}  # exchanged tensors, and those changed in place, by number
        self._own: dict[int, Tensor] = {}  # this rank's results that are still to be exchanged
        self._forked: dict[int, Tensor] = {}
        self._deferred: list[_Deferred] = []
        self._hooks: dict[int, list[Any]] = {}  # hooks on the gradients of results that this rank does not have yet

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._now, self._forms = self._schedule(args, kwargs)
        self._place, buffers = 0, dict(self.module.named_buffers())
        try:
            with self.watching(dict(self._named_state())):
                for tensor, number in zip(tensors_in((args, kwargs)), self._now.trace.inputs, strict=True):
                    self.numbers[tensor] = number
                output = self._forward(*args, **kwargs)
            for name, buffer in self.module.named_buffers():
                if buffer is not buffers.get(name):
                    raise PlanError(
                        f"the model's forward replaces its buffer '{name}', which only one rank of branch = "
                        f"{self.axis.degree} may compute; change it in place (copy_), or use branch = 1"
                    )
            self._reach(END, tensors_in(output))
            return map_tensors(lambda tensor: self._operand(tensor, None), output)
        finally:
            self.numbers.clear()
            self._deferred = []
            for held in (self._state, self._values, self._own, self._forked, self._hooks):
                held.clear()

    def _schedule(self, args: Any, kwargs: Any) -> tuple[BranchSchedule, Forms]:
        for traced, own in zip(self.tracer.model.modules(), self.module.modules(), strict=True):
            traced.training = own.training
        with _hidden_from_recompute():
            trace = self.tracer.own(args, kwargs, self.device)
            if id(trace) not in self._schedules:
                batch = None
                if self._splits_batch:
                    degree = self.axis.degree
                    all_args, all_kwargs = all_samples((args, kwargs), degree)
                    whole = self.tracer.own(all_args, all_kwargs, self.device)
                    batch = find_batch_dims(trace, whole, degree)
                made = make_schedule(trace, self.owners, batch)
                self._schedules[id(trace)] = made, Forms(made)
        return self._schedules[id(trace)]

    def _named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters that the region's own code sees while it computes, and its buffers, by name."""
        yield from self.module.named_parameters()
        start = f"{self.region}." if self.region else ""
        for flat in self._units.flats:
            for parameter, whole in zip(flat.layout.parameters, flat.whole_parameters, strict=True):
                if parameter.name.startswith(start):
                    yield parameter.name.removeprefix(start), whole
        yield from self.module.named_buffers()

    @property
    def _units(self) -> Units:
        units = units_of(self.model)
        assert units is not None
        return units

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        self._state = {self._now.trace.parameters[name]: tensor for name, tensor in parameters.items()}
        for number, tensor in self._state.items():
            self.numbers[tensor] = number

    # --- the model's own code

    def operation(self, func: Any, args: Any, kwargs: Any, numbered: list[Tensor]) -> Any:
        name, event = operation_name(func), self._expected()
        if event is None or event.name != name or {self.numbers[tensor] for tensor in numbered} != set(event.inputs):
            if name == "register_hook" and isinstance(args[0], FakeTensor):
                self._hooks.setdefault(self.numbers[args[0]], []).append(args[1])
                return None
            result = func(*args, **kwargs)
            if tensors_in(result):  # an operation that returns no tensor is not an event
                raise self._another_way(name)
            return result
        self._reach(name, numbered)
        place, rank = self._place, self._now.ranks[self._place]
        self._place += 1
        args, kwargs = self._with_sizes(event, place, args, kwargs)
        is_deferred = place in self._now.deferred
        if is_deferred:
            numbers = [self.numbers.get(tensor) for tensor in tensors_in((args, kwargs))]
            self._deferred.append(_Deferred(place, func, args, kwargs, numbers))
        if is_deferred or rank not in (None, self.axis.index):
            with self._seeded(name, None if is_deferred else rank):
                result = copy_structure(self._forms.results[place])
        else:
            args, kwargs = map_tensors(lambda tensor: self._operand(tensor, rank), (args, kwargs))
            with self._seeded(name, rank):
                result = outcome(name, args, func(*args, **kwargs))
        self._made(event, result, rank)
        if event.changed:
            self._follow(numbered, event, result)
        return result

    def _with_sizes(self, event: TraceEvent, place: int, args: Any, kwargs: Any) -> Any:
        """Returns arguments whose numbers fit the samples that the operation computes, if ranks have different ones.

        The model's code may have read a number off a tensor with other samples: `result.view(len(images), -1)` in a
        branch has the number of this rank's images, and `result` the samples of all ranks.
        """
        if self._now.batch is None:
            return args, kwargs
        here, there = event.arguments, self._now.batch.whole.events[place].arguments
        if self._now.ranks[place] is not None:
            here, there = there, here

        def check(tensor: Tensor, recorded: RecordedTensor) -> None:
            if self.numbers.get(tensor) is None and tuple(tensor.shape) != recorded.shape:
                raise PlanError(
                    f"branch.batch = 'split': '{event.name}' is given a tensor {list(tensor.shape)} that the forward "
                    f"made for the samples of another part of the model, and needs {list(recorded.shape)}; make it by "
                    f"the size of the operation's own inputs, or use branch.batch = 'same'"
                )

        return with_sizes((args, kwargs), here, there, check)

    @contextmanager
    def _seeded(self, name: str, rank: int | None) -> Iterator[None]:
        """Draw a seed on all ranks before a random operation of a branch, and use it for this operation only."""
        if rank is None or not is_random(name):
            yield
            return
        seed = int(torch.randint(0, 2**62, ()))
        before = rng_state(self.device)
        seed_rng(seed, self.device)
        try:
            yield
        finally:
            set_rng_state(before, self.device)

    def _made(self, event: TraceEvent, result: Any, rank: int | None) -> None:
        tensors = tensors_in(result)
        if len(tensors) != len(event.outputs):
            raise self._another_way(event.name)
        for tensor, number in zip(tensors, event.outputs, strict=True):
            self.numbers[tensor] = number
            if rank == self.axis.index and number in self._now.kept:
                self._own[number] = tensor

    def _follow(self, numbered: Sequence[Tensor], event: TraceEvent, result: Any) -> None:
        """Give tensors that an operation has changed in place the number of its result, as in the trace."""
        if event.inputs[0] not in event.changed or not isinstance(result, Tensor):
            return
        for tensor in numbered:
            if self.numbers[tensor] == event.inputs[0]:
                self.numbers[tensor] = event.outputs[0]
        if not isinstance(result, FakeTensor):
            self._values[event.outputs[0]] = result

    # --- communication

    def _reach(self, name: str, given: Sequence[Tensor]) -> None:
        """Communicate what the schedule says before the next event, which is given these tensors."""
        event = self._expected()
        if event is None or event.name != name:
            raise self._another_way(name)
        if self._place in self._now.exchanges:
            self._exchange(self._now.exchanges[self._place])
        if self._place not in self._now.deferred:
            self._fork(self._place, {self.numbers.get(tensor): tensor for tensor in given})

    def _fork(self, place: int, given: Mapping[int | None, Tensor]) -> None:
        """Fork the tensors that the schedule says, of those that an event is given, by number."""
        numbers, batch = self._now.forks.get(place, ()), self._now.batch
        if not numbers or (batch is None and not torch.is_grad_enabled()):
            return
        common = [self._numbered_operand(given[number], number, None) for number in numbers]
        enter = self._units.backward_entry()
        if batch is None:
            self._forked.update(zip(numbers, fork(common, self.axis, enter), strict=True))
            return
        for number, tensor in zip(numbers, common, strict=True):
            self._forked[number] = gather_fork(tensor, batch.dims[number], self.axis, enter)

    def _exchange(self, exchange: BranchExchange) -> None:
        if exchange.buffers is not None:
            self._exchange_tensors(exchange.buffers, None)
        if exchange.tensors:
            self._exchange_tensors(exchange, self._now.batch)
        self._run_deferred()

    def _exchange_tensors(self, exchange: BranchExchange, batch: BatchDims | None) -> None:
        forms = [self._forms.by_number[one.number] for one in exchange.tensors]
        exchanger = Exchanger(exchange, forms, self.axis, self.device)
        if batch is not None:
            exchanger = ShareExchanger(exchange, forms, self.axis, self.device, batch.dims)
        own = [
            self._state[one.number] if one.is_buffer else self._own.pop(one.number)
            for one in exchange.tensors
            if one.rank == self.axis.index
        ]
        forks = [self._forked[number] for number in exchange.forks if number in self._forked]
        found = exchanger.run(own, forks, self._units.backward_entry())
        for one, tensor in zip(exchange.tensors, found, strict=True):
            if not one.is_buffer:
                self._set_value(one.number, tensor)
            elif one.rank != self.axis.index:
                with torch.no_grad():
                    self._state[one.number].copy_(tensor)

    def _run_deferred(self) -> None:
        """Run the operations that waited for results of other ranks."""
        waiting, self._deferred = self._deferred, []
        for one in waiting:
            event, rank = self._now.trace.events[one.place], self._now.ranks[one.place]
            self._fork(one.place, dict(zip(one.numbers, tensors_in((one.args, one.kwargs)), strict=True)))
            if rank in (None, self.axis.index):
                operand = partial(self._next_operand, iter(one.numbers), rank)
                args, kwargs = map_tensors(operand, (one.args, one.kwargs))
                with self._seeded(event.name, rank):
                    result = one.func(*args, **kwargs)
                for number, tensor in zip(event.outputs, tensors_in(result), strict=True):
                    self._set_value(number, tensor)

    def _next_operand(self, numbers: Iterator[int | None], rank: int | None, tensor: Tensor) -> Tensor:
        return self._numbered_operand(tensor, next(numbers), rank)

    def _set_value(self, number: int, tensor: Tensor) -> None:
        """Set the tensor of a number for which fake tensors stood until now, and register the hooks put on these."""
        self._values[number] = tensor
        for hook in self._hooks.pop(number, ()) if tensor.requires_grad else ():
            tensor.register_hook(hook)

    def _operand(self, tensor: Tensor, rank: int | None) -> Tensor:
        """Returns what an operation on this rank takes in place of a tensor of the model's own code.

        That is the exchanged tensor for a fake one, the forked one if a branch uses a tensor that all ranks have, and
        else the tensor itself. `rank` is the only rank that runs the operation; None if all ranks run it.
        """
        return self._numbered_operand(tensor, self.numbers.get(tensor), rank)

    def _numbered_operand(self, tensor: Tensor, number: int | None, rank: int | None) -> Tensor:
        if number is None:
            if rank is not None and tensor.requires_grad:
                raise PlanError(
                    "a branch uses an input of the model that requires a gradient, which only the branch's rank would "
                    "compute; give inputs without requires_grad, or use branch = 1"
                )
            return tensor
        maker = self._now.makers.get(number)
        if maker is not None and maker == rank:
            return self._values.get(number, tensor) if isinstance(tensor, FakeTensor) else tensor
        if rank is not None and number in self._forked:
            return self._forked[number]
        found = self._values.get(number, tensor)
        if isinstance(found, FakeTensor):
            raise self._another_way("a result of another rank")
        return found

    def _expected(self) -> TraceEvent | None:
        events = self._now.trace.events
        return events[self._place] if self._place < len(events) else None

    def _another_way(self, name: str) -> PlanError:
        event = self._expected()
        return PlanError(
            f"branch rank {self.axis.index}: the model's forward came to '{name}' where its trace has "
            f"'{event.name if event else 'nothing'}'; branches need a forward that takes the same way for inputs of "
            f"the same shapes, on every rank"
        )

"""Holds a model's state in units and moves it at the right moment, by hooks from outside; the model is not edited.

A unit is one block's parameters (what no block owns belongs to the root). Before a unit computes, its flat buffers are
made whole, the next unit's are fetched ahead in the order that the last pass recorded; after its backward its gradients
are reduced while earlier units still compute. Reductions start in one fixed order on every rank (the reverse of the
forward order, the root last), so ranks whose gradients arrive in another order, or not at all, still agree.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import PlanError
from weft.health.rank_status import Status
from weft.profile import Block, ParameterUses, find_parameters, profile
from weft.sharding.flat_buffer import Flat

_ATTRIBUTE = "_weft_units"
MakeFlats = Callable[[Block, Mapping[str, ParameterUses]], Sequence[Flat]]


@dataclass(eq=False)
class Use:
    """A forward's use of a block: how many gradients of its inputs backward has yet to deliver."""

    inputs_left: int = 0


class Unit:
    """The flat buffers of one block, and where the block is in the step."""

    def __init__(self, name: str, module: nn.Module, flats: Sequence[Flat]) -> None:
        self.name, self.module, self.flats = name, module, tuple(flats)
        what = f"block {name}" if name else "the root"
        self.forward_words, self.backward_words = f"forward of {what}", f"backward of {what}"
        self.trained = tuple(flat for flat in flats if flat.trainable)
        self.is_sharded = any(flat.shard.degree > 1 for flat in flats)
        self.is_streamed = any(flat.is_streamed for flat in flats)
        self.in_backward = False
        self.needs_backward = False
        self.missing = 0
        self.use = Use()
        self.uses_in_backward: set[Use] = set()
        self.expect_use()

    def expect_use(self) -> None:
        """Start waiting for one gradient of every trained parameter, and for the inputs of a new forward."""
        self.missing = sum(len(flat.whole_parameters) for flat in self.trained)
        self.use = Use()
        self.uses_in_backward.clear()

    @property
    def is_done(self) -> bool:
        """Whether backward needs the block no more: the gradients of its parameters are all there, and of inputs."""
        return self.missing == 0 and not self.uses_in_backward

    def start_gather(self) -> None:
        """Begin to make all buffers whole."""
        for flat in self.flats:
            flat.start_gather()

    def finish_gather(self) -> None:
        """Make all buffers whole."""
        for flat in self.flats:
            flat.finish_gather()

    def release(self, stale: bool) -> None:
        """After use; see `Flat.release`."""
        self.in_backward = False
        for flat in self.flats:
            flat.release(stale)


class Units:
    """All units of a model, and the hooks that drive them."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], compute_dtype: torch.dtype) -> None:
        self.root, self.blocks = units[0], tuple(units[1:])
        self.compute_dtype = compute_dtype
        self.sync = True
        self.status: Status | None = None  # is told which block the rank is in, where somebody watches
        self._is_streamed = any(unit.is_streamed for unit in units)
        self.rehearses = False  # whether backwards drop their gradients, and what was added up before stays
        self._in_step = False  # see begin_step
        self._forward_order: list[Unit] = []  # as recorded in this pass
        self._order: list[Unit] = list(self.blocks)  # as recorded in the last whole pass
        self._to_reduce: list[Unit] = []
        self._last_started: Unit | None = None
        self._in_backward = False
        self._has_gradients = False  # whether this backward has delivered any
        self._accumulating = False  # whether the last backward left gradients for the next to add to
        self._places: dict[int, tuple[Flat, int]] | None = None
        self._install_hooks(model)

    @cached_property
    def all(self) -> tuple[Unit, ...]:
        """Every unit, the root first."""
        return (self.root, *self.blocks)

    @property
    def flats(self) -> Iterator[Flat]:
        """Every flat buffer, unit by unit."""
        return (flat for unit in self.all for flat in unit.flats)

    # --- a step of a pipeline

    def begin_step(self) -> None:
        """From here to `end_step`, forwards and backwards of several micro-batches come in any order.

        The optimizer changes nothing meanwhile, so what is whole stays so, the root's buffers too; and backward adds
        up gradients, which are reduced in the one that `sync` marks, or by `reduce_all`.
        """
        self._start_pass()
        self._in_step = True
        self._gather_lasting()

    def end_step(self) -> None:
        """The optimizer may change the pieces now."""
        self._in_step = False
        for unit in self.all:
            unit.release(stale=True)

    def reduce_all(self) -> None:
        """Reduce what backwards without `sync` have added up; outside of any backward."""
        self._to_reduce = self._reduction_order()
        self._reduce()

    def add_late_gradient(self, parameter: Tensor) -> None:
        """Take a gradient that was computed after the backward that it belongs to."""
        if self._places is None:
            self._places = {
                id(whole): (flat, index) for flat in self.flats for index, whole in enumerate(flat.whole_parameters)
            }
        flat, index = self._places[id(parameter)]
        flat.take_gradient(index)

    # --- forward

    def _before_model(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._forward_order = []
        if not self._in_step:
            if torch._C._current_graph_task_id() == -1:  # else a checkpoint around the model runs it again in backward
                self._start_pass()
            self._gather_lasting()
        return _cast(args, self.compute_dtype), _cast(kwargs, self.compute_dtype)

    def _gather_lasting(self) -> None:
        """Make whole what stays whole for the pass: the root's buffers, and all that stage 3 does not free."""
        for unit in self.all:
            if unit is self.root or not any(flat.frees_whole for flat in unit.flats):
                unit.start_gather()
        self.root.finish_gather()
        if self._is_streamed:
            self._start_first(self._order)

    def _start_pass(self) -> None:
        """Trust nothing that an earlier pass left whole: without a backward, it may have been cut short or followed by
        an update. Between the micro-batches of a step nothing changes, and what is whole stays so.
        """
        if self._in_backward:  # the last backward was cut short
            self._in_backward, self._last_started = False, None
            for flat in self.flats:
                flat.discard_gradient()
        for unit in self.all:
            unit.expect_use()
            unit.release(stale=not self._accumulating)

    def _after_model(self, _: nn.Module, __: Any, output: Any) -> None:
        self._order = list(dict.fromkeys(self._forward_order))
        if self._in_step:
            return
        if not torch.is_grad_enabled():
            for unit in self.all:
                unit.release(stale=False)
            return
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._before_model_backward)

    def _before_block(self, unit: Unit, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self.status is not None and not unit.in_backward:
            self.status.enters(unit.forward_words)
        unit.finish_gather()
        if unit.in_backward:  # the user's own checkpointing calls the block again
            return
        self._fetch_ahead(unit, +1)
        self._forward_order.append(unit)
        if torch.is_grad_enabled() and len(unit.trained) < len(unit.flats):
            self._await_inputs(unit, [*_tensors(args), *_tensors(kwargs)])

    def _after_block(self, unit: Unit, _: nn.Module, __: Any, output: Any) -> None:
        if unit.in_backward:
            return
        tensors = _tensors(output)
        if torch.is_grad_enabled() and not tensors:
            raise PlanError(
                f"block '{unit.name}' returned {type(output).__name__}, in which no tensor was found; "
                f"return tensors, or tuples, lists, dicts or dataclasses of them"
            )
        if any(flat.is_freed_view(tensor) for flat in unit.flats for tensor in tensors):
            raise PlanError(
                f"block '{unit.name}' returned a view of its parameter, which "
                + ("memory.weights > 0" if unit.is_streamed else "shard.stage = 3")
                + " frees after the block; return a copy of it (.clone()), or use "
                + ("weights = 0" if unit.is_streamed else "stage 1 or 2")
            )
        unit.needs_backward = any(tensor.requires_grad for tensor in tensors)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, unit, unit.use))
        unit.release(stale=False)

    # --- backward

    def _before_model_backward(self, _: Tensor) -> None:
        if not self._in_backward:
            self._begin_backward()
        if self.status is not None:
            self.status.enters(self.root.backward_words)
        self.root.finish_gather()  # a forward without gradients in between has released it

    def _before_backward(self, unit: Unit, use: Use, _: Tensor) -> None:
        if unit.is_done and use.inputs_left == 0:  # an output that is an input handed on: its gradient comes last
            return
        if self._in_step and not self._in_backward:
            self._begin_backward()
        if use.inputs_left:
            unit.uses_in_backward.add(use)
        if self.status is not None:
            self.status.enters(unit.backward_words)
        unit.in_backward = True
        unit.finish_gather()
        self._fetch_ahead(unit, -1)
        if not self.rehearses:
            for flat in unit.trained:
                flat.expect_gradient()

    def _take(self, number: int, place: int, index: int, parameter: Tensor) -> None:
        if parameter.grad is None:  # it went into an operation whose backward had nothing for it
            return
        unit = self.all[number]
        flat = unit.trained[place]
        if not self._in_backward:
            self._begin_backward()
        self._has_gradients = True
        if self.rehearses:
            parameter.grad = None
        else:
            flat.take_gradient(index)
        unit.missing -= 1
        if unit.missing == 0:
            self._release_if_done(unit)
            if self.rehearses:
                return
            if self.sync:
                self._reduce_ready()
            else:
                for own in unit.trained:
                    own.keep_gradient()

    def _release_if_done(self, unit: Unit) -> None:
        if unit is not self.root and unit.is_done:
            unit.release(stale=self.sync and not self._in_step)

    def _begin_backward(self) -> None:
        self._in_backward, self._has_gradients = True, False
        self._to_reduce = self._reduction_order()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]

    def _reduction_order(self) -> list[Unit]:
        return [unit for unit in (*reversed(self.blocks), self.root) if unit.trained]

    def _reduce_ready(self, force: bool = False) -> None:
        while self._to_reduce and (force or self._to_reduce[0].missing == 0):
            unit = self._to_reduce.pop(0)
            with self._named_by(unit):
                for flat in unit.trained:
                    flat.start_reduce()
            if self._last_started is not None:
                self._continue(self._last_started)
            self._last_started = unit
            if not unit.is_sharded:  # nothing travels over `shard`, so the other axes need not wait for a unit
                self._continue(unit)
                self._last_started = None

    def _continue(self, unit: Unit) -> None:
        with self._named_by(unit):
            for flat in unit.trained:
                flat.continue_reduce()

    @contextmanager
    def _named_by(self, unit: Unit) -> Iterator[None]:
        """Calls are known by this unit's backward, whichever block's the rank is in by now."""
        if self.status is None:
            yield
            return
        before, self.status.inside = self.status.inside, unit.backward_words
        try:
            yield
        finally:
            self.status.inside = before

    def _end_backward(self) -> None:
        self._in_backward = False
        if self.status is not None and not self._in_step:
            self.status.enters("the end of backward")
        if not self._has_gradients and not self._in_step:  # torch.autograd.grad; a backward through its result may come
            return
        if not self.rehearses:
            self._accumulating = not self.sync
            if self.sync:
                self._reduce()
            else:
                for unit in self.all:
                    for flat in unit.trained:
                        flat.keep_gradient()
        for unit in self.all:
            unit.expect_use()
            if not self._in_step:
                unit.release(stale=self.sync)
            elif unit is not self.root:
                unit.release(stale=False)

    def _reduce(self) -> None:
        """Reduce all that is still to be, and show the optimizer its gradients."""
        self._reduce_ready(force=True)
        if self._last_started is not None:
            self._continue(self._last_started)
            self._last_started = None
        for unit in self.all:
            for flat in unit.trained:
                flat.finish_reduce()

    # --- inside

    def _fetch_ahead(self, unit: Unit, direction: int) -> None:
        """Start gathering the unit that the last pass used after (or, in backward, before) this one."""
        try:
            position = self._order.index(unit)
        except ValueError:
            return
        if direction > 0:
            self._start_first(self._order[position + 1 :])
        else:
            self._start_first(self._order[:position][::-1], for_backward=True)

    def _start_first(self, units: Sequence[Unit], for_backward: bool = False) -> None:
        """Start gathering the first of them; where some are streamed from the host, the first of those."""
        following = next((unit for unit in units if unit.is_streamed or not self._is_streamed), None)
        if following is not None and (following.needs_backward or not for_backward):
            following.start_gather()

    def _await_inputs(self, unit: Unit, tensors: list[Tensor]) -> None:
        """What is frozen in a block has no gradient to wait for, and backward needs it until the inputs have theirs."""
        use, inputs = unit.use, [tensor for tensor in tensors if tensor.requires_grad]
        use.inputs_left += len(inputs) or 1  # with no input found, the block waits for the end of backward

        def arrived(_: Tensor) -> None:
            use.inputs_left -= 1
            if use.inputs_left == 0:
                unit.uses_in_backward.discard(use)
                self._release_if_done(unit)

        for tensor in inputs:
            tensor.register_hook(arrived)

    def _install_hooks(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(self._before_model, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._after_model)
        for unit in self.blocks:
            unit.module.register_forward_pre_hook(partial(self._before_block, unit), with_kwargs=True, prepend=True)
            unit.module.register_forward_hook(partial(self._after_block, unit))
        for number, unit in enumerate(self.all):
            for place, flat in enumerate(unit.trained):
                for index, parameter in enumerate(flat.whole_parameters):
                    parameter.register_post_accumulate_grad_hook(_weakly(self._take, number, place, index))


def _weakly(method: Callable[..., None], *numbers: int) -> Callable[[Tensor], None]:
    """A hook on a parameter that does not keep its owner alive; Python cannot break cycles through tensors."""
    reference = weakref.WeakMethod(method)

    def call(tensor: Tensor) -> None:
        owner = reference()
        if owner is not None:
            owner(*numbers, tensor)

    return call


def units_of(model: nn.Module) -> Units | None:
    """The units that hold a model's state, or None for a model that one rank holds plainly."""
    return model.__dict__.get(_ATTRIBUTE)


def hold(model: nn.Module, make_flats: MakeFlats, compute_dtype: torch.dtype) -> Units:
    """Put every parameter of `model` into units: one for each block, and the root's for the rest (tied ones too)."""
    if units_of(model) is not None:
        raise PlanError("the model is parallel already; build it anew to apply another plan")
    structure, places = profile(model), find_parameters(model)
    units = [Unit(b.name, model.get_submodule(b.name), make_flats(b, places[b.name])) for b in structure.all]
    held = Units(model, units, compute_dtype)
    model.__dict__[_ATTRIBUTE] = held
    return held


def _tensors(value: Any) -> list[Tensor]:
    """Every tensor inside nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [t for field in dataclasses.fields(value) for t in _tensors(getattr(value, field.name))]
    return []


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in the arguments of a model, in the compute dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_cast(item, dtype) for item in value)
    if isinstance(value, list):
        return [_cast(item, dtype) for item in value]
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value

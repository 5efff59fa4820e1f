"""Hooks that gather a model's parameters before each block and reduce its gradients after; the model is not edited.

A unit is the parameters of one block; parameters outside all blocks belong to the root unit. Before a unit computes,
its flat buffers are gathered, and the next unit's are prefetched in the order that the last pass recorded. After its
backward its gradients are reduced while earlier units still compute. All ranks start reductions in reverse forward
order, the root last, so they agree even if gradients arrive in another order or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import PlanError
from weft.health.rank_status import Status
from weft.inspection.annotations import Annotation
from weft.inspection.nested_tensors import tensors_in
from weft.profiling import Block, ParameterUses, find_parameters, profile
from weft.sharding.flat_buffer import Flat
from weft.sharding.parameter_reads import ReadWatch
from weft.sharding.way_agreement import WayAgreement
from weft.sharding.weak_hook import weakly

MakeFlats = Callable[[Block, Mapping[str, ParameterUses]], Sequence[Flat]]


@dataclass(eq=False)
class BlockUse:
    """One forward through a block, and how many gradients of its inputs backward has yet to deliver."""

    inputs_left: int = 0


class Unit:
    """The flat buffers of one block, and the block's state in the current step."""

    def __init__(self, name: str, module: nn.Module, flats: Sequence[Flat]) -> None:
        self.name, self.module, self.flats = name, module, tuple(flats)
        what = f"block {name}" if name else "the root"
        self.forward_words, self.backward_words = f"forward of {what}", f"backward of {what}"
        self.trained = tuple(flat for flat in flats if flat.trainable)
        self.is_sharded = any(flat.shard.degree > 1 for flat in flats)
        self.is_streamed = any(flat.is_streamed for flat in flats)
        self.in_backward = False
        self.needs_backward = False
        self.had_backward = False  # whether any backward has reached it so far
        self.missing = 0
        self.use = BlockUse()
        self.uses_in_backward: set[BlockUse] = set()
        self.expect_use()

    def expect_use(self) -> None:
        """Reset the counters: wait for a gradient of every trained parameter, and for the inputs of a new forward."""
        self.missing = sum(len(flat.whole_parameters) for flat in self.trained)
        self.use = BlockUse()
        self.uses_in_backward.clear()

    @property
    def is_done(self) -> bool:
        """Whether backward no longer needs the block: all gradients of its parameters and inputs have arrived."""
        return self.missing == 0 and not self.uses_in_backward

    def start_gather(self) -> None:
        """Start to gather all buffers."""
        for flat in self.flats:
            flat.start_gather()

    def finish_gather(self) -> None:
        """Wait until all buffers are gathered and visible to the modules."""
        for flat in self.flats:
            flat.finish_gather()

    def release(self, stale: bool) -> None:
        """Release all buffers after use; see `Flat.release`."""
        self.in_backward = False
        for flat in self.flats:
            flat.release(stale)


class Units:
    """All units of a model, and the hooks that gather and reduce them."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], compute_dtype: torch.dtype) -> None:
        self.root, self.blocks = units[0], tuple(units[1:])
        self.compute_dtype = compute_dtype
        self.sync = True
        self.status: Status | None = None  # if set, it records which block this rank is in
        self.way: WayAgreement | None = None  # if set, ranks must call the same blocks in the same order
        self._is_streamed = any(unit.is_streamed for unit in units)
        self.rehearses = False  # if True, backward drops its gradients and keeps sums of earlier ones
        self._in_step = False  # see begin_step
        self._open: Unit | None = None  # the block whose forward runs
        self._forward_order: list[Unit] = []  # of the current pass, as recorded so far
        # Units of the last complete pass, in order. Before the first pass only copies from the host are started ahead:
        # a collective for a block that is never called would not be predicted.
        self._order: list[Unit] = list(self.blocks) if self._is_streamed else []
        self._to_reduce: list[Unit] = []
        self._last_started: Unit | None = None
        self._in_backward = False
        self._has_gradients = False  # whether this backward has delivered any
        self._accumulating = False  # whether the last backward left gradients that the next one adds to
        self._places: dict[int, tuple[Flat, int]] | None = None
        self._install_hooks(model)
        self.reads = ReadWatch(model, {unit.name: unit.flats for unit in self.all})

    @cached_property
    def all(self) -> tuple[Unit, ...]:
        """All units, the root first."""
        return (self.root, *self.blocks)

    @property
    def flats(self) -> Iterator[Flat]:
        """All flat buffers, unit by unit."""
        return (flat for unit in self.all for flat in unit.flats)

    # --- a step of a pipeline

    def begin_step(self) -> None:
        """Begin a pipeline step: until `end_step`, forwards and backwards of micro-batches run in any order.

        The optimizer changes nothing in between, so gathered buffers stay gathered, those of the root too. Backward
        sums gradients, which are reduced in the backward that `sync` marks, or by `reduce_all`.
        """
        self._start_pass()
        self._in_step = True
        self._gather_lasting()

    def end_step(self) -> None:
        """End a pipeline step and release all units. The optimizer may now change the pieces."""
        self._in_step = False
        for unit in self.all:
            unit.release(stale=True)

    def reduce_all(self) -> None:
        """Reduce the gradients that backwards without `sync` have summed. Call it outside of backward."""
        self._to_reduce = self._reduction_order()
        self._reduce()

    def add_late_gradient(self, parameter: Tensor) -> None:
        """Take a parameter's gradient that was computed after the backward that it belongs to."""
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
            # otherwise a checkpoint around the model is recomputing it in backward
            if torch._C._current_graph_task_id() == -1:
                self._start_pass()
                if self.way is not None:
                    self.way.begin()
            self._gather_lasting()
        return _cast(args, self.compute_dtype), _cast(kwargs, self.compute_dtype)

    def _gather_lasting(self) -> None:
        """Gather the buffers that stay whole during the pass: the root's, and all that stage 3 does not free."""
        for unit in self.all:
            if unit is self.root or not any(flat.frees_whole for flat in unit.flats):
                unit.start_gather()
        self.root.finish_gather()
        self.reads.gather()
        if self._is_streamed:
            self._start_first(self._order)

    def _start_pass(self) -> None:
        """Release all buffers that an earlier pass left gathered, unless gradients are being accumulated.

        A pass without a backward may have been interrupted, or an update may have followed it. Between the
        micro-batches of a step parameters do not change, so their buffers stay gathered.
        """
        if self._in_backward:  # the last backward was interrupted
            self._in_backward, self._last_started = False, None
            for flat in self.flats:
                flat.discard_gradient()
        for unit in self.all:
            unit.expect_use()
            unit.release(stale=not self._accumulating)

    def _after_model(self, _: nn.Module, __: Any, output: Any) -> None:
        self._order = list(dict.fromkeys(self._forward_order))
        if self.way is not None and torch._C._current_graph_task_id() == -1:
            self.way.end()
        if self._in_step:
            return
        if not torch.is_grad_enabled():
            for unit in self.all:
                unit.release(stale=False)
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._before_model_backward)

    def _before_block(self, unit: Unit, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self.status is not None and not unit.in_backward:
            self.status.enters(unit.forward_words)
        if self.way is not None and torch._C._current_graph_task_id() == -1:
            self.way.enters(unit.name)
        unit.finish_gather()
        if unit.in_backward:  # the user's own checkpointing recomputes the block
            return
        self._open = unit
        self._fetch_ahead(unit, +1)
        self._forward_order.append(unit)
        if torch.is_grad_enabled() and len(unit.trained) < len(unit.flats):
            self._await_inputs(unit, [*tensors_in(args), *tensors_in(kwargs)])

    def _after_block(self, unit: Unit, _: nn.Module, __: Any, output: Any) -> None:
        if unit.in_backward:
            return
        self._open = None
        tensors = tensors_in(output)
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
        if torch._C._current_graph_task_id() == -1:  # else a checkpoint recomputes blocks, whose backward comes next
            unit.release(stale=False)

    # --- backward

    def _before_model_backward(self, _: Tensor) -> None:
        if not self._in_backward:
            self._begin_backward()
        if self.status is not None:
            self.status.enters(self.root.backward_words)
        self.root.finish_gather()  # an evaluation between forward and backward may have released it

    def backward_entry(self) -> Callable[[], None] | None:
        """Returns what to call where backward enters the block that runs now by another way than its outputs."""
        unit = self._open
        return None if unit is None else partial(self._before_backward, unit, unit.use)

    def _before_backward(self, unit: Unit, use: BlockUse, _: Tensor | None = None) -> None:
        if unit.is_done and use.inputs_left == 0:  # an output that is also an input: its gradient comes last
            return
        if self._in_step and not self._in_backward:
            self._begin_backward()
        if use.inputs_left:
            unit.uses_in_backward.add(use)
        if self.status is not None:
            self.status.enters(unit.backward_words)
        unit.in_backward = unit.had_backward = True
        unit.finish_gather()
        self._fetch_ahead(unit, -1)
        if not self.rehearses:
            for flat in unit.trained:
                flat.expect_gradient()

    def _take(self, number: int, place: int, index: int, parameter: Tensor) -> None:
        if parameter.grad is None:  # an operation used it whose backward gave no gradient
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
            if not unit.is_sharded:  # nothing is sent over `shard`, so the reductions over other axes can start now
                self._continue(unit)
                self._last_started = None

    def _continue(self, unit: Unit) -> None:
        with self._named_by(unit):
            for flat in unit.trained:
                flat.continue_reduce()

    @contextmanager
    def _named_by(self, unit: Unit) -> Iterator[None]:
        """Attribute the collectives inside the block to this unit's backward, not to the block that the rank is in."""
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
        # torch.autograd.grad; a backward through its result may follow
        if not self._has_gradients and not self._in_step:
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
        """Reduce all gradients that are left, and make them visible to the optimizer."""
        self._reduce_ready(force=True)
        if self._last_started is not None:
            self._continue(self._last_started)
            self._last_started = None
        for unit in self.all:
            for flat in unit.trained:
                flat.finish_reduce()

    # --- internal

    def _fetch_ahead(self, unit: Unit, direction: int) -> None:
        """Start to gather the unit that the last pass used after this one (in backward, `direction` -1: before)."""
        try:
            position = self._order.index(unit)
        except ValueError:
            return
        if direction > 0:
            self._start_first(self._order[position + 1 :])
        else:
            self._start_first(self._order[:position][::-1], for_backward=True)

    def _start_first(self, units: Sequence[Unit], for_backward: bool = False) -> None:
        """Start to gather the first of `units`; if some units are streamed from the host, the first streamed one."""
        following = next((unit for unit in units if unit.is_streamed or not self._is_streamed), None)
        if following is None or (for_backward and not following.needs_backward):
            return
        if not for_backward or following.had_backward or following.is_streamed:  # its result may be detached
            following.start_gather()

    def _await_inputs(self, unit: Unit, tensors: list[Tensor]) -> None:
        """Keep a block with frozen parameters gathered until its inputs have gradients.

        Frozen parameters get no gradient to wait for, and backward needs them until then.
        """
        use, inputs = unit.use, [tensor for tensor in tensors if tensor.requires_grad]
        use.inputs_left += len(inputs) or 1  # if no input is found, the block stays gathered until backward ends

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
                    parameter.register_post_accumulate_grad_hook(weakly(self._take, number, place, index))


PARALLEL_ALREADY = "the model is parallel already; build it anew to apply another plan"
_UNITS = Annotation[Units]("units")


def units_of(model: nn.Module) -> Units | None:
    """Return the units that hold a model's state, or None if it has no flat buffers."""
    return _UNITS.get(model)


def make_units(model: nn.Module, make_flats: MakeFlats, compute_dtype: torch.dtype) -> Units:
    """Put every parameter of `model` into units: one per block; tied and all other parameters into the root's."""
    if units_of(model) is not None:
        raise PlanError(PARALLEL_ALREADY)
    structure, places = profile(model), find_parameters(model)
    units = [Unit(b.name, model.get_submodule(b.name), make_flats(b, places[b.name])) for b in structure.all]
    _UNITS.set(model, all_units := Units(model, units, compute_dtype))
    return all_units


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with all floating-point tensors inside it in `dtype`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_cast(item, dtype) for item in value)
    if isinstance(value, list):
        return [_cast(item, dtype) for item in value]
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value

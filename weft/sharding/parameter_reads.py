"""Watches forwards for reads of parameters by code that cannot see them whole, and for writes that would be lost.

Between uses a module shows this rank's pieces of its parameters. Under the tensor axes only the forward of a
parameter's own module knows which part the rank holds, and in a pipeline a stage has no values of another's. Code
elsewhere (a penalty in the model's forward or in the objective, a weight that another block borrows,
`block.forward(h)`) would compute with something else. Where the whole parameter is in memory anyway (`data`, shard
stages 1 and 2) the code is given that; elsewhere the read is refused by name. A forward that changes a parameter in
place (`self.weight.data.clamp_(-1, 1)`) is refused where the rank computes with a copy of the parameter.

The watch sees every operation, which takes time, so it is on in the first training and the first evaluation only, and
off in models that torch.compile compiles.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.errors import PlanError
from weft.inspection.blocks import AbsentModule
from weft.inspection.callers import transform_around, unwrapped
from weft.inspection.nested_tensors import map_tensors, tensors_in
from weft.profiling import SHARED_BY_STAGES
from weft.sharding.flat_buffer import Flat

# Attributes that a piece of a parameter shares with the whole, as in `hidden.to(self.linear.weight.dtype)`.
WITHOUT_TENSOR_AXES = "tensor.x = 1 and tensor.y = 1"
_SAME_FOR_PIECES = frozenset({"dtype", "device", "layout", "requires_grad", "is_cuda", "is_cpu", "is_leaf"})


class ReadWatch:
    """Watches the first training and the first evaluation of a model. Buffers that they read stay gathered.

    `flats` has the flat buffers of each block by its name, and those of the root under "".
    """

    def __init__(self, model: nn.Module, flats: Mapping[str, Sequence[Flat]]) -> None:
        self._model, self._flats = model, flats
        self._seen: set[bool] = set()  # the modes (training or not) that were watched, or are
        self._read: dict[int, Flat] = {}  # buffers that are read outside of their blocks, by id
        self._in_model = ExitStack()
        if SHARED_BY_STAGES.get(model) is None:  # a pipeline watches what its schedule runs
            model.register_forward_pre_hook(self._begin, prepend=True)
            model.register_forward_hook(self._end, always_call=True)

    def gather(self) -> None:
        """Make the buffers whole that code outside of their blocks reads."""
        for flat in self._read.values():
            flat.finish_gather()

    @contextmanager
    def watching(self, in_model: bool = False) -> Iterator[None]:
        """Watch the code inside the context, if it is the model's first in this mode.

        `in_model`: that code is the model's forward, not an objective that calls the model.
        """
        if self._model.training in self._seen or any(map(_is_compiled, self._model.modules())):
            yield
            return
        self._seen.add(self._model.training)
        operations = _Operations(self._model, self._flats, in_model)
        with operations.named_modules(), operations:
            yield
        self._read |= operations.read

    def _begin(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._in_model.enter_context(self.watching(in_model=True))

    def _end(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._in_model.close()


@dataclass(frozen=True)
class _HeldParameter:
    """A parameter that modules show whole or as this rank's piece, or that another stage holds (no `flat`)."""

    name: str
    flat: Flat | None = None
    index: int = 0  # in the buffer
    is_cut: bool = False  # Do the tensor axes give this rank a part of it?


class _Operations(TorchFunctionMode):
    """Sees every operation on a parameter, and which module runs it."""

    def __init__(self, model: nn.Module, flats: Mapping[str, Sequence[Flat]], in_model: bool) -> None:
        super().__init__()
        self._model, self._flats = model, flats
        self._all_flats = [flat for own in flats.values() for flat in own]
        self._held = {**_own_parameters(self._all_flats), **_absent_parameters(model)}
        self._running = [("", model)] if in_model else []
        self._is_axis = False  # Is the operation one of weft's own axes?
        self.read: dict[int, Flat] = {}  # buffers that were read outside of their blocks, by id

    @contextmanager
    def named_modules(self) -> Iterator[None]:
        """Follow which module runs."""
        handles = []
        blocks = {
            f"{block}.{name}": block
            for block in self._flats
            if block
            for name, _ in self._model.get_submodule(block).named_modules()
            if name
        }
        for name, module in self._model.named_modules():
            if any(module is running for _, running in self._running):  # torch is going through its hooks
                continue
            enter = partial(self._enter, name, blocks.get(name, ""))
            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, block: str, module: nn.Module, _: Any) -> None:
        """Called before a module. Inside a block whose own call has not gathered it, gather it or refuse."""
        self._running.append((name, module))
        if transform := transform_around():
            self._refuse_transform(name, module, transform)
        for flat in self._flats[block] if block else ():
            self._make_whole(flat, f"module '{name}' is called", f"block '{block}'")

    def _leave(self, *_: Any) -> None:
        self._running.pop()

    def _refuse_transform(self, name: str, module: nn.Module, transform: str) -> None:
        """Refuse a call inside of a transform of torch.func of a module that communicates in its forward."""
        cut = [
            one.flat
            for one in self._held.values()
            if one.is_cut and one.flat and self._is_in_owner(one.flat, one.index)
        ]
        obstacle = _away(self._flats.get(name, ()), "copies the block's parameters", "gathers the block's parameters")
        if obstacle is None and cut:
            obstacle = "the tensor axes communicate", WITHOUT_TENSOR_AXES
        if obstacle is not None:
            raise PlanError(
                f"'{name}' is called inside of torch.func.{transform}, where weft cannot follow tensors, and "
                f"{obstacle[0]} in its call; call it outside of the transform, with the whole batch, or use "
                f"{obstacle[1]}"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad and not self._running and SHARED_BY_STAGES.get(self._model) is not None:
            raise PlanError(
                "the objective computes gradients (torch.autograd.grad), which go back through several stages of the "
                "pipeline; use pipe = 1"
            )
        is_of_all = getattr(getattr(func, "__self__", None), "__name__", "") in _SAME_FOR_PIECES
        if not is_of_all and any(id(tensor) in self._held for tensor in tensors_in((args, kwargs))):
            is_attribute = getattr(func, "__name__", "") == "__get__"  # as .dtype
            self._is_axis = _calling_module(sys._getframe(1)).startswith("weft.parallel.")
            args, kwargs = map_tensors(partial(self._readable, is_attribute), (args, kwargs))
        if _is_in_place(func) and _is_of_the_model(sys._getframe(1)):
            for tensor in tensors_in(args[:1]):
                self._refuse_lost_write(tensor)
        return func(*args, **kwargs)

    def _refuse_lost_write(self, tensor: Tensor) -> None:
        """Refuse to change a parameter, or a view of one, of which the optimizer would not see the change."""
        storage = unwrapped(tensor).untyped_storage()._cdata
        flat = next((one for one in self._all_flats if one.whole.untyped_storage()._cdata == storage), None)
        if flat is None or not flat.is_whole:  # while it is gathered, weft writes it
            return
        obstacle = _away([flat], "streams a copy of the block's parameters", "gathers a copy of the block's parameters")
        if obstacle is None and flat.is_apart:
            obstacle = "the optimizer has master weights of its own", "precision 'fp32'"
        if obstacle is not None:
            inside = zip(flat.layout.parameters, flat.whole_parameters, strict=True)
            place = tensor.storage_offset()
            name = next(one.name for one, whole in inside if 0 <= place - whole.storage_offset() < whole.numel())
            raise PlanError(
                f"{self._reader} changes parameter '{name}' in place, where "
                f"{obstacle[0]}, so the change would be lost; change parameters after the optimizer's step, compute "
                f"with a changed copy (as torch.nn.utils.parametrize does), or use {obstacle[1]}"
            )

    def _readable(self, is_attribute: bool, tensor: Tensor) -> Tensor:
        """Return a parameter as the running code may read it, or refuse the read."""
        held = self._held.get(id(tensor))
        if held is None or (held.flat is None and is_attribute):
            return tensor
        reading = f"{self._reader} reads parameter '{held.name}'"
        if held.flat is None:
            raise PlanError(
                f"{reading}, which another stage of the pipeline holds; put both into one stage (pipe.split), or use "
                f"pipe = 1"
            )
        if not self._running and SHARED_BY_STAGES.get(self._model) is not None:
            raise PlanError(
                f"{reading}, and a stage of the pipeline has only its own parameters; add penalties through the "
                f"optimizer (weight_decay), or use pipe = 1"
            )
        if held.is_cut and not self._is_in_owner(held.flat, held.index) and not self._is_axis:
            raise PlanError(
                f"{reading}, of which the tensor axes give each rank a part; call the module that holds it instead, or "
                f"use {WITHOUT_TENSOR_AXES}"
            )
        self._make_whole(held.flat, reading, "its block")
        return held.flat.whole_parameters[held.index]

    def _make_whole(self, flat: Flat, reading: str, block: str) -> None:
        """Gather a buffer that is read outside of a call of its block, or refuse that."""
        if flat.is_whole:
            return
        obstacle = _away([flat], "frees the block's parameters", "frees the block's parameters")
        if obstacle is None and any(parameter.cut is not None for parameter in flat.layout.parameters):
            obstacle = "the tensor axes do not count its communication", WITHOUT_TENSOR_AXES
        if obstacle is not None:
            raise PlanError(
                f"{reading} outside of a call of {block}, where {obstacle[0]}; call the block (not its .forward, nor "
                f"its parameters), add penalties through the optimizer (weight_decay), or use {obstacle[1]}"
            )
        flat.finish_gather()
        self.read[id(flat)] = flat

    def _is_in_owner(self, flat: Flat, index: int) -> bool:
        return bool(self._running) and any(self._running[-1][1] is module for module, _ in flat.owners[index])

    @property
    def _reader(self) -> str:
        if not self._running:
            return "the objective"
        name = self._running[-1][0]
        return f"'{name}'" if name else "the model's own forward"


def _away(flats: Sequence[Flat], if_streamed: str, if_sharded: str) -> tuple[str, str] | None:
    """Returns why parameters are not in memory between uses of their block, and the setting without that; or None."""
    if any(flat.is_streamed for flat in flats):
        return f"memory.weights > 0 {if_streamed}", "weights = 0"
    if any(flat.frees_whole for flat in flats):
        return f"shard.stage = 3 {if_sharded}", "stage 1 or 2"
    return None


def _is_compiled(module: nn.Module) -> bool:
    """Is the module compiled? torch.compile does not follow the watch."""
    forward = module.__dict__.get("forward")
    has_code = hasattr(forward, "_torchdynamo_orig_callable") or hasattr(forward, "compiled")
    return has_code or module._compiled_call_impl is not None


def _is_of_the_model(frame: FrameType | None) -> bool:
    """Does the code of this frame, or what it calls torch for, belong to the model and not to weft's runtime?"""
    module = _calling_module(frame)
    return module.startswith("weft.models.") or not module.startswith("weft.")


def _is_in_place(func: Any) -> bool:
    """Does a function of torch change its first argument? `parameter.data = ...` does too."""
    name = getattr(func, "__name__", "")
    return name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))


def _calling_module(frame: FrameType | None) -> str:
    """Return the name of the module whose code calls torch in this frame.

    A hook on saved tensors, which autograd calls, counts as the code that saves them.
    """
    while frame is not None and (
        f"{_module_of(frame)}.".startswith("torch.")
        or frame.f_code.co_name == "__torch_function__"
        or _module_of(frame.f_back) == "torch.autograd.function"
    ):
        frame = frame.f_back
    return _module_of(frame)


def _module_of(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def _own_parameters(flats: Sequence[Flat]) -> Mapping[int, _HeldParameter]:
    """Return the whole parameters and the pieces of flat buffers by id."""
    found = {}
    for flat in flats:
        index_of = {parameter.name: index for index, parameter in enumerate(flat.layout.parameters)}
        pieces = [(piece, index_of[part.parameter.name]) for piece, part in zip(flat.pieces, flat.parts, strict=True)]
        wholes = [(whole, index) for index, whole in enumerate(flat.whole_parameters)]
        for tensor, index in (*pieces, *wholes):
            parameter = flat.layout.parameters[index]
            is_cut = parameter.cut is not None and not parameter.cut.is_whole
            found[id(tensor)] = _HeldParameter(parameter.name, flat, index, is_cut)
    return found


def _absent_parameters(model: nn.Module) -> Mapping[int, _HeldParameter]:
    """Return the parameters of units that other stages hold, by id."""
    absent = [module.__dict__ for module in model.modules() if isinstance(module, AbsentModule)]
    return {
        id(parameter): _HeldParameter(f"{one['module_name']}.{name}")
        for one in absent
        for name, parameter in one["stands_for"].named_parameters()
    }

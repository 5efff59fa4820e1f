"""A rank's forward on shapes alone: what it says, computes and keeps, and how its result lies.

The model runs on fake tensors under the same view as later for real, over axes that only count. So costs need no
formulas of their own: the calls are those that the runtime's code makes. What backward will say is noted by each
operation; what recompute will say again follows from where a block saves something for the last time.

The same forward of whole images runs beside it: from outside, both must look alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.comm import Axis, Ledger
from weft.errors import PlanError
from weft.plan import Plan
from weft.profile import Profile, Tally, count
from weft.spatial.fuse import Layer, fuse
from weft.spatial.operands import map_tensors
from weft.spatial.place import Call, Grid, Needs, Place, tensors_in
from weft.spatial.view import Position, View, install
from weft.spatial.windows import Extra

Sizes = tuple[int, int]


@dataclass
class Said:
    """One call: of forward, or (`is_backward`) of backward. `again` is whether recompute makes it once more."""

    block: str
    call: Call
    is_backward: bool = False
    again: bool = False


@dataclass(frozen=True)
class Dry:
    """What one rank does in a forward and backward of one micro-batch; `output` is "tile", "whole" or "batch"."""

    said: tuple[Said, ...]
    sizes: Sizes
    output: str
    extras: Mapping[Position, Extra]
    profile: Profile


class _Recorder(Ledger):
    """Takes down the calls of a dry run with the block that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Said] = []
        self.tally: _Tally | None = None

    @property
    def block(self) -> str:
        return self.tally.running if self.tally is not None else ""

    def record(self, axis: str, operation: str, num_bytes: int) -> None:
        self.said.append(Said(self.block, (axis, operation, num_bytes)))

    def note(self, calls: list[Call]) -> None:
        """What backward will say."""
        self.said += [Said(self.block, call, is_backward=True) for call in calls]

    def saved(self) -> None:
        """The block under way has saved something: recompute comes as far as here."""
        for one in reversed(self.said):
            if one.block != self.block or one.again:
                break
            one.again = not one.is_backward


class _Tally(Tally):
    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        recorder.tally = self

    def _pack(self, tensor: Tensor) -> Tensor:
        self.recorder.saved()
        return super()._pack(tensor)


def image_sizes(example: Any) -> Sizes:
    """Rows and columns of the images among a model's arguments: of the first tensor that has dims enough."""
    for tensor in tensors_in(example):
        if tensor.dim() > 2 and tensor.is_floating_point():
            return tensor.shape[-2], tensor.shape[-1]
    raise PlanError("tile splits images [batch, channels, rows, columns], and none is among the model's arguments")


def dry_run(whole: Profile, plan: Plan, coordinates: Mapping[str, int]) -> Dry:
    """What the rank at these coordinates does."""
    key = f"dry {plan.tile} {coordinates['rows']} {coordinates['columns']}"
    if key not in whole.kept:
        whole.kept[key] = _dry_run(whole, plan, coordinates)
    found: Dry = whole.kept[key]
    return found


def _dry_run(whole: Profile, plan: Plan, coordinates: Mapping[str, int]) -> Dry:
    assert whole.model is not None and whole.example is not None  # noqa: PT018
    with FakeTensorMode(allow_non_fake_inputs=True):
        sizes = image_sizes(whole.example())
    check_sizes(sizes, plan)
    if plan.tile.fused == 1:
        return _run(whole, plan, coordinates, sizes, {})
    layers: list[Layer] = []
    _run(whole, plan, coordinates, sizes, {}, layers)
    return _run(whole, plan, coordinates, sizes, fuse(layers, plan.tile.fused))


def _run(
    whole: Profile,
    plan: Plan,
    coordinates: Mapping[str, int],
    sizes: Sizes,
    extras: Mapping[Position, Extra],
    layers: list[Layer] | None = None,
) -> Dry:
    """One forward; `layers` takes those that look at neighbours."""
    assert whole.model is not None and whole.example is not None  # noqa: PT018
    recorder, tile, (row, column) = _Recorder(), plan.tile, (coordinates["rows"], coordinates["columns"])
    axis = partial(Axis, group=None, ledger=recorder, dry=True)

    def take(taken: Place, given: Place, needs: tuple[Needs, Needs]) -> None:
        if layers is not None:
            block, number = view.position  # which has gone on to the next
            layers.append(Layer((block, number - 1), taken, given, needs))

    grid = Grid(
        axis("rows", tile.rows, row),
        axis("columns", tile.columns, column),
        axis("tile", tile.degree, row * tile.columns + column),
        note=recorder.note,
        layer=take,
    )
    view = View(grid, tile, extras)
    with _restored(whole.model), _compared(whole.model, view, _outline(whole)):
        tiled = install(whole.model, view, sizes)
        example = partial(_cut, whole.example, grid, sizes)
        counted = count(whole.model, example, None, whole.dtype, whole, _Tally(recorder))
    kept = {name: getattr(counted, name) for name in ("root", "blocks", "units", "stream_numel")}
    return Dry(tuple(recorder.said), sizes, tiled.output, extras, replace(whole, **kept))


def check_sizes(sizes: Sizes, plan: Plan) -> None:
    """Refuse images that have fewer pixels than tiles along a dim."""
    for name, size, degree in zip(("rows", "columns"), sizes, (plan.tile.rows, plan.tile.columns), strict=True):
        if size < degree:
            raise PlanError(
                f"tile.{name} = {degree}, but the images have {size} {name}; use at most {size}, or larger images"
            )


def _cut(example: Callable[[], Any], grid: Grid, sizes: Sizes) -> Any:
    place = Place.of(grid, sizes)

    def part(tensor: Tensor) -> Tensor:
        if tensor.dim() < 3 or tuple(tensor.shape[-2:]) != sizes:
            return tensor
        (top, bottom), (left, right) = place.owned(grid)
        return tensor[..., top:bottom, left:right].clone()

    return map_tensors(part, example())


# --- how the model looks from outside


@dataclass
class _Outline:
    """The shapes of what modules return, in the order of their calls."""

    calls: list[tuple[str, tuple[torch.Size, ...]]] = field(default_factory=list)


def _outline(whole: Profile) -> _Outline:
    """Of the whole model."""
    if "outline" not in whole.kept:
        found = _Outline()
        assert whole.model is not None and whole.example is not None  # noqa: PT018
        with _watched(whole.model, lambda name, _, out: found.calls.append((name, _shapes(out)))):
            count(whole.model, whole.example, None, whole.dtype, whole)
        whole.kept["outline"] = found
    outline: _Outline = whole.kept["outline"]
    return outline


def _shapes(output: Any) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in tensors_in(output))


@contextmanager
def _compared(model: nn.Module, view: View, outline: _Outline) -> Iterator[None]:
    """Hold each module's results to those of the whole, and keep the name of the module that runs."""
    expected = iter(outline.calls)
    lost = (
        "weft follows samples along the first dim only; use tile.hand_over = 'gather'"
        if view.tile.hand_over == "batch"
        else "weft lost the tile's place in an operation that it does not see (an autograd.Function of the model's "
        "own, or NumPy); hand tiles over before it (tile.until)"
    )

    def leave(name: str, module: nn.Module, output: Any) -> None:
        view.path.pop()
        told, shapes = next(expected, ("", ())), _shapes(output)
        if told != (name, shapes):
            rows, columns = view.grid.rows.degree, view.grid.columns.degree
            raise PlanError(
                f"tile = {rows} × {columns}: '{name}' ({type(module).__name__}) gave {_text(shapes)} where the whole "
                f"model has {_text(told[1])} ('{told[0]}'); {lost}"
            )

    enters = [
        module.register_forward_pre_hook(lambda _, __, name=name: view.path.append(name))  # type: ignore[misc]
        for name, module in model.named_modules()
        if name
    ]
    try:
        with _watched(model, leave):
            yield
    finally:
        for handle in enters:
            handle.remove()


def _text(shapes: tuple[torch.Size, ...]) -> str:
    return " and ".join(str(list(shape)) for shape in shapes) or "nothing"


@contextmanager
def _watched(model: nn.Module, leave: Callable[[str, nn.Module, Any], None]) -> Iterator[None]:
    def hook(name: str, module: nn.Module, _: Any, output: Any) -> None:
        leave(name, module, output)

    handles = [module.register_forward_hook(partial(hook, name)) for name, module in model.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """The model's forwards and hooks are afterwards as they are now."""
    before = [(module, module.__dict__.get("forward"), dict(module._forward_pre_hooks)) for module in model.modules()]
    kwargs = [dict(module._forward_pre_hooks_with_kwargs) for module in model.modules()]
    try:
        yield
    finally:
        for (module, forward, hooks), with_kwargs in zip(before, kwargs, strict=True):
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward
            module._forward_pre_hooks.clear()
            module._forward_pre_hooks.update(hooks)
            module._forward_pre_hooks_with_kwargs.clear()
            module._forward_pre_hooks_with_kwargs.update(with_kwargs)

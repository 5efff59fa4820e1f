"""A rank's forward on shapes alone: what it says, computes and keeps, and how its result lies.

The model runs on fake tensors under the same view as later for real, over axes that only count. So costs need no
formulas of their own: the calls are those that the runtime's code makes. What backward will say is noted by each
operation; what recompute will say again follows from where a block saves something for the last time.

The same forward of whole images runs beside it: from outside, both must look alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.comm import Axis
from weft.errors import PlanError
from weft.inspection.parameter_cut import share
from weft.plan import Plan
from weft.profile import Profile, Tally, count
from weft.spatial.fuse import Layer, fuse
from weft.spatial.operands import map_tensors
from weft.spatial.recorded_calls import Recorder, Said
from weft.spatial.tile_layout import Grid, Needs, Place, place_of, tensors_in
from weft.spatial.tiled_model import TiledModel, install, prepare
from weft.spatial.view import Position, View
from weft.spatial.windows import Extra

Sizes = tuple[int, int]


@dataclass(frozen=True)
class Dry:
    """What one rank does in a forward and backward of one micro-batch; `output` is "tile", "whole" or "batch". `point`
    has the pixels of the largest image that is handed over before `tile.until`, `taken` the bytes of the whole images
    that each block takes as tiles.
    """

    said: tuple[Said, ...]
    sizes: Sizes
    output: str
    extras: Mapping[Position, Extra]
    profile: Profile
    point: int | None
    taken: Mapping[str, tuple[int, ...]]


class _Tally(Tally):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.taken: dict[str, tuple[int, ...]] = {}

    def _pack(self, tensor: Tensor) -> Tensor:
        self.recorder.saved()
        return super()._pack(tensor)

    def _enter(self, name: str, *given: Any) -> None:
        super()._enter(name, *given)
        self.recorder.block = self.running
        tiles = {id(one): (one, at) for one in tensors_in(given) if isinstance(at := place_of(one), Place)}
        with torch._C.DisableTorchFunction():
            whole = [math.prod(at.whole_shape(tuple(one.shape))) * one.itemsize for one, at in tiles.values()]
        self.taken[name] = tuple(whole)

    def _leave(self, name: str, *given: Any) -> None:
        super()._leave(name, *given)
        self.recorder.block = self.running


def image_sizes(example: Any) -> Sizes:
    """Rows and columns of the images among a model's arguments: of the first tensor that has dims enough."""
    for tensor in tensors_in(example):
        if tensor.dim() > 2 and tensor.is_floating_point():
            return tensor.shape[-2], tensor.shape[-1]
    raise PlanError("tile splits images [batch, channels, rows, columns], and none is among the model's arguments")


def dry_run(whole: Profile, plan: Plan, coordinates: Mapping[str, int]) -> Dry:
    """What the rank at these coordinates does."""
    over = f"{plan.statistics} over {plan.num_batch_ranks}, {'staged' if plan.pipe.degree > 1 else 'whole'}"
    key = f"dry {plan.tile} {over} {coordinates['rows']} {coordinates['columns']}"
    if key not in whole.cache:
        whole.cache[key] = _dry_run(whole, plan, coordinates)
    found: Dry = whole.cache[key]
    return found


def _dry_run(whole: Profile, plan: Plan, coordinates: Mapping[str, int]) -> Dry:
    assert whole.model is not None and whole.example is not None  # noqa: PT018
    sizes = (0, 0)
    if plan.tile.degree > 1:
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
    recorder = Recorder()

    def take(taken: Place, given: Place, needs: tuple[Needs, Needs]) -> None:
        if layers is not None:
            unit, number = view.position  # which has gone on to the next
            layers.append(Layer((unit, number - 1), taken, given, needs))

    view = View(_dry_grid(plan, coordinates, recorder, take), plan.tile, extras, plan.pipe.degree > 1)
    with _restored(whole.model), _compared(whole.model, view, _outline(whole)):
        tiled = install(whole.model, view, sizes)
        example = partial(cut_images, whole.example, plan, (coordinates["rows"], coordinates["columns"]), sizes)
        tally = _Tally(recorder)
        counted = count(whole.model, example, None, whole.dtype, whole, tally)
    kept = {name: getattr(counted, name) for name in ("root", "blocks", "units", "stream_numel")}
    return Dry(tuple(recorder.said), sizes, tiled.output, extras, replace(whole, **kept), view.point, tally.taken)


def _dry_grid(
    plan: Plan,
    coordinates: Mapping[str, int],
    recorder: Recorder,
    layer: Callable[[Place, Place, tuple[Needs, Needs]], None] | None = None,
) -> Grid:
    """The axes of a rank, on which calls are only counted."""
    tile, (row, column) = plan.tile, (coordinates["rows"], coordinates["columns"])
    axis = partial(Axis, group=None, ledger=recorder, dry=True)
    num_ranks, is_over_batch = plan.num_batch_ranks, plan.has_batch_statistics
    return Grid(
        axis("rows", tile.rows, row),
        axis("columns", tile.columns, column),
        axis("tile", tile.degree, row * tile.columns + column),
        note=recorder.note,
        layer=layer,
        samples=axis("samples", num_ranks * tile.degree, 0) if is_over_batch else None,
        batch=axis("batch", num_ranks, 0) if is_over_batch else None,
    )


@contextmanager
def dry_stages(
    model: nn.Module, plan: Plan, at: tuple[int, int], sizes: Sizes, extras: Mapping[Position, Extra]
) -> Iterator[tuple[TiledModel, Recorder]]:
    """A model that a pipeline's trace can run on shapes as the stages of the rank at this row and column will run it,
    and what takes down its calls.
    """
    recorder, coordinates = Recorder(), {"rows": at[0], "columns": at[1]}
    view = View(_dry_grid(plan, coordinates, recorder), plan.tile, extras, is_staged=True)
    with _restored(model):
        yield prepare(model, view, sizes), recorder


def check_sizes(sizes: Sizes, plan: Plan) -> None:
    """Refuse images that have fewer pixels than tiles along a dim."""
    for name, size, degree in zip(("rows", "columns"), sizes, (plan.tile.rows, plan.tile.columns), strict=True):
        if size < degree:
            raise PlanError(
                f"tile.{name} = {degree}, but the images have {size} {name}; use at most {size}, or larger images"
            )


def cut_images(example: Callable[[], Any], plan: Plan, at: tuple[int, int], sizes: Sizes) -> Any:
    """The arguments that the forward of the rank at a row and column is given: its tiles of whole images."""
    if plan.tile.degree == 1:
        return example()
    (top, bottom), (left, right) = share(sizes[0], plan.tile.rows, at[0]), share(sizes[1], plan.tile.columns, at[1])

    def part(tensor: Tensor) -> Tensor:
        if tensor.dim() < 3 or tuple(tensor.shape[-2:]) != sizes:
            return tensor
        return tensor[..., top:bottom, left:right].clone()

    return map_tensors(part, example())


# --- how the model looks from outside


@dataclass
class _Outline:
    """The shapes of what modules return, in the order of their calls."""

    calls: list[tuple[str, tuple[torch.Size, ...]]] = field(default_factory=list)


def _outline(whole: Profile) -> _Outline:
    """Of the whole model."""
    if "outline" not in whole.cache:
        found = _Outline()
        assert whole.model is not None and whole.example is not None  # noqa: PT018
        with _watched(whole.model, lambda name, _, out: found.calls.append((name, _shapes(out)))):
            count(whole.model, whole.example, None, whole.dtype, whole)
        whole.cache["outline"] = found
    outline: _Outline = whole.cache["outline"]
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

"""A rank's forward on fake tensors: what it sends, computes and saves, and the layout of its result.

The model runs under the same view as in training, over axes that only count. So costs need no formulas of their own:
the collectives are those that the runtime's code makes. Each operation records the collectives of its backward. Those
that recompute repeats follow from the last tensor that a block saves.

The forward of whole images runs too, and the shapes that modules return must be equal in both.
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

from weft.comm import Axis, Ledger
from weft.errors import PlanError
from weft.inspection.annotations import Annotation
from weft.inspection.nested_tensors import map_tensors, tensors_in
from weft.inspection.parameter_cut import share
from weft.plan import Plan, Tile
from weft.profiling import Profile, ProfileCache, RecordedCall, Tally, count
from weft.spatial.fuse import NeighbourLayer, fuse
from weft.spatial.tile_layout import CollectiveCall, Grid, Needs, TileLayout, layout_of
from weft.spatial.tiled_model import TiledModel, install, prepare
from weft.spatial.view import Position, View
from weft.spatial.windows import Extra

ImageSizes = tuple[int, int]


class CallRecorder(Ledger):
    """A ledger that records the calls of a dry run with their block and their position in a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        self.block = ""
        self.event: int | None = None
        self.events_before = 0

    def record(self, axis: str, operation: str, num_bytes: int) -> None:
        self._take((axis, operation, num_bytes), is_backward=False)

    def note(self, calls: list[CollectiveCall]) -> None:
        """Record calls that backward will make."""
        for call in calls:
            self._take(call, is_backward=True)

    def saved(self) -> None:
        """Mark the block's earlier calls as recomputed: it has saved a tensor, so recompute runs up to here."""
        for one in reversed(self.calls):
            if one.block != self.block or one.recomputed:
                break
            one.recomputed = not one.is_backward

    def _take(self, call: CollectiveCall, is_backward: bool) -> None:
        self.calls.append(
            RecordedCall(self.block, call, is_backward, event=self.event, events_before=self.events_before)
        )


@dataclass(frozen=True)
class DryRun:
    """The work of one rank in a forward and backward of one micro-batch.

    `output` is the layout of the result: "tile", "whole" or "batch". `point` has the pixels of the largest image that
    is handed over before `tile.until`. `taken` has, for each block, the bytes of the whole images that it takes as
    tiles.
    """

    calls: tuple[RecordedCall, ...]
    sizes: ImageSizes
    output: str
    extras: Mapping[Position, Extra]
    profile: Profile
    point: int | None
    taken: Mapping[str, tuple[int, ...]]


class _TileTally(Tally):
    def __init__(self, recorder: CallRecorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.taken: dict[str, tuple[int, ...]] = {}

    def _pack(self, tensor: Tensor) -> Tensor:
        self.recorder.saved()
        return super()._pack(tensor)

    def _enter(self, name: str, *given: Any) -> None:
        super()._enter(name, *given)
        self.recorder.block = self.running
        tiles = {id(one): (one, at) for one in tensors_in(given) if isinstance(at := layout_of(one), TileLayout)}
        with torch._C.DisableTorchFunction():
            whole = [math.prod(at.whole_shape(tuple(one.shape))) * one.itemsize for one, at in tiles.values()]
        self.taken[name] = tuple(whole)

    def _leave(self, name: str, *given: Any) -> None:
        super()._leave(name, *given)
        self.recorder.block = self.running


def image_sizes(example: Any) -> ImageSizes:
    """Return rows and columns of the images among a model's arguments.

    They are those of the first floating-point tensor with 3 or more dims.
    """
    for tensor in tensors_in(example):
        if tensor.dim() > 2 and tensor.is_floating_point():
            return tensor.shape[-2], tensor.shape[-1]
    raise PlanError("tile splits images [batch, channels, rows, columns], and none is among the model's arguments")


_DRY_RUNS = ProfileCache[tuple[Tile, tuple[str, int], bool, tuple[int, int]], DryRun]()


def dry_run(whole: Profile, plan: Plan, coordinates: Mapping[str, int]) -> DryRun:
    """Return the dry run of the rank at these coordinates. Results are cached in the profile."""
    statistics, place = (plan.statistics, plan.num_batch_ranks), (coordinates["rows"], coordinates["columns"])
    key = plan.tile, statistics, plan.pipe.degree > 1, place
    return _DRY_RUNS.get(whole, key, lambda: _dry_run(whole, plan, coordinates))


def _dry_run(whole: Profile, plan: Plan, coordinates: Mapping[str, int]) -> DryRun:
    assert whole.model is not None and whole.example is not None  # noqa: PT018
    sizes = (0, 0)
    if plan.tile.degree > 1:
        with FakeTensorMode(allow_non_fake_inputs=True):
            sizes = image_sizes(whole.example())
        check_sizes(sizes, plan)
    if plan.tile.fused == 1:
        return _run(whole, plan, coordinates, sizes, {})
    layers: list[NeighbourLayer] = []
    _run(whole, plan, coordinates, sizes, {}, layers)
    return _run(whole, plan, coordinates, sizes, fuse(layers, plan.tile.fused))


def _run(
    whole: Profile,
    plan: Plan,
    coordinates: Mapping[str, int],
    sizes: ImageSizes,
    extras: Mapping[Position, Extra],
    layers: list[NeighbourLayer] | None = None,
) -> DryRun:
    """Run one forward. Operations that need neighbouring pixels are appended to `layers`."""
    assert whole.model is not None and whole.example is not None  # noqa: PT018
    recorder = CallRecorder()

    def add_layer(input_layout: TileLayout, output_layout: TileLayout, needs: tuple[Needs, Needs]) -> None:
        if layers is not None:
            unit, number = view.position  # it has advanced to the next layer already
            layers.append(NeighbourLayer((unit, number - 1), input_layout, output_layout, needs))

    view = View(_dry_grid(plan, coordinates, recorder, add_layer), plan.tile, extras, plan.pipe.degree > 1)
    with _restored(whole.model), _compared(whole.model, view, _OUTLINES.get(whole, None, lambda: _outline(whole))):
        tiled = install(whole.model, view, sizes)
        example = partial(cut_images, whole.example, plan, (coordinates["rows"], coordinates["columns"]), sizes)
        tally = _TileTally(recorder)
        counted = count(whole.model, example, None, whole.dtype, whole, tally)
    kept = {name: getattr(counted, name) for name in ("root", "blocks", "units", "stream_numel")}
    return DryRun(tuple(recorder.calls), sizes, tiled.output, extras, replace(whole, **kept), view.point, tally.taken)


def _dry_grid(
    plan: Plan,
    coordinates: Mapping[str, int],
    recorder: CallRecorder,
    layer: Callable[[TileLayout, TileLayout, tuple[Needs, Needs]], None] | None = None,
) -> Grid:
    """Return the axes of a rank, on which collectives are only recorded."""
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
    model: nn.Module, plan: Plan, at: tuple[int, int], sizes: ImageSizes, extras: Mapping[Position, Extra]
) -> Iterator[tuple[TiledModel, CallRecorder]]:
    """Prepare a model so that a pipeline can trace it on fake tensors as the stages of the rank at this row and column.

    Yields the prepared model and the recorder of its collectives.
    """
    recorder, coordinates = CallRecorder(), {"rows": at[0], "columns": at[1]}
    view = View(_dry_grid(plan, coordinates, recorder), plan.tile, extras, is_staged=True)
    with _restored(model):
        yield prepare(model, view, sizes), recorder


def check_sizes(sizes: ImageSizes, plan: Plan) -> None:
    """Refuse images that have fewer pixels than tiles along a dim."""
    for name, size, degree in zip(("rows", "columns"), sizes, (plan.tile.rows, plan.tile.columns), strict=True):
        if size < degree:
            raise PlanError(
                f"tile.{name} = {degree}, but the images have {size} {name}; use at most {size}, or larger images"
            )


def cut_images(example: Callable[[], Any], plan: Plan, at: tuple[int, int], sizes: ImageSizes) -> Any:
    """Return the arguments of the forward on the rank at a row and column: its tiles of the example's whole images."""
    if plan.tile.degree == 1:
        return example()
    (top, bottom), (left, right) = share(sizes[0], plan.tile.rows, at[0]), share(sizes[1], plan.tile.columns, at[1])

    def part(tensor: Tensor) -> Tensor:
        if tensor.dim() < 3 or tuple(tensor.shape[-2:]) != sizes:
            return tensor
        return tensor[..., top:bottom, left:right].clone()

    return map_tensors(part, example())


# --- comparison with the whole model


@dataclass
class _Outline:
    """The shapes that modules return, in the order of their calls."""

    calls: list[tuple[str, tuple[torch.Size, ...]]] = field(default_factory=list)


def _outline(whole: Profile) -> _Outline:
    """Return the outline of the whole model."""
    found = _Outline()
    assert whole.model is not None and whole.example is not None  # noqa: PT018
    with _watched(whole.model, lambda name, _, out: found.calls.append((name, _shapes(out)))):
        count(whole.model, whole.example, None, whole.dtype, whole)
    return found


_OUTLINES = ProfileCache[None, _Outline]()


def _shapes(output: Any) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in tensors_in(output))


@contextmanager
def _compared(model: nn.Module, view: View, outline: _Outline) -> Iterator[None]:
    """Check each module's result shapes against those of the whole model, and keep the name of the running module."""
    expected = iter(outline.calls)
    lost = (
        "weft follows samples along the first dim only; use tile.hand_over = 'gather'"
        if view.tile.hand_over == "batch"
        else "weft lost the tile's place in an operation that it does not see (an autograd.Function of the model's "
        "own, or NumPy); hand tiles over before it (tile.until)"
    )

    def leave(name: str, module: nn.Module, output: Any) -> None:
        view.path.pop()
        known_point, shapes = next(expected, ("", ())), _shapes(output)
        if known_point != (name, shapes):
            rows, columns = view.grid.rows.degree, view.grid.columns.degree
            raise PlanError(
                f"tile = {rows} × {columns}: '{name}' ({type(module).__name__}) gave {_text(shapes)} where the whole "
                f"model has {_text(known_point[1])} ('{known_point[0]}'); {lost}"
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
    """Restore the model's forwards and hooks afterwards."""
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


@dataclass(frozen=True)
class Tiling:
    """How a model is tiled.

    `sizes` are those of its images. `output` is the layout of its result: "tile", "whole" on every rank, or "batch".
    `extras` are the pixels beside their own that layers compute, so that later ones need not fetch them. `point`: see
    `View`.
    """

    sizes: tuple[int, int]
    output: str
    extras: Mapping[Position, Extra] = field(default_factory=dict)
    point: int | None = None


_TILING = Annotation[Tiling]("tiling")


def tiling_of(model: nn.Module) -> Tiling | None:
    """Return how a model is tiled; None if it is not."""
    return _TILING.get(model)


def tiling_for(whole: Profile, plan: Plan) -> Tiling | None:
    """Return how a plan that was not refused tiles a model; None if it does not."""
    if not plan.is_viewed:
        return None
    found = dry_run(whole, plan, {"rows": 0, "columns": 0})
    return Tiling(found.sizes, found.output, found.extras, found.point)


def mark_tiling(model: nn.Module, tiling: Tiling) -> None:
    """Store with a model how it is tiled."""
    _TILING.set(model, tiling)


def localise_tile(profile: Profile, plan: Plan, coordinates: Mapping[str, int]) -> Profile:
    """Return the profile of a forward on the rank at these coordinates."""
    if not plan.is_viewed or not profile.counted:
        return profile
    return dry_run(profile, plan, coordinates).profile

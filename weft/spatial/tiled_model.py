"""Runs a model under the view of a rank's tile: its own forward, or that of a pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from weft.errors import PlanError
from weft.inspection.annotations import Annotation
from weft.inspection.blocks import AbsentModule, find_blocks, find_units
from weft.inspection.nested_tensors import map_tensors, tensors_in
from weft.spatial.halo import forget_widened
from weft.spatial.hand_over import own_part
from weft.spatial.tile_layout import BatchShare, TileLayout, layout_of, set_layout
from weft.spatial.view import View, forget_handed_over, hand_over


class TiledModel:
    """A model's forward on a rank's tile. `output` is the layout of its last result: "tile", "whole" or "batch"."""

    def __init__(self, model: nn.Module, view: View, sizes: tuple[int, int]) -> None:
        self.view, self.sizes, self.output = view, sizes, "whole"
        self._name, self._forward = type(model).__name__, model.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.running((args, kwargs)):
            output = self._forward(*args, **kwargs)
        return self.finish(output)

    @contextmanager
    def running(self, given: Any) -> Iterator[None]:
        """Enter the view, with the layout of this rank's tile set on the images among the arguments `given`."""
        images = self._images(given)
        layout = TileLayout.of(self.view.grid, self.sizes)
        self.view.notes.forget()
        self.view.point = None
        with self.view, self.view.inside(""):
            try:
                for image in images:
                    set_layout(image, layout)
                yield
            finally:
                forget_widened(images)
                forget_handed_over(images)
                for image in images:
                    set_layout(image, None)

    def _images(self, given: Any) -> list[Tensor]:
        grid = self.view.grid
        if grid.tile.degree == 1:
            return []
        layout = TileLayout.of(grid, self.sizes)
        own = tuple(end - begin for begin, end in layout.owned(grid))
        images = [one for one in tensors_in(given) if one.dim() > 2 and tuple(one.shape[-2:]) == own]
        if not images:
            raise PlanError(
                f"{self._name} was given no tile of {own[0]} × {own[1]} pixels, which is what the rank at row "
                f"{grid.rows.index} and column {grid.columns.index} holds of images of {self.sizes[0]} × "
                f"{self.sizes[1]}; cut them with weft.tile(image, mesh)"
            )
        return images

    def finish(self, output: Any) -> Any:
        """Return the model's output without layouts: of tiles, this rank's own pixels."""
        found = {type(layout_of(tensor)) for tensor in tensors_in(output) if tensor.dim()}
        if len(found) > 1:
            raise PlanError(
                f"{self._name} returns tensors in tiles beside others that are whole; return one kind, or hand tiles "
                f"over before them (tile.until)"
            )
        self.output = {TileLayout: "tile", BatchShare: "batch"}.get(found.pop() if found else type(None), "whole")

        def finish(tensor: Tensor) -> Tensor:
            layout = layout_of(tensor)
            return set_layout(
                own_part(tensor, layout, self.view.grid) if isinstance(layout, TileLayout) else tensor, None
            )

        return map_tensors(finish, output)


_TILED_MODEL = Annotation[TiledModel]("tiled_model")  # on a pipeline stage's model


def run_unit(view: View, name: str, unit: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a unit's forward. Recompute may call that of a block again in backward, outside of the view."""
    try:
        if view.is_on:
            with torch._C.DisableTorchFunction():
                view.notes.record((args, kwargs))
            with view.inside(name):
                return forward(*args, **kwargs)
        view.notes.restore((args, kwargs))
        with view, view.inside(name), _copied_buffers(unit):
            return forward(*args, **kwargs)
    finally:
        forget_widened(tensors_in((args, kwargs)))


@contextmanager
def _copied_buffers(block: nn.Module) -> Iterator[None]:
    """Replace a block's buffers by copies in recompute: forward has already updated its running statistics."""
    held = [(module, dict(module._buffers)) for module in block.modules() if module._buffers]
    try:
        with _disable_current_modes():  # selective recompute watches operations and must not see these
            for module, buffers in held:
                module._buffers.update({key: None if one is None else one.clone() for key, one in buffers.items()})
        yield
    finally:
        for module, buffers in held:
            module._buffers.update(buffers)


def _before_until(view: View, _: nn.Module, args: Any, kwargs: Any) -> Any:
    view.pass_point((args, kwargs))
    return map_tensors(hand_over, (args, kwargs))


def _before_unit(view: View, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return None if view.point is None else map_tensors(view.hand_over_late, (args, kwargs))


def install(model: nn.Module, view: View, sizes: tuple[int, int]) -> TiledModel:
    """Make a model run on tiles of images of these sizes from now on."""
    tiled = prepare(model, view, sizes)
    setattr(model, "forward", tiled)  # noqa: B010 (a method to mypy)
    return tiled


def install_stage(model: nn.Module, view: View, sizes: tuple[int, int]) -> None:
    """Prepare a pipeline stage to run on tiles. The pipeline runs its forward (`tiled_of`)."""
    _TILED_MODEL.set(model, prepare(model, view, sizes))


def prepare(model: nn.Module, view: View, sizes: tuple[int, int]) -> TiledModel:
    """Let a model's units run on tiles, and return the object that runs the model. The model's own forward stays."""
    find = find_units if view.is_staged else find_blocks
    for name, unit in find(model).items():
        setattr(unit, "forward", partial(run_unit, view, name, unit, unit.forward))  # noqa: B010
        if view.tile.until and not isinstance(unit, AbsentModule):
            unit.register_forward_pre_hook(partial(_before_unit, view), with_kwargs=True)
    if view.tile.until:
        _watch_point(model, view)
    return TiledModel(model, view, sizes)


def _watch_point(model: nn.Module, view: View) -> None:
    """Hand tiles over before the module `until`; if another stage has it, tell the view when that point is passed."""
    for name, module in model.named_modules():
        if isinstance(module, AbsentModule) and f"{view.tile.until}.".startswith(f"{name}."):
            module.register_forward_pre_hook(lambda *_: view.pass_point(()))
        elif name == view.tile.until:
            module.register_forward_pre_hook(partial(_before_until, view), with_kwargs=True)


def tiled_of(model: nn.Module) -> TiledModel | None:
    """Return the object that runs a stage on tiles; None if it does not run on tiles."""
    return _TILED_MODEL.get(model)

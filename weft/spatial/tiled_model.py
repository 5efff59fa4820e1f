"""A model under the view of a rank's tile: its own forward, or that of a stage which a pipeline leads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from weft.errors import PlanError
from weft.inspection.absent_module import AbsentModule
from weft.inspection.blocks import find_blocks, find_units
from weft.spatial.hand_over import own_part
from weft.spatial.operands import map_tensors
from weft.spatial.tile_layout import Place, Share, place_of, put, tensors_in
from weft.spatial.view import View, forget_handed, hand_over
from weft.spatial.wide_tiles import forget

_ATTRIBUTE = "_weft_tiled"


class TiledModel:
    """A model's forward on a rank's tile. `output` says how its last result lies: "tile", "whole" or "batch"."""

    def __init__(self, model: nn.Module, view: View, sizes: tuple[int, int]) -> None:
        self.view, self.sizes, self.output = view, sizes, "whole"
        self._name, self._forward = type(model).__name__, model.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.running((args, kwargs)):
            output = self._forward(*args, **kwargs)
        return self.finish(output)

    @contextmanager
    def running(self, given: Any) -> Iterator[None]:
        """While the model's code runs on the images among what it is given."""
        images = self._images(given)
        place = Place.of(self.view.grid, self.sizes)
        self.view.notes.forget()
        self.view.point = None
        with self.view, self.view.inside(""):
            try:
                for image in images:
                    put(image, place)
                yield
            finally:
                forget(images)
                forget_handed(images)
                for image in images:
                    put(image, None)

    def _images(self, given: Any) -> list[Tensor]:
        grid = self.view.grid
        if grid.tile.degree == 1:
            return []
        place = Place.of(grid, self.sizes)
        own = tuple(end - begin for begin, end in place.owned(grid))
        images = [one for one in tensors_in(given) if one.dim() > 2 and tuple(one.shape[-2:]) == own]
        if not images:
            raise PlanError(
                f"{self._name} was given no tile of {own[0]} × {own[1]} pixels, which is what the rank at row "
                f"{grid.rows.index} and column {grid.columns.index} holds of images of {self.sizes[0]} × "
                f"{self.sizes[1]}; cut them with weft.tile(image, mesh)"
            )
        return images

    def finish(self, output: Any) -> Any:
        """What the model gives, out of the view: this rank's own pixels of what is in tiles."""
        found = {type(place_of(tensor)) for tensor in tensors_in(output) if tensor.dim()}
        if len(found) > 1:
            raise PlanError(
                f"{self._name} returns tensors in tiles beside others that are whole; return one kind, or hand tiles "
                f"over before them (tile.until)"
            )
        self.output = {Place: "tile", Share: "batch"}.get(found.pop() if found else type(None), "whole")

        def finish(tensor: Tensor) -> Tensor:
            place = place_of(tensor)
            return put(own_part(tensor, place, self.view.grid) if isinstance(place, Place) else tensor, None)

        return map_tensors(finish, output)


def run_unit(view: View, name: str, unit: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A unit's forward, which (of a block) recompute may call again in backward, outside of the view."""
    try:
        if view.is_on:
            with torch._C.DisableTorchFunction():
                view.notes.take_down((args, kwargs))
            with view.inside(name):
                return forward(*args, **kwargs)
        view.notes.restore((args, kwargs))
        with view, view.inside(name), _copied_buffers(unit):
            return forward(*args, **kwargs)
    finally:
        forget(tensors_in((args, kwargs)))


@contextmanager
def _copied_buffers(block: nn.Module) -> Iterator[None]:
    """Running statistics have been counted in forward: what computes again changes copies of them."""
    held = [(module, dict(module._buffers)) for module in block.modules() if module._buffers]
    try:
        with _disable_current_modes():  # selective recompute watches operations, and knows of none here
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
    """Let a model run on tiles of images of these sizes, from now on."""
    tiled = prepare(model, view, sizes)
    setattr(model, "forward", tiled)  # noqa: B010 (a method to mypy)
    return tiled


def install_stage(model: nn.Module, view: View, sizes: tuple[int, int]) -> None:
    """The same for a stage, whose forward the pipeline leads (`tiled_of`)."""
    model.__dict__[_ATTRIBUTE] = prepare(model, view, sizes)


def prepare(model: nn.Module, view: View, sizes: tuple[int, int]) -> TiledModel:
    """What runs a model on tiles; its own forward stays as it is."""
    find = find_units if view.is_staged else find_blocks
    for name, unit in find(model).items():
        setattr(unit, "forward", partial(run_unit, view, name, unit, unit.forward))  # noqa: B010
        if view.tile.until and not isinstance(unit, AbsentModule):
            unit.register_forward_pre_hook(partial(_before_unit, view), with_kwargs=True)
    if view.tile.until:
        _watch_point(model, view)
    return TiledModel(model, view, sizes)


def _watch_point(model: nn.Module, view: View) -> None:
    """Let tiles be handed over before `until`, or (where another stage has it) the view know when that has been."""
    for name, module in model.named_modules():
        if isinstance(module, AbsentModule) and f"{view.tile.until}.".startswith(f"{name}."):
            module.register_forward_pre_hook(lambda *_: view.pass_point(()))
        elif name == view.tile.until:
            module.register_forward_pre_hook(partial(_before_until, view), with_kwargs=True)


def tiled_of(model: nn.Module) -> TiledModel | None:
    """How a stage runs on tiles; None for one that does not."""
    return model.__dict__.get(_ATTRIBUTE)

"""The view under which a model runs on a rank's tile: its code sees whole images, and each function works on tiles.

A TorchFunctionMode sees every call of torch that the model's code makes, inside modules or not. So the model is not
edited, no module is replaced, and parameters stay where they are. A function without a rule is refused by name. At a
function that needs whole images, tiles are handed over (unless the plan says where).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    handle_torch_function,
    has_torch_function,
)

from weft.errors import PlanError
from weft.inspection.annotations import Annotation
from weft.inspection.nested_tensors import map_tensors, tensors_in
from weft.models.vision.pools import avg_pool2d
from weft.plan import Tile
from weft.spatial import norms
from weft.spatial.arguments import DRAWS, META, is_in_place, normalise, plain_name
from weft.spatial.halo import forget_widened, is_outdated, note_change, note_copy, version_of
from weft.spatial.hand_over import from_share, own_samples, to_share, to_whole
from weft.spatial.operands import random_operation
from weft.spatial.rules import RULES
from weft.spatial.shapes import refuse_along_samples, shape_of
from weft.spatial.tile_layout import BatchShare, Grid, LayoutNotes, TileLayout, layout_of, set_layout
from weft.spatial.windows import NO_EXTRA, Extra, NeedsWhole, Unsupported

_HANDED_OVER = Annotation[tuple[Tensor, int]]("handed_over")  # on a tile: what it was handed over as, at which version
OUTDATED = "takes pixels of which another copy (a slice, an image or what it was handed over as) was changed in place"
Position = tuple[str, int]  # a unit ("" for the root), and the number of a layer in it


def hand_over(tensor: Tensor) -> Tensor:
    """Convert a tile to whole images, or to a share of the batch, as the view says; without a view return it unchanged.

    It is dispatched like torch's own functions, so that other modes see it.
    """
    if has_torch_function((tensor,)):
        return handle_torch_function(hand_over, (tensor,), tensor)  # type: ignore[no-any-return]
    return tensor


def handed_over(tensor: Tensor) -> Tensor:
    """Return what a tile was handed over as, kept for as long as the tile lives; the tensor itself if it was not, or if
    it was changed in place since then.
    """
    found = _HANDED_OVER.get(tensor)
    return tensor if found is None or found[1] != version_of(tensor) else found[0]


def forget_handed_over(tensors: Iterable[Tensor]) -> None:
    """Drop what tensors that outlive the forward were handed over as."""
    for tensor in tensors:
        _HANDED_OVER.pop(tensor)


class View(TorchFunctionMode):
    """The mode under which a model's code runs on one rank's tiles. `path` names the running module, if it is recorded.

    `extras` has the extra pixels that a rank computes in some layers, by the layer's unit and its number there. They
    save exchanges and change no result: missing pixels are fetched anyway.

    In a pipeline stage (`is_staged`) the root's code runs with parts left out. To be the same in every cut of the
    model, its layers compute only their own pixels and share no fetched ones.

    After the module `tile.until`, units take images whole if they have at most as many pixels as the largest that was
    handed over there: `point`, which is None before. A stage that does not see the module gets it as `known_point`.
    """

    def __init__(
        self,
        grid: Grid,
        tile: Tile,
        extras: Mapping[Position, Extra] | None = None,
        is_staged: bool = False,
        known_point: int | None = None,
    ) -> None:
        super().__init__()
        self.grid, self.tile, self.extras, self.is_staged = grid, tile, extras or {}, is_staged
        self.known_point = known_point
        self.point: int | None = None
        self.notes = LayoutNotes()
        self.path: list[str] = []
        self.position: Position = ("", 0)

    @property
    def is_on(self) -> bool:
        """Whether the model's code runs under this view now, in this thread."""
        return self in _get_current_function_mode_stack()

    def extra(self) -> Extra:
        """Return the extra pixels of the next layer, and count the layer."""
        unit, number = self.position
        self.position = unit, number + 1
        return NO_EXTRA if self._is_between else self.extras.get((unit, number), NO_EXTRA)

    @property
    def _is_between(self) -> bool:
        """Whether the code between the units of a stage is running."""
        return self.is_staged and not self.position[0]

    @contextmanager
    def inside(self, unit: str) -> Iterator[None]:
        """Set the position while a unit runs."""
        before, self.position = self.position, (unit, 0)
        try:
            yield
        finally:
            self.position = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is hand_over:
            return self.hand_over(args[0])
        if func is F.avg_pool2d:  # of whole tensors; on tiles its rule pools padded ones
            func = avg_pool2d
            args, kwargs = (args, kwargs) if args else normalise(func, "avg_pool2d", args, kwargs)
        if self.point is not None and not self.position[0]:  # code around units takes what they were given
            args, kwargs = map_tensors(handed_over, (args, kwargs))
        tensors = tensors_in((args, kwargs))
        layouts = [layout for tensor in tensors if (layout := layout_of(tensor)) is not None]
        name = str(getattr(func, "__name__", type(func).__name__))
        if not layouts:
            self._note_changes(name, tensors, kwargs)
            if self.grid.batch is not None and func in (F.batch_norm, torch.batch_norm):
                args, kwargs = normalise(func, "batch_norm", args, kwargs)
                return _batch_norm(self.grid, *args, **kwargs)
            return func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload):  # as fake tensors ask for their device
            if func.namespace == "prim":
                return func(*args, **kwargs)
            name = func._schema.name.rpartition("::")[2] if func.namespace == "aten" else func._schema.name
        if name in ("__get__", "__set__"):
            name = str(func.__self__.__name__)
            if name != "shape" and not isinstance(result := func(*args, **kwargs), Tensor):
                return result
        if plain_name(name) in META:
            return func(*args, **kwargs)
        self._note_changes(name, tensors, kwargs)
        try:
            if not any(isinstance(layout, TileLayout) for layout in layouts):
                return self._on_shares(func, name, args, kwargs)
            if any(isinstance(layout, BatchShare) for layout in layouts):
                target = next(layout for layout in layouts if isinstance(layout, TileLayout))
                args, kwargs = map_tensors(partial(self._to_tiles, target), (args, kwargs))
            rule = RULES.get(plain_name(name))
            if rule is None:
                raise Unsupported("has no rule for tiles")
            try:
                return rule(self, func, name, *normalise(func, name, args, kwargs))
            finally:
                if self._is_between:
                    forget_widened(tensors_in((args, kwargs)))
        except Unsupported as reason:
            raise self._refusal(name, str(reason), "") from None
        except NeedsWhole as reason:
            if self.tile.until:
                raise self._refusal(name, f"cannot go on in tiles ({reason})", " earlier") from None
            args, kwargs = map_tensors(self.hand_over, (args, kwargs))
            return self.__torch_function__(func, types, args, kwargs)

    def _note_changes(self, name: str, tensors: list[Tensor], kwargs: Mapping[str, Any]) -> None:
        """Note which tensor an operation changes in place. Refuse outdated ones."""
        if any(map(is_outdated, tensors)):
            raise self._refusal(name, OUTDATED, "")
        if tensors and is_in_place(name, kwargs):
            note_change(tensors[0])
            forget_widened(tensors[:1])
            forget_handed_over(tensors[:1])

    def pass_point(self, given: Any) -> None:
        """Called when the module `tile.until` begins: set `point` from its arguments, which are then handed over."""
        layouts = [layout for tensor in tensors_in(given) if isinstance(layout := layout_of(tensor), TileLayout)]
        self.point = (
            max((math.prod(layout.sizes) for layout in layouts), default=0)
            if self.known_point is None
            else self.known_point
        )

    def hand_over_late(self, tensor: Tensor) -> Tensor:
        """Return a unit's input after `tile.until`: whole if handed over before, or of at most `point` pixels."""
        layout = layout_of(tensor)
        is_small = isinstance(layout, TileLayout) and self.point is not None and math.prod(layout.sizes) <= self.point
        return hand_over(tensor) if is_small else handed_over(tensor)

    def hand_over(self, tensor: Tensor) -> Tensor:
        """Hand a tile over once for all its users.

        In stages, which know only their own units, and inside of units, where recompute repeats it, each use hands
        over.
        """
        if self.is_staged or self.position[0] or not isinstance(layout_of(tensor), TileLayout):
            return self._hand_over(tensor)
        whole = handed_over(tensor)
        if whole is tensor:
            whole = self._hand_over(tensor)
            _HANDED_OVER.set(tensor, (whole, version_of(tensor)))
        return whole

    def _hand_over(self, tensor: Tensor) -> Tensor:
        """Convert a tile to whole images or a share of the batch.

        A whole tensor becomes a share if the plan has shares.
        """
        layout, is_batch = layout_of(tensor), self.tile.hand_over == "batch"
        if isinstance(layout, TileLayout):
            found, own = (
                to_share(self.grid, tensor, layout) if is_batch else (to_whole(self.grid, tensor, layout), None)
            )
            note_copy(found, tensor)
            return set_layout(found, own)
        is_whole = layout is None and self.tile.until and tensor.dim() > 1
        return set_layout(*own_samples(self.grid, tensor)) if is_batch and is_whole else tensor

    def _to_tiles(self, target: TileLayout, tensor: Tensor) -> Tensor:
        layout = layout_of(tensor)
        if not isinstance(layout, BatchShare):
            return tensor
        sizes = target.sizes
        if tensor.dim() < 4 or tuple(tensor.shape[dim] for dim in target.dims) != sizes:
            raise Unsupported(f"takes images of {sizes[0]} × {sizes[1]} pixels together with a share of the batch")
        own = TileLayout.of(self.grid, sizes, target.dims)
        return set_layout(from_share(self.grid, tensor, layout, own), own)

    def _on_shares(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run a function on a share of the batch: operations on each sample run unchanged."""
        plain = plain_name(name)
        share = next(layout for t in tensors_in((args, kwargs)) if isinstance(layout := layout_of(t), BatchShare))
        call = normalise(func, name, args, kwargs)
        if plain in ("shape", "size", "numel", "nelement", "len"):
            return shape_of(self, func, name, *call)
        if plain == "batch_norm":
            return set_layout(_batch_norm(self.grid, *call[0], **call[1]), share)
        local = share.num_samples // self.grid.tile.degree
        refuse_along_samples(plain, call, local)
        if plain in ("view", "reshape", "expand") and len(call[0]) > 1:
            first, *others = call[0][1]
            args, kwargs = (call[0][0], [local if first == share.num_samples else first, *others]), call[1]
        result = random_operation(self, func, name, *call) if plain in DRAWS else func(*args, **kwargs)
        for tensor in tensors_in(result):
            if tensor.dim() and tensor.shape[0] == local:
                set_layout(tensor, share)
            elif not tensor.dim():
                raise Unsupported("takes samples together")
        return result

    def _refusal(self, name: str, reason: str, where: str) -> PlanError:
        rows, columns = self.grid.rows.degree, self.grid.columns.degree
        at = f" in '{self.path[-1]}'" if self.path and self.path[-1] else ""
        return PlanError(
            f"tile = {rows} × {columns}: the operation '{plain_name(name)}'{at} {reason}; hand tiles over{where} "
            f"before it (tile.until = the name of a module), or use rows = columns = 1"
        )


def _batch_norm(grid: Grid, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    layout = layout_of(input)
    assert not isinstance(layout, TileLayout)
    return norms.batch_norm(grid, input, layout, *args, **kwargs)

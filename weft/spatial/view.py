"""The view under which a model runs on a rank's tile: its code sees whole images, and each function works on tiles.

A TorchFunctionMode sees every call of torch that the model's code makes, be it by a module or by itself. So the model
is not edited, no module is swapped, and parameters stay where they are. What has no rule is refused by name; what
needs whole images is where tiles are handed over (unless the plan says where).
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
from weft.models.vision.pools import avg_pool2d
from weft.plan import Tile
from weft.spatial import norms
from weft.spatial.arguments import normalise
from weft.spatial.hand_over import from_share, own_samples, to_share, to_whole
from weft.spatial.names import DRAWS, META, plain_name
from weft.spatial.operands import draws, map_tensors
from weft.spatial.rules import RULES
from weft.spatial.shapes import refuse_along_samples, shape_of
from weft.spatial.tile_layout import Grid, Notes, Place, Share, place_of, put, tensors_in
from weft.spatial.wide_tiles import forget
from weft.spatial.windows import NO_EXTRA, Extra, NeedsWhole, Unsupported

_HANDED = "_weft_handed"
Position = tuple[str, int]  # a unit ("" for the root), and the number of a layer in it


def hand_over(tensor: Tensor) -> Tensor:
    """A tile to whole images, or to a share of the batch; the view says which, and without one nothing happens.

    It is a function like torch's own, so that whoever watches those sees it.
    """
    if has_torch_function((tensor,)):
        return handle_torch_function(hand_over, (tensor,), tensor)  # type: ignore[no-any-return]
    return tensor


def handed(tensor: Tensor) -> Tensor:
    """What a tile was handed over as, for as long as the tile lives; itself, if it was not."""
    found: Tensor = tensor.__dict__.get(_HANDED, tensor)
    return found


def forget_handed(tensors: Iterable[Tensor]) -> None:
    """Let go of what tensors that outlive the forward were handed over as."""
    for tensor in tensors:
        tensor.__dict__.pop(_HANDED, None)


class View(TorchFunctionMode):
    """How one rank sees its tiles. `path` names the module that runs, where someone keeps it.

    `extras` says how many pixels beside its own a rank computes in some layers, which are known by the unit that they
    are in and their number there. It saves exchanges and changes no result: what is missing is fetched anyway.

    Of a stage of a pipeline (`is_staged`) the root's code runs with parts left out. What it does then is the same in
    every cut of the model: its layers compute no more than their own, and fetch for themselves alone.

    Behind the module `tile.until`, units take images whole that have at most as many pixels as the largest which was
    handed over there: `point`, None before it. A stage that does not see the module is `told` it.
    """

    def __init__(
        self,
        grid: Grid,
        tile: Tile,
        extras: Mapping[Position, Extra] | None = None,
        is_staged: bool = False,
        told: int | None = None,
    ) -> None:
        super().__init__()
        self.grid, self.tile, self.extras, self.is_staged = grid, tile, extras or {}, is_staged
        self.told = told
        self.point: int | None = None
        self.notes = Notes()
        self.path: list[str] = []
        self.position: Position = ("", 0)

    @property
    def is_on(self) -> bool:
        """Whether the model's code runs under it now, in this thread."""
        return self in _get_current_function_mode_stack()

    def extra(self) -> Extra:
        """What the next layer is to compute beside its own."""
        unit, number = self.position
        self.position = unit, number + 1
        return NO_EXTRA if self._is_between else self.extras.get((unit, number), NO_EXTRA)

    @property
    def _is_between(self) -> bool:
        """Whether the code between the units of a stage runs."""
        return self.is_staged and not self.position[0]

    @contextmanager
    def inside(self, unit: str) -> Iterator[None]:
        """While a unit runs."""
        before, self.position = self.position, (unit, 0)
        try:
            yield
        finally:
            self.position = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is hand_over:
            return self.hand_over(args[0])
        if func is F.avg_pool2d:  # of what is whole; with tiles its rule pools what is padded
            func = avg_pool2d
            args, kwargs = (args, kwargs) if args else normalise(func, "avg_pool2d", args, kwargs)
        if self.point is not None and not self.position[0]:  # the code around units takes what they were given
            args, kwargs = map_tensors(handed, (args, kwargs))
        places = [place for tensor in tensors_in((args, kwargs)) if (place := place_of(tensor)) is not None]
        if not places:
            if self.grid.batch is not None and func in (F.batch_norm, torch.batch_norm):
                args, kwargs = normalise(func, "batch_norm", args, kwargs)
                return _batch_norm(self.grid, *args, **kwargs)
            return func(*args, **kwargs)
        name = str(getattr(func, "__name__", type(func).__name__))
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
        try:
            if not any(isinstance(place, Place) for place in places):
                return self._on_shares(func, name, args, kwargs)
            if any(isinstance(place, Share) for place in places):
                target = next(place for place in places if isinstance(place, Place))
                args, kwargs = map_tensors(partial(self._to_tiles, target), (args, kwargs))
            rule = RULES.get(plain_name(name))
            if rule is None:
                raise Unsupported("has no rule for tiles")
            try:
                return rule(self, func, name, *normalise(func, name, args, kwargs))
            finally:
                if self._is_between:
                    forget(tensors_in((args, kwargs)))
        except Unsupported as reason:
            raise self._refusal(name, str(reason), "") from None
        except NeedsWhole as reason:
            if self.tile.until:
                raise self._refusal(name, f"cannot go on in tiles ({reason})", " earlier") from None
            args, kwargs = map_tensors(self.hand_over, (args, kwargs))
            return self.__torch_function__(func, types, args, kwargs)

    def pass_point(self, given: Any) -> None:
        """The module before which tiles are handed over begins; what it is given is about to be."""
        places = [place for tensor in tensors_in(given) if isinstance(place := place_of(tensor), Place)]
        self.point = max((math.prod(place.sizes) for place in places), default=0) if self.told is None else self.told

    def hand_over_late(self, tensor: Tensor) -> Tensor:
        """For a unit behind the point: what earlier ones were given whole, and other images of no more pixels."""
        place = place_of(tensor)
        is_small = isinstance(place, Place) and self.point is not None and math.prod(place.sizes) <= self.point
        return hand_over(tensor) if is_small else handed(tensor)

    def hand_over(self, tensor: Tensor) -> Tensor:
        """A tile once for all that take it. But for stages, of which each knows its own units alone, and inside of
        units, where recompute does it again.
        """
        if self.is_staged or self.position[0] or not isinstance(place_of(tensor), Place):
            return self._hand_over(tensor)
        if _HANDED not in tensor.__dict__:
            tensor.__dict__[_HANDED] = self._hand_over(tensor)
        return handed(tensor)

    def _hand_over(self, tensor: Tensor) -> Tensor:
        """A tile to whole images, or to a share of the batch; what is whole becomes a share where the plan has both."""
        place = place_of(tensor)
        if self.tile.hand_over == "batch":
            if isinstance(place, Place):
                return put(*to_share(self.grid, tensor, place))
            is_whole = place is None and self.tile.until and tensor.dim() > 1
            return put(*own_samples(self.grid, tensor)) if is_whole else tensor
        return put(to_whole(self.grid, tensor, place), None) if isinstance(place, Place) else tensor

    def _to_tiles(self, target: Place, tensor: Tensor) -> Tensor:
        place = place_of(tensor)
        if not isinstance(place, Share):
            return tensor
        sizes = target.sizes
        if tensor.dim() < 4 or tuple(tensor.shape[dim] for dim in target.dims) != sizes:
            raise Unsupported(f"takes images of {sizes[0]} × {sizes[1]} pixels together with a share of the batch")
        own = Place.of(self.grid, sizes, target.dims)
        return put(from_share(self.grid, tensor, place, own), own)

    def _on_shares(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Whole images of a rank's samples: what is done to each sample is done as it stands."""
        plain = plain_name(name)
        share = next(place for t in tensors_in((args, kwargs)) if isinstance(place := place_of(t), Share))
        call = normalise(func, name, args, kwargs)
        if plain in ("shape", "size", "numel", "nelement", "len"):
            return shape_of(self, func, name, *call)
        if plain == "batch_norm":
            return put(_batch_norm(self.grid, *call[0], **call[1]), share)
        local = share.num_samples // self.grid.tile.degree
        refuse_along_samples(plain, call, local)
        if plain in ("view", "reshape", "expand") and len(call[0]) > 1:
            first, *others = call[0][1]
            args, kwargs = (call[0][0], [local if first == share.num_samples else first, *others]), call[1]
        result = draws(self, func, name, *call) if plain in DRAWS else func(*args, **kwargs)
        for tensor in tensors_in(result):
            if tensor.dim() and tensor.shape[0] == local:
                put(tensor, share)
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
    place = place_of(input)
    assert not isinstance(place, Place)
    return norms.batch_norm(grid, input, place, *args, **kwargs)

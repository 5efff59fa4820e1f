"""The exchange of borders: one autograd operation that brings a rank the pixels that an operation needs.

    forward    columns: a rank sends strips of its own pixels to ranks that need and do not hold them;
               rows: the same for the widened tile, which brings the corners
    backward   the transpose: gradients of received pixels go back, rows first, and the sender adds them

Pixels outside the image get `fill`: 0 for convolutions, -inf for maxima. There is one message for each peer that needs
something, along each axis: 2 × columns and 2 × rows for an inner tile with a kernel's halo. Gathering whole images is
the same operation: every rank needs everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.comm import Axis, Pending, exchange
from weft.inspection.annotations import Annotation
from weft.inspection.first_order import Transposable
from weft.inspection.memory_traffic import storage_key
from weft.inspection.parameter_cut import Interval
from weft.spatial.ownership import Line, Transfers, inside, length, meet, transfers
from weft.spatial.tile_layout import Grid, TileLayout, layout_of, set_layout

Strips = list[Tensor]


@dataclass(frozen=True)
class HaloDim:
    """One dim of a fetch, as this rank sees it. `communicates`: whether any rank of the axis has to send something."""

    axis: Axis
    dim: int
    size: int
    held: Interval
    need: Interval
    transfers: Transfers
    communicates: bool

    @staticmethod
    def of(line: Line, needs: Sequence[Interval], axis: Axis, dim: int) -> HaloDim:
        found = [transfers(line, needs, index) for index in range(line.degree)]
        communicates = any(one.receives for one in found)
        return HaloDim(axis, dim, line.size, line.held[axis.index], needs[axis.index], found[axis.index], communicates)

    @property
    def is_view(self) -> bool:
        """Whether this rank holds all pixels that it needs."""
        return inside(self.need, self.held)

    @property
    def outside(self) -> list[Interval]:
        """The needed pixels before and after the image."""
        found = (self.need[0], min(0, self.need[1])), (max(self.size, self.need[0]), self.need[1])
        return [one for one in found if length(one)]

    def of_need(self, tensor: Tensor, pixels: Interval) -> Tensor:
        """Return these pixels of a tensor that holds the needed pixels."""
        return tensor.narrow(self.dim, pixels[0] - self.need[0], length(pixels))

    def of_held(self, tensor: Tensor, pixels: Interval) -> Tensor:
        """Return these pixels of a tensor that holds the held pixels."""
        return tensor if pixels == self.held else tensor.narrow(self.dim, pixels[0] - self.held[0], length(pixels))

    def exchange_strips(self, value: Tensor, meanwhile: Callable[[], None] | None = None) -> Strips:
        """Send the pixels that others need of `value`, which holds the held pixels. Return those received, in order.

        `meanwhile` is called while the messages travel.
        """
        received = [(peer, value.new_empty(self._shape(value, pixels))) for peer, pixels in self.transfers.receives]
        sent = [(peer, self.of_held(value, pixels).contiguous()) for peer, pixels in self.transfers.sends]
        pending = exchange(received, sent, self.axis)
        if meanwhile is not None:
            meanwhile()
        pending.wait()
        return [tensor for _, tensor in received]

    def exchange_gradients(self, gradient: Tensor) -> tuple[Pending, list[tuple[int, Tensor]], Any]:
        """Start to send the gradients of received pixels and to receive those of sent pixels.

        Returns the pending exchange, the receive buffers, and the sent tensors, which must be kept alive.
        """
        received = [(peer, gradient.new_empty(self._shape(gradient, pixels))) for peer, pixels in self.transfers.sends]
        sent = [(peer, self.of_need(gradient, pixels).contiguous()) for peer, pixels in self.transfers.receives]
        return exchange(received, sent, self.axis), received, sent

    def assemble(self, out: Tensor, value: Tensor | None, strips: Strips, fill: float) -> Tensor:
        """Write own pixels (unless `value` is None), received ones and the fill into `out`, which has the needed
        pixels.
        """
        if value is not None:
            common = meet(self.held, self.need)
            self.of_need(out, common).copy_(self.of_held(value, common))
        for (_, pixels), strip in zip(self.transfers.receives, strips, strict=True):
            self.of_need(out, pixels).copy_(strip)
        for pixels in self.outside:
            self.of_need(out, pixels).fill_(fill)
        return out

    def add_up(self, gradient: Tensor, received: list[tuple[int, Tensor]]) -> Tensor:
        """Return the gradient of the held pixels from that of the needed pixels and the received gradients."""
        common = meet(self.held, self.need)
        if common == self.held and not received:
            return self.of_need(gradient, common)
        out = gradient.new_zeros(self._shape(gradient, self.held))
        self.of_held(out, common).copy_(self.of_need(gradient, common))
        for (_, pixels), (_, more) in zip(self.transfers.sends, received, strict=True):
            self.of_held(out, pixels).add_(more)
        return out

    def _shape(self, value: Tensor, pixels: Interval) -> list[int]:
        return _with_size(value.shape, self.dim, length(pixels))


@dataclass(frozen=True)
class Halo:
    """The pixels that a tile has to fetch for an operation, along rows and columns."""

    grid: Grid
    rows: HaloDim
    columns: HaloDim
    fill: float = 0.0

    @staticmethod
    def of(
        grid: Grid, layout: TileLayout, rows: Sequence[Interval], columns: Sequence[Interval], fill: float = 0.0
    ) -> Halo:
        return Halo(
            grid,
            HaloDim.of(layout.rows, rows, grid.rows, layout.dims[0]),
            HaloDim.of(layout.columns, columns, grid.columns, layout.dims[1]),
            fill,
        )

    @property
    def communicates(self) -> bool:
        """Whether any rank of this line of tiles has to send something."""
        return self.rows.communicates or self.columns.communicates

    @property
    def is_view(self) -> bool:
        """Whether this rank holds all that it needs and no rank sends anything."""
        return not self.communicates and self.rows.is_view and self.columns.is_view

    def gather(
        self,
        value: Tensor,
        strips: tuple[Strips, Strips] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Strips, Strips]:
        """Return the needed pixels, and the strips received along columns and along rows.

        With `strips`, nothing is sent again. `meanwhile` is called while strips travel, those of columns if there are
        any.
        """
        rows, columns = self.rows, self.columns
        shape = _with_size(value.shape, columns.dim, length(columns.need))
        out = None if rows.is_view else _empty_like(value, _with_size(shape, rows.dim, length(rows.need)))
        is_in_place = False
        of_columns = (
            strips[0] if strips else columns.exchange_strips(value, meanwhile if columns.communicates else None)
        )
        if columns.is_view:
            wide = columns.of_held(value, columns.need)
        elif out is not None and inside(rows.held, rows.need):
            wide, is_in_place = rows.of_need(out, rows.held), True
        else:
            wide = _empty_like(value, shape)
        if not columns.is_view:
            columns.assemble(wide, value, of_columns, self.fill)
        of_rows = strips[1] if strips else rows.exchange_strips(wide, None if columns.communicates else meanwhile)
        if out is None:
            return rows.of_held(wide, rows.need), of_columns, of_rows
        return rows.assemble(out, None if is_in_place else wide, of_rows, self.fill), of_columns, of_rows

    def note_backward(self, of_columns: Strips, of_rows: Strips) -> None:
        """Record for a dry run the messages that `HaloBackward` will send."""
        if self.grid.note is not None:
            sent = [(self.rows.axis.name, strip) for strip in of_rows]
            sent += [(self.columns.axis.name, strip) for strip in of_columns]
            self.grid.note([(name, "send", strip.numel() * strip.element_size()) for name, strip in sent])

    def pad(self, value: Tensor) -> Tensor:
        """Return the needed pixels if no rank sends anything: cut to size, and filled outside of the image."""
        for side in (self.columns, self.rows):
            common = meet(side.held, side.need)
            if common != side.held:
                value = side.of_held(value, common)
            before, after = common[0] - side.need[0], side.need[1] - common[1]
            if before or after:
                value = F.pad(value, [0, 0] * (-1 - side.dim) + [before, after], value=self.fill)
        return value


class HaloBackward:
    """The transpose of a fetch in progress: from the gradient of the needed pixels to that of the held ones."""

    def __init__(self, halo: Halo, gradient: Tensor) -> None:
        self._halo = halo
        self._gradient = gradient if halo.rows.communicates else halo.rows.add_up(gradient, [])
        self._exchange = (halo.rows if halo.rows.communicates else halo.columns).exchange_gradients(self._gradient)

    def finish(self) -> Tensor:
        """Wait for the first dim, add its gradients, and do the second dim."""
        rows, columns, gradient = self._halo.rows, self._halo.columns, self._gradient
        pending, received, _ = self._exchange
        pending.wait()
        if rows.communicates:
            gradient = rows.add_up(gradient, received)
            pending, received, _ = columns.exchange_gradients(gradient)
            pending.wait()
        return columns.add_up(gradient, received)


def has_storage_of(tensor: Tensor, other: Tensor) -> bool:
    """Return whether a tensor lies in the memory of another, as a view of it does."""
    return storage_key(tensor) == storage_key(other)


def _gathered(value: Tensor, halo: Halo) -> Tensor:
    out, of_columns, of_rows = halo.gather(value)
    if value.requires_grad:
        halo.note_backward(of_columns, of_rows)
    # Not a view: later operations may change it in place, which autograd allows of no view that was made here.
    return out.clone() if out._is_view() or has_storage_of(out, value) else out


_FETCH = Transposable(_gathered, lambda gradient, halo: HaloBackward(halo, gradient).finish(), "tile")


def fetch(value: Tensor, halo: Halo) -> Tensor:
    """Return the pixels of a tile that are needed, from this rank and others."""
    return _FETCH.apply(value, halo) if halo.communicates else halo.pad(value)


def _with_size(shape: Sequence[int], dim: int, size: int) -> list[int]:
    found = list(shape)
    found[dim] = size
    return found


def _empty_like(value: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an uninitialised tensor in the memory format (channels last) of `value`."""
    is_last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    if not is_last or value.is_contiguous():
        return value.new_empty(shape)
    return value.new_empty([shape[0], *shape[2:], shape[1]]).permute(0, 3, 1, 2)


# --- tiles with extra pixels, which are fetched once for several layers: later users of the tile find them too. So a
# shortcut around the layers of a group holds as many pixels as they do, and their sum needs no exchange.


# On a tile: its widened version, and the version counter of the tile at the time.
_WIDENED = Annotation[tuple[Tensor, int]]("widened")


def version_of(tensor: Tensor) -> int:
    """Return a number that every change in place raises. Tensors of torch.inference_mode() count none."""
    with torch._C.DisableTorchFunction():
        return 0 if tensor.is_inference() else tensor._version


def widen(
    grid: Grid, value: Tensor, layout: TileLayout, rows: Sequence[Interval], columns: Sequence[Interval]
) -> tuple[Tensor, TileLayout]:
    """Return a tile that also has the pixels that each rank needs, and its layout; unchanged if no rank needs any."""
    found = TileLayout(_hull(layout.rows, rows), _hull(layout.columns, columns), layout.dims)
    if found == layout:
        return value, layout
    wide = set_layout(fetch(value, Halo.of(grid, layout, found.rows.held, found.columns.held)), found)
    _WIDENED.set(value, (wide, version_of(value)))
    return wide, found


def widest(tensor: Tensor) -> Tensor:
    """Return the widened version of a tile if there is one and the tile has not changed since."""
    while True:
        wide, version = _WIDENED.get(tensor) or (tensor, -1)
        if version != version_of(tensor) or layout_of(tensor) is None:
            return tensor
        tensor = wide


def forget_widened(tensors: Iterable[Tensor]) -> None:
    """Drop the widened versions of tiles after the block that they were given to: recompute fetches them again."""
    for tensor in tensors:
        _WIDENED.pop(tensor)


def _hull(line: Line, needs: Sequence[Interval]) -> Line:
    found = []
    for held, need in zip(line.held, needs, strict=True):
        begin, end = meet(need, (0, line.size))
        found.append((min(held[0], begin), max(held[1], end)) if end > begin else held)
    return Line(line.size, tuple(found))


# --- copies of pixels where torch has views: of slices, and of what is handed over. A change of one in place does not
# reach the others, whose later use is refused.


@dataclass(eq=False)
class _Copies:
    """An image and copies of its pixels. `changed` stands for the one of them that was changed in place last."""

    changed: object = None


_COPIES = Annotation[tuple[_Copies, object]]("copies")  # and what stands for the tensor among them


def note_copy(copied: Tensor, image: Tensor) -> None:
    """Note that a tensor has the pixels of an image where torch has a view of them. Of a view nothing is noted."""
    if has_storage_of(copied, image):
        return
    copies, own = _COPIES.get(_root(image)) or (_Copies(), object())
    if copies.changed is not None:  # what was copied before the change stays outdated
        copies = _Copies()
    _COPIES.set(_root(image), (copies, own))
    _COPIES.set(_root(copied), (copies, object()))


def note_change(tensor: Tensor) -> None:
    """Note that a tensor is changed in place, which outdates all other copies of its pixels."""
    if found := _COPIES.get(_root(tensor)):
        found[0].changed = found[1]


def is_outdated(tensor: Tensor) -> bool:
    """Return whether another copy of a tensor's pixels was changed in place, where torch would change them here too."""
    found = _COPIES.get(_root(tensor))
    return found is not None and found[0].changed not in (None, found[1])


def _root(tensor: Tensor) -> Tensor:
    """Return the tensor that a view is of. Tensors of torch.inference_mode() do not know it."""
    return tensor if tensor._base is None else tensor._base

"""The exchange of borders: one autograd operation that gives a rank the pixels that an operation needs.

    forward    columns: strips of what a rank owns go to those who need them and do not hold them;
               rows: the same of the widened tile, so that corners come along
    backward   the transpose: what was received goes back as gradients, rows first, and is added by who sent it

Pixels outside the image get `fill`: 0 for convolutions, -inf for maxima. One message for each peer that needs
something, along each axis: 2 × columns and 2 × rows for an inner tile with a kernel's halo. Gathering whole images is
the same operation: every rank needs everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from weft.comm import Axis, Pending, exchange
from weft.inspection.parameter_cut import Interval
from weft.spatial.ownership import Line, Moves, inside, length, meet, moves
from weft.spatial.tile_layout import Grid, Place

Strips = list[Tensor]


@dataclass(frozen=True)
class Side:
    """One dim of a fetch, as this rank sees it. `talks` is whether any rank of the axis has to say something."""

    axis: Axis
    dim: int
    size: int
    held: Interval
    need: Interval
    moves: Moves
    talks: bool

    @staticmethod
    def of(line: Line, needs: Sequence[Interval], axis: Axis, dim: int) -> Side:
        found = [moves(line, needs, index) for index in range(line.degree)]
        talks = any(one.receives for one in found)
        return Side(axis, dim, line.size, line.held[axis.index], needs[axis.index], found[axis.index], talks)

    @property
    def is_view(self) -> bool:
        """Whether this rank holds all it needs."""
        return inside(self.need, self.held)

    @property
    def outside(self) -> list[Interval]:
        """The needed pixels before and behind the image."""
        found = (self.need[0], min(0, self.need[1])), (max(self.size, self.need[0]), self.need[1])
        return [one for one in found if length(one)]

    def of_need(self, tensor: Tensor, pixels: Interval) -> Tensor:
        """These pixels of a tensor that has the needed ones."""
        return tensor.narrow(self.dim, pixels[0] - self.need[0], length(pixels))

    def of_held(self, tensor: Tensor, pixels: Interval) -> Tensor:
        """These pixels of a tensor that has the held ones."""
        return tensor.narrow(self.dim, pixels[0] - self.held[0], length(pixels))

    def trade(self, value: Tensor, meanwhile: Callable[[], None] | None = None) -> Strips:
        """Send what others need of a tensor of the held pixels; what was received, in the order of the moves.

        `meanwhile` is done while it travels.
        """
        received = [(peer, value.new_empty(self._shape(value, pixels))) for peer, pixels in self.moves.receives]
        sent = [(peer, self.of_held(value, pixels).contiguous()) for peer, pixels in self.moves.sends]
        pending = exchange(received, sent, self.axis)
        if meanwhile is not None:
            meanwhile()
        pending.wait()
        return [tensor for _, tensor in received]

    def trade_back(self, gradient: Tensor) -> tuple[Pending, list[tuple[int, Tensor]], Any]:
        """Send the gradients of what was received; those of what was sent are on their way. The last is kept alive."""
        received = [(peer, gradient.new_empty(self._shape(gradient, pixels))) for peer, pixels in self.moves.sends]
        sent = [(peer, self.of_need(gradient, pixels).contiguous()) for peer, pixels in self.moves.receives]
        return exchange(received, sent, self.axis), received, sent

    def assemble(self, out: Tensor, value: Tensor | None, strips: Strips, fill: float) -> Tensor:
        """Own pixels (unless they are there), received ones and the fill, in a tensor of the needed pixels."""
        if value is not None:
            common = meet(self.held, self.need)
            self.of_need(out, common).copy_(self.of_held(value, common))
        for (_, pixels), strip in zip(self.moves.receives, strips, strict=True):
            self.of_need(out, pixels).copy_(strip)
        for pixels in self.outside:
            self.of_need(out, pixels).fill_(fill)
        return out

    def add_up(self, gradient: Tensor, received: list[tuple[int, Tensor]]) -> Tensor:
        """Gradients of the needed pixels, and received ones, to those of the held pixels."""
        common = meet(self.held, self.need)
        if common == self.held and not received:
            return self.of_need(gradient, common)
        out = gradient.new_zeros(self._shape(gradient, self.held))
        self.of_held(out, common).copy_(self.of_need(gradient, common))
        for (_, pixels), (_, more) in zip(self.moves.sends, received, strict=True):
            self.of_held(out, pixels).add_(more)
        return out

    def _shape(self, value: Tensor, pixels: Interval) -> list[int]:
        return _with_size(value.shape, self.dim, length(pixels))


@dataclass(frozen=True)
class Halo:
    """What a tile at some place has to fetch for an operation, and how."""

    grid: Grid
    rows: Side
    columns: Side
    fill: float = 0.0

    @staticmethod
    def of(grid: Grid, place: Place, rows: Sequence[Interval], columns: Sequence[Interval], fill: float = 0.0) -> Halo:
        return Halo(
            grid,
            Side.of(place.rows, rows, grid.rows, place.dims[0]),
            Side.of(place.columns, columns, grid.columns, place.dims[1]),
            fill,
        )

    @property
    def talks(self) -> bool:
        """Whether any rank of this line of tiles has to say something."""
        return self.rows.talks or self.columns.talks

    @property
    def is_view(self) -> bool:
        """Whether all that is needed is a part of what this rank holds, and nobody says anything."""
        return not self.talks and self.rows.is_view and self.columns.is_view

    def gather(
        self,
        value: Tensor,
        strips: tuple[Strips, Strips] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Strips, Strips]:
        """The needed pixels, and what came from others: of columns, of rows. With `strips`, nothing is said again.

        `meanwhile` is done while strips travel, those of columns if there are any.
        """
        rows, columns = self.rows, self.columns
        shape = _with_size(value.shape, columns.dim, length(columns.need))
        out = None if rows.is_view else _empty_like(value, _with_size(shape, rows.dim, length(rows.need)))
        is_in_place = False
        of_columns = strips[0] if strips else columns.trade(value, meanwhile if columns.talks else None)
        if columns.is_view:
            wide = columns.of_held(value, columns.need)
        elif out is not None and inside(rows.held, rows.need):
            wide, is_in_place = rows.of_need(out, rows.held), True
        else:
            wide = _empty_like(value, shape)
        if not columns.is_view:
            columns.assemble(wide, value, of_columns, self.fill)
        of_rows = strips[1] if strips else rows.trade(wide, None if columns.talks else meanwhile)
        if out is None:
            return rows.of_held(wide, rows.need), of_columns, of_rows
        return rows.assemble(out, None if is_in_place else wide, of_rows, self.fill), of_columns, of_rows

    def note_backward(self, of_columns: Strips, of_rows: Strips) -> None:
        """Tell a dry run what `GiveBack` will say."""
        if self.grid.note is not None:
            sent = [(self.rows.axis.name, strip) for strip in of_rows]
            sent += [(self.columns.axis.name, strip) for strip in of_columns]
            self.grid.note([(name, "send", strip.numel() * strip.element_size()) for name, strip in sent])

    def pad(self, value: Tensor) -> Tensor:
        """The needed pixels where nobody has anything to say: cut, and filled outside of the image."""
        for side in (self.columns, self.rows):
            common = meet(side.held, side.need)
            if common != side.held:
                value = side.of_held(value, common)
            before, after = common[0] - side.need[0], side.need[1] - common[1]
            if before or after:
                value = F.pad(value, [0, 0] * (-1 - side.dim) + [before, after], value=self.fill)
        return value


class GiveBack:
    """The transpose of a fetch under way: the gradient of needed pixels to that of held ones."""

    def __init__(self, halo: Halo, gradient: Tensor) -> None:
        self._halo = halo
        self._gradient = gradient if halo.rows.talks else halo.rows.add_up(gradient, [])
        self._trade = (halo.rows if halo.rows.talks else halo.columns).trade_back(self._gradient)

    def finish(self) -> Tensor:
        """Wait, add, and do the second dim."""
        rows, columns, gradient = self._halo.rows, self._halo.columns, self._gradient
        pending, received, _ = self._trade
        pending.wait()
        if rows.talks:
            gradient = rows.add_up(gradient, received)
            pending, received, _ = columns.trade_back(gradient)
            pending.wait()
        return columns.add_up(gradient, received)


class _Fetch(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, halo: Halo) -> Tensor:
        ctx.halo = halo
        out, of_columns, of_rows = halo.gather(value)
        if ctx.needs_input_grad[0]:
            halo.note_backward(of_columns, of_rows)
        # No view: what follows may change it in place.
        is_view = out.untyped_storage()._cdata == value.untyped_storage()._cdata
        return out.clone() if is_view else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return GiveBack(ctx.halo, gradient).finish(), None


def fetch(value: Tensor, halo: Halo) -> Tensor:
    """The pixels that are needed of a tile, wherever they are."""
    if not halo.talks:
        return halo.pad(value)
    out: Tensor = _Fetch.apply(value, halo)
    return out


def _with_size(shape: Sequence[int], dim: int, size: int) -> list[int]:
    found = list(shape)
    found[dim] = size
    return found


def _empty_like(value: Tensor, shape: Sequence[int]) -> Tensor:
    """Uninitialised, in the order of dims in memory (channels last) of `value`."""
    is_last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    if not is_last or value.is_contiguous():
        return value.new_empty(shape)
    return value.new_empty([shape[0], *shape[2:], shape[1]]).permute(0, 3, 1, 2)

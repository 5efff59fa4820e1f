"""From tiles to what every rank holds whole, to shares of the batch, to sums; and back.

The loss of a step is the sum of what the ranks of a tile compute, so every operation here is paired with its true
transpose: a sum with a sum, a gather with a gather that adds up, an exchange of samples for pixels with its inverse.
Whatever all ranks compute alike then gets its gradient in as many parts, which add up where gradients of weights do.

    whole    every rank gets the pixels of all others: the whole image less its own tile, both ways
    share    a rank gets all pixels of its samples, and gives away its pixels of the others'
    sum      an all-reduce of the partial sums, forward and backward
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from weft.comm import Axis, all_reduce, exchange
from weft.errors import PlanError
from weft.inspection.parameter_cut import Interval, share
from weft.spatial.halo import Halo, fetch
from weft.spatial.ownership import length
from weft.spatial.tile_layout import Grid, Place, Share


def to_whole(grid: Grid, value: Tensor, place: Place) -> Tensor:
    """The whole image, on every rank."""
    rows, columns = place.sizes
    halo = Halo.of(grid, place, [(0, rows)] * place.rows.degree, [(0, columns)] * place.columns.degree)
    return fetch(value, halo)


def to_tile(value: Tensor, place: Place, grid: Grid) -> Tensor:
    """This rank's part of a whole tensor that may have one pixel, or no dim, where the image has rows or columns."""
    for dim, size, (begin, end) in zip(place.dims, place.sizes, place.held(grid), strict=True):
        if value.dim() >= -dim and value.shape[dim] == size and end - begin < size:
            value = value.narrow(dim, begin, end - begin)
    return value


def own_part(value: Tensor, place: Place, grid: Grid) -> Tensor:
    """The pixels that this rank owns of those that it holds."""
    for dim, held, owned in zip(place.dims, place.held(grid), place.owned(grid), strict=True):
        if held != owned:
            value = value.narrow(dim, owned[0] - held[0], length(owned))
    return value


def sum_over(value: Tensor, axis: Axis, grid: Grid) -> Tensor:
    """The sum over the ranks of an axis, on all of them."""
    if axis.degree == 1:
        return value
    out: Tensor = _Sum.apply(value, axis, grid)
    return out


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis, grid: Grid) -> Tensor:
        ctx.axis = axis
        if grid.note is not None and ctx.needs_input_grad[0]:
            grid.note([(axis.name, "all_reduce", value.numel() * value.element_size())])
        value = value.contiguous().clone()
        all_reduce(value, axis).wait()
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous().clone()
        all_reduce(gradient, ctx.axis).wait()
        return gradient, None, None


# --- shares of the batch


def to_share(grid: Grid, value: Tensor, place: Place) -> tuple[Tensor, Share]:
    """This rank's samples, with all their pixels."""
    samples = _samples(grid, value.shape[0])
    out: Tensor = _ToShare.apply(own_part(value, place, grid), grid, Place.of(grid, place.sizes, place.dims), samples)
    return out, Share(value.shape[0])


def from_share(grid: Grid, value: Tensor, found: Share, place: Place) -> Tensor:
    """This rank's pixels of all samples, where each rank holds its samples."""
    own = Place.of(grid, place.sizes, place.dims)
    out: Tensor = _FromShare.apply(value, grid, own, _samples(grid, found.num_samples))
    return out


def own_samples(grid: Grid, value: Tensor) -> tuple[Tensor, Share]:
    """This rank's samples of what all ranks hold."""
    begin, end = _samples(grid, value.shape[0])[grid.tile.index]
    return value[begin:end], Share(value.shape[0])


def _samples(grid: Grid, num_samples: int) -> list[Interval]:
    degree = grid.tile.degree
    if num_samples % degree:
        raise PlanError(
            f"tile.hand_over = 'batch' does not divide {num_samples} samples over {degree} tiles; use a micro-batch "
            f"that is a multiple of {degree}, or hand_over = 'gather'"
        )
    return [share(num_samples, degree, index) for index in range(degree)]


class _ToShare(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, grid: Grid, place: Place, samples: list[Interval]) -> Tensor:
        ctx.grid, ctx.place, ctx.samples = grid, place, samples
        out = _spread(value, grid, place, samples)
        if ctx.needs_input_grad[0]:
            tiles = range(grid.tile.degree)
            _note(grid, [_pixels(out, place, grid, index).numel() * out.element_size() for index in tiles])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _collect(gradient, ctx.grid, ctx.place, ctx.samples), None, None, None


class _FromShare(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, grid: Grid, place: Place, samples: list[Interval]) -> Tensor:
        ctx.grid, ctx.place, ctx.samples = grid, place, samples
        out = _collect(value, grid, place, samples)
        if ctx.needs_input_grad[0]:
            _note(grid, [length(one) * out[0].numel() * out.element_size() for one in samples])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _spread(gradient, ctx.grid, ctx.place, ctx.samples), None, None, None


def _spread(value: Tensor, grid: Grid, place: Place, samples: list[Interval]) -> Tensor:
    """Own pixels of all samples to all pixels of own samples."""
    axis, mine = grid.tile, samples[grid.tile.index]
    out = value.new_empty(length(mine), *place.whole_shape(tuple(value.shape))[1:])
    others = [index for index in range(axis.degree) if index != axis.index]
    sent = [(peer, value[slice(*samples[peer])].contiguous()) for peer in others]
    received = [(peer, torch.empty_like(_pixels(out, place, grid, peer).contiguous())) for peer in others]
    pending = exchange(received, sent, axis)
    _pixels(out, place, grid, axis.index).copy_(value[slice(*mine)])
    pending.wait()
    for peer, tensor in received:
        _pixels(out, place, grid, peer).copy_(tensor)
    return out


def _collect(value: Tensor, grid: Grid, place: Place, samples: list[Interval]) -> Tensor:
    """All pixels of own samples to own pixels of all samples: what `_spread` did, undone, and its transpose."""
    axis, mine = grid.tile, samples[grid.tile.index]
    own = _pixels(value, place, grid, axis.index)
    out = value.new_empty(samples[-1][1], *own.shape[1:])
    others = [index for index in range(axis.degree) if index != axis.index]
    sent = [(peer, _pixels(value, place, grid, peer).contiguous()) for peer in others]
    received = [(peer, out[slice(*samples[peer])]) for peer in others]
    pending = exchange(received, sent, axis)
    out[slice(*mine)].copy_(own)
    pending.wait()
    return out


def _pixels(value: Tensor, place: Place, grid: Grid, index: int) -> Tensor:
    """The pixels of whole images that the rank at an index of the tiles owns."""
    row, column = divmod(index, grid.columns.degree)
    for dim, (begin, end) in zip(place.dims, (place.rows.owned[row], place.columns.owned[column]), strict=True):
        value = value.narrow(dim, begin, end - begin)
    return value


def _note(grid: Grid, sizes: list[int]) -> None:
    """Tell a dry run the bytes that go back to each rank of the tiles, from all but this one."""
    if grid.note is not None:
        others = [size for index, size in enumerate(sizes) if index != grid.tile.index]
        grid.note([(grid.tile.name, "send", size) for size in others])

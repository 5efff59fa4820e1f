"""Conversions from tiles to whole tensors on every rank, to shares of the batch, and to sums; and back.

The loss of a step is the sum of what the ranks of a tile compute, so every operation here has its true transpose as
backward: a sum has a sum, a gather has a gather that adds, an exchange of samples for pixels has its inverse. A value
that all ranks compute equally then gets its gradient in as many parts, which are summed with the gradients of weights.

    whole    every rank gets the pixels of all others: the whole image without its own tile, both ways
    share    a rank gets all pixels of its samples, and sends its pixels of the other samples
    sum      an all-reduce of the partial sums, forward and backward
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm import Axis, all_reduce, exchange
from weft.errors import PlanError
from weft.inspection.first_order import Transposable
from weft.inspection.parameter_cut import Interval, share
from weft.spatial.halo import Halo, fetch
from weft.spatial.ownership import length
from weft.spatial.tile_layout import BatchShare, Grid, TileLayout


def to_whole(grid: Grid, value: Tensor, layout: TileLayout) -> Tensor:
    """Return the whole image, on every rank."""
    rows, columns = layout.sizes
    halo = Halo.of(grid, layout, [(0, rows)] * layout.rows.degree, [(0, columns)] * layout.columns.degree)
    return fetch(value, halo)


def to_tile(value: Tensor, layout: TileLayout, grid: Grid) -> Tensor:
    """Return this rank's part of a whole tensor, which may have one pixel or no dim for rows or columns."""
    for dim, size, (begin, end) in zip(layout.dims, layout.sizes, layout.held(grid), strict=True):
        if value.dim() >= -dim and value.shape[dim] == size and end - begin < size:
            value = value.narrow(dim, begin, end - begin)
    return value


def own_part(value: Tensor, layout: TileLayout, grid: Grid) -> Tensor:
    """Return the pixels that this rank owns, of those that it holds."""
    for dim, held, owned in zip(layout.dims, layout.held(grid), layout.owned(grid), strict=True):
        if held != owned:
            value = value.narrow(dim, owned[0] - held[0], length(owned))
    return value


def sum_over(value: Tensor, axis: Axis, grid: Grid) -> Tensor:
    """Return the sum over the ranks of an axis, on all of them."""
    return value if axis.degree == 1 else _SUM.apply(value, axis, grid)


def _all_reduced(value: Tensor, axis: Axis, grid: Grid) -> Tensor:
    if grid.note is not None and value.requires_grad:  # in forward: backward will do the same
        grid.note([(axis.name, "all_reduce", value.numel() * value.element_size())])
    total = value.contiguous().clone()
    all_reduce(total, axis).wait()
    return total


_SUM = Transposable(_all_reduced, _all_reduced, "tile")


# --- shares of the batch


def to_share(grid: Grid, value: Tensor, layout: TileLayout) -> tuple[Tensor, BatchShare]:
    """Return this rank's samples, with all their pixels."""
    samples = _samples(grid, value.shape[0])
    own = TileLayout.of(grid, layout.sizes, layout.dims)
    return _TO_SHARE.apply(own_part(value, layout, grid), grid, own, samples), BatchShare(value.shape[0])


def from_share(grid: Grid, value: Tensor, found: BatchShare, layout: TileLayout) -> Tensor:
    """Return this rank's pixels of all samples, from a tensor of which each rank holds its samples."""
    own = TileLayout.of(grid, layout.sizes, layout.dims)
    return _FROM_SHARE.apply(value, grid, own, _samples(grid, found.num_samples))


def own_samples(grid: Grid, value: Tensor) -> tuple[Tensor, BatchShare]:
    """Return this rank's samples of a tensor that all ranks hold."""
    begin, end = _samples(grid, value.shape[0])[grid.tile.index]
    return value[begin:end], BatchShare(value.shape[0])


def _samples(grid: Grid, num_samples: int) -> list[Interval]:
    degree = grid.tile.degree
    if num_samples % degree:
        raise PlanError(
            f"tile.hand_over = 'batch' does not divide {num_samples} samples over {degree} tiles; use a micro-batch "
            f"that is a multiple of {degree}, or hand_over = 'gather'"
        )
    return [share(num_samples, degree, index) for index in range(degree)]


def _pixels_to_samples(value: Tensor, grid: Grid, layout: TileLayout, samples: list[Interval]) -> Tensor:
    """Exchange own pixels of all samples for all pixels of own samples."""
    axis, mine = grid.tile, samples[grid.tile.index]
    out = value.new_empty(length(mine), *layout.whole_shape(tuple(value.shape))[1:])
    others = [index for index in range(axis.degree) if index != axis.index]
    sent = [(peer, value[slice(*samples[peer])].contiguous()) for peer in others]
    received = [(peer, torch.empty_like(_pixels(out, layout, grid, peer).contiguous())) for peer in others]
    pending = exchange(received, sent, axis)
    _pixels(out, layout, grid, axis.index).copy_(value[slice(*mine)])
    pending.wait()
    for peer, tensor in received:
        _pixels(out, layout, grid, peer).copy_(tensor)
    if value.requires_grad:
        tiles = range(axis.degree)
        _note(grid, [_pixels(out, layout, grid, index).numel() * out.element_size() for index in tiles])
    return out


def _samples_to_pixels(value: Tensor, grid: Grid, layout: TileLayout, samples: list[Interval]) -> Tensor:
    """Exchange all pixels of own samples for own pixels of all samples.

    It is the inverse of `_pixels_to_samples`, and its transpose.
    """
    axis, mine = grid.tile, samples[grid.tile.index]
    own = _pixels(value, layout, grid, axis.index)
    out = value.new_empty(samples[-1][1], *own.shape[1:])
    others = [index for index in range(axis.degree) if index != axis.index]
    sent = [(peer, _pixels(value, layout, grid, peer).contiguous()) for peer in others]
    received = [(peer, out[slice(*samples[peer])]) for peer in others]
    pending = exchange(received, sent, axis)
    out[slice(*mine)].copy_(own)
    pending.wait()
    if value.requires_grad:
        _note(grid, [length(one) * out[0].numel() * out.element_size() for one in samples])
    return out


_TO_SHARE = Transposable(_pixels_to_samples, _samples_to_pixels, "tile")
_FROM_SHARE = Transposable(_samples_to_pixels, _pixels_to_samples, "tile")


def _pixels(value: Tensor, layout: TileLayout, grid: Grid, index: int) -> Tensor:
    """Return the pixels of whole images that the rank at an index of the tiles owns."""
    row, column = divmod(index, grid.columns.degree)
    for dim, (begin, end) in zip(layout.dims, (layout.rows.owned[row], layout.columns.owned[column]), strict=True):
        value = value.narrow(dim, begin, end - begin)
    return value


def _note(grid: Grid, sizes: list[int]) -> None:
    """Record for a dry run the bytes that backward sends to each other rank of the tiles."""
    if grid.note is not None:
        others = [size for index, size in enumerate(sizes) if index != grid.tile.index]
        grid.note([(grid.tile.name, "send", size) for size in others])

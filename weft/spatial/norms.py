"""Norms with statistics over the pixels of all tiles: batch, instance, group and layer norm.

Each rank computes mean and variance of the pixels that it owns. One all-gather brings those of all ranks, which every
rank combines in the same way (Chan et al. 1979: no difference of large squares). Extra pixels are normalised but not
counted. Backward sums two numbers for each channel over the tiles. Bytes for c channels of s bytes an element:
all-gather of 2·c·s·tiles forward, all-reduce of 2·c·s backward. With `plan.statistics = "batch"` batch norm does so
over the ranks of all samples, with tiles or without.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from weft.comm import Axis, all_gather, all_reduce
from weft.inspection.first_order import first_order
from weft.spatial.hand_over import own_part, to_tile
from weft.spatial.tile_layout import BatchShare, Grid, TileLayout

aten = torch.ops.aten


class _Normalise(Function):
    """Channels [samples, channels, ...] to mean 0 and variance 1 over samples and all tiles, then weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        counts: Tensor,
        layout: TileLayout | None,
        grid: Grid,
        axis: Axis,
        eps: float,
    ) -> Any:
        own = value if layout is None else own_part(value, layout, grid)
        mean, variance = _whole_moments(own, counts, axis)
        if grid.note is not None and ctx.needs_input_grad[0]:
            grid.note([(axis.name, "all_reduce", 2 * mean.numel() * mean.element_size())])
        ctx.save_for_backward(value, weight, mean, variance)
        ctx.layout, ctx.grid, ctx.axis, ctx.eps, ctx.num_pixels = layout, grid, axis, eps, counts.sum()
        ctx.mark_non_differentiable(mean, variance)
        wide = [None if one is None else one.to(mean.dtype) for one in (weight, bias)]
        out = F.batch_norm(value, mean, variance, wide[0], wide[1], False, 0.0, eps)
        return out, mean, variance

    @staticmethod
    @first_order("tile")
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        value, weight, mean, variance = ctx.saved_tensors
        wide = None if weight is None else weight.to(mean.dtype)
        # As if mean and variance were constants; then their part is added to the gradient of own pixels.
        found, of_weight, of_bias = aten.native_batch_norm_backward(
            *(gradient, value, wide if wide is not None else torch.ones_like(mean), mean, variance, None, None),
            *(False, ctx.eps, [True, True, True]),
        )
        if ctx.needs_input_grad[0]:
            sums = torch.stack([of_bias, of_weight])
            all_reduce(sums, ctx.axis).wait()
            scale = (variance + ctx.eps).rsqrt() * (1 if wide is None else wide) / ctx.num_pixels
            slope = scale * sums[1] * (variance + ctx.eps).rsqrt()
            shape = [1, -1, *(1 for _ in range(value.dim() - 2))]
            own, pixels = found, value
            if ctx.layout is not None:
                own, pixels = (own_part(one, ctx.layout, ctx.grid) for one in (found, value))
            shift = scale * sums[0] - slope * mean
            own.sub_(pixels * slope.view(shape).to(value.dtype)).sub_(shift.view(shape).to(value.dtype))
        of_weight = of_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_bias = of_bias.to(value.dtype if weight is None else weight.dtype) if ctx.needs_input_grad[2] else None
        return found, of_weight, of_bias, None, None, None, None, None


def _whole_moments(own: Tensor, counts: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return mean and (biased) variance of each channel over the samples and pixels of all ranks."""
    dims = [dim for dim in range(own.dim()) if dim != 1]
    wide = own.float() if own.dtype in (torch.bfloat16, torch.float16) else own
    variance, mean = torch.var_mean(wide, dims, correction=0)
    parts = mean.new_empty(axis.degree, 2, mean.numel())
    all_gather(parts.view(-1), torch.stack([mean, variance]).view(-1), axis).wait()
    shares = (counts / counts.sum()).to(mean.dtype).view(-1, 1)
    mean = (parts[:, 0] * shares).sum(0)
    variance = ((parts[:, 1] + (parts[:, 0] - mean).square()) * shares).sum(0)
    return mean, variance


def _counts(axis: Axis, value: Tensor, layout: TileLayout | BatchShare | None) -> Tensor:
    """Return how many pixels (of one channel, over all samples) each rank of the axis owns.

    Tiles are the inner ranks of it.
    """
    if not isinstance(layout, TileLayout):
        counts = [value.numel() // value.shape[1]]
    else:
        others = value.numel() // value.shape[1] // (value.shape[-1] * value.shape[-2])
        counts = [
            others * (row[1] - row[0]) * (column[1] - column[0])
            for row in layout.rows.owned
            for column in layout.columns.owned
        ]
    counts *= axis.degree // len(counts)
    return torch.tensor(counts, dtype=torch.float64, device=value.device)


def batch_norm(
    grid: Grid,
    value: Tensor,
    layout: TileLayout | BatchShare | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Computes F.batch_norm on tiles, shares of the batch or whole tensors."""
    if not training:
        return F.batch_norm(value, running_mean, running_var, weight, bias, False, momentum, eps)
    axis = grid.batch if layout is None else grid.samples or grid.tile  # a whole tensor is the same on all tiles
    assert axis is not None
    counts = _counts(axis, value, layout)
    tiles = layout if isinstance(layout, TileLayout) else None
    out, mean, variance = _Normalise.apply(value, weight, bias, counts, tiles, grid, axis, eps)
    if running_mean is not None and running_var is not None:
        num_pixels = counts.sum().to(variance.dtype)
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            unbiased = variance * (num_pixels / (num_pixels - 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return out  # type: ignore[no-any-return]


def group_norm(
    grid: Grid,
    value: Tensor,
    layout: TileLayout,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Computes F.group_norm on tiles. The groups of all samples are treated as channels of one sample."""
    shape = value.shape
    # [1, groups of all samples, channels.., rows, columns]
    grouped = value.reshape(1, shape[0] * num_groups, -1, *shape[-2:])
    counts = _counts(grid.tile, grouped, layout)
    out = _Normalise.apply(grouped, None, None, counts, layout, grid, grid.tile, eps)[0].reshape(shape)
    return _affine(out, weight, bias, [-1, *(1 for _ in shape[2:])])


def instance_norm(
    grid: Grid,
    value: Tensor,
    layout: TileLayout,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Computes F.instance_norm on tiles. Its running statistics are means over the samples."""
    if not use_input_stats:
        return F.instance_norm(value, running_mean, running_var, weight, bias, False, momentum, eps)
    shape = value.shape
    flat = value.reshape(1, shape[0] * shape[1], *shape[2:])
    counts = _counts(grid.tile, flat, layout)
    out, mean, variance = _Normalise.apply(flat, None, None, counts, layout, grid, grid.tile, eps)
    if running_mean is not None and running_var is not None:
        num_pixels = counts.sum().to(variance.dtype)
        unbiased = variance * (num_pixels / (num_pixels - 1))
        with torch.no_grad():
            running_mean.lerp_(mean.view(shape[:2]).mean(0).to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.view(shape[:2]).mean(0).to(running_var.dtype), momentum)
    return _affine(out.reshape(shape), weight, bias, [-1, *(1 for _ in shape[2:])])


def layer_norm(
    grid: Grid, value: Tensor, layout: TileLayout, num_dims: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Computes F.layer_norm over the last `num_dims` dims, with rows and columns among them."""
    shape = value.shape
    flat = value.reshape(1, -1, *shape[len(shape) - num_dims :])  # [1, samples, ..., rows, columns]
    counts = _counts(grid.tile, flat, layout)
    out = _Normalise.apply(flat, None, None, counts, layout, grid, grid.tile, eps)[0].reshape(shape)
    weight, bias = (None if one is None else to_tile(one, layout, grid) for one in (weight, bias))
    return _affine(out, weight, bias, None)


def _affine(value: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int] | None) -> Tensor:
    if weight is not None:
        value = value * (weight if shape is None else weight.view(shape))
    return value if bias is None else value + (bias if shape is None else bias.view(shape))

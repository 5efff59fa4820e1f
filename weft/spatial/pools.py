"""Pools on tiles: max pools with -inf outside of the image, average pools by the pixels that each output counts."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from weft.inspection.first_order import first_order
from weft.inspection.parameter_cut import Interval
from weft.spatial.halo import Halo, HaloBackward, fetch, widen
from weft.spatial.ownership import SlidingWindow
from weft.spatial.tile_layout import Grid, TileLayout
from weft.spatial.windows import NO_EXTRA, Extra, Result, Unsupported, WindowLayout, make_windows, pad_depth, per_dim

aten = torch.ops.aten


def max_pool(
    grid: Grid,
    value: Tensor,
    layout: TileLayout,
    num_dims: int,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    extra: Extra = NO_EXTRA,
) -> Result:
    """Computes F.max_pool2d or max_pool3d on tiles."""
    if return_indices:
        raise Unsupported("gives indices into the whole image")
    windows = _pool_windows(num_dims, kernel_size, stride, padding, dilation)
    slide = WindowLayout.of(grid, layout, windows[-2:], ceil_mode, extra)
    if extra != NO_EXTRA:
        value, layout = widen(grid, value, layout, slide.rows, slide.columns)
    value = pad_depth(value, windows, [False] * (num_dims - 2), ceil_mode, -math.inf)
    halo = slide.halo(grid, layout, -math.inf, [False, False])
    shape = tuple(tuple(getattr(window, name) for window in windows) for name in ("kernel", "stride", "dilation"))
    if halo.is_view:
        pool = F.max_pool2d if num_dims == 2 else F.max_pool3d
        return pool(halo.pad(value), shape[0], shape[1], 0, shape[2]), slide.layout
    out: Tensor = _HaloMaxPool.apply(value, halo, num_dims, shape)
    return out, slide.layout


class _HaloMaxPool(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, halo: Halo, num_dims: int, shape: Any) -> Tensor:
        kernel, stride, dilation = shape
        padded, of_columns, of_rows = halo.gather(value)
        if ctx.needs_input_grad[0]:
            halo.note_backward(of_columns, of_rows)
        pool = aten.max_pool2d_with_indices if num_dims == 2 else aten.max_pool3d_with_indices
        out, indices = pool(padded, kernel, stride, [0] * num_dims, dilation)
        ctx.halo, ctx.num_dims, ctx.shape, ctx.padded = halo, num_dims, shape, padded.shape
        ctx.save_for_backward(indices)
        return out  # type: ignore[no-any-return]

    @staticmethod
    @first_order("tile")
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (indices,), (kernel, stride, dilation) = ctx.saved_tensors, ctx.shape
        is_2d, zeros = ctx.num_dims == 2, [0] * ctx.num_dims
        pool = aten.max_pool2d_with_indices_backward if is_2d else aten.max_pool3d_with_indices_backward
        padded = gradient.new_empty(ctx.padded)  # only its shape is used
        found = pool(gradient.contiguous(), padded, kernel, stride, zeros, dilation, False, indices)
        return HaloBackward(ctx.halo, found).finish(), None, None, None


def average_pool(
    grid: Grid,
    value: Tensor,
    layout: TileLayout,
    num_dims: int,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    extra: Extra = NO_EXTRA,
) -> Result:
    """Computes F.avg_pool2d or avg_pool3d on tiles: sums, divided by the number of pixels that each output counts."""
    windows = _pool_windows(num_dims, kernel_size, stride, padding, 1)
    slide = WindowLayout.of(grid, layout, windows[-2:], ceil_mode, extra)
    if extra != NO_EXTRA:
        value, layout = widen(grid, value, layout, slide.rows, slide.columns)
    sizes = layout.whole_shape(tuple(value.shape))[-num_dims:]
    held = [*((0, w.num_outputs(n, ceil_mode)) for w, n in zip(windows[:-2], sizes[:-2], strict=True))]
    held += slide.layout.held(grid)
    value = pad_depth(value, windows, [False] * (num_dims - 2), ceil_mode)
    wide = fetch(value, slide.halo(grid, layout, 0.0, [False, False]))
    pool = F.avg_pool2d if num_dims == 2 else F.avg_pool3d
    kernel, step = (tuple(getattr(window, name) for window in windows) for name in ("kernel", "stride"))
    sums = pool(wide, kernel, step, divisor_override=divisor_override or 1)
    divisor: Tensor | int = 1
    if divisor_override is None:
        for dim, (window, size, own) in enumerate(zip(windows, sizes, held, strict=True), -num_dims):
            divisor = divisor * _counts(window, size, own, count_include_pad, sums, dim)
    return sums / divisor, slide.layout


def _counts(
    window: SlidingWindow, size: int, held: Interval, count_include_pad: bool, like: Tensor, dim: int
) -> Tensor | int:
    """Return the number of pixels along a dim that each output averages."""
    counts = []
    for index in range(*held):
        begin = index * window.stride - window.before
        end = min(begin + window.kernel, size + window.after)
        counts.append(end - begin if count_include_pad else min(end, size) - max(begin, 0))
    if len(set(counts)) == 1:
        return counts[0]
    return torch.tensor(counts, dtype=like.dtype, device=like.device).view(-1, *(1 for _ in range(-1 - dim)))


def _pool_windows(num_dims: int, kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> list[SlidingWindow]:
    stride = kernel_size if stride is None or stride == [] else stride
    kernels, strides, dilations = (per_dim(one, num_dims) for one in (kernel_size, stride, dilation))
    return make_windows(kernels, strides, padding, dilations)

"""Convolutions and pools on tiles: fetch what the rank's own outputs need, then compute as without padding.

Dims that no axis splits keep torch's own padding. A convolution saves for backward the tile and the received strips,
not the padded copy: as much as on the whole image, plus the halo. Its weight's gradient is computed while the halo's
gradients travel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from weft.inspection.first_order import first_order
from weft.inspection.parameter_cut import Interval
from weft.spatial.halo import Halo, HaloBackward, fetch, widen
from weft.spatial.overlap import Overlap, plan_overlap
from weft.spatial.ownership import Line, SlidingWindow, length
from weft.spatial.tile_layout import Grid, TileLayout

aten = torch.ops.aten
Extra = tuple[tuple[int, int], tuple[int, int]]  # extra pixels to compute: (before, after) of rows, of columns
NO_EXTRA: Extra = ((0, 0), (0, 0))
Result = tuple[Tensor, TileLayout]


class NeedsWhole(Exception):  # noqa: N818 (it leads to a hand-over)
    """An operation cannot run on tiles, but can on whole images."""


class Unsupported(Exception):  # noqa: N818 (it becomes a PlanError that names the operation)
    """Weft has no rule for an operation on tiles."""


def per_dim(value: Any, num_dims: int) -> tuple[int, ...]:
    """Return a setting of a convolution or pool for each spatial dim."""
    if isinstance(value, int):
        return (value,) * num_dims
    return tuple(value) if len(value) == num_dims else tuple(value) * num_dims


@dataclass(frozen=True)
class WindowLayout:
    """Windows over an image: the layout of the outputs, and the pixels that each rank needs for its part of them."""

    layout: TileLayout
    rows: tuple[Interval, ...]
    columns: tuple[Interval, ...]

    @staticmethod
    def of(
        grid: Grid, layout: TileLayout, windows: Sequence[SlidingWindow], ceil: bool = False, extra: Extra = NO_EXTRA
    ) -> WindowLayout:
        """`windows` are those of rows and columns."""
        if layout.dims != (-2, -1):
            raise Unsupported("wants rows and columns in the last two dims")
        lines, needs = [], []
        for line, window, more in zip((layout.rows, layout.columns), windows, extra, strict=True):
            out = outputs(line, window.num_outputs(line.size, ceil), more)
            lines.append(out)
            needs.append(tuple(window.needs(held) for held in out.held))
        found = TileLayout(lines[0], lines[1])
        if grid.layer is not None:
            grid.layer(layout, found, (windows[0].needs, windows[1].needs))
        return WindowLayout(found, needs[0], needs[1])

    def halo(self, grid: Grid, layout: TileLayout, fill: float, native: Sequence[bool]) -> Halo:
        """Return the pixels to fetch. In a dim with `native` padding a rank uses all that it holds."""
        rows = layout.rows.held if native[0] else self.rows
        columns = layout.columns.held if native[1] else self.columns
        return Halo.of(grid, layout, rows, columns, fill)


def outputs(line: Line, num_outputs: int, extra: tuple[int, int] = (0, 0)) -> Line:
    """Return the line of an operation's outputs."""
    if num_outputs < line.degree:
        raise NeedsWhole(f"its result has {num_outputs} pixels along a dim that {line.degree} tiles share")
    return Line.of(num_outputs, line.degree, extra)


# --- convolutions


@dataclass(frozen=True)
class ConvolutionSettings:
    """Settings of one convolution; `padding` is the part left to torch."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        zeros = [0] * len(self.stride)
        return torch.convolution(
            value, weight, bias, self.stride, self.padding, self.dilation, False, zeros, self.groups
        )

    def backward(self, gradient: Tensor, value: Tensor, weight: Tensor, mask: list[bool]) -> Any:
        zeros, sizes = [0] * len(self.stride), [weight.shape[0]]
        return aten.convolution_backward(
            *(gradient, value, weight, sizes, self.stride, self.padding, self.dilation, False, zeros),
            *(self.groups, mask),
        )


def convolution(
    grid: Grid,
    value: Tensor,
    layout: TileLayout,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    extra: Extra = NO_EXTRA,
) -> Result:
    """Computes torch.conv2d or conv3d on tiles."""
    num_dims = weight.dim() - 2
    windows = make_windows(tuple(weight.shape[2:]), per_dim(stride, num_dims), padding, per_dim(dilation, num_dims))
    slide = WindowLayout.of(grid, layout, windows[-2:], extra=extra)
    if extra != NO_EXTRA:
        value, layout = widen(grid, value, layout, slide.rows, slide.columns)
    native = [
        *(window.before == window.after for window in windows[:-2]),
        *(w.before == w.after and d == 1 for w, d in zip(windows[-2:], _degrees(grid), strict=True)),
    ]
    value = pad_depth(value, windows, native)
    settings = ConvolutionSettings(
        per_dim(stride, num_dims),
        tuple(window.before if own else 0 for window, own in zip(windows, native, strict=True)),
        per_dim(dilation, num_dims),
        groups,
    )
    halo = slide.halo(grid, layout, 0.0, native[-2:])
    if halo.is_view:
        return settings.forward(halo.pad(value), weight, bias), slide.layout
    overlap = None
    if halo.communicates:
        held, need = (halo.rows.held, halo.columns.held), (halo.rows.need, halo.columns.need)
        own = slide.layout.held(grid)
        pixels = math.prod(value.shape[2:-2]) * value.shape[0] * length(own[0]) * length(own[1])
        overlap = plan_overlap(windows[-2:], native[-2:], own, held, need, 2 * pixels * weight.numel())
    out: Tensor = _HaloConvolution.apply(value, weight, bias, halo, settings, overlap)
    return out, slide.layout


class _HaloConvolution(Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        halo: Halo,
        settings: ConvolutionSettings,
        overlap: Overlap | None,
    ) -> Tensor:
        ctx.halo, ctx.settings = halo, settings
        inner: list[Tensor] = []

        def compute_inner() -> None:
            if overlap is not None:
                inner.append(settings.forward(overlap.seen(value, overlap.inner, overlap.held), weight, bias))

        padded, of_columns, of_rows = halo.gather(value, meanwhile=compute_inner)
        ctx.num_of_columns = len(of_columns)
        if ctx.needs_input_grad[0]:
            halo.note_backward(of_columns, of_rows)
        ctx.save_for_backward(value, weight, *of_columns, *of_rows)
        if overlap is None:
            return settings.forward(padded, weight, bias)
        rows, columns = (length(part) for part in overlap.outputs)
        out = inner[0].new_empty(*inner[0].shape[:-2], rows, columns)
        overlap.put(out, overlap.inner, inner.pop())
        for strip in overlap.strips:
            overlap.put(out, strip, settings.forward(overlap.seen(padded, strip, overlap.need), weight, bias))
        return out

    @staticmethod
    @first_order("tile")
    def backward(ctx: Any, gradient: Tensor) -> Any:
        value, weight, *strips = ctx.saved_tensors
        needs_value, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        kept = strips[: ctx.num_of_columns], strips[ctx.num_of_columns :]
        padded = ctx.halo.gather(value, kept)[0]
        returning = None
        if needs_value:
            found = ctx.settings.backward(gradient, padded, weight, [True, False, False])[0]
            returning = HaloBackward(ctx.halo, found)
        of_weight = of_bias = None
        if needs_weight or needs_bias:
            mask = [False, needs_weight, needs_bias]
            _, of_weight, of_bias = ctx.settings.backward(gradient, padded, weight, mask)
        return None if returning is None else returning.finish(), of_weight, of_bias, None, None, None


def transposed_convolution(
    grid: Grid,
    value: Tensor,
    layout: TileLayout,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
    extra: Extra = NO_EXTRA,
) -> Result:
    """Computes torch.conv_transpose2d or conv_transpose3d on tiles."""
    num_dims = weight.dim() - 2
    strides, paddings, more, dilations = (per_dim(one, num_dims) for one in (stride, padding, output_padding, dilation))
    kernels = tuple(weight.shape[2:])
    lines, needs, cuts, seen = [], [], [], []
    for line, axis, beside, dim in zip(
        (layout.rows, layout.columns), (grid.rows, grid.columns), extra, (-2, -1), strict=True
    ):
        reach, step, before = dilations[dim] * (kernels[dim] - 1) + 1, strides[dim], paddings[dim]
        size = (line.size - 1) * step - 2 * before + reach + more[dim]
        out = outputs(line, size, beside)
        seen.append(partial(_seen_by, reach, step, before))
        need = [seen[-1](held) for held in out.held]
        lines.append(out)
        needs.append(line.held if axis.degree == 1 else need)
        begin = out.held[axis.index][0]
        cuts.append(0 if axis.degree == 1 else begin - (need[axis.index][0] * step - before))
    if extra != NO_EXTRA:
        value, layout = widen(grid, value, layout, needs[0], needs[1])
    is_split = [*(False for _ in kernels[:-2]), *(degree > 1 for degree in _degrees(grid))]
    wide = fetch(value, Halo.of(grid, layout, needs[0], needs[1]))
    whole = torch.convolution(
        *(wide, weight, bias, strides, [0 if cut else p for p, cut in zip(paddings, is_split, strict=True)]),
        *(dilations, True, [0 if cut else m for m, cut in zip(more, is_split, strict=True)], groups),
    )
    found = TileLayout(lines[0], lines[1])
    if grid.layer is not None:
        grid.layer(layout, found, (seen[0], seen[1]))
    for dim, cut, (begin, end) in zip((-2, -1), cuts, found.held(grid), strict=True):
        if cut or whole.shape[dim] != end - begin:
            whole = whole.narrow(dim, cut, end - begin)
    return whole, found


def _seen_by(reach: int, stride: int, before: int, held: Interval) -> Interval:
    """Return the inputs of a transposed convolution for outputs `held`: from one at or before them to one after."""
    begin, end = held[0] + before, held[1] + before  # before the padding is cut off
    first = min(-(-(begin - reach + 1) // stride), begin // stride)
    num_inputs = max((end - 1) // stride + 1 - first, -(-(end - first * stride - reach) // stride) + 1)
    return first, first + num_inputs


# --- windows


def _degrees(grid: Grid) -> tuple[int, int]:
    return grid.rows.degree, grid.columns.degree


def make_windows(
    kernels: Sequence[int], strides: Sequence[int], padding: Any, dilations: Sequence[int]
) -> list[SlidingWindow]:
    found = []
    for dim, (kernel, stride, dilation) in enumerate(zip(kernels, strides, dilations, strict=True)):
        if padding == "same":
            total = dilation * (kernel - 1)
            found.append(SlidingWindow(kernel, stride, total // 2, total - total // 2, dilation))
        else:
            before = 0 if padding == "valid" else per_dim(padding, len(kernels))[dim]
            found.append(SlidingWindow(kernel, stride, before, before, dilation))
    return found


def pad_depth(
    value: Tensor, windows: Sequence[SlidingWindow], native: Sequence[bool], ceil: bool = False, fill: float = 0.0
) -> Tensor:
    """Pad the dims before rows and columns whose padding is not left to torch."""
    pads: list[int] = []
    for window, own, size in zip(windows[:-2], native, value.shape[-len(windows) : -2], strict=False):
        begin, end = window.needs((0, window.num_outputs(size, ceil)))
        pads = [*((0, 0) if own else (-begin, max(0, end - size))), *pads]
    return F.pad(value, [0, 0, 0, 0, *pads], value=fill) if any(pads) else value

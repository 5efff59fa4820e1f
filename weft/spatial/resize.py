"""Operations whose outputs need inputs at a ratio: interpolation, adaptive pools, pixel shuffles, crops and pads.

Interpolation works dim by dim: an output is the mean of one or two pixels, whose indices in the whole image follow from
its own index. The tile fetches the pixels of its outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.inspection.parameter_cut import Interval
from weft.spatial.halo import Halo, fetch, has_storage_of, widen
from weft.spatial.hand_over import own_part, sum_over
from weft.spatial.ownership import Line, SlidingWindow
from weft.spatial.pools import average_pool, max_pool
from weft.spatial.tile_layout import Grid, TileLayout
from weft.spatial.windows import NO_EXTRA, Extra, Result, Unsupported, WindowLayout, outputs, per_dim

MODES = ("nearest", "nearest-exact", "linear", "bilinear", "trilinear", "area")


def interpolate(
    grid: Grid,
    value: Tensor,
    layout: TileLayout,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
    extra: Extra = NO_EXTRA,
) -> tuple[Tensor, TileLayout | None]:
    """Computes F.interpolate on tiles."""
    if mode not in MODES or antialias or layout.dims != (-2, -1):
        raise Unsupported(f"has mode = '{mode}'{', antialias' if antialias else ''}, not one of {', '.join(MODES)}")
    num_dims = value.dim() - 2
    whole = layout.whole_shape(tuple(value.shape))[2:]
    if size is None:
        factors = [float(one) for one in (scale_factor if isinstance(scale_factor, (tuple, list)) else [scale_factor])]
        factors = factors * (num_dims // len(factors))
        sizes = [math.floor(n * factor) for n, factor in zip(whole, factors, strict=True)]
        ratios = [n / out for n, out in zip(whole, sizes, strict=True)]
        if not recompute_scale_factor:
            ratios = [1 / factor for factor in factors]
    else:
        sizes = list(per_dim(size, num_dims))
        ratios = [n / out for n, out in zip(whole, sizes, strict=True)]
    if mode == "area":
        return adaptive_average_pool(grid, value, layout, sizes)
    lines = (outputs(layout.rows, sizes[-2], extra[0]), outputs(layout.columns, sizes[-1], extra[1]))
    samples = [_InterpolationPoints(mode, *one, bool(align_corners)) for one in zip(whole, sizes, ratios, strict=True)]
    needs = [[sample.needs(held) for held in line.held] for sample, line in zip(samples[-2:], lines, strict=True)]
    found = TileLayout(*lines)
    if grid.layer is not None:
        grid.layer(layout, found, (samples[-2].needs, samples[-1].needs))
    if extra != NO_EXTRA:
        value, layout = widen(grid, value, layout, needs[0], needs[1])
    value = fetch(value, Halo.of(grid, layout, needs[0], needs[1]))
    for dim, held, need in zip((-2, -1), found.held(grid), _own(grid, needs), strict=True):
        value = samples[dim].take(value, dim, held, need[0])
    for dim in range(-num_dims, -2):
        value = samples[dim].take(value, dim, (0, sizes[dim]), 0)
    return value, found


class _InterpolationPoints:
    """The pixels of a dim from which each output is computed."""

    def __init__(self, mode: str, size: int, num_outputs: int, ratio: float, align_corners: bool) -> None:
        self.size, self.is_nearest, self.is_exact = size, mode.startswith("nearest"), mode == "nearest-exact"
        self.is_aligned = align_corners
        if align_corners:
            self.ratio = (size - 1) / (num_outputs - 1) if num_outputs > 1 else 0.0
        else:
            self.ratio = ratio

    def needs(self, held: Interval) -> Interval:
        """Return the pixels from the first to the last that outputs are computed from."""
        first, last = self._pixel(held[0]), self._pixel(held[1] - 1)
        return int(first), min(int(last) + (1 if self.is_nearest else 2), self.size)

    def take(self, value: Tensor, dim: int, held: Interval, start: int) -> Tensor:
        """Return these outputs, from a tensor that begins with pixel `start`."""
        at = [self._pixel(index) for index in range(*held)]
        below = torch.tensor([int(one) for one in at], device=value.device)
        first = value.index_select(dim, below - start)
        if self.is_nearest:
            return first
        above = (below + 1).clamp(max=self.size - 1)
        weights = torch.tensor([one - int(one) for one in at], dtype=torch.float64, device=value.device)
        weights = weights.to(value.dtype).view(-1, *(1 for _ in range(-1 - dim)))
        return first * (1 - weights) + value.index_select(dim, above - start) * weights

    def _pixel(self, index: int) -> float:
        if self.is_nearest:  # in torch's own precision, so that rounding is the same
            return min(math.floor(np.float32(index + 0.5 * self.is_exact) * np.float32(self.ratio)), self.size - 1)
        at = index * self.ratio if self.is_aligned else max((index + 0.5) * self.ratio - 0.5, 0.0)
        return min(at, self.size - 1)


# --- adaptive pools


def adaptive_average_pool(
    grid: Grid, value: Tensor, layout: TileLayout, output_size: Any
) -> tuple[Tensor, TileLayout | None]:
    """Computes F.adaptive_avg_pool2d or 3d on tiles. One output for all pixels is a sum over tiles, on every rank."""
    if layout.dims != (-2, -1):
        raise Unsupported("wants rows and columns in the last two dims")
    num_dims = value.dim() - 2
    whole, sizes = _adaptive_sizes(value, layout, output_size)
    if sizes[-2:] == [1, 1]:
        depth = F.adaptive_avg_pool3d(value, (sizes[0], None, None)) if num_dims == 3 else value
        return mean_over(grid, depth, layout, keepdim=True), None
    windows = _even_windows(whole, sizes)
    if windows is not None:
        kernel = [window.kernel for window in windows]
        return average_pool(grid, value, layout, num_dims, kernel, kernel)
    lines = outputs(layout.rows, sizes[-2]), outputs(layout.columns, sizes[-1])
    needs = [[_adapted(line, n, held) for held in line.held] for line, n in zip(lines, whole[-2:], strict=True)]
    value = fetch(value, Halo.of(grid, layout, needs[0], needs[1]))
    found = TileLayout(*lines)
    for dim, held, need in zip((-2, -1), found.held(grid), _own(grid, needs), strict=True):
        means = _means(found.sizes[dim], whole[dim], held, need, value)  # [outputs, pixels]
        value = torch.tensordot(value.movedim(dim, -1), means, ([-1], [1])).movedim(-1, dim)
    if num_dims == 3:
        value = F.adaptive_avg_pool3d(value, (sizes[0], None, None))
    return value, found


def adaptive_max_pool(
    grid: Grid, value: Tensor, layout: TileLayout, output_size: Any, return_indices: bool = False
) -> Result:
    """Computes F.adaptive_max_pool2d or 3d on tiles, if all windows have one size."""
    whole, sizes = _adaptive_sizes(value, layout, output_size)
    windows = _even_windows(whole, sizes)
    if windows is None:
        raise Unsupported(f"has uneven windows: {sizes[-2]} × {sizes[-1]} outputs of {whole[-2]} × {whole[-1]} pixels")
    kernel = [window.kernel for window in windows]
    return max_pool(grid, value, layout, value.dim() - 2, kernel, kernel, return_indices=return_indices)


def _adaptive_sizes(value: Tensor, layout: TileLayout, output_size: Any) -> tuple[Sequence[int], list[int]]:
    """Return the sizes of the whole image and of the outputs; an output size of None keeps that of the image."""
    whole = layout.whole_shape(tuple(value.shape))[2:]
    given = output_size if isinstance(output_size, (tuple, list)) else per_dim(output_size, len(whole))
    return whole, [n if out is None else out for n, out in zip(whole, given, strict=True)]


def _even_windows(whole: Sequence[int], sizes: Sequence[int]) -> list[SlidingWindow] | None:
    if any(n % out for n, out in zip(whole, sizes, strict=True)):
        return None
    return [SlidingWindow(n // out, n // out) for n, out in zip(whole, sizes, strict=True)]


def _adapted(line: Line, size: int, held: Interval) -> Interval:
    """Return the pixels of adaptive outputs: output i of o needs [floor(i·n / o), ceil((i + 1)·n / o))."""
    return held[0] * size // line.size, -(-held[1] * size // line.size)


def _means(num_outputs: int, size: int, held: Interval, need: Interval, like: Tensor) -> Tensor:
    rows = torch.zeros(held[1] - held[0], need[1] - need[0], dtype=like.dtype, device=like.device)
    for row, index in enumerate(range(*held)):
        begin, end = index * size // num_outputs, -(-(index + 1) * size // num_outputs)
        rows[row, begin - need[0] : end - need[0]] = 1 / (end - begin)
    return rows


def mean_over(grid: Grid, value: Tensor, layout: TileLayout, keepdim: bool) -> Tensor:
    """Return the mean over rows and columns, on every rank."""
    total = own_part(value, layout, grid).sum(layout.dims, keepdim=keepdim)
    return sum_over(total, grid.tile, grid) / (layout.sizes[0] * layout.sizes[1])


# --- crops, pads and shuffles


def crop(grid: Grid, value: Tensor, layout: TileLayout, parts: Sequence[slice | None]) -> Result:
    """Return value[..., rows, columns] with slices of the whole image; None keeps a whole dim."""
    lines, needs = [], []
    for line, part in zip((layout.rows, layout.columns), parts, strict=True):
        begin, end, step = (part or slice(None)).indices(line.size)
        out = outputs(line, len(range(begin, end, step)))
        window = SlidingWindow(1, step, -begin)
        lines.append(out)
        needs.append([window.needs(held) for held in out.held])
    value = fetch(value, Halo.of(grid, layout, needs[0], needs[1]))
    for dim, part in zip(layout.dims, parts, strict=True):
        if part is not None and (part.step or 1) > 1:
            value = value.movedim(dim, 0)[:: part.step].movedim(0, dim)
    return value, TileLayout(lines[0], lines[1], layout.dims)


def pad(
    grid: Grid, value: Tensor, layout: TileLayout, pads: Sequence[int], mode: str = "constant", fill: Any = None
) -> Result:
    """Computes F.pad with a constant, on tiles; negative values crop."""
    if mode != "constant":
        raise Unsupported(f"pads with mode = '{mode}'")
    around = {-1 - i // 2: (pads[i], pads[i + 1]) for i in range(0, len(pads), 2)}
    lines, needs = [], []
    for dim, line in zip(layout.dims, (layout.rows, layout.columns), strict=True):
        before, after = around.pop(dim, (0, 0))
        out = outputs(line, line.size + before + after)
        lines.append(out)
        needs.append([(begin - before, end - before) for begin, end in out.held])
    image, value = value, fetch(value, Halo.of(grid, layout, needs[0], needs[1], float(fill or 0)))
    if around:
        others = [one for dim in range(-1, min(around) - 1, -1) for one in around.get(dim, (0, 0))]
        value = F.pad(value, others, value=fill)
    elif has_storage_of(value, image):  # as torch, whose result may be changed in place
        value = value.clone()
    return value, TileLayout(lines[0], lines[1], layout.dims)


def pixel_shuffle(grid: Grid, value: Tensor, layout: TileLayout, factor: int) -> Result:
    """Computes torch.pixel_shuffle on tiles: blocks of channels become blocks of pixels."""
    lines = (outputs(layout.rows, layout.rows.size * factor), outputs(layout.columns, layout.columns.size * factor))
    needs = [[(begin // factor, -(-end // factor)) for begin, end in line.held] for line in lines]
    value = F.pixel_shuffle(fetch(value, Halo.of(grid, layout, needs[0], needs[1])), factor)
    found = TileLayout(*lines)
    for dim, held, need in zip((-2, -1), found.held(grid), _own(grid, needs), strict=True):
        value = value.narrow(dim, held[0] - need[0] * factor, held[1] - held[0])
    return value, found


def pixel_unshuffle(grid: Grid, value: Tensor, layout: TileLayout, factor: int) -> Result:
    """Computes torch.pixel_unshuffle on tiles: blocks of pixels become blocks of channels."""
    slide = WindowLayout.of(grid, layout, [SlidingWindow(factor, factor)] * 2)
    return F.pixel_unshuffle(fetch(value, slide.halo(grid, layout, 0.0, [False, False])), factor), slide.layout


def _own(grid: Grid, needs: Sequence[Sequence[Interval]]) -> tuple[Interval, Interval]:
    return needs[0][grid.rows.index], needs[1][grid.columns.index]

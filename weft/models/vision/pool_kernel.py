"""Max and average pools of images as Triton kernels, for GPUs.

torch's own kernels for channels-last images took 40 % of AmoebaNet-D's step. They save 8 bytes for every result of a
max pool: the index of its pixel in the image. These kernels save one byte: its index in the window. torch.compile takes
6 to 9 seconds for each size of pool. Results equal torch's, and so do gradients, except for the order of their sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.models.vision.pools import CHANNELS_PER_THREAD, NO_CODE, PoolWindow, pool_replacements

_PIXELS, _CHANNELS = 16, 128  # of one program; fewer channels if the image has fewer
_NO_CODE, _CHANNELS_PER_THREAD = tl.constexpr(NO_CODE), tl.constexpr(CHANNELS_PER_THREAD)


@triton.jit
def _split(pixel, height, width):
    """Returns the row, the column and the image of a pixel."""
    line = pixel // width
    return line % height, pixel % width, line // height


@triton.jit
def _start(image, row, column, height, width, channels):
    """Returns the offset of a pixel's first channel [pixels, 1]."""
    return (((image * height + row) * width + column).to(tl.int64) * channels)[:, None]


@triton.jit
def _in_window(row, column, height, width, K0: tl.constexpr, K1: tl.constexpr):
    """Returns the number of pixels of the image in the window that begins at (row, column) [pixels, 1]."""
    rows = tl.minimum(row + K0, height) - tl.maximum(row, 0)
    columns = tl.minimum(column + K1, width) - tl.maximum(column, 0)
    return (rows * columns).to(tl.float32)[:, None]


@triton.jit
def _pool(
    images_ptr,
    results_ptr,
    codes_ptr,
    num_results,
    height,
    width,
    num_rows,
    num_columns,
    num_eights,
    K0: tl.constexpr,
    K1: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
    IS_MAX: tl.constexpr,
    COUNTS_PADDING: tl.constexpr,
    HAS_CODES: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    channels = num_eights * _CHANNELS_PER_THREAD  # so that the compiler knows that it is a multiple
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    inside = (pixel < num_results)[:, None] & (channel < channels)
    row, column, image = _split(pixel, num_rows, num_columns)
    top, left = row * S0 - P0, column * S1 - P1
    best = tl.full([PIXELS, CHANNELS], float("-inf") if IS_MAX else 0.0, tl.float32)
    first = tl.maximum(-top, 0) * K1 + tl.maximum(-left, 0)  # the first position of the window inside the image
    code = tl.zeros([PIXELS, CHANNELS], tl.int32) + first[:, None]
    for y in tl.static_range(K0):
        for x in tl.static_range(K1):
            here = (top + y >= 0) & (top + y < height) & (left + x >= 0) & (left + x < width)
            start = _start(image, top + y, left + x, height, width, channels)
            outside = float("-inf") if IS_MAX else 0.0
            value = tl.load(images_ptr + start + channel, mask=inside & here[:, None], other=outside).to(tl.float32)
            if IS_MAX:  # as in torch: the first of the largest values, or the last NaN
                is_best = (value > best) | (value != value)
                best = tl.where(is_best, value, best)
                code = tl.where(is_best, y * K1 + x, code)
            else:
                best += value
    if not IS_MAX:
        best = best / (K0 * K1 if COUNTS_PADDING else _in_window(top, left, height, width, K0, K1))
    place = pixel.to(tl.int64)[:, None] * channels + channel
    tl.store(results_ptr + place, best.to(results_ptr.dtype.element_ty), mask=inside)
    if HAS_CODES:
        tl.store(codes_ptr + place, code.to(tl.uint8), mask=inside)


@triton.jit
def _pool_backward(
    gradients_ptr,
    codes_ptr,
    results_ptr,
    num_pixels,
    height,
    width,
    num_rows,
    num_columns,
    num_eights,
    K0: tl.constexpr,
    K1: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
    IS_MAX: tl.constexpr,
    COUNTS_PADDING: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Every pixel of the image sums the gradients of the windows that contain it."""
    channels = num_eights * _CHANNELS_PER_THREAD
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    inside = (pixel < num_pixels)[:, None] & (channel < channels)
    row, column, image = _split(pixel, height, width)
    total = tl.zeros([PIXELS, CHANNELS], tl.float32)
    for y in tl.static_range(K0):
        for x in tl.static_range(K1):
            low, left = row + P0 - y, column + P1 - x  # the window's row and column, times the stride
            here = (low >= 0) & (left >= 0) & (low % S0 == 0) & (left % S1 == 0)
            here = here & (low // S0 < num_rows) & (left // S1 < num_columns)
            start = _start(image, low // S0, left // S1, num_rows, num_columns, channels)
            is_read = inside & here[:, None]
            gradient = tl.load(gradients_ptr + start + channel, mask=is_read, other=0.0).to(tl.float32)
            if IS_MAX:
                code = tl.load(codes_ptr + start + channel, mask=is_read, other=_NO_CODE)
                total += tl.where(code == y * K1 + x, gradient, 0.0)
            elif COUNTS_PADDING:
                total += gradient
            else:
                total += gradient * (1.0 / tl.maximum(_in_window(low - P0, left - P1, height, width, K0, K1), 1.0))
    if COUNTS_PADDING and not IS_MAX:
        total = total / (K0 * K1)
    place = pixel.to(tl.int64)[:, None] * channels + channel
    tl.store(results_ptr + place, total.to(results_ptr.dtype.element_ty), mask=inside)


def kernel_pools() -> dict[Any, Callable[..., Any]]:
    """Maps torch's pool functions to functions that use the kernels where they fit."""

    def fits(images: Tensor, window: PoolWindow) -> bool:
        return window.fits(images) and images.is_contiguous(memory_format=torch.channels_last)

    return pool_replacements(_Pool.apply, fits)


class _Pool(torch.autograd.Function):
    """Pools images [batch, channels, height, width], channels last, to images of fewer pixels."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, window: PoolWindow, is_max: bool, counts_padding: bool) -> Tensor:
        results = _like(images, *window.results(images))
        has_codes = is_max and ctx.needs_input_grad[0]
        codes = torch.empty_like(results, dtype=torch.uint8) if has_codes else results
        flags = {"IS_MAX": is_max, "COUNTS_PADDING": counts_padding, "HAS_CODES": has_codes}
        _run(_pool, (images, results, codes), results, images, results, window, flags)
        if has_codes:
            ctx.save_for_backward(codes)
        ctx.settings = images.shape[2:], window, is_max, counts_padding
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sizes, window, is_max, counts_padding = ctx.settings
        gradients = gradients.contiguous(memory_format=torch.channels_last)
        made = _like(gradients, *sizes)
        codes = ctx.saved_tensors[0] if is_max else made
        flags = {"IS_MAX": is_max, "COUNTS_PADDING": counts_padding}
        _run(_pool_backward, (gradients, codes, made), made, made, gradients, window, flags)
        return made, None, None, None


def _like(images: Tensor, height: int, width: int) -> Tensor:
    shape = (*images.shape[:2], height, width)
    return torch.empty(shape, dtype=images.dtype, device=images.device, memory_format=torch.channels_last)


def _run(
    kernel: Any,
    tensors: tuple[Tensor, ...],
    made: Tensor,
    images: Tensor,
    results: Tensor,
    window: PoolWindow,
    flags: dict[str, bool],
) -> None:
    """Run a kernel with one program for some pixels and channels of `made`. `images` and `results` are those of
    forward, or their gradients.
    """
    batch, channels, height, width = made.shape
    num_pixels, together = batch * height * width, min(_CHANNELS, int(triton.next_power_of_2(channels)))
    grid = triton.cdiv(num_pixels, _PIXELS), triton.cdiv(channels, together)
    sizes = *images.shape[2:], *results.shape[2:], channels // CHANNELS_PER_THREAD
    kernel[grid](*tensors, num_pixels, *sizes, **window.settings(), **flags, PIXELS=_PIXELS, CHANNELS=together)

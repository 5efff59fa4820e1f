"""Pools of images for which weft has kernels on GPUs (pool_kernel.py): which they are, and what they keep.

A max pool keeps one byte for each result, its place in the window, and an average nothing; torch's keep their images,
and 8 bytes for each result of a max pool.

torch's own average is mended, whose gradient is wrong without a word: on GPUs for padded images with channels last
(https://github.com/pytorch/pytorch/issues/188344, seen with 2.11), and compiled where windows reach over the edge
(https://github.com/pytorch/pytorch/issues/198119, seen with 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._triton import has_triton

from weft.inspection.torch_patches import replaced

TOGETHER = 8  # channels that a thread reads at once
NONE = 255  # no place in a window
MOST_PIXELS = 2**31 - 2**10  # that kernels number in 32 bits, those of the last program beside the image too
COMPILED_PIXELS = 25  # of a window for which torch's compiler has a gradient of its own
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX: Any = F.max_pool2d
_AVERAGE: Any = F.avg_pool2d
Sizes = int | tuple[int, ...] | list[int]  # of rows and columns


class Window(NamedTuple):
    """Rows and columns of each."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @classmethod
    def of(cls, size: Sizes, stride: Sizes | None, padding: Sizes) -> Window:
        return cls(_pair(size), _pair(stride or size), _pair(padding))

    def fits(self, images: Tensor) -> bool:
        """Whether the kernels can pool images like these."""
        if images.dim() != 4 or images.dtype not in DTYPES:
            return False
        batch, channels, height, width = images.shape
        rows, columns = self.results(images)
        return (
            channels % TOGETHER == 0
            and 0 < batch * max(height * width, rows * columns) < MOST_PIXELS
            and self.size[0] * self.size[1] < NONE
            and all(2 * padding <= size for padding, size in zip(self.padding, self.size, strict=True))
            and min(rows, columns) > 0
        )

    def results(self, images: Tensor) -> tuple[int, int]:
        """Rows and columns of them."""
        rows, columns = (
            (length + 2 * self.padding[axis] - self.size[axis]) // self.stride[axis] + 1
            for axis, length in enumerate(images.shape[2:])
        )
        return rows, columns

    def settings(self) -> dict[str, int]:
        """By the kernels' names."""
        names = zip("KSP", self, strict=True)
        return {f"{name}{axis}": pair[axis] for name, pair in names for axis in range(2)}


Pool = Callable[[Tensor, Window, bool, bool], Any]  # of maxima or not; whether padding counts in an average


def instead(pool: Pool, fits: Callable[[Tensor, Window], bool]) -> dict[Any, Callable[..., Any]]:
    """For functions of torch those that pool by `pool` what fits it."""

    def maxima(
        input: Tensor,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        window = Window.of(kernel_size, stride, padding)
        if fits(input, window) and _pair(dilation) == (1, 1) and not ceil_mode and not return_indices:
            return pool(input, window, True, True)
        return _MAX(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)

    def averages(
        input: Tensor,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        window = Window.of(kernel_size, stride, padding)
        if fits(input, window) and not ceil_mode and divisor_override is None:
            return pool(input, window, False, count_include_pad)
        return avg_pool2d(input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)

    return {_MAX: maxima, torch.max_pool2d: maxima, _AVERAGE: averages}


# --- averages with the right gradient


def mend_averages(model: nn.Module) -> None:
    """Let a model's average pools have the right gradient. What it calls as a function stays as it is."""
    for module in model.modules():
        if type(module) is nn.AvgPool2d:
            module.__class__ = _Average


class _Average(nn.AvgPool2d):
    """Compiled where torch's compiler has a gradient of its own which is right."""

    def forward(self, images: Tensor) -> Tensor:
        settings = (self.ceil_mode, self.count_include_pad, self.divisor_override)
        rows, columns = _pair(self.kernel_size)
        is_right = rows * columns <= COMPILED_PIXELS and not (self.ceil_mode and self.count_include_pad)
        pool = _AVERAGE if is_right and torch.compiler.is_compiling() else _uncompiled
        result: Tensor = pool(images, self.kernel_size, self.stride, self.padding, *settings)
        return result


@torch._disable_dynamo  # type: ignore[attr-defined]
def _uncompiled(images: Tensor, kernel_size: Sizes, stride: Sizes, padding: Sizes, *settings: Any) -> Any:
    """By kernel where torch's is wrong."""
    pool = avg_pool2d
    if has_wrong_gradient(images, padding) and has_triton():
        from weft.models.vision.pool_kernel import by_kernel

        pool = by_kernel()[_AVERAGE]
    return pool(images, kernel_size, stride, padding, *settings)


def avg_pool2d(
    input: Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, *more: Any, **named: Any
) -> Any:
    """torch's with the right gradient: that of a copy with channels first, where torch's would be wrong."""
    if not has_wrong_gradient(input, padding):
        return _AVERAGE(input, kernel_size, stride, padding, *more, **named)
    first = input.clone(memory_format=torch.contiguous_format)
    return _AVERAGE(first, kernel_size, stride, padding, *more, **named).contiguous(memory_format=torch.channels_last)


def has_wrong_gradient(images: Tensor, padding: Sizes) -> bool:
    """Whether torch's average of these would have one."""
    return images.is_cuda and images.dim() == 4 and images.stride(1) == 1 and any(_pair(padding))


# --- what kernels keep


def keeping() -> dict[Any, Callable[..., Any]]:
    """Functions that keep what kernels would keep. They compute nothing: for tensors without values."""
    return instead(_Kept.apply, lambda images, window: window.fits(images))


@contextmanager
def as_by_kernel() -> Iterator[None]:
    """While it lasts they stand for torch's, in backward too, where recompute pools again and modes of torch do not
    reach.
    """
    found = keeping()
    with (
        replaced(F, "max_pool2d", found[_MAX]),
        replaced(torch, "max_pool2d", found[torch.max_pool2d]),
        replaced(F, "avg_pool2d", found[_AVERAGE]),
    ):
        yield


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, window: Window, is_max: bool, counts_padding: bool) -> Tensor:
        is_last = images.is_contiguous(memory_format=torch.channels_last)
        form = torch.channels_last if is_last else torch.contiguous_format
        shape = (*images.shape[:2], *window.results(images))
        results = torch.empty(shape, dtype=images.dtype, device=images.device, memory_format=form)
        if is_max:
            ctx.save_for_backward(torch.empty_like(results, dtype=torch.uint8))
        ctx.shape = images.shape
        return results

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients.new_empty(ctx.shape), None, None, None


def _pair(sizes: Sizes) -> tuple[int, int]:
    if isinstance(sizes, int):
        return sizes, sizes
    return sizes[0], sizes[-1]

"""Image pools for which weft has GPU kernels (pool_kernel.py): when the kernels fit, and what they save for backward.

A max pool saves one byte for each result, its index in the window, and an average pool saves nothing. torch's pools
save their images, and 8 bytes for each result of a max pool.

This file also fixes torch's own average pool, whose gradient is silently wrong: on GPUs for padded channels-last images
(https://github.com/pytorch/pytorch/issues/188344, seen with 2.11), and compiled if windows reach beyond the edge
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

CHANNELS_PER_THREAD = 8  # channels that a thread reads at once
NO_CODE = 255  # not an index in a window
MOST_PIXELS = 2**31 - 2**10  # the limit for 32-bit indices, including those of the last program beyond the image
COMPILED_PIXELS = 25  # the largest window for which torch's compiler generates its own gradient
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX: Any = F.max_pool2d
_AVERAGE: Any = F.avg_pool2d
Size2d = int | tuple[int, ...] | list[int]  # a size of rows and columns


class PoolWindow(NamedTuple):
    """The window of a pool: its size, stride and padding, each as (rows, columns)."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @classmethod
    def of(cls, size: Size2d, stride: Size2d | None, padding: Size2d) -> PoolWindow:
        return cls(_pair(size), _pair(stride or size), _pair(padding))

    def fits(self, images: Tensor) -> bool:
        """Returns whether the kernels can pool images like these."""
        if images.dim() != 4 or images.dtype not in DTYPES:
            return False
        batch, channels, height, width = images.shape
        rows, columns = self.results(images)
        return (
            channels % CHANNELS_PER_THREAD == 0
            and 0 < batch * max(height * width, rows * columns) < MOST_PIXELS
            and self.size[0] * self.size[1] < NO_CODE
            and all(2 * padding <= size for padding, size in zip(self.padding, self.size, strict=True))
            and min(rows, columns) > 0
        )

    def results(self, images: Tensor) -> tuple[int, int]:
        """Returns the numbers of rows and columns of the results."""
        rows, columns = (
            (length + 2 * self.padding[axis] - self.size[axis]) // self.stride[axis] + 1
            for axis, length in enumerate(images.shape[2:])
        )
        return rows, columns

    def settings(self) -> dict[str, int]:
        """Returns the kernel's arguments K0, K1, S0, S1, P0 and P1."""
        names = zip("KSP", self, strict=True)
        return {f"{name}{axis}": pair[axis] for name, pair in names for axis in range(2)}


Pool = Callable[[Tensor, PoolWindow, bool, bool], Any]  # images, window, whether it is a max pool, count_include_pad


def pool_replacements(pool: Pool, fits: Callable[[Tensor, PoolWindow], bool]) -> dict[Any, Callable[..., Any]]:
    """Maps torch's pool functions to functions that call `pool` for images that fit, and torch otherwise."""

    def maxima(
        input: Tensor,
        kernel_size: Size2d,
        stride: Size2d | None = None,
        padding: Size2d = 0,
        dilation: Size2d = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        window = PoolWindow.of(kernel_size, stride, padding)
        if fits(input, window) and _pair(dilation) == (1, 1) and not ceil_mode and not return_indices:
            return pool(input, window, True, True)
        return _MAX(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)

    def averages(
        input: Tensor,
        kernel_size: Size2d,
        stride: Size2d | None = None,
        padding: Size2d = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        window = PoolWindow.of(kernel_size, stride, padding)
        if fits(input, window) and not ceil_mode and divisor_override is None:
            return pool(input, window, False, count_include_pad)
        return avg_pool2d(input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)

    return {_MAX: maxima, torch.max_pool2d: maxima, _AVERAGE: averages}


# --- average pools with a correct gradient


def fix_average_gradients(model: nn.Module) -> None:
    """Fix the gradient of a model's nn.AvgPool2d modules. Calls of F.avg_pool2d are not changed."""
    for module in model.modules():
        if type(module) is nn.AvgPool2d:
            module.__class__ = _FixedAveragePool


class _FixedAveragePool(nn.AvgPool2d):
    """An average pool that is compiled only if the gradient of torch's compiler is correct."""

    def forward(self, images: Tensor) -> Tensor:
        settings = (self.ceil_mode, self.count_include_pad, self.divisor_override)
        rows, columns = _pair(self.kernel_size)
        is_right = rows * columns <= COMPILED_PIXELS and not (self.ceil_mode and self.count_include_pad)
        pool = _AVERAGE if is_right and torch.compiler.is_compiling() else _uncompiled
        result: Tensor = pool(images, self.kernel_size, self.stride, self.padding, *settings)
        return result


@torch._disable_dynamo  # type: ignore[attr-defined]
def _uncompiled(images: Tensor, kernel_size: Size2d, stride: Size2d, padding: Size2d, *settings: Any) -> Any:
    """Uses weft's kernel if torch's gradient would be wrong and Triton is available."""
    pool = avg_pool2d
    if has_wrong_gradient(images, padding) and has_triton():
        from weft.models.vision.pool_kernel import kernel_pools

        pool = kernel_pools()[_AVERAGE]
    return pool(images, kernel_size, stride, padding, *settings)


def avg_pool2d(
    input: Tensor, kernel_size: Size2d, stride: Size2d | None = None, padding: Size2d = 0, *more: Any, **named: Any
) -> Any:
    """F.avg_pool2d with a correct gradient: pools a channels-first copy if torch's gradient would be wrong."""
    if not has_wrong_gradient(input, padding):
        return _AVERAGE(input, kernel_size, stride, padding, *more, **named)
    first = input.clone(memory_format=torch.contiguous_format)
    return _AVERAGE(first, kernel_size, stride, padding, *more, **named).contiguous(memory_format=torch.channels_last)


def has_wrong_gradient(images: Tensor, padding: Size2d) -> bool:
    """Returns whether the gradient of torch's average pool is wrong for these images."""
    return images.is_cuda and images.dim() == 4 and images.stride(1) == 1 and any(_pair(padding))


# --- memory that the kernels save for backward


def memory_only_pools() -> dict[Any, Callable[..., Any]]:
    """Maps torch's pool functions to functions that save as much memory as the kernels but compute nothing, for tensors
    without values.
    """
    return pool_replacements(_MemoryOnlyPool.apply, lambda images, window: window.fits(images))


@contextmanager
def memory_of_kernel_pools() -> Iterator[None]:
    """In this context the functions of `memory_only_pools` replace torch's. Also in backward, where recompute calls
    pools again and torch's modes are not active.
    """
    found = memory_only_pools()
    with (
        replaced(F, "max_pool2d", found[_MAX]),
        replaced(torch, "max_pool2d", found[torch.max_pool2d]),
        replaced(F, "avg_pool2d", found[_AVERAGE]),
    ):
        yield


class _MemoryOnlyPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, window: PoolWindow, is_max: bool, counts_padding: bool) -> Tensor:
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


def _pair(sizes: Size2d) -> tuple[int, int]:
    if isinstance(sizes, int):
        return sizes, sizes
    return sizes[0], sizes[-1]

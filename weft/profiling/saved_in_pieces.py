"""Activations saved by blocks that are compiled in pieces (`compile/pieces.py`).

They equal those of uncompiled blocks, with two exceptions. Pools run as kernels, which save other tensors. A ReLU in a
piece without a norm before it saves its mask beside its result; after a norm, the mask is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.inspection.torch_patches import replaced
from weft.models.vision.pools import memory_of_kernel_pools

_relu: Any = F.relu
_pad: Any = F.pad


@contextmanager
def as_in_pieces() -> Iterator[None]:
    """Inside the context, torch's functions save what blocks compiled in pieces save.

    This includes calls in backward by recompute, which modes of torch would miss. Pools compute nothing, so use it with
    fake tensors only.
    """
    with memory_of_kernel_pools(), replaced(F, "relu", _relu_in_piece), replaced(F, "pad", _pad_in_piece):
        yield


def _relu_in_piece(images: Tensor, inplace: bool = False) -> Any:
    """A ReLU of a sum, which is in one piece with the sum."""
    is_masked = _comes_from(images, "Add")  # asked before an in-place ReLU changes `grad_fn`
    result = _relu(images, inplace)
    return _Masked.apply(result) if is_masked else result


def _pad_in_piece(images: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """Padding, which is in one piece with a ReLU directly before it."""
    return _pad(_Masked.apply(images) if _comes_from(images, "Relu") else images, pad, mode, value)


def _comes_from(images: Tensor, name: str) -> bool:
    return images.grad_fn is not None and images.grad_fn.name().startswith(name)


class _Masked(torch.autograd.Function):
    """Returns a tensor unchanged, and saves a mask with one byte for each element."""

    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(images, dtype=torch.bool))
        return images.view_as(images)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> Tensor:
        return gradients

"""What blocks keep that are compiled in pieces (weft/compile/pieces.py): what they keep uncompiled, but for pools,
which have kernels then, and for ReLUs that are in a piece with no norm before them: their masks are kept beside the
results. Behind a norm they are computed again.
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
    """While it lasts, functions of torch keep that, in backward too, where recompute calls them again and modes of
    torch do not reach. Pools compute nothing: for tensors without values.
    """
    with memory_of_kernel_pools(), replaced(F, "relu", _relu_in_piece), replaced(F, "pad", _pad_in_piece):
        yield


def _relu_in_piece(images: Tensor, inplace: bool = False) -> Any:
    """A ReLU behind a sum is in one piece with it."""
    is_masked = _comes_from(images, "Add")  # before it is written over
    result = _relu(images, inplace)
    return _Masked.apply(result) if is_masked else result


def _pad_in_piece(images: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """So is one before padding, and behind nothing else."""
    return _pad(_Masked.apply(images) if _comes_from(images, "Relu") else images, pad, mode, value)


def _comes_from(images: Tensor, name: str) -> bool:
    return images.grad_fn is not None and images.grad_fn.name().startswith(name)


class _Masked(torch.autograd.Function):
    """A tensor as it is, for which a byte of each number is kept."""

    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(images, dtype=torch.bool))
        return images.view_as(images)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> Tensor:
        return gradients

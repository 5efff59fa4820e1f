"""LayerNorm and RMSNorm of features that are split over y: moments are summed over the axis, forward and backward."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from weft.comm import Axis, Ledger
from weft.inspection.split_probe import TOLERANCE, random_copy
from weft.parallel.tensor.operations import enter, leave

ALONE = Axis("y", 1, 0, None, Ledger())


_PLAIN: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # results of `is_plain_norm`


def split_norm(module: Any, axis: Axis, input: Tensor) -> Tensor:
    """Returns the LayerNorm or RMSNorm of this rank's features, computed in float32 at least."""
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    size = input.shape[-1] * axis.degree
    if isinstance(module, nn.LayerNorm):
        wide = wide - _sum_over(wide.sum(-1, keepdim=True), axis) / size
    variance = _sum_over(wide.square().sum(-1, keepdim=True), axis) / size
    eps = getattr(module, "eps", None) or getattr(module, "variance_epsilon", None) or torch.finfo(input.dtype).eps
    normed = (wide * torch.rsqrt(variance + eps)).to(input.dtype)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    out = normed if weight is None else normed * weight
    return out if bias is None else out + bias


def is_plain_norm(module: nn.Module, width: int) -> bool:
    """Does a norm of `width` features compute what `split_norm` does? Some add one to the weight, or norm more dims."""
    if module not in _PLAIN:
        _PLAIN[module] = _equals_split_norm(module, width)
    return _PLAIN[module]


def _equals_split_norm(module: nn.Module, width: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    try:
        copy = random_copy(module, generator)
        value = torch.randn(2, 4, width, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            return torch.allclose(copy(value), split_norm(copy, ALONE, value), rtol=TOLERANCE, atol=TOLERANCE)
    except Exception:  # anything that the user's code may raise
        return False


def _sum_over(value: Tensor, axis: Axis) -> Tensor:
    return enter(leave(value, axis), axis)

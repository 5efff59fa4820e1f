"""A norm by plain functions. For few rows on a CPU, the calls take longer than the numbers, so there are few."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from weft.models.attention import RMSNorm


def plain_norm(hidden: Tensor, norm: nn.Module) -> Tensor:
    """norm(hidden) of hidden states [tokens, hidden]."""
    is_wide = hidden.dtype in (torch.float32, torch.float64)
    if not (is_wide and isinstance(norm, RMSNorm) and hidden.is_cpu):
        out: Tensor = norm(hidden)
        return out
    length = torch.linalg.vector_norm(hidden, 2, -1, True)
    mean = torch.addcmul(_tensor(norm.eps, hidden.dtype), length, length, value=1 / hidden.shape[-1])
    return (hidden * mean.rsqrt_()).mul_(norm.weight)


@cache
def _tensor(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype)

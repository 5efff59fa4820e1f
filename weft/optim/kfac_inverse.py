"""Inverses of damped Kronecker factors, by Cholesky, with more damping where a factor is not positive definite."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

logger = logging.getLogger("weft")
RETRIES, RETRY_FACTOR = 6, 10.0


def damped_inverses(input_factor: Tensor, output_factor: Tensor, damping: float) -> tuple[Tensor, Tensor, float] | None:
    """(A + π √λ I)⁻¹, (G + √λ / π I)⁻¹ and the damping λ that was used, for factors [groups, n, n].

    π = √((tr A / dim A) / (tr G / dim G)) balances the two. If Cholesky fails, it is tried again with ten times the
    damping, up to `RETRIES` times. Returns None if all fail, or if a factor is not finite.
    """
    if not bool(input_factor.isfinite().all() & output_factor.isfinite().all()):
        return None
    means = [factor.diagonal(dim1=1, dim2=2).mean(1) for factor in (input_factor, output_factor)]
    is_positive = (means[0] > 0) & (means[1] > 0)
    pi = torch.where(is_positive, means[0] / torch.where(is_positive, means[1], 1.0), 1.0).sqrt()
    for attempt in range(RETRIES + 1):
        used = damping * RETRY_FACTOR**attempt
        first = _inverse(input_factor, pi * used**0.5)
        second = None if first is None else _inverse(output_factor, used**0.5 / pi)
        if first is not None and second is not None:
            return first, second, used
    return None


def _inverse(factor: Tensor, damping: Tensor) -> Tensor | None:
    """(factor + damping I)⁻¹ for [groups, n, n] and [groups]; None if that is not positive definite."""
    damped = factor.clone()
    damped.diagonal(dim1=1, dim2=2).add_(damping.unsqueeze(1))
    lower, info = torch.linalg.cholesky_ex(damped)
    if bool(info.any()):
        return None
    found = torch.cholesky_inverse(lower)
    return found if bool(found.isfinite().all()) else None

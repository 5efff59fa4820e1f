"""Inverses of damped Kronecker factors, by Cholesky, with more damping where a factor is not positive definite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.optim.kfac_layers import FactorSizes
from weft.optim.kfac_placement import NUM_STATISTICS, make_slots, slot_views

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


def write_inverses(places: tuple[Tensor, Tensor, Tensor], factors: tuple[Tensor, Tensor], damping: float) -> None:
    """Write a layer's damped inverses and its statistics to their places in a message.

    Statistics are the mean diagonals of both factors and the damping that was used: infinite, and no inverses are
    written, if there are none.
    """
    found = damped_inverses(*factors, damping)
    means = [factor.diagonal(dim1=1, dim2=2).mean() for factor in factors]
    places[2].copy_(torch.stack([*means, torch.full_like(means[0], math.inf if found is None else found[2])]))
    if found is not None:
        places[0].copy_(found[0])
        places[1].copy_(found[1])


def invert_message(factors: Tensor, sizes: Sequence[FactorSizes], damping: float) -> Tensor:
    """The message with inverses and statistics of layers whose factors a message brings, one layer behind the other."""
    given, asked = (make_slots(sizes, [0] * len(sizes), 1, extra) for extra in (0, NUM_STATISTICS))
    inverses = factors.new_zeros(asked.numel)
    for layer, begin, start in zip(sizes, given.starts, asked.starts, strict=True):
        first, second, _ = slot_views(factors, begin, layer, 0)
        write_inverses(slot_views(inverses, start, layer, NUM_STATISTICS), (first, second), damping)
    return inverses

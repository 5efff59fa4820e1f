"""Inverses of damped Kronecker factors, by Cholesky, on training ranks or on ranks with the role `curvature`.

All training ranks keep the factors. With `sub-grid` and `sub-grid-async` rank 0 gives the factors to an `Inverter` when
inverses are due, and broadcasts what it answers. With `sub-grid` all ranks wait for that. With `sub-grid-async` they go
on: while an answer is outstanding, rank 0 says once in each update whether it has come, and all ranks use it from the
same update on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from weft.optim.kfac_layers import FactorSizes
from weft.optim.kfac_placement import NUM_STATISTICS, make_slots, slot_views
from weft.optim.kfac_ranks import BatchRanks

RETRIES, RETRY_FACTOR = 6, 10.0


def damped_inverses(input_factor: Tensor, output_factor: Tensor, damping: float) -> tuple[Tensor, Tensor, float] | None:
    """Returns (A + π √λ I)⁻¹, (G + √λ / π I)⁻¹ and the damping λ that was used, for factors [groups, n, n].

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
    """Returns the message with inverses and statistics of layers whose factors a message brings, one layer behind the
    other.
    """
    given, asked = (make_slots(sizes, [0] * len(sizes), 1, extra) for extra in (0, NUM_STATISTICS))
    inverses = factors.new_zeros(asked.numel)
    for layer, begin, start in zip(sizes, given.starts, asked.starts, strict=True):
        first, second, _ = slot_views(factors, begin, layer, 0)
        write_inverses(slot_views(inverses, start, layer, NUM_STATISTICS), (first, second), damping)
    return inverses


Factors = tuple[Tensor, Tensor]


class Inverter(Protocol):
    """Inverts all layers' factors; one request at a time."""

    def ask(self, factors: Sequence[Factors]) -> None:
        """Begin to invert these factors, which may change after this call."""

    def has_answer(self) -> bool:
        """Has the answer to the last request come?"""

    def take(self) -> Tensor:
        """Wait for the answer, a message of host memory with the inverses and statistics of all layers in order."""

    def close(self) -> None:
        """No more will be asked."""


class LocalInverter:
    """Inverts in this process, where no curvature ranks are given (a benchmark, for example)."""

    def __init__(self, sizes: Sequence[FactorSizes], damping: float) -> None:
        self._sizes, self._damping = sizes, damping
        self._answer: Tensor | None = None

    def ask(self, factors: Sequence[Factors]) -> None:
        self._answer = invert_message(pack_factors(factors), self._sizes, self._damping)

    def has_answer(self) -> bool:
        return self._answer is not None

    def take(self) -> Tensor:
        assert self._answer is not None, "nothing was asked"
        answer, self._answer = self._answer, None
        return answer

    def close(self) -> None:
        """Nothing is outstanding."""


def pack_factors(factors: Sequence[Factors]) -> Tensor:
    """Packs both factors of some layers into one message of host memory, which shares no memory with them."""
    return torch.cat([factor.flatten() for pair in factors for factor in pair]).cpu()


class SubGrid:
    """A training rank's view of the requests: `of_update` is the update whose factors are being inverted, or None.

    `like` is a tensor with the device and the dtype of the inverses. All ranks call `ask` and `take`.
    """

    def __init__(
        self, sizes: Sequence[FactorSizes], ranks: BatchRanks, damping: float, waits: bool, like: Tensor
    ) -> None:
        self.inverter: Inverter = LocalInverter(sizes, damping)  # used on rank 0 alone
        self.waits, self.num_skipped = waits, 0
        self.of_update: int | None = None
        self._ranks, self._like = ranks, like
        self._numel = make_slots(sizes, [0] * len(sizes), 1, NUM_STATISTICS).numel

    def ask(self, update: int, factors: Sequence[Factors]) -> None:
        """Ask for the inverses of an update's factors, or count them as skipped if others are outstanding."""
        if self.of_update is not None:
            self.num_skipped += 1
            return
        self.of_update = update
        if self._ranks.index == 0:
            self.inverter.ask(factors)

    def take(self, waits: bool) -> tuple[int, Tensor] | None:
        """Returns the update that was asked for and its message of inverses, if it has come, or after a wait; else
        None.
        """
        if self.of_update is None or not (waits or self._has_come()):
            return None
        message = self._like.new_empty(self._numel)
        if self._ranks.index == 0:
            message.copy_(self.inverter.take())
        self._ranks.broadcast(message)
        update, self.of_update = self.of_update, None
        return update, message

    def _has_come(self) -> bool:
        """Has the answer come to rank 0? All ranks learn the same."""
        flag = torch.zeros(1, dtype=torch.int64, device=self._like.device)
        if self._ranks.index == 0:
            flag.fill_(self.inverter.has_answer())
        self._ranks.broadcast(flag)
        return bool(flag)

"""Inverses of K-FAC's factors that ranks with the role `curvature` compute, asked by the first training rank.

All training ranks keep the factors. When inverses are due, rank 0 gives the factors to an `Inverter`, and broadcasts
what it answers. With `sub-grid` all ranks wait for that. With `sub-grid-async` they go on: while an answer is
outstanding, rank 0 says once in each update whether it has come, and all ranks use it from the same update on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from weft.optim.kfac_inverse import invert_message
from weft.optim.kfac_layers import FactorSizes
from weft.optim.kfac_placement import NUM_STATISTICS, make_slots
from weft.optim.kfac_ranks import BatchRanks

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
    """Both factors of some layers in one message of host memory, which shares no memory with them."""
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
        """The update that was asked for and its message of inverses, if it has come, or after a wait; else None."""
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

"""Goldfish loss (Hans et al. 2024): leaves one in k targets out of the loss, chosen by a hash of the targets before it.

A passage loses the same targets wherever it occurs, so the model cannot memorise it. As an input every token stays. A
target is left out if T[key] < 1/k. The key is the product of the last `h` targets, including this one, with the
overflow of 64 bits, modulo the length of T. T holds numbers in [0, 1) that torch's CPU generator draws from one seed,
whatever the device. The first h - 1 targets of a sequence always count. The product does not depend on the order of the
targets, and all windows that contain a token 0 have the same key.

Targets are masked before a batch is split over ranks, so every layout of the sequence and every implementation of the
loss leaves out the same ones, and the loss is divided by the number of those that remain. Held-out loss counts all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

from weft.errors import ConfigError

if TYPE_CHECKING:  # the table of a run file is read without torch
    from torch import Tensor

TABLE_SIZE = 1_000_003
TABLE_SEED = 2_971_215_073


@dataclass(frozen=True)
class Goldfish:
    """Which targets the loss leaves out."""

    k: Annotated[int, "one in k targets is left out"] = 4
    h: Annotated[int, "by a hash of so many targets: itself and those before it"] = 13

    def __post_init__(self) -> None:
        if self.k < 2:
            raise ConfigError(f"train.goldfish.k = {self.k} leaves out every target; use at least 2")
        if self.h < 1:
            raise ConfigError(f"train.goldfish.h = {self.h}; a window holds at least 1 target")

    def left_out(self, targets: Tensor) -> Tensor:
        """Returns a mask of the targets [batch, sequence] that are left out."""
        import torch

        result = torch.zeros_like(targets, dtype=torch.bool)
        num_windows = targets.shape[1] - self.h + 1
        if num_windows < 1:
            return result
        keys = targets[:, :num_windows].clone()
        for place in range(1, self.h):
            keys *= targets[:, place : place + num_windows]
        result[:, self.h - 1 :] = _table().to(targets.device)[keys % TABLE_SIZE] < 1 / self.k
        return result

    def apply(self, targets: Tensor) -> Tensor:
        """Replace targets that are left out by IGNORE. Targets that are IGNORE already stay so."""
        from weft.models.loss import IGNORE

        return targets.masked_fill(self.left_out(targets), IGNORE)


@lru_cache(maxsize=1)
def _table() -> Tensor:
    import torch

    # Always on the CPU: generators of other devices draw other numbers from the same seed.
    generator = torch.Generator("cpu").manual_seed(TABLE_SEED)
    return torch.rand(TABLE_SIZE, generator=generator, device="cpu")

"""Goldfish loss (Hans et al. 2024): one in k targets is left out, chosen by a hash of what stands before it.

The same passage loses the same targets wherever it occurs, so it cannot be learnt by heart; as an input every token
stays. A target is left out if T[key] < 1/k, where key is the product of the last `h` targets, itself among them, with
the overflow of 64 bits, modulo the length of T: numbers in [0, 1) that torch's CPU generator draws from one seed, on
any device. The first h - 1 targets of a sequence always count. Of a product the order is lost, and a token 0 makes all
windows that hold it alike.

Targets are changed before a batch is dealt out, so any layout of the sequence and any form of the loss take the same
ones, and the count of targets that the loss is divided by is theirs. Held-out loss counts all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.models.loss import IGNORE

TABLE_SIZE = 1_000_003
TABLE_SEED = 2_971_215_073


@dataclass(frozen=True)
class Goldfish:
    """One in `k` targets, by a hash of `h` targets."""

    k: int = 4
    h: int = 13

    def __post_init__(self) -> None:
        if self.k < 2:
            raise ConfigError(f"train.goldfish.k = {self.k} leaves out every target; use at least 2")
        if self.h < 1:
            raise ConfigError(f"train.goldfish.h = {self.h}; a window holds at least 1 target")

    def left_out(self, targets: Tensor) -> Tensor:
        """Which of the targets [batch, sequence] are left out."""
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
        """The targets that count; those that did not count before still do not."""
        return targets.masked_fill(self.left_out(targets), IGNORE)


@lru_cache(maxsize=1)
def _table() -> Tensor:
    # On the CPU, whatever the device: generators of others draw other numbers from the same seed.
    generator = torch.Generator("cpu").manual_seed(TABLE_SEED)
    return torch.rand(TABLE_SIZE, generator=generator, device="cpu")

"""The table `[lora]` of a run file."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.errors import ConfigError
from weft.schema import at_least


@dataclass(frozen=True)
class Lora:
    """The table `[lora]`: the rank and scale (`alpha` / `rank`) of the updates, the names of the linears that have one,
    and the dropout of their inputs. `adapter` is a folder in PEFT's format to start from, which then gives the rest.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    dropout: float = 0.0
    adapter: str | None = None

    def __post_init__(self) -> None:
        at_least("lora.rank", self.rank, 1)
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"lora.alpha = {self.alpha}; it must be above 0 and finite")
        if not self.targets:
            raise ConfigError("lora.targets = [] names no linear; give names, such as ['q_proj', 'v_proj']")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora.dropout = {self.dropout}; it must be at least 0 and below 1")

    @property
    def scaling(self) -> float:
        """The factor of the update."""
        return self.alpha / self.rank

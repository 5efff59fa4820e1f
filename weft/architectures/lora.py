"""The table `[lora]` of a run file."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated

from weft.errors import ConfigError
from weft.schema import at_least, to_table

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Lora:
    """The table `[lora]`: updates of low rank. `targets` is as PEFT's target_modules."""

    rank: Annotated[int, "the rank of the updates"] = 8
    alpha: Annotated[float, "their scale is alpha / rank"] = 16.0
    targets: Annotated[
        tuple[str, ...] | str,
        "names of the linears of blocks that have an update, or ends of names after a dot; as a string, a regular "
        "expression for whole names, or all-linear",
    ] = ("q_proj", "v_proj")
    dropout: Annotated[float, "the probability of dropout on the updates' inputs"] = 0.0
    adapter: Annotated[str | None, "a folder in PEFT's format to start from, which gives the rest"] = None

    def __post_init__(self) -> None:
        at_least("lora.rank", self.rank, 1)
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"lora.alpha = {self.alpha}; it must be above 0 and finite")
        if not self.targets:
            raise ConfigError(
                f"lora.targets = {to_table(self.targets)!r} names no linear; give names, such as ['q_proj', 'v_proj']"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora.dropout = {self.dropout}; it must be at least 0 and below 1")

        if isinstance(self.targets, str) and self.targets != ALL_LINEAR:
            try:
                re.compile(self.targets)
            except re.error as error:
                raise ConfigError(
                    f"lora.targets = '{self.targets}' is no regular expression ({error}); give one for whole names, "
                    f"a list of names, or '{ALL_LINEAR}'"
                ) from None

    def is_target(self, name: str) -> bool:
        """Does `targets` choose the linear with this whole name?"""
        if isinstance(self.targets, str):
            return self.targets == ALL_LINEAR or re.fullmatch(self.targets, name) is not None
        return any(is_end_of(target, name) for target in self.targets)

    @property
    def scaling(self) -> float:
        """The factor of the update."""
        return self.alpha / self.rank


def is_end_of(target: str, name: str) -> bool:
    """Is `target` the name of a module, or its end after a dot?"""
    return name == target or name.endswith(f".{target}")

"""How small all-reduces are carried out, as a decode over several ranks makes them, and of which calls they consist.

    library    the axis' usual all-reduce, in two levels where the axis crosses nodes (`collective_choice.py`)
    one_shot   one all-gather of whole tensors; each rank adds them up in the order of ranks
    two_shot   a reduce-scatter and an all-gather of equal parts, padded to 16 bytes each
    symmetric_one_shot, symmetric_two_shot
               the same in one kernel, which reads the memory of other GPUs (`comm/small_sums.py`)

For n ranks and W bytes, one_shot receives (n - 1)·W bytes in one call, two_shot 2·(n - 1)/n·W in two. Which takes least
depends on W, n and the machine, so it is chosen by size from a measured table (`comm/small_measure.py`). Sums that
symmetric memory does not take are the library's.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Literal, get_args

Strategy = Literal["library", "one_shot", "two_shot", "symmetric_one_shot", "symmetric_two_shot"]
SYMMETRIC: tuple[Strategy, ...] = ("symmetric_one_shot", "symmetric_two_shot")
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class SmallChoice:
    """The strategy of an all-reduce by its bytes: that of the least of `sizes` that is not smaller; beyond, the
    library's.
    """

    sizes: tuple[int, ...]
    strategies: tuple[Strategy, ...]

    @staticmethod
    def always(strategy: Strategy) -> SmallChoice:
        return SmallChoice((1 << 62,), (strategy,))

    def strategy(self, num_bytes: int) -> Strategy:
        place = bisect.bisect_left(self.sizes, num_bytes)
        return self.strategies[place] if place < len(self.sizes) else "library"


def padded_to_parts(num_bytes: int, degree: int) -> int:
    """Bytes of a tensor that is padded to equal parts of whole 16 bytes for all ranks."""
    unit = degree * ALIGNMENT_BYTES
    return -(-num_bytes // unit) * unit


def calls_of_small(strategy: Strategy, num_bytes: int, degree: int) -> list[tuple[str, int]]:
    """The calls that replace one all-reduce: (operation, bytes), as the ledger counts them."""
    if strategy == "library" or strategy in SYMMETRIC:
        return [("all_reduce", num_bytes)]
    if strategy == "one_shot":
        return [("all_gather", degree * num_bytes)]
    padded = padded_to_parts(num_bytes, degree)
    return [("reduce_scatter", padded), ("all_gather", padded)]

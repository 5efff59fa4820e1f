"""The number of threads with which a CPU decodes fastest, found by a short measurement."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn import functional as F


def fastest_threads(most: int, seconds_of: Callable[[int], float] | None = None) -> int:
    """The number of threads with which a product takes least time: a power of two, or `most`. More must gain 5 %."""
    if most == 1:
        return 1
    numbers = [number for number in (2**power for power in range(most.bit_length())) if number < most] + [most]
    seconds = {number: (seconds_of or _seconds_of_product)(number) for number in numbers}
    best = 1
    for number in numbers:
        best = number if seconds[number] < 0.95 * seconds[best] else best
    return best


def _seconds_of_product(threads: int) -> float:
    """The least of some times of a product of one row with a weight of 64 MB, which no cache holds."""
    before = torch.get_num_threads()
    weight, row = torch.zeros(4096, 4096), torch.ones(1, 4096)
    torch.set_num_threads(threads)
    try:
        best = float("inf")
        for _ in range(8):
            begin = time.perf_counter()
            F.linear(row, weight)
            best = min(best, time.perf_counter() - begin)
        return best
    finally:
        torch.set_num_threads(before)

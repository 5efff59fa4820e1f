"""Memory that is read while a CPU is measured, as the weights of a large model would be.

What products read pushes weights, code and data of other operations out of the caches, so that these take longer.
"""

from __future__ import annotations

from time import thread_time as clock

import torch

RING_BYTES = 1 << 28  # more than caches hold
_COLUMNS = 1024


class Ballast:
    """Memory that is read after products. Keeps when products began, and how long it was read after each."""

    def __init__(self, ring_bytes: int | None = None) -> None:
        ring_bytes = ring_bytes or RING_BYTES
        self._memory, self._row = torch.ones(ring_bytes // 4 // _COLUMNS, _COLUMNS), torch.ones(_COLUMNS)
        self._place = self._num_rows = 0
        self.begins, self.seconds = list[float](), list[float]()

    def set_bytes(self, number: int) -> None:
        """How many are read each time."""
        self._num_rows = number // 4 // _COLUMNS

    def clear(self) -> None:
        self.begins.clear()
        self.seconds.clear()

    def begin(self) -> None:
        self.begins.append(clock())

    def read_again(self) -> None:
        """Read the rows of the last time, as every step of a decode reads the same weights."""
        self._place = 0
        self.read()

    def read(self, share: float = 1.0) -> None:
        """Read the next rows, as a product does: a share of those that were set."""
        start = clock()
        left = int(share * self._num_rows)
        while left:
            number = min(left, len(self._memory) - self._place)
            torch.mv(self._memory[self._place : self._place + number], self._row)
            self._place, left = (self._place + number) % len(self._memory), left - number
        self.seconds.append(clock() - start)

"""Results of the collectives of a block's forward, kept so that its recompute does not communicate again.

A forward that is recomputed in backward calls the same collectives twice. `KeptResults` copies the result of each one
in the first call, and fills the outputs of the second call from these copies (communication-aware checkpointing, Singh
et al. 2023). A recompute stops when it has what backward needs, so the last collectives of a block may not be reached:
from the second time on, only as many results are kept as the first recompute took.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class KeptBytes:
    """The bytes of all results that a rank keeps now, and the most that it kept at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, num_bytes: int) -> None:
        """Count results that are kept, or (negative) that are dropped."""
        self.now += num_bytes
        self.most = max(self.most, self.now)


class NeededResults:
    """How many collectives of a block its recompute reaches; None before the first recompute."""

    number: int | None = None


class KeptResults:
    """The results of one forward. `is_again` says that the forward runs for the second time."""

    def __init__(self, total: KeptBytes, needed: NeededResults) -> None:
        self._total, self._needed = total, needed
        self._copies: deque[list[Tensor]] = deque()
        self._num_started = self._num_taken = 0
        self.is_again = False

    def make_room(self) -> list[Tensor] | None:
        """Returns an empty list for the copies of the next collective's results; None if they are not needed."""
        self._num_started += 1
        if self._needed.number is not None and self._num_started > self._needed.number:
            return None
        self._copies.append([])
        return self._copies[-1]

    def keep(self, room: list[Tensor], results: Sequence[Tensor]) -> None:
        """Copy the results of a collective that is complete."""
        with torch.no_grad(), _disable_current_modes():  # not part of what selective recompute records
            room += [result.detach().clone() for result in results]
        self._total.add(_bytes(room))

    def take(self, results: Sequence[Tensor]) -> bool:
        """Fill the outputs of the next collective; False if nothing is kept for it."""
        if not self._copies or not self.is_again:
            return False
        copies = self._copies.popleft()
        self._num_taken += 1
        with torch.no_grad(), _disable_current_modes():
            for result, copy in zip(results, copies, strict=True):
                result.detach().copy_(copy)
        self._total.add(-_bytes(copies))
        return True

    def end(self) -> None:
        """Drop what a recompute did not reach."""
        self._needed.number = self._num_taken
        for copies in self._copies:
            self._total.add(-_bytes(copies))
        self._copies.clear()


class KeepingForward:
    """A forward that may run twice: `holder.kept` collects the results of collectives, and then provides them."""

    def __init__(self, forward: Callable[..., Any], holder: Any, needed: NeededResults) -> None:
        self._forward, self._holder = forward, holder
        self._kept = KeptResults(holder.kept_bytes, needed)

    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]  # what it keeps differs from call to call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before, self._holder.kept = self._holder.kept, self._kept
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._holder.kept = before
            if self._kept.is_again:
                self._kept.end()
            self._kept.is_again = True


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

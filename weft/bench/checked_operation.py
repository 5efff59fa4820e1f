"""An operation that is timed, and how what it delivers is checked.

Payloads are whole numbers that follow from (rank, place, iteration), and receive buffers are overwritten before a
checked iteration, so a flipped bit, ranks in the wrong order and a buffer that was not written are all found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import Axis
from weft.errors import CorruptionError

ITEM_BYTES = 4  # int32
STALE = -1  # no payload has it
_MODULUS = 65_521  # sums over 32,000 ranks still fit int32


def pattern(rank: int, size: int, iteration: int) -> Tensor:
    """The payload of a rank: [size] int32."""
    return ((torch.arange(size) * 7 + rank * 1009 + iteration * 31) % _MODULUS).to(torch.int32)


@dataclass
class Buffers:
    """What a rank gives to an operation and what it gets. In-place operations have one tensor for both."""

    given: Tensor
    taken: Tensor


@dataclass(frozen=True)
class BenchOperation:
    """An operation of one size. `formula` is its name in the ring formulas, None if the planner does not time it.

    `expected(rank, degree, size, iteration)` is what `taken` must hold, None on a rank that receives nothing.
    """

    name: str
    make: Callable[[int, int], tuple[int, int]]  # (elements, degree) -> sizes of `given` and `taken`
    run: Callable[[Buffers, Axis], None]
    expected: Callable[[int, int, int, int], Tensor | None]
    formula: str | None = None
    in_place: bool = False
    only_pairs: bool = False  # uses the first two ranks
    num_messages: int = 1  # that a rank sends in one direction in a repeat
    is_round_trip: bool = False  # a repeat is a message there and one back

    def buffers(self, num_bytes: int, degree: int, device: torch.device, pinned: bool = False) -> Buffers:
        """Buffers for a call of about `num_bytes`, rounded up to whole parts for each rank."""

        def zeros(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device, pin_memory=pinned)

        given, taken = self.make(max(1, num_bytes // ITEM_BYTES), degree)
        first = zeros(given)
        return Buffers(first, first if self.in_place else zeros(taken))

    def check(self, buffers: Buffers, axis: Axis, iteration: int) -> None:
        """Run once with a new payload, and raise CorruptionError if the result is wrong."""
        buffers.taken.fill_(STALE)
        buffers.given.copy_(pattern(axis.index, buffers.given.numel(), iteration))
        self.run(buffers, axis)
        wanted = self.expected(axis.index, axis.degree, buffers.given.numel(), iteration)
        if wanted is not None:
            compare(self.name, axis.index, buffers.taken.cpu(), wanted)


def compare(name: str, rank: int, found: Tensor, wanted: Tensor) -> None:
    """Raise CorruptionError at the first element that differs."""
    wrong = (found != wanted).nonzero().flatten().tolist()
    if wrong:
        place = wrong[0]
        stale = "; it was never written" if int(found[place]) == STALE else ""
        raise CorruptionError(
            f"{name}: rank {rank} received {int(found[place])} instead of {int(wanted[place])} at element {place} of "
            f"{found.numel()} ({len(wrong)} are wrong{stale}); the transport corrupts data: check drivers and cables"
        )

"""A flat buffer as AdamW holds it: its state, and the runs of elements that are treated alike and updated at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.optim.state_store import Store
from weft.optim.update import needs_draws
from weft.sharding.flat_buffer import Flat
from weft.sharding.layout import CODE_BLOCK

_SEED_STEP = 1_000_003


@dataclass(frozen=True)
class Run:
    """The elements [start, stop) of a slice: the parts from `first` to before `last`, all of one group."""

    start: int
    stop: int
    group: int
    first: int
    last: int

    @property
    def numel(self) -> int:
        """How many."""
        return self.stop - self.start

    def chunks(self, size: int) -> list[tuple[int, int]]:
        """The run in pieces of at most `size`, which is whole blocks of codes, or all of it."""
        assert size % CODE_BLOCK == 0 or size == self.numel
        return [(start, min(start + size, self.stop)) for start in range(self.start, self.stop, size)]


class Held:
    """A flat buffer with its state, and the runs that it is updated in."""

    def __init__(self, flat: Flat, number: int, groups: Mapping[int, int]) -> None:
        self.flat, self.number = flat, number
        self.parts = [(part, piece) for part, piece in zip(flat.parts, flat.pieces, strict=True) if piece.numel()]
        self.group_of = [groups.get(id(piece)) for _, piece in self.parts]
        self.store = Store(flat)
        self.needs_draws = needs_draws(flat.slice, self.store.tensors)
        # Of a delayed update: its gradient and what that is scaled by, where the weights go, and when they are there.
        self.pending: Tensor | None = None
        self.pending_scale: Tensor | None = None
        self.following: Tensor | None = None
        self.done: torch.cuda.Event | None = None

    def runs(self, joined: bool) -> Iterator[Run]:
        """Parts that lie side by side and are alike, as one where `joined`; padding between them stays zero."""
        steps, found = self.store.steps.tolist(), list[Run]()
        for index, ((part, piece), group) in enumerate(zip(self.parts, self.group_of, strict=True)):
            shows = not (self.flat.hides_gradient or self.flat.delays)
            if group is None or (shows and piece.grad is None):
                continue
            stop, last = part.offset + part.stop - part.start, found[-1] if found else None
            if joined and last and last.last == index and last.group == group and steps[last.first] == steps[index]:
                found[-1] = Run(last.start, stop, group, last.first, index + 1)
            else:
                found.append(Run(part.offset, stop, group, index, index + 1))
        return iter(found)

    def seed(self, step: int, start: int) -> int:
        """Of the draws of a chunk: from the step, the buffer and the place in all of it, which no shard changes."""
        position = self.flat.shard.index * self.flat.layout.slice_numel + start
        return ((step * _SEED_STEP + self.number) % (1 << 31) << 32) + position % (1 << 32)

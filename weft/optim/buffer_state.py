"""AdamW's state of one flat buffer, and the ranges of elements that are updated together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.optim.state_store import MomentStore
from weft.optim.update import needs_random_bits
from weft.sharding.flat_buffer import Flat
from weft.sharding.layout import CODE_BLOCK

_SEED_STEP = 1_000_003


@dataclass(frozen=True)
class ElementRange:
    """The elements [start, stop) of a slice: its parts from `first` to before `last`, all in one parameter group."""

    start: int
    stop: int
    group: int
    first: int
    last: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    def chunks(self, size: int) -> list[tuple[int, int]]:
        """Split the range into chunks (start, stop) of at most `size`: a multiple of CODE_BLOCK, or the whole range."""
        assert size % CODE_BLOCK == 0 or size == self.numel
        return [(start, min(start + size, self.stop)) for start in range(self.start, self.stop, size)]


class BufferState:
    """A flat buffer with its optimizer state. `groups` maps the id of a piece to its parameter group."""

    def __init__(self, flat: Flat, number: int, groups: Mapping[int, int]) -> None:
        self.flat, self.number = flat, number
        self.parts = [(part, piece) for part, piece in zip(flat.parts, flat.pieces, strict=True) if piece.numel()]
        self.group_of = [groups.get(id(piece)) for _, piece in self.parts]
        self.store = MomentStore(flat)
        self.needs_random_bits = needs_random_bits(flat.slice, self.store.tensors)
        # A delayed update: its gradient and scale, a tensor for the new weights, and the event that ends it.
        self.pending: Tensor | None = None
        self.pending_scale: Tensor | None = None
        self.following: Tensor | None = None
        self.done: torch.cuda.Event | None = None

    def runs(self, joined: bool) -> Iterator[ElementRange]:
        """Yield the ranges to update.

        If `joined`, neighbouring parts of equal group and step form one; padding stays zero.
        """
        steps, found = self.store.steps.tolist(), list[ElementRange]()
        for index, ((part, piece), group) in enumerate(zip(self.parts, self.group_of, strict=True)):
            shows = not (self.flat.hides_gradient or self.flat.options.delays)
            if group is None or id(piece) in self.flat.unused or (shows and piece.grad is None):
                continue
            stop, last = part.offset + part.stop - part.start, found[-1] if found else None
            if joined and last and last.last == index and last.group == group and steps[last.first] == steps[index]:
                found[-1] = ElementRange(last.start, stop, group, last.first, index + 1)
            else:
                found.append(ElementRange(part.offset, stop, group, index, index + 1))
        return iter(found)

    def seed(self, step: int, start: int) -> int:
        """Seed for the random bits of a chunk, from step, buffer and position in it; sharding does not change it."""
        position = self.flat.shard.index * self.flat.layout.slice_numel + start
        return ((step * _SEED_STEP + self.number) % (1 << 31) << 32) + position % (1 << 32)

"""AdamW's state of one flat buffer: its tensors, a delayed update, and the ranges that are updated together.

Moments are in the master dtype, in bf16, or 8-bit codes with a scale for each `CODE_BLOCK` elements of a part, counted
from the start of the part.

A delayed update (`plan.memory.delay`) is saved as its gradient, its scale and its number. `pending_step` counts updates
from 1 and must be `step` + 1; otherwise the gradient is stale, because a run without delay has continued since it was
saved. A stale gradient is never applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from weft.errors import CheckpointError
from weft.optim.update import decode, encode, needs_random_bits
from weft.sharding.flat_buffer import Flat
from weft.sharding.layout import CODE_BLOCK, ParameterPart, moment_dtype, num_scales


class MomentStore:
    """Both moments of a slice, with padding, and the step count of each part."""

    def __init__(self, flat: Flat) -> None:
        moment = moment_dtype(flat.options.state, flat.options.master_dtype)
        self.has_scales = moment is None
        parts = [part for part in flat.parts if part.numel]
        numel = flat.layout.slice_numel if parts else 0
        self.steps = torch.zeros(len(parts))
        self.tensors: tuple[Tensor, ...]
        if moment is None:
            counts = [num_scales(part) for part in parts]
            self._scale_starts = [sum(counts[:index]) for index in range(len(counts))]
            scales = [flat.state_zeros(sum(counts), torch.float32) for _ in range(2)]
            codes = flat.state_zeros(numel, torch.int8), flat.state_zeros(numel, torch.uint8)
            self.tensors = (codes[0], scales[0], codes[1], scales[1])
        else:
            self.tensors = (flat.state_zeros(numel, moment), flat.state_zeros(numel, moment))
        # Whether torch's fused kernel can update it: all tensors have one dtype, and it is not rounded.
        self.is_plain = moment == flat.options.slice_dtype != torch.bfloat16

    def at(self, index: int, part: ParameterPart, place: slice) -> tuple[Tensor, ...]:
        """Returns the state of the elements at `place` of the slice.

        For 8-bit codes they must lie in part `index` and cover whole blocks.
        """
        if not self.has_scales:
            return tuple(tensor[place] for tensor in self.tensors)
        low = self._scale_starts[index] + (place.start - part.offset) // CODE_BLOCK
        scales = slice(low, low + -(-(place.stop - place.start) // CODE_BLOCK))
        return tuple(tensor[place if number % 2 == 0 else scales] for number, tensor in enumerate(self.tensors))

    def views(self, index: int, part: ParameterPart) -> dict[str, Tensor]:
        """Return a part's state by name, as views in the stored format."""
        moments = ("exp_avg", "exp_avg_sq")
        names = [f"{one}{end}" for one in moments for end in (("", "_scale") if self.has_scales else ("",))]
        found = self.at(index, part, part.place)
        return {"step": self.steps[index], **dict(zip(names, found, strict=True))}

    def read(self, index: int, part: ParameterPart) -> tuple[Tensor, Tensor]:
        """Return a part's moments: as stored, or decoded to fp32."""
        return decode(self.at(index, part, part.place))

    def write(self, index: int, part: ParameterPart, first: Tensor, second: Tensor) -> None:
        """Set a part's moments."""
        encode(self.at(index, part, part.place), first, second)


KINDS = ("pending", "pending_scale", "pending_step")


def is_pending(state: Mapping[str, Tensor]) -> bool:
    """Return whether a state contains a delayed update."""
    return "pending" in state


def stale_reason(state: Mapping[str, Tensor]) -> str | None:
    """Return why the delayed update in a state is not the next one; None if it is."""
    if "pending_step" not in state or "pending_scale" not in state:
        return "does not say which update it is"
    number, done = int(state["pending_step"]), int(state["step"])
    return None if number == done + 1 else f"belongs to update {number}, and the state is that of {done} updates"


def refuse_undelayed(name: str) -> NoReturn:
    """Refuse a delayed update in a run without delay: dropping it would change the run."""
    raise CheckpointError(
        f"the state of '{name}' has a gradient whose update was put off by plan.memory.delay = true, and now it is "
        f"false; resume with delay = true"
    )


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
            stop, last = part.place.stop, found[-1] if found else None
            if joined and last and last.last == index and last.group == group and steps[last.first] == steps[index]:
                found[-1] = ElementRange(last.start, stop, group, last.first, index + 1)
            else:
                found.append(ElementRange(part.offset, stop, group, index, index + 1))
        return iter(found)

    def seed(self, step: int, start: int) -> int:
        """Returns the seed for the random bits of a chunk, from step, buffer and position in it; sharding does not
        change it.
        """
        position = self.flat.shard.index * self.flat.layout.slice_numel + start
        return ((step * _SEED_STEP + self.number) % (1 << 31) << 32) + position % (1 << 32)

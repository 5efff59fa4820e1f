"""What K-FAC sends: sums of factors and inverses over ranks with different samples, and whole gradients over `shard`.

Ranks with different samples are those along `shard`, and for each of them those along `data`. A message of equal parts
has the part of rank `index` at that place: it is cut over `shard` first, and each cut over `data`.

K-FAC multiplies matrices of gradients, and a slice is any part of one. Stage 1 keeps a buffer for the whole gradient,
and this rank's slice of the sum over ranks is a part of it. So one all-gather for each buffer that has a parameter of a
layer brings the sum to all ranks, without more memory. Each rank then updates its slice.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from weft.comm import Axis, Key, Traffic, all_gather, all_reduce, broadcast, reduce_scatter
from weft.errors import PlanError
from weft.mesh import Mesh
from weft.parallel.model_state import all_flats
from weft.sharding.flat_buffer import Flat
from weft.sharding.layout import FlatLayout

AXES = ("shard", "data")  # in the order in which messages are cut


@dataclass(frozen=True)
class BatchRanks:
    """The axes along which ranks have different samples, without those of one rank. All ranks call each method."""

    axes: tuple[Axis, ...] = ()

    @classmethod
    def of(cls, mesh: Mesh) -> BatchRanks:
        """Returns the ranks of a mesh with different samples."""
        return cls(tuple(mesh[name] for name in AXES if mesh[name].degree > 1))

    @property
    def degree(self) -> int:
        """The number of ranks."""
        return math.prod(axis.degree for axis in self.axes)

    @property
    def index(self) -> int:
        """This rank's place among them."""
        place = 0
        for axis in self.axes:
            place = place * axis.degree + axis.index
        return place

    def sum(self, message: Tensor) -> None:
        """Sum a message over all ranks, in place."""
        for axis in self.axes:
            all_reduce(message, axis).wait()

    def scatter(self, message: Tensor) -> Tensor:
        """Sum a message over all ranks, and return this rank's part of the sum."""
        for axis in self.axes:
            part = message.new_empty(message.numel() // axis.degree)
            reduce_scatter(part, message, axis).wait()
            message = part
        return message

    def gather(self, part: Tensor) -> Tensor:
        """Return the message of which each rank has a part."""
        for axis in reversed(self.axes):
            whole = part.new_empty(part.numel() * axis.degree)
            all_gather(whole, part, axis).wait()
            part = whole
        return part

    def broadcast(self, message: Tensor) -> None:
        """Copy the message of the first rank to all."""
        for axis in self.axes:  # along the last axis every group has the message at its first rank
            broadcast(message, axis).wait()


def traffic_of(operation: str, num_bytes: int, degrees: Mapping[str, int]) -> Iterator[tuple[Key, Traffic]]:
    """Yields the traffic of a rank for one call of `sum`, `scatter`, `gather` or `broadcast` of a message of so many
    bytes.

    `degrees` gives the ranks of each axis.
    """
    name = {"sum": "all_reduce", "scatter": "reduce_scatter", "gather": "all_gather"}.get(operation, operation)
    for axis in AXES:
        if degrees[axis] > 1:
            yield (axis, name), Traffic(1, num_bytes)
        if operation in ("scatter", "gather"):
            num_bytes //= degrees[axis]


def refuse_buffers(model: nn.Module) -> None:
    """Raise PlanError if gradients of the model cannot be made whole on the device."""
    for flat in all_flats(model):
        is_away = flat.is_streamed or flat.options.on_host or flat.options.delays
        if is_away or (flat.trainable and not flat.keeps_whole_gradient):
            raise PlanError(
                "K-FAC needs whole gradients on the device; set plan.shard.stage to 1, plan.memory.offload and weights "
                "to 0, and plan.memory.delay to false"
            )


def gathered_layouts(layouts: Sequence[FlatLayout], names: Collection[str]) -> list[FlatLayout]:
    """Returns the buffers whose gradients are gathered: those with a parameter of `names`."""
    return [one for one in layouts if one.degree > 1 and any(own.name in names for own in one.parameters)]


class WholeGradients:
    """Reads the gradients of the parameters `names`. `pieces` are those that this rank updates, by name."""

    def __init__(self, model: nn.Module, names: Collection[str], pieces: Mapping[str, nn.Parameter]) -> None:
        self._names, self._pieces = names, pieces
        self._flats = [flat for flat in all_flats(model) if gathered_layouts([flat.layout], names)]

    def read(self) -> dict[str, Tensor]:
        """Returns the gradient of each parameter that has one, by name. All ranks of `shard` must call it."""
        if not self._flats:
            found = ((name, self._pieces[name].grad) for name in self._names)
            return {name: gradient for name, gradient in found if gradient is not None}
        return {name: gradient for flat in self._flats for name, gradient in self._of(flat)}

    def _of(self, flat: Flat) -> Iterator[tuple[str, Tensor]]:
        whole = flat.whole_gradient.tensor
        if whole is None or flat.slice_gradient is None:
            return
        all_gather(whole, flat.slice_gradient, flat.shard).wait()
        for index, (parameter, view) in enumerate(zip(flat.layout.parameters, flat.layout.views(whole), strict=True)):
            if parameter.name not in self._names:
                continue
            # A parameter that no rank has a gradient of is -0.0 in every element (`sharding/whole_gradient.py`).
            if index in flat.whole_gradient.received or not bool((view.signbit() & (view == 0)).all()):
                yield parameter.name, view

"""The ranks that have different samples of a step, over which K-FAC sums factors and passes inverses on.

These are the ranks along `shard`, and for each of them those along `data`. A message of equal parts has the part of
rank `index` at that place: it is cut over `shard` first, and each cut over `data`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from weft.comm import Axis, Key, Traffic, all_gather, all_reduce, broadcast, reduce_scatter
from weft.mesh import Mesh

AXES = ("shard", "data")  # in the order in which messages are cut


@dataclass(frozen=True)
class BatchRanks:
    """The axes along which ranks have different samples, without those of one rank. All ranks call each method."""

    axes: tuple[Axis, ...] = ()

    @classmethod
    def of(cls, mesh: Mesh) -> BatchRanks:
        """Those of a mesh."""
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
    """The traffic of a rank for one call of `sum`, `scatter`, `gather` or `broadcast` of a message of so many bytes.

    `degrees` gives the ranks of each axis.
    """
    name = {"sum": "all_reduce", "scatter": "reduce_scatter", "gather": "all_gather"}.get(operation, operation)
    for axis in AXES:
        if degrees[axis] > 1:
            yield (axis, name), Traffic(1, num_bytes)
        if operation in ("scatter", "gather"):
            num_bytes //= degrees[axis]

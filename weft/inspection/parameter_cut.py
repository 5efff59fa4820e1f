"""Which part of a parameter a rank holds under the tensor axes: intervals along each dim, and what its gradient needs.

A fused parameter (q|k|v, gate|up) takes several intervals of one dim, stacked. Sizes that do not divide are split as
evenly as whole units (heads, features, vocabulary rows) allow. Pure arithmetic, shared by the runtime, the cost
formulas and the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Interval = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """A rank's part of a parameter of global `shape`.

    `replicas` ranks of x × y hold the same part, of which this is the first if `is_first`; `sums` names the axes over
    which its gradients are partial sums.
    """

    shape: tuple[int, ...]
    intervals: tuple[tuple[Interval, ...], ...]
    replicas: int = 1
    sums: tuple[str, ...] = ()
    is_first: bool = True

    @staticmethod
    def whole(shape: Sequence[int]) -> Cut:
        """All of it."""
        return Cut(tuple(shape), tuple(((0, size),) for size in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(sum(end - begin for begin, end in pieces) for pieces in self.intervals)

    @property
    def is_whole(self) -> bool:
        """Whether the part is everything, in order."""
        return self.intervals == Cut.whole(self.shape).intervals

    def take(self, value: Tensor) -> Tensor:
        """The part of a whole tensor."""
        assert tuple(value.shape) == self.shape, f"{tuple(value.shape)} is not {self.shape}"
        for dim, pieces in enumerate(self.intervals):
            if pieces != ((0, self.shape[dim]),):
                value = torch.cat([value.narrow(dim, begin, end - begin) for begin, end in pieces], dim)
        return value


def share(size: int, degree: int, index: int) -> Interval:
    """The `index`-th of `degree` contiguous parts of range(size), as even as can be; earlier parts are the larger."""
    base, rest = divmod(size, degree)
    begin = index * base + min(index, rest)
    return begin, begin + base + (index < rest)


def share_units(num_units: int, unit: int, degree: int, index: int) -> Interval:
    """As `share`, in whole units (heads of `unit` features)."""
    begin, end = share(num_units, degree, index)
    return begin * unit, end * unit


def stack(widths: Sequence[int], parts: Sequence[Interval]) -> tuple[Interval, ...]:
    """The intervals of fused sub-parameters of these widths, of each of which `parts` says what is taken."""
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return tuple((start + begin, start + end) for start, (begin, end) in zip(starts, parts, strict=True))

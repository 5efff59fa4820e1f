"""The part of a parameter that a rank holds under axes that split weights, and over which its gradient is summed.

A part is a list of intervals along each dim. A fused parameter (q|k|v, gate|up) has several intervals of one dim, which
are concatenated. Sizes that do not divide are split as evenly as whole units (heads, features, vocabulary rows) allow.
The runtime, the cost formulas and the checkpoint share this arithmetic.
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

    `intervals` are the [begin, end) ranges along each dim. `replicas` ranks of the axes that cut parameters (expert, x,
    y) hold the same part; this rank is the first of them if `is_first`. `sums` names the axes over which the part's
    gradients are partial sums. `apart` names axes that split no other parameter: their ranks hold different parts, and
    gradients are not summed over them. `is_final`: the cut counts for all axes, also for those of a cut beside it.
    """

    shape: tuple[int, ...]
    intervals: tuple[tuple[Interval, ...], ...]
    replicas: int = 1
    sums: tuple[str, ...] = ()
    is_first: bool = True
    apart: tuple[str, ...] = ()
    is_final: bool = False

    @staticmethod
    def whole(shape: Sequence[int]) -> Cut:
        """Returns the cut that contains the whole parameter."""
        return Cut(tuple(shape), tuple(((0, size),) for size in shape))

    @staticmethod
    def nothing(shape: Sequence[int]) -> Cut:
        """Returns the cut of a rank that holds no element of a parameter. Its local shape has a size of 0."""
        intervals = tuple(((0, size if dim else 0),) for dim, size in enumerate(shape))
        return Cut(tuple(shape), intervals or (((0, 0),),))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(sum(end - begin for begin, end in pieces) for pieces in self.intervals)

    @property
    def is_whole(self) -> bool:
        """Is the part the whole parameter, in order?"""
        return self.intervals == Cut.whole(self.shape).intervals

    @property
    def is_nothing(self) -> bool:
        """Does the rank hold no element of a parameter that has some?"""
        return 0 in self.local_shape and 0 not in self.shape

    def beside(self, other: Cut | None) -> Cut:
        """Returns the part under the axes of both cuts, which are of one parameter and cut different dims of it.

        It is nothing if one of them is nothing.
        """
        if other is None or self.is_final or self.is_nothing:
            return self
        if other.is_final or other.is_nothing:
            return other
        assert self.shape == other.shape
        whole = Cut.whole(self.shape).intervals
        pairs = list(zip(self.intervals, other.intervals, whole, strict=True))
        assert all(all_of_it in (one, another) for one, another, all_of_it in pairs)
        return Cut(
            self.shape,
            tuple(another if one == all_of_it else one for one, another, all_of_it in pairs),
            self.replicas * other.replicas,
            (*self.sums, *other.sums),
            self.is_first and other.is_first,
            (*self.apart, *other.apart),
        )

    def take(self, value: Tensor) -> Tensor:
        """Returns this part of a whole tensor."""
        assert tuple(value.shape) == self.shape, f"{tuple(value.shape)} is not {self.shape}"
        if 0 in self.local_shape:
            return value.new_empty(self.local_shape)
        for dim, pieces in enumerate(self.intervals):
            if pieces != ((0, self.shape[dim]),):
                value = torch.cat([value.narrow(dim, begin, end - begin) for begin, end in pieces], dim)
        return value


def share(size: int, degree: int, index: int) -> Interval:
    """Returns the `index`-th of `degree` contiguous parts of range(size), [begin, end).

    The sizes of parts differ by at most 1; earlier parts are the larger ones.
    """
    base, rest = divmod(size, degree)
    begin = index * base + min(index, rest)
    return begin, begin + base + (index < rest)


def share_units(num_units: int, unit: int, degree: int, index: int) -> Interval:
    """Like `share`, for `num_units` units (such as heads) of `unit` features each, which are not divided."""
    begin, end = share(num_units, degree, index)
    return begin * unit, end * unit


def stack_intervals(widths: Sequence[int], parts: Sequence[Interval]) -> tuple[Interval, ...]:
    """Returns intervals of a fused parameter whose sub-parameters have these `widths`.

    `parts` has one interval for each sub-parameter, counted from where that sub-parameter begins.
    """
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return tuple((start + begin, start + end) for start, (begin, end) in zip(starts, parts, strict=True))

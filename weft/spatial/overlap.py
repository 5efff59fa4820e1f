"""Computes the inner part of a convolution while halos travel.

The order is: start the exchange, compute inner outputs, wait, compute border strips, assemble.

              ┌─────┬───────────┬─────┐
              │     │    top    │     │    inner outputs need pixels that the rank holds;
              │     ├───────────┤     │    the four strips around them wait for the halo
              │left │   inner   │right│
              │     ├───────────┤     │
              │     │  bottom   │     │
              └─────┴───────────┴─────┘

It costs four more small convolutions and a copy of the outputs, so it is used only if the inner part takes longer than
a message and is most of the tile. Of the two phases of an exchange, the first (columns) is hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from weft.inspection.parameter_cut import Interval
from weft.spatial.ownership import SlidingWindow, length

# Inner work that takes as long as a message on a device of some hundred TFLOP/s; less hides nothing.
WORTH_FLOPS = 4e9
WORTH_SHARE = 0.5  # least share of inner outputs

Region = tuple[Interval, Interval]
Convolve = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Overlap:
    """The inner outputs of a tile. A window is None in a dim that no axis splits."""

    windows: tuple[SlidingWindow | None, SlidingWindow | None]
    outputs: Region
    inner: Region
    held: Region
    need: Region

    @property
    def strips(self) -> list[Region]:
        """The outputs around the inner ones: left, right, top and bottom."""
        (top, bottom), (left, right) = self.outputs
        (inner_top, inner_bottom), (inner_left, inner_right) = self.inner
        found = [
            ((top, bottom), (left, inner_left)),
            ((top, bottom), (inner_right, right)),
            ((top, inner_top), (inner_left, inner_right)),
            ((inner_bottom, bottom), (inner_left, inner_right)),
        ]
        return [(rows, columns) for rows, columns in found if length(rows) and length(columns)]

    def seen(self, value: Tensor, region: Region, start: Region) -> Tensor:
        """Return the pixels that outputs of a region need, of a tensor whose pixels begin at `start`."""
        for dim, window, part, (begin, _) in zip((-2, -1), self.windows, region, start, strict=True):
            if window is not None:
                first, last = window.needs(part)
                value = value.narrow(dim, first - begin, last - first)
        return value

    def put(self, out: Tensor, region: Region, value: Tensor) -> None:
        """Copy outputs of a region to their position in `out`."""
        for dim, part, (begin, _) in zip((-2, -1), region, self.outputs, strict=True):
            out = out.narrow(dim, part[0] - begin, length(part))
        out.copy_(value)


def plan_overlap(
    windows: Sequence[SlidingWindow], native: Sequence[bool], outputs: Region, held: Region, need: Region, flops: int
) -> Overlap | None:
    """Return how to hide a halo behind a convolution of `flops`, or None if it is not worth it."""
    inner = []
    for window, own, (begin, end), (first, last) in zip(windows, native, outputs, held, strict=True):
        low = -(-(first + window.before) // window.stride)
        high = (last - window.reach + window.before) // window.stride + 1
        inner.append((begin, end) if own else (max(begin, low), min(end, high)))
    share = math.prod(length(part) for part in inner) / math.prod(length(part) for part in outputs)
    if share < WORTH_SHARE or share * flops < WORTH_FLOPS:
        return None
    left = [None if own else window for window, own in zip(windows, native, strict=True)]
    return Overlap((left[0], left[1]), outputs, (inner[0], inner[1]), held, need)

"""The pixels of a dim that each tile owns and holds, what an operation needs of them, and the transfers between ranks.

It is pure arithmetic. Ownership depends only on the size of the dim: n ranks share N pixels in order, as evenly as
possible. So two tensors of one size always have the same layout, however they were computed: residual sums, skips and
the data loader agree without communication, and tiles stay balanced in every layer. The outputs of an operation are
owned in the same way. What they need of its input follows, and pixels that a tile does not hold are fetched from their
owner, however far. With sizes that divide, that is the rule lo = p, hi = max(0, d(k-1) - p - s + 1) for neighbours; a
tile thinner than the kernel fetches from further tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.inspection.parameter_cut import Interval, share


@dataclass(frozen=True)
class Line:
    """One dim of an image split over the ranks of an axis: its size, and the pixels that each rank holds.

    A rank holds the pixels that it owns, and extra ones that it fetched or computed for later layers.
    """

    size: int
    held: tuple[Interval, ...]

    @staticmethod
    def of(size: int, degree: int, extra: tuple[int, int] = (0, 0)) -> Line:
        """Return a line of which each rank holds its own pixels and `extra` ones before and after them, in the
        image.
        """
        owned = [share(size, degree, index) for index in range(degree)]
        return Line(size, tuple((max(0, begin - extra[0]), min(size, end + extra[1])) for begin, end in owned))

    @property
    def degree(self) -> int:
        """The number of ranks."""
        return len(self.held)

    @property
    def owned(self) -> tuple[Interval, ...]:
        """The pixels that each rank owns."""
        return tuple(share(self.size, self.degree, index) for index in range(self.degree))

    def common(self, other: Line) -> Line:
        """Return the line of the pixels that each rank holds of both."""
        assert self.size == other.size
        return Line(self.size, tuple(meet(a, b) for a, b in zip(self.held, other.held, strict=True)))


@dataclass(frozen=True)
class SlidingWindow:
    """The inputs of each output along a dim: output o needs inputs o·stride - before + i·dilation, i < kernel."""

    kernel: int = 1
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        """The number of pixels from the first to the last that an output needs."""
        return self.dilation * (self.kernel - 1) + 1

    def num_outputs(self, size: int, ceil: bool = False) -> int:
        """Return the number of outputs of a dim of `size`.

        With `ceil`, as torch's pools: the last one starts inside.
        """
        room = size + self.before + self.after - self.reach
        if not ceil:
            return room // self.stride + 1
        outputs = -(-room // self.stride) + 1
        return outputs - 1 if (outputs - 1) * self.stride >= size + self.before else outputs

    def needs(self, outputs: Interval) -> Interval:
        """Return the pixels that these outputs need; some may lie outside the image."""
        begin, end = outputs
        return begin * self.stride - self.before, (end - 1) * self.stride - self.before + self.reach


@dataclass(frozen=True)
class Transfers:
    """The sends and receives of one rank along an axis, each as (index of the peer, pixels)."""

    sends: tuple[tuple[int, Interval], ...]
    receives: tuple[tuple[int, Interval], ...]


def transfers(line: Line, needs: Sequence[Interval], index: int) -> Transfers:
    """Return the transfers of rank `index` by which every rank gets the pixels that it needs and does not hold."""
    owned = line.owned
    sends = [
        (peer, piece)
        for peer in range(line.degree)
        if peer != index
        for piece in _pieces(line.held[peer], needs[peer], owned[index])
    ]
    receives = [
        (peer, piece)
        for peer in range(line.degree)
        if peer != index
        for piece in _pieces(line.held[index], needs[index], owned[peer])
    ]
    return Transfers(tuple(sends), tuple(receives))


def _pieces(held: Interval, need: Interval, owned: Interval) -> list[Interval]:
    """Return the pixels of an owner that are needed before and after those held."""
    missing = (need[0], min(need[1], held[0])), (max(need[0], held[1]), need[1])
    return [piece for part in missing if length(piece := meet(part, owned))]


def meet(left: Interval, right: Interval) -> Interval:
    """Return the pixels of both; an empty interval if there are none."""
    begin = max(left[0], right[0])
    return begin, max(begin, min(left[1], right[1]))


def length(interval: Interval) -> int:
    """Return the number of pixels."""
    return max(0, interval[1] - interval[0])


def inside(interval: Interval, outer: Interval) -> bool:
    """Return whether all pixels are among those of `outer`."""
    return interval[0] >= outer[0] and interval[1] <= outer[1]

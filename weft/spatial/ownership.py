"""Which pixels of a dim each tile owns and holds, what an operation needs of them, and who sends what to whom. Pure.

Ownership depends on the size of the dim alone: n ranks share N pixels in order, as evenly as can be. So two tensors of
one size always lie alike, whatever way they came: residual sums, skips and the loader agree without a word, and tiles
stay balanced in every layer. An operation's outputs are owned in the same way, what they need of its input follows, and
what a tile does not hold of it is fetched from whoever owns it, however far: with sizes that divide, that is the rule
lo = p, hi = max(0, d(k-1) - p - s + 1) of neighbours; a tile thinner than the kernel asks further tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.inspection.parameter_cut import Interval, share


@dataclass(frozen=True)
class Line:
    """One dim of an image over the ranks of an axis: its size, and the pixels that each of them holds.

    A rank holds what it owns, and beside it what it fetched or computed for later layers.
    """

    size: int
    held: tuple[Interval, ...]

    @staticmethod
    def of(size: int, degree: int, extra: tuple[int, int] = (0, 0)) -> Line:
        """Each rank holds what it owns, and `extra` pixels before and behind it where the image has them."""
        owned = [share(size, degree, index) for index in range(degree)]
        return Line(size, tuple((max(0, begin - extra[0]), min(size, end + extra[1])) for begin, end in owned))

    @property
    def degree(self) -> int:
        """Over how many ranks it goes."""
        return len(self.held)

    @property
    def owned(self) -> tuple[Interval, ...]:
        """The pixels that each rank owns."""
        return tuple(share(self.size, self.degree, index) for index in range(self.degree))

    def common(self, other: Line) -> Line:
        """What each rank holds of both."""
        assert self.size == other.size
        return Line(self.size, tuple(meet(a, b) for a, b in zip(self.held, other.held, strict=True)))


@dataclass(frozen=True)
class Window:
    """How outputs look at inputs along a dim: output o sees inputs o·stride - before + i·dilation, i < kernel."""

    kernel: int = 1
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        """How many pixels lie between the first and the last that an output sees, those included."""
        return self.dilation * (self.kernel - 1) + 1

    def num_outputs(self, size: int, ceil: bool = False) -> int:
        """How many outputs a dim of `size` has; with `ceil`, as torch's pools have it: the last starts inside."""
        room = size + self.before + self.after - self.reach
        if not ceil:
            return room // self.stride + 1
        outputs = -(-room // self.stride) + 1
        return outputs - 1 if (outputs - 1) * self.stride >= size + self.before else outputs

    def needs(self, outputs: Interval) -> Interval:
        """The pixels that these outputs see; some may lie outside the image."""
        begin, end = outputs
        return begin * self.stride - self.before, (end - 1) * self.stride - self.before + self.reach


@dataclass(frozen=True)
class Moves:
    """What one rank sends and receives along an axis: (index of the peer, pixels)."""

    sends: tuple[tuple[int, Interval], ...]
    receives: tuple[tuple[int, Interval], ...]


def moves(line: Line, needs: Sequence[Interval], index: int) -> Moves:
    """What goes where so that every rank has the pixels that it needs and does not hold, from whoever owns them."""
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
    return Moves(tuple(sends), tuple(receives))


def _pieces(held: Interval, need: Interval, owned: Interval) -> list[Interval]:
    """What an owner has of the pixels that are needed before and behind those held."""
    missing = (need[0], min(need[1], held[0])), (max(need[0], held[1]), need[1])
    return [piece for part in missing if length(piece := meet(part, owned))]


def meet(left: Interval, right: Interval) -> Interval:
    """The pixels of both; an empty interval where there are none."""
    begin = max(left[0], right[0])
    return begin, max(begin, min(left[1], right[1]))


def length(interval: Interval) -> int:
    """How many pixels there are."""
    return max(0, interval[1] - interval[0])


def inside(interval: Interval, outer: Interval) -> bool:
    """Whether all pixels are among those of `outer`."""
    return interval[0] >= outer[0] and interval[1] <= outer[1]

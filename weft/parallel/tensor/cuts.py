"""Computes the part of each parameter that the rank at (x, y) holds, and over which axes its gradients are summed.

It follows from a pairing alone. The runtime, the cost formulas and the checkpoint share it.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.inspection.chain_ends import ChainEnds
from weft.inspection.parameter_cut import Cut, Interval, share
from weft.inspection.split_probe import ADAPTER
from weft.inspection.tensor_splits import Pairing, Split
from weft.plan import Plan


def parameter_cuts(
    pairing: Pairing, shapes: Mapping[str, tuple[int, ...]], plan: Plan, coordinates: Mapping[str, int]
) -> dict[str, Cut]:
    """Returns, by name, the part of every parameter on the rank at `coordinates`."""
    x, y = coordinates["x"], coordinates["y"]
    make = _CutMaker(pairing, plan, x, y)
    return {name: make.cut(name, shape) for name, shape in shapes.items()}


def ends_of(pairing: Pairing, plan: Plan) -> ChainEnds:
    """Returns the modules around the chain of blocks to which `tensor.sequence` extends the split of the sequence."""
    return pairing.ends if plan.tensor.sequence and plan.tensor.x > 1 and not pairing.is_whole else ChainEnds()


class _CutMaker:
    def __init__(self, pairing: Pairing, plan: Plan, x: int, y: int) -> None:
        self.pairing, self.plan, self.x, self.y = pairing, plan, x, y
        self.num_x, self.num_y = plan.tensor.x, plan.tensor.y
        self.ends = ends_of(pairing, plan)

    def cut(self, name: str, shape: tuple[int, ...]) -> Cut:
        name = self.pairing.tied.get(name, name)
        module, _, leaf = name.rpartition(".")
        if module in self.pairing.embeddings:
            return self._make(shape, {0: (share(shape[0], self.num_x, self.x),), 1: self._over_y(shape[1])}, x=1, y=1)
        split = self.pairing.splits.get(module)
        if split is None:
            return self._other(name, shape)
        if leaf in ADAPTER:
            return self._adapter(split, leaf, shape)
        over_x, repeats = split.over_x(self.num_x, self.x), split.repeats(self.num_x)
        if split.kind == "row":
            if leaf == "bias":
                return self._make(shape, {0: self._over_y(shape[0])}, y=1, sums=self._outside_sums(name))
            inner, outer = (0, 1) if split.transposed else (1, 0)
            return self._make(shape, {inner: over_x, outer: self._over_y(shape[outer])}, x=1, y=1)
        sums = (f"x:{repeats}",) if repeats > 1 else ()
        if leaf == "bias":
            return self._make(shape, {0: over_x}, x=1, repeats=repeats, sums=sums)
        inner, outer = (0, 1) if split.transposed else (1, 0)
        cuts = {outer: over_x, inner: self._over_y(shape[inner])}
        return self._make(shape, cuts, x=1, y=1, repeats=repeats, sums=sums)

    def _adapter(self, split: Split, leaf: str, shape: tuple[int, ...]) -> Cut:
        """Returns the part of A [rank, in] or B [out, rank] of a low-rank update, whose rank is never split.

        A follows the inputs of the linear and B its outputs. The gradient of A is a partial sum over the axis that
        splits the outputs, and that of B over the one that splits the inputs.
        """
        over_x, repeats = split.over_x(self.num_x, self.x), split.repeats(self.num_x)
        of_x = ("x",) if self.num_x > 1 else ()
        of_y = ("y",) if self.num_y > 1 else ()
        dim = 1 if leaf == ADAPTER[0] else 0
        if (leaf == ADAPTER[0]) == (split.kind == "row"):  # x splits it: A of a row, B of a column
            sums = (f"x:{repeats}",) if repeats > 1 else ()
            return self._make(shape, {dim: over_x}, x=1, repeats=repeats, sums=(*sums, *of_y))
        return self._make(shape, {dim: self._over_y(shape[dim])}, y=1, sums=of_x)

    def _over_y(self, size: int) -> tuple[Interval, ...]:
        return (share(size, self.num_y, self.y),)

    def _other(self, name: str, shape: tuple[int, ...]) -> Cut:
        if name in self.pairing.tables:
            last = len(shape) - 1
            return self._make(shape, {last: (share(shape[last], self.num_x, self.x),)}, x=1)
        if name in self.pairing.inner:
            return self._make(shape, {}, sums=("x",) if self.num_x > 1 else ())
        sums = self._outside_sums(name)
        if self.pairing.is_whole:
            return self._make(shape, {}, sums=sums)
        if self.num_y > 1 and shape:
            return self._make(shape, {len(shape) - 1: self._over_y(shape[-1])}, y=1, sums=sums)
        if self.num_y > 1:  # a scalar that is applied to features split over y
            sums = (*sums, "y")
        return self._make(shape, {}, sums=sums)

    def _outside_sums(self, name: str) -> tuple[str, ...]:
        """Returns ("x",) if each rank of x has only its part of the sequence here, so gradients are partial sums."""
        if not self.plan.tensor.sequence or self.num_x == 1:
            return ()
        is_split = self.pairing.block_of(name) is not None or name.rpartition(".")[0] == self.ends.norm
        return ("x",) if is_split else ()

    def _make(
        self,
        shape: tuple[int, ...],
        cuts: dict[int, tuple[Interval, ...]],
        x: int = 0,
        y: int = 0,
        repeats: int = 1,
        sums: tuple[str, ...] = (),
    ) -> Cut:
        """`x`, `y`: whether the axis splits the parameter; `repeats` neighbours on x hold the same part."""
        intervals = tuple(cuts.get(dim, ((0, size),)) for dim, size in enumerate(shape))
        replicas = (repeats if x else self.num_x) * (1 if y else self.num_y)
        is_first = (self.x % repeats == 0 if x else self.x == 0) and (bool(y) or self.y == 0)
        return Cut(shape, intervals, replicas, sums, is_first)

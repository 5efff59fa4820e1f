"""Independent branches: where data forks into paths that need nothing of each other.

A node is a layer that multiplies, or a unit of the model. While the model runs, each tensor carries the set of nodes
that it was computed from; so of two nodes it is known whether one needs the other. A node that each other one needs, or
is needed by, is a point that all data passes. Between two such points, nodes that are joined by need form a path; two
paths or more are branches:

    q, k, v → attention → o → gate, up → down        branches (q | k | v) and (gate | up)
    1x1 | 1x1 → 3x3 | 1x1 → 5x5 | pool → 1x1         four branches, of one and of two nodes

A residual or other path without a node computes (nearly) nothing and is no branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from weft.profile.parts import Paths


class Flow:
    """Which nodes each tensor was computed from."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._needs: dict[str, int] = {}  # by node, as a set of bits
        self._made_from: dict[int, int] = {}  # by storage; whoever reports keeps the tensors alive

    def operation(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """Results are made from what the inputs were made from (and, where written in place, what was there)."""
        found = self._all(inputs)
        if found:
            self._mark(outputs, found)

    def enter(self, name: str, inputs: Iterable[Tensor]) -> None:
        """A node begins; of several calls the first counts."""
        if name not in self._numbers:
            self._numbers[name] = len(self._numbers)
            self._needs[name] = self._all(inputs)

    def leave(self, name: str, outputs: Iterable[Tensor]) -> None:
        """A node ends."""
        self._mark(outputs, 1 << self._numbers[name])

    def branches(self, names: Iterable[str]) -> tuple[Paths, ...]:
        """The forks among these nodes, in the order of computation."""
        nodes = sorted((name for name in names if name in self._numbers), key=self._numbers.__getitem__)
        segments: list[list[str]] = [[]]
        for node in nodes:
            if all(other == node or self._is_joined(node, other) for other in nodes):
                segments.append([])
            else:
                segments[-1].append(node)
        forks = [tuple(self._paths(segment)) for segment in segments]
        return tuple(fork for fork in forks if len(fork) > 1)

    def _paths(self, nodes: list[str]) -> Iterator[tuple[str, ...]]:
        left = list(nodes)
        while left:
            path = [left.pop(0)]
            for node in path:  # which grows
                joined = [other for other in left if self._is_joined(node, other)]
                path += joined
                left = [other for other in left if other not in joined]
            yield tuple(sorted(path, key=self._numbers.__getitem__))

    def _is_joined(self, one: str, other: str) -> bool:
        return bool(self._needs[one] >> self._numbers[other] & 1 or self._needs[other] >> self._numbers[one] & 1)

    def _all(self, tensors: Iterable[Tensor]) -> int:
        found = 0
        for tensor in tensors:
            found |= self._made_from.get(tensor.untyped_storage()._cdata, 0)
        return found

    def _mark(self, tensors: Iterable[Tensor], made_from: int) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()._cdata
            self._made_from[storage] = self._made_from.get(storage, 0) | made_from

"""Finds independent branches: places where data forks into paths that do not depend on each other.

A node is a linear, a convolution, or a unit of the model. While the model runs, the set of nodes that each tensor was
computed from is recorded, so the dependencies between nodes are known. A node that depends on, or is needed by, every
other node is a point that all data passes through. Between two such points, nodes that depend on each other form a
path; two or more paths are branches:

    q, k, v → attention → o → gate, up → down        branches (q | k | v) and (gate | up)
    1x1 | 1x1 → 3x3 | 1x1 → 5x5 | pool → 1x1         four branches, of one and of two nodes

A path without a node, such as a residual, computes (nearly) nothing and is not a branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from weft.profiling.parts import Paths


class DataFlow:
    """Records which nodes each tensor was computed from."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._needs: dict[str, int] = {}  # node -> bit set of the nodes that its inputs were computed from
        self._made_from: dict[int, int] = {}  # storage -> bit set of nodes; the caller keeps the tensors alive

    def operation(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """Record an operation. Outputs depend on the nodes of its inputs; in-place outputs keep their own, too."""
        found = self._all(inputs)
        if found:
            self._mark(outputs, found)

    def enter(self, name: str, inputs: Iterable[Tensor]) -> None:
        """Record the start of a node. Only its first call counts."""
        if name not in self._numbers:
            self._numbers[name] = len(self._numbers)
            self._needs[name] = self._all(inputs)

    def leave(self, name: str, outputs: Iterable[Tensor]) -> None:
        """Record the end of a node."""
        self._mark(outputs, 1 << self._numbers[name])

    def branches(self, names: Iterable[str]) -> tuple[Paths, ...]:
        """Returns the forks among these nodes, in the order of computation; each fork is a tuple of its paths."""
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
            for node in path:  # the loop body appends to it
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

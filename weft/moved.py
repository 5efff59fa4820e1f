"""Bytes that pass through memory beside matmuls and attention: norms, activations, residuals, casts, the loss.

Counted twice, because a step can run in two ways. *Eager*: each operation is a kernel that reads its inputs and writes
its output. *Fused*: all operations between two matmuls are one kernel, which reads what comes from outside once and
writes only what is used again outside of it (by a later one, by a matmul, or by backward).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves


class Moved(NamedTuple):
    """Bytes read and written, and kernels, of one forward; eager and fused."""

    num_bytes: int = 0
    num_kernels: int = 0
    fused_bytes: int = 0
    fused_kernels: int = 0

    def plus(self, other: Moved) -> Moved:
        """The sum, figure by figure."""
        return Moved(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


Place = tuple[str, str]  # the block that runs, and the layer behind which it is


class MovedTally:
    """Sees every operation of a forward on fake tensors, and keeps what moves by place."""

    def __init__(self) -> None:
        self.by_place: dict[Place, Moved] = {}
        self._segment = 0  # a run of operations without a matmul
        self._is_open = False
        self._made: dict[int, tuple[int, Place, int]] = {}  # storage -> (segment, place, bytes), until used outside
        self._read: set[int] = set()  # by this segment, from outside
        self._alive: list[Tensor] = []

    def product(self, args: Any, result: Any) -> None:
        """A matmul or attention: the segment ends. Its own bytes are counted with it."""
        for tensor in _tensors(args):
            self._use(tensor)
        self._segment += 1
        self._is_open = False
        self._read.clear()
        self._alive += _tensors(result)

    def operation(self, func: Any, args: Any, result: Any, place: Place) -> None:
        """Anything else; a view moves nothing."""
        inputs, outputs = _tensors(args), _tensors(result)
        known = {_storage(tensor) for tensor in inputs}
        if not func._schema.is_mutable and all(_storage(tensor) in known for tensor in outputs):
            return
        moved = Moved(sum(map(_bytes, inputs)) + sum(map(_bytes, outputs)), 1, 0, 0 if self._is_open else 1)
        self._is_open = True
        for tensor in inputs:
            storage = _storage(tensor)
            made = self._made.get(storage)
            if (made is None or made[0] != self._segment) and storage not in self._read:
                self._read.add(storage)
                moved = moved.plus(Moved(fused_bytes=_bytes(tensor)))
                self._use(tensor)
        self._add(place, moved)
        for tensor in outputs:
            self._made.setdefault(_storage(tensor), (self._segment, place, _bytes(tensor)))
            self._alive.append(tensor)  # a storage's address means something only while it lives

    def saved(self, tensor: Tensor) -> None:
        """Backward will use the tensor, so a fused kernel writes it."""
        self._use(tensor)

    def _use(self, tensor: Tensor) -> None:
        """From outside of the segment that made it: what nobody has used so was never written."""
        made = self._made.pop(_storage(tensor), None)
        if made is not None:
            self._add(made[1], Moved(fused_bytes=made[2]))

    def _add(self, place: Place, moved: Moved) -> None:
        self.by_place[place] = self.by_place.get(place, Moved()).plus(moved)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

"""Bytes that pass through memory beside matmuls and attention: norms, activations, residuals, casts, the loss.

Counted twice, because a step can run in two ways. *Eager*: each operation is a kernel that reads its inputs and writes
its output. *Fused*: all operations between two matmuls are one kernel, which reads what comes from outside once and
writes only what is used again outside of it (by a later one, by a matmul, or by backward).
"""

from __future__ import annotations

from collections.abc import Sequence
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


class Moves(NamedTuple):
    """What the fused kernels of a compiled block read and write, beside its matmuls and attention, and how many there
    are: in forward, in backward, and for what selective recompute makes again.
    """

    forward_bytes: int = 0
    forward_kernels: int = 0
    backward_bytes: int = 0
    backward_kernels: int = 0
    again_bytes: int = 0
    again_kernels: int = 0


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

    def product(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """A matmul or attention: the segment ends. Its own bytes are counted with it."""
        for tensor in inputs:
            self._use(tensor)
        self._segment += 1
        self._is_open = False
        self._read.clear()
        self._alive += outputs

    def operation(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], place: Place, reads_twice: bool = False
    ) -> None:
        """Anything else that is no view. One that `reads_twice` is two kernels when fused: statistics of whole images
        are known only when all has been read.
        """
        num_bytes = sum(map(bytes_of, (*inputs, *outputs)))
        moved = Moved(num_bytes, 1, 0, 0 if self._is_open else 1)
        if reads_twice:
            moved = moved.plus(Moved(fused_bytes=bytes_of(inputs[0]), fused_kernels=1))
        self._is_open = True
        for tensor in inputs:
            storage = _storage(tensor)
            made = self._made.get(storage)
            if (made is None or made[0] != self._segment) and storage not in self._read:
                self._read.add(storage)
                moved = moved.plus(Moved(fused_bytes=bytes_of(tensor)))
                self._use(tensor)
        self._add(place, moved)
        for tensor in outputs:
            self._made.setdefault(_storage(tensor), (self._segment, place, bytes_of(tensor)))
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


def is_view(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Whether an operation moves nothing, but looks at its inputs in another way."""
    known = {_storage(tensor) for tensor in inputs}
    return not func._schema.is_mutable and all(_storage(tensor) in known for tensor in outputs)


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor in a nested value."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def bytes_of(tensor: Tensor) -> int:
    """The bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

"""Counts the memory traffic of all operations except matmuls and attention: norms, activations, residuals, casts, loss.

It is counted in two ways, because a step can run in two ways. *Eager*: each operation is one kernel that reads its
inputs and writes its output. *Fused*: all operations between two matmuls are one kernel. That kernel reads each outside
tensor once, and writes only tensors that are used outside of it (by a later kernel, by a matmul, or by backward).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from weft.inspection.callers import unwrapped
from weft.inspection.nested_tensors import tensors_in


class MemoryTraffic(NamedTuple):
    """Bytes read and written and number of kernels in one forward, eager (the first two fields) and fused."""

    num_bytes: int = 0
    num_kernels: int = 0
    fused_bytes: int = 0
    fused_kernels: int = 0

    def plus(self, other: MemoryTraffic) -> MemoryTraffic:
        """Returns the sum, field by field."""
        return MemoryTraffic(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class FusedTraffic(NamedTuple):
    """Bytes read and written by the fused kernels of a compiled block, and the number of these kernels.

    Matmuls and attention are not included. `forward` and `backward` are the two passes; `again` is the forward work
    that selective recompute repeats.
    """

    forward_bytes: int = 0
    forward_kernels: int = 0
    backward_bytes: int = 0
    backward_kernels: int = 0
    again_bytes: int = 0
    again_kernels: int = 0


TrafficKey = tuple[str, str]  # the block that runs, and the layer that ran last before the operation


class TrafficCounter:
    """Counts the memory traffic of every operation of a forward on fake tensors, by block and preceding layer."""

    def __init__(self) -> None:
        self.by_layer: dict[TrafficKey, MemoryTraffic] = {}
        self._segment = 0  # the number of this run of operations without a matmul
        self._is_open = False  # whether the segment has a kernel already
        self._written: dict[int, tuple[int, TrafficKey, int]] = {}  # storage -> (segment, key, bytes), until used
        self._read: set[int] = set()  # outside storages that this segment has read
        self._alive: list[Tensor] = []  # keeps storages alive: addresses of freed ones are used again

    def product(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Record a matmul or attention, which ends the segment. Its own traffic is counted with its FLOPs."""
        for tensor in inputs:
            self._use(tensor)
        self._segment += 1
        self._is_open = False
        self._read.clear()
        self._alive += outputs

    def operation(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], key: TrafficKey, reads_twice: bool = False
    ) -> None:
        """Record any other operation that is not a view.

        One that `reads_twice` is two kernels when fused: statistics of whole images are known only after all of the
        input is read.
        """
        num_bytes = sum(map(bytes_of, (*inputs, *outputs)))
        moved = MemoryTraffic(num_bytes, 1, 0, 0 if self._is_open else 1)
        if reads_twice:
            moved = moved.plus(MemoryTraffic(fused_bytes=bytes_of(inputs[0]), fused_kernels=1))
        self._is_open = True
        for tensor in inputs:
            storage = storage_key(tensor)
            written = self._written.get(storage)
            if (written is None or written[0] != self._segment) and storage not in self._read:
                self._read.add(storage)
                moved = moved.plus(MemoryTraffic(fused_bytes=bytes_of(tensor)))
                self._use(tensor)
        self._add(key, moved)
        for tensor in outputs:
            self._written.setdefault(storage_key(tensor), (self._segment, key, bytes_of(tensor)))
            self._alive.append(tensor)

    def saved(self, tensor: Tensor) -> None:
        """Record that backward uses the tensor, so a fused kernel writes it to memory."""
        self._use(tensor)

    def _use(self, tensor: Tensor) -> None:
        """Count the write of a tensor that is used outside of its segment. Other tensors are not written when fused."""
        written = self._written.pop(storage_key(tensor), None)
        if written is not None:
            self._add(written[1], MemoryTraffic(fused_bytes=written[2]))

    def _add(self, key: TrafficKey, moved: MemoryTraffic) -> None:
        self.by_layer[key] = self.by_layer.get(key, MemoryTraffic()).plus(moved)


def is_view(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Does an operation move no bytes, because all its outputs are views of its inputs?"""
    known = {storage_key(tensor) for tensor in inputs}
    return not func._schema.is_mutable and all(storage_key(tensor) in known for tensor in outputs)


def tensors_of(value: Any) -> list[Tensor]:
    """Returns every tensor in a nested value; inside of torch.func, those that have storage."""
    return [unwrapped(tensor) for tensor in tensors_in(value)]


def bytes_of(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def storage_key(tensor: Tensor) -> int:
    """Returns what identifies the memory of a tensor while it lives."""
    return int(tensor.untyped_storage()._cdata)

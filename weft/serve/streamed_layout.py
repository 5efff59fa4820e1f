"""How the weights of a block lie end to end in memory, and how many bytes they have there.

Tensors that share memory stay together, so that a joined linear and its parts are moved at once. Ranks that read a
block together have equal shares of its bytes, so the end is padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNMENT = 256  # bytes, as torch's allocator aligns tensors


@dataclass(frozen=True)
class Extent:
    """Tensors that share memory: where they begin and end there, and where they begin in the block. All in bytes."""

    begin: int
    end: int
    start: int
    tensors: list[Tensor]

    @property
    def stored(self) -> Tensor:
        """Their bytes as they are in memory."""
        return torch.empty(0, dtype=torch.uint8).set_(self.tensors[0].untyped_storage())[self.begin : self.end]


class BlockLayout:
    """The layout of a block that is made of modules, which `num_readers` ranks read together."""

    def __init__(self, modules: Iterable[nn.Module], num_readers: int = 1) -> None:
        self.extents: list[Extent] = []
        start = 0
        for tensors in _sharing_memory(modules):
            begin = min(_first_byte(tensor) for tensor in tensors) // ALIGNMENT * ALIGNMENT
            end = max(_first_byte(one) + _num_bytes(one) for one in tensors)
            self.extents.append(Extent(begin, end, start, tensors))
            start += padded(end - begin, ALIGNMENT)
        self.num_bytes = padded(start, num_readers * ALIGNMENT)
        self.share_bytes = self.num_bytes // num_readers

    def read(self, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Yields the bytes of the block between two places: where each piece begins after `begin`, and the piece."""
        for extent in self.extents:
            first, last = max(begin, extent.start), min(end, extent.start + extent.end - extent.begin)
            if first < last:
                yield first - begin, extent.stored[first - extent.start : last - extent.start]

    def move_tensors(self, block: Tensor) -> None:
        """Make all tensors views of a block's bytes."""
        for extent in self.extents:
            for tensor in extent.tensors:
                first = extent.start + _first_byte(tensor) - extent.begin
                own = block[first : first + _num_bytes(tensor)].view(tensor.dtype)
                tensor.data = own.as_strided(tensor.shape, tensor.stride())


def padded(size: int, unit: int) -> int:
    """The least multiple of a unit that is not below a size."""
    return -(-size // unit) * unit


def _sharing_memory(modules: Iterable[nn.Module]) -> list[list[Tensor]]:
    """The tensors of modules, those that share memory together. It needs no memory: they may be on the meta device."""
    found: dict[int, dict[int, Tensor]] = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            found.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
    return [list(same.values()) for same in found.values()]


def _first_byte(tensor: Tensor) -> int:
    """Where a tensor begins in its memory."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _num_bytes(tensor: Tensor) -> int:
    """From a tensor's first byte to its last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()

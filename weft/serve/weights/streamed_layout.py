"""How the weights of a block lie end to end in memory, and which blocks are in host memory.

Tensors that share memory stay together, so that a joined linear and its parts are moved at once. Ranks that read a
block together have equal shares of its bytes, so the end is padded. Nothing here needs values: tensors may be on the
meta device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.sharding.layout import evenly_spaced

ALIGNMENT = 256  # bytes, as torch's allocator aligns tensors


def streamed_numbers(num_blocks: int, num_resident: int) -> tuple[int, ...]:
    """The blocks whose weights are in host memory, if `num_resident` others stay on the device. Both are spread evenly,
    so that some are computed while others are copied. The first block is in host memory.
    """
    return evenly_spaced(num_blocks, 1 - num_resident / num_blocks)


@dataclass(frozen=True)
class TensorSlot:
    """A parameter or buffer of a module, which can get other memory."""

    module: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        found = self.module._parameters.get(self.name)
        return self.module.get_buffer(self.name) if found is None else found

    def put(self, tensor: Tensor) -> None:
        """Set the tensor. A new parameter is made, because one on the meta device cannot get memory."""
        if self.name in self.module._parameters:
            given = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
            self.module._parameters[self.name] = given
        else:
            self.module._buffers[self.name] = tensor


def tensor_slots(modules: Iterable[nn.Module]) -> Iterator[TensorSlot]:
    """Yields the slots of modules themselves, without those of modules inside them."""
    for module in modules:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield TensorSlot(module, name)


@dataclass(frozen=True)
class Extent:
    """Tensors that share memory: where they begin and end there, and where they begin in the block. All in bytes."""

    begin: int
    end: int
    start: int
    slots: list[TensorSlot]

    @property
    def stored(self) -> Tensor:
        """Their bytes as they are in memory."""
        storage = self.slots[0].tensor.untyped_storage()
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[self.begin : self.end]


@dataclass(frozen=True)
class BlockView:
    """Which bytes of a block a slot's tensor has, and as what it reads them."""

    slot: TensorSlot
    first: int
    num_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]


class BlockLayout:
    """The layout of a block that is made of modules, which `num_readers` ranks read together."""

    def __init__(self, modules: Iterable[nn.Module], num_readers: int = 1) -> None:
        self._extents: list[Extent] = []
        self._views: list[BlockView] = []
        start = 0
        for slots in _sharing_memory(modules):
            tensors = [slot.tensor for slot in slots]
            begin = min(_first_byte(tensor) for tensor in tensors) // ALIGNMENT * ALIGNMENT
            end = max(_first_byte(one) + _num_bytes(one) for one in tensors)
            self._extents.append(Extent(begin, end, start, slots))
            for slot, one in zip(slots, tensors, strict=True):
                first = start + _first_byte(one) - begin
                self._views.append(BlockView(slot, first, _num_bytes(one), one.dtype, one.shape, one.stride()))
            start += padded(end - begin, ALIGNMENT)
        self.num_bytes = padded(start, num_readers * ALIGNMENT)
        self.share_bytes = self.num_bytes // num_readers

    def copy_to(self, block: Tensor) -> None:
        """Copy all tensors, which are where they were when the layout was made, to a block's bytes."""
        for extent in self._extents:
            block[extent.start : extent.start + extent.end - extent.begin].copy_(extent.stored)

    def move_tensors(self, block: Tensor) -> None:
        """Make all tensors views of a block's bytes."""
        for view in self._views:
            own = block[view.first : view.first + view.num_bytes].view(view.dtype)
            view.slot.put(own.as_strided(view.shape, view.strides))


def padded(size: int, unit: int) -> int:
    """The least multiple of a unit that is not below a size."""
    return -(-size // unit) * unit


def _sharing_memory(modules: Iterable[nn.Module]) -> list[list[TensorSlot]]:
    """The slots of modules and of those inside them, with tensors that share memory together."""
    every = {id(one): one for module in modules for one in module.modules()}
    found: dict[int, list[TensorSlot]] = {}
    for slot in tensor_slots(every.values()):
        found.setdefault(slot.tensor.untyped_storage()._cdata, []).append(slot)
    return list(found.values())


def _first_byte(tensor: Tensor) -> int:
    """Where a tensor begins in its memory."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _num_bytes(tensor: Tensor) -> int:
    """From a tensor's first byte to its last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()

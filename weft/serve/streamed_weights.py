"""Weights of blocks in host memory, copied to the device shortly before they are needed: models larger than a GPU.

The device has room for the weights of `ahead` + 1 blocks. The tensors of a block are views of its place there for good,
so the model computes as usual and gives the same bits. When a block has been computed, its place is filled with the
weights of the next block that lies there, while the blocks in between compute. All other weights stay on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from weft.sharding.host_memory import host_zeros

_ALIGNMENT = 256  # bytes, as torch's allocator aligns tensors


class StreamedWeights:
    """The weights of blocks, each given by the modules that it is made of, in the order in which they compute."""

    def __init__(self, blocks: Sequence[Sequence[nn.Module]], device: torch.device, ahead: int) -> None:
        extents = [_extents(modules) for modules in blocks]
        sizes = [sum(_aligned(end - begin) for begin, end, _ in of_block) for of_block in extents]
        self.num_places = min(ahead + 1, len(blocks))
        self.places = torch.empty(self.num_places, max(sizes), dtype=torch.uint8, device=device)
        self._home = list[Tensor]()
        for index, (of_block, size) in enumerate(zip(extents, sizes, strict=True)):
            home = host_zeros(size, torch.uint8, device)
            start = 0
            for begin, end, tensors in of_block:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())
                home[start : start + end - begin].copy_(whole[begin:end])
                place = self.places[index % self.num_places, start : start + end - begin]
                for tensor in tensors:
                    first = _first_byte(tensor) - begin
                    own = place[first : first + _num_bytes(tensor)].view(tensor.dtype)
                    tensor.data = own.as_strided(tensor.shape, tensor.stride())
                start += _aligned(end - begin)
            self._home.append(home)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._copies is not None:
            self._has_come = [torch.cuda.Event() for _ in range(self.num_places)]
            self._is_free = [torch.cuda.Event() for _ in range(self.num_places)]
        self._number = [-1] * self.num_places  # of the block in each place
        for index in range(self.num_places):
            self._fetch(index)

    def need(self, index: int) -> None:
        """Block `index` is computed next: the device waits for its weights."""
        place = index % self.num_places
        if self._number[place] != index:  # blocks are not computed in their order
            self._fetch(index)
        if self._copies is not None:
            torch.cuda.current_stream().wait_event(self._has_come[place])

    def done(self, index: int) -> None:
        """Block `index` has been computed: its place is filled for the next block there, or for the next step."""
        place = index % self.num_places
        if self._copies is not None:
            self._is_free[place].record()
        following = index + self.num_places
        self._fetch(following if following < len(self._home) else place)

    def _fetch(self, index: int) -> None:
        place, home = index % self.num_places, self._home[index]
        if self._number[place] == index:
            return
        self._number[place] = index
        if self._copies is None:
            self.places[place, : len(home)].copy_(home)
            return
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(self._is_free[place])
            self.places[place, : len(home)].copy_(home, non_blocking=True)
            self._has_come[place].record()


def _extents(modules: Iterable[nn.Module]) -> list[tuple[int, int, list[Tensor]]]:
    """The tensors of modules, those that share memory together: where they begin and end there, in bytes."""
    found: dict[int, dict[int, Tensor]] = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            found.setdefault(tensor.untyped_storage().data_ptr(), {})[id(tensor)] = tensor
    extents = []
    for same in found.values():
        tensors = list(same.values())
        begin = min(_first_byte(tensor) for tensor in tensors) // _ALIGNMENT * _ALIGNMENT
        extents.append((begin, max(_first_byte(one) + _num_bytes(one) for one in tensors), tensors))
    return extents


def _first_byte(tensor: Tensor) -> int:
    """Where a tensor begins in its memory."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _num_bytes(tensor: Tensor) -> int:
    """From a tensor's first byte to its last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def move_all_but(model: nn.Module, blocks: Iterable[nn.Module], device: torch.device) -> None:
    """Move a model to a device, without some of its modules."""
    left = {id(one) for block in blocks for one in block.modules()}
    for module in model.modules():
        if id(module) not in left:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.data = tensor.data.to(device)

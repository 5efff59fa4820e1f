"""Weights of blocks in host memory, copied to the device shortly before they are needed: models larger than a GPU.

The device has room for the weights of `ahead` + 1 blocks. The tensors of a block are views of its place there for good,
so the model computes as usual and gives the same bits. When a block has been computed, its place is filled with the
weights of the next block that lies there, while the blocks in between compute. Some blocks may stay on the device
(resident blocks), and all other weights do.

Ranks that compute with the same weights (replicas) read them together: each keeps an equal share of every block in host
memory and copies it to its place, and an all-gather completes the block on all of them. Such ranks must go through the
blocks equally often: a rank without work calls `pass_by`. Gathers then have the order of blocks on all of them.

The weights of a block lie end to end (`BlockLayout`). Tensors that share memory stay together, so that a joined linear
and its parts are moved at once. Ranks that read together have equal shares of the bytes, so the end is padded. A layout
needs no values: tensors may be on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.comm import Axis, Pending, all_gather
from weft.errors import ConfigError, PlanError
from weft.sharding.host_memory import KEPT_FREE_BYTES, available_host_bytes, host_zeros
from weft.sharding.layout import evenly_spaced

ALIGNMENT = 256  # bytes, as torch's allocator aligns tensors


def streamed_numbers(num_blocks: int, num_resident: int) -> tuple[int, ...]:
    """Return the blocks whose weights are in host memory, if `num_resident` others stay on the device. Both are spread
    evenly, so that some are computed while others are copied. The first block is in host memory.
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
    """Yield the slots of modules themselves, without those of modules inside them."""
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
    """Return the least multiple of a unit that is not below a size."""
    return -(-size // unit) * unit


def _sharing_memory(modules: Iterable[nn.Module]) -> list[list[TensorSlot]]:
    """Return the slots of modules and of those inside them, with tensors that share memory together."""
    every = {id(one): one for module in modules for one in module.modules()}
    found: dict[int, list[TensorSlot]] = {}
    for slot in tensor_slots(every.values()):
        found.setdefault(slot.tensor.untyped_storage()._cdata, []).append(slot)
    return list(found.values())


def _first_byte(tensor: Tensor) -> int:
    """Return where a tensor begins in its memory."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _num_bytes(tensor: Tensor) -> int:
    """From a tensor's first byte to its last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


class StreamedWeights:
    """The weights of blocks, each given by the modules that it is made of, in the order in which they compute.

    `readers` are the ranks that read together; None: this rank reads all. `num_resident` blocks stay on the device.
    Blocks have their values, or are on the meta device: `fill` gives a block its values once its tensors have memory.
    In host memory and on the device there is never more than the weights' own places, and one block.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[nn.Module]],
        device: torch.device,
        ahead: int,
        readers: Axis | None = None,
        num_resident: int = 0,
        fill: Callable[[int], None] | None = None,
        num_local_ranks: int = 1,
    ) -> None:
        refuse_resident(num_resident, len(blocks))
        self._readers = readers
        degree = 1 if readers is None else readers.degree
        self._layouts = [BlockLayout(modules, degree) for modules in blocks]
        self.block_bytes = tuple(layout.num_bytes for layout in self._layouts)
        self.numbers = streamed_numbers(len(blocks), num_resident)
        self._order = {number: index for index, number in enumerate(self.numbers)}
        self.num_places = min(ahead + 1, len(self.numbers))
        largest = max(self.block_bytes[number] for number in self.numbers)
        resident_bytes = sum(self.block_bytes) - sum(self.block_bytes[number] for number in self.numbers)
        host_bytes = sum(self._layouts[number].share_bytes for number in self.numbers)
        _refuse_memory(host_bytes, self.num_places * largest + resident_bytes, device, num_local_ranks)
        self.places = torch.empty(self.num_places, largest, dtype=torch.uint8, device=device)
        self.home: list[Tensor] = []  # of streamed blocks: all bytes, or this rank's share
        self.resident: list[Tensor] = []
        self._read(device, fill)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._copies is not None:
            self._has_come = [torch.cuda.Event() for _ in range(self.num_places)]
            self._is_free = [torch.cuda.Event() for _ in range(self.num_places)]
        self._index = [-1] * self.num_places  # of the block in each place, among streamed ones
        self._gathers: list[Pending | None] = [None] * self.num_places
        for index in range(self.num_places):
            self._fetch(index)

    def _read(self, device: torch.device, fill: Callable[[int], None] | None) -> None:
        """Put the values of each block to where they stay, one block after the other."""
        index = 0 if self._readers is None else self._readers.index
        whole = None if self._readers is None else torch.empty(max(self.block_bytes), dtype=torch.uint8)
        for number, layout in enumerate(self._layouts):
            if number not in self._order:
                self.resident.append(torch.empty(layout.num_bytes, dtype=torch.uint8, device=device))
                self._fill(number, self.resident[-1], fill)
                continue
            home = host_zeros(layout.share_bytes, torch.uint8, device)
            self.home.append(home)
            block = home if whole is None else whole[: layout.num_bytes]
            self._fill(number, block, fill)
            if whole is not None:
                home.copy_(block[index * len(home) : (index + 1) * len(home)])
            layout.move_tensors(self.places[self._order[number] % self.num_places])

    def _fill(self, number: int, block: Tensor, fill: Callable[[int], None] | None) -> None:
        """Give bytes of memory to the tensors of a block, with their values."""
        if fill is None:
            self._layouts[number].copy_to(block)
            self._layouts[number].move_tensors(block)
        else:
            self._layouts[number].move_tensors(block)
            fill(number)

    def need(self, number: int) -> None:
        """Block `number` is computed next: the device waits for its weights."""
        if number not in self._order:
            return
        index = self._order[number]
        place = index % self.num_places
        if self._index[place] != index:  # blocks are not computed in their order
            self._fetch(index)
        self._wait_for_gather(place)
        if self._copies is not None:
            torch.cuda.current_stream().wait_event(self._has_come[place])

    def done(self, number: int) -> None:
        """Block `number` has been computed: its place is filled for the next block there, or for the next step."""
        if number not in self._order:
            return
        index = self._order[number]
        place = index % self.num_places
        if self._copies is not None:
            self._is_free[place].record()
        following = index + self.num_places
        self._fetch(following if following < len(self.home) else place)

    def pass_by(self) -> None:
        """Give this rank's shares of all blocks to the other readers, while it computes nothing."""
        for number in self.numbers:
            self.need(number)
            self.done(number)

    @contextmanager
    def values(self) -> Iterator[None]:
        """A context in which every tensor has its values, in host memory if it is streamed. Nothing may compute."""
        assert self._readers is None, "this rank has shares of blocks only"
        pairs = list(zip(self.numbers, self.home, strict=True))
        for number, home in pairs:
            self._layouts[number].move_tensors(home)
        try:
            yield
        finally:
            for index, (number, _) in enumerate(pairs):
                self._layouts[number].move_tensors(self.places[index % self.num_places])

    def _fetch(self, index: int) -> None:
        place, home = index % self.num_places, self.home[index]
        if self._index[place] == index:
            return
        self._index[place] = index
        self._wait_for_gather(place)
        block = self.places[place, : self.block_bytes[self.numbers[index]]]
        own = block.view(-1, len(home))[0 if self._readers is None else self._readers.index]
        with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
            if self._copies is not None:
                self._copies.wait_event(self._is_free[place])
            own.copy_(home, non_blocking=True)
            if self._readers is not None:
                self._gathers[place] = all_gather(block, own, self._readers)
            if self._copies is not None:
                self._has_come[place].record()

    def _wait_for_gather(self, place: int) -> None:
        gather, self._gathers[place] = self._gathers[place], None
        if gather is not None:
            gather.wait()


def move_all_but(model: nn.Module, blocks: Iterable[nn.Module], device: torch.device) -> list[nn.Module]:
    """Move a model to a device, without some of its modules. Tensors on the meta device get memory without values.

    Returns the modules that were moved.
    """
    left = {id(one) for block in blocks for one in block.modules()}
    modules = [module for module in model.modules() if id(module) not in left]
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the tensor before, which is kept: ids are used again
    for slot in list(tensor_slots(modules)):
        before = slot.tensor
        if id(before) not in moved:
            after = torch.empty_like(before, device=device) if before.is_meta else before.detach().to(device)
            is_parameter = isinstance(before, nn.Parameter)
            moved[id(before)] = before, nn.Parameter(after, requires_grad=False) if is_parameter else after
        slot.put(moved[id(before)][1])
    return modules


def refuse_resident(num_resident: int, num_blocks: int) -> None:
    """Raise PlanError if no block would be streamed."""
    if not 0 <= num_resident < num_blocks:
        raise PlanError(
            f"--resident-blocks {num_resident} of a rank's {num_blocks} blocks cannot stay on the device while others "
            f"are streamed; give 0 to {num_blocks - 1}, or leave out --stream-weights if all fit"
        )


def _refuse_memory(host_bytes: int, device_bytes: int, device: torch.device, num_local_ranks: int) -> None:
    """Raise ConfigError if weights do not fit, before they are read: a host without memory ends processes silently."""
    available = available_host_bytes()
    if available is not None and host_bytes * num_local_ranks > available - KEPT_FREE_BYTES:
        raise ConfigError(
            f"--stream-weights keeps {host_bytes / 2**30:.1f} GiB in host memory for each of {num_local_ranks} ranks "
            f"here, and {available / 2**30:.1f} GiB are free, of which {KEPT_FREE_BYTES / 2**30:.0f} stay free; keep "
            f"more blocks on the device (--resident-blocks), or weights in fewer bits (--weights)"
        )
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for itself is free, too
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    if free is not None and device_bytes > free:
        raise ConfigError(
            f"blocks would take {device_bytes / 2**30:.1f} GiB of {device}, of which {free / 2**30:.1f} are free; "
            f"lower --resident-blocks or --stream-weights, or keep weights in fewer bits (--weights)"
        )

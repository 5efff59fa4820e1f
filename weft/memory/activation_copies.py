"""Copies saved activations of blocks to host memory, and back one offloaded block ahead. The bytes do not change.

    compute   │ block 0 │ block 1 │ block 2 │ block 3 │  loss  │ 3 back │ 2 back │ 1 back │ 0 back │
    down                │ 0 goes            │                                                          blocks 0 and 2
    down                                    │ 2 goes │                                                 are offloaded
    up                                                         │ 2 comes│     │ 0 comes │

autograd's hooks report each tensor that a block saves. Its storage is copied once, whatever views share it. The device
keeps its copy until the main stream has waited for the copy to the host: after the next offloaded block, and before the
last block at the latest. So at most two blocks are being copied at a time, and the stream waits, not the host. Memory
for the copy back is allocated on the main stream too, which waits for the copy before it is used. Streams share memory
only through these waits, so the allocator can reuse all of it at once.

Host buffers are allocated in the first step, one per storage and of its size, and reused in all later steps.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from weft.errors import PlanError
from weft.inspection.annotations import Annotation
from weft.inspection.memory_traffic import storage_key, tensors_of
from weft.sharding.host_memory import KEPT_FREE_BYTES, CopyStream, available_host_bytes, host_zeros

MIN_OFFLOAD_BYTES = 1 << 20  # smaller storages stay: their copy takes longer to start than to run
_least: list[int] = [MIN_OFFLOAD_BYTES]  # the last one is in force


def min_offload_bytes() -> int:
    """Returns the smallest storage that is offloaded, in bytes."""
    return _least[-1]


@contextmanager
def offload_from(num_bytes: int) -> Iterator[None]:
    """While the context is active, offload storages of at least `num_bytes`.

    Proofs need it: they run on tiny models.
    """
    _least.append(num_bytes)
    try:
        yield
    finally:
        _least.pop()


class HostBufferPool:
    """Host buffers by size, which are reused after `give`."""

    def __init__(self, device: torch.device) -> None:
        self.buffers: list[Tensor] = []
        self._device = device
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def take(self, num_bytes: int) -> Tensor:
        """Return a buffer [num_bytes]."""
        if self._free[num_bytes]:
            return self._free[num_bytes].pop()
        available = available_host_bytes()
        if available is not None and num_bytes > available - KEPT_FREE_BYTES:
            held = sum(buffer.numel() for buffer in self.buffers)
            raise PlanError(
                f"plan.memory.activations keeps {held / 2**30:.1f} GiB of activations in host memory and needs "
                f"{num_bytes / 2**30:.1f} more, of which the host has {available / 2**30:.1f} GiB "
                f"({KEPT_FREE_BYTES / 2**30:.0f} stay free); lower it, or plan.micro_batch"
            )
        self.buffers.append(host_zeros(num_bytes, torch.uint8, self._device))
        return self.buffers[-1]

    def give(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        self._free[buffer.numel()].append(buffer)


class SavedTensor(NamedTuple):
    """A saved tensor that stays on the device, with its version: autograd does not check that of packed tensors."""

    tensor: Tensor
    version: int


class OffloadedView(NamedTuple):
    """A saved tensor that is a view of an offloaded storage."""

    source: OffloadedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class OffloadedGroup:
    """The storages that one block offloaded in one forward, and the group before it."""

    def __init__(self, before: OffloadedGroup | None) -> None:
        self.before = before
        self.storages: list[weakref.ref[OffloadedStorage]] = []
        self.device_copies: list[Tensor] = []  # kept until the copy to the host is done
        self.down: Any = None  # the end of the last copy to the host

    def start(self) -> None:
        """Start the copies back to the device of all storages that are still needed."""
        for reference in reversed(self.storages):
            sent = reference()
            if sent is not None:
                sent.start()


class OffloadedStorage:
    """A storage in host memory. It lives until no saved tensor needs it."""

    def __init__(
        self, offloader: ActivationOffloader, group: OffloadedGroup, storage: torch.UntypedStorage, version: int
    ) -> None:
        self.group, self.version, self._offloader = group, version, offloader
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.buffer = offloader.pool.take(source.numel())
        self._down = group.down = offloader.down.copy(self.buffer, source)
        group.device_copies.append(source)
        group.storages.append(weakref.ref(self))
        offloader.down_bytes += source.numel()
        self._up: tuple[Tensor, Any] | None = None  # the bytes on the device, and the end of their copy

    def start(self) -> None:
        """Start the copy back to the device, unless it has started."""
        if self._up is None:
            target = torch.empty(self.buffer.numel(), dtype=torch.uint8, device=self._offloader.device)
            self._up = target, self._offloader.up.copy(target, self.buffer, self._down)
            self._offloader.up_bytes += target.numel()

    def fetch(self) -> torch.UntypedStorage:
        """Return the storage on the device; the current stream waits for its copy.

        Starts the copies of the group before it.
        """
        self.start()
        assert self._up is not None
        if self.group.before is not None:
            self.group.before.start()
            self.group.before = None
        target, event = self._up
        self._offloader.up.wait(event)
        return target.untyped_storage()

    def __del__(self) -> None:
        if hasattr(self, "_up"):
            if self._up is not None:  # its copy may have started and not been used
                self._offloader.up.wait(self._up[1])
            self._offloader.pool.give(self.buffer)


class ActivationOffloader:
    """The hooks on a model's blocks that offload activations. `down_bytes` and `up_bytes` count the copied bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, HostBufferPool(device)
        self.down, self.up = CopyStream(device), CopyStream(device)
        self.down_bytes = self.up_bytes = 0
        self._entered: list[saved_tensors_hooks | None] = []  # a stack, as blocks may be nested
        self._staying = set[int]()
        self._offloaded: dict[int, tuple[weakref.ref[torch.UntypedStorage], weakref.ref[OffloadedStorage]]] = {}
        self._group: OffloadedGroup | None = None  # of the block that runs, or ran last
        self._under_way: list[OffloadedGroup] = []

    def install(self, model: nn.Module, sent: list[nn.Module], last: nn.Module) -> None:
        """Offload what the blocks `sent` save. `last` is the last of all blocks."""
        model.register_forward_pre_hook(self._begin)
        for block in sent:
            # Hooks, not a new forward, which torch.compile replaces: hooks run outside of it, and of recompute.
            block.register_forward_pre_hook(self._enter, with_kwargs=True)
            block.register_forward_hook(self._leave, always_call=True)
        last.register_forward_pre_hook(self._release_all)
        last.register_forward_hook(self._expect)
        model.register_forward_hook(self._release_all)
        _OFFLOADER.set(model, self)

    # --- forward

    def _begin(self, *_: Any) -> None:
        self._release_all()
        self._group = None
        self._offloaded = {key: pair for key, pair in self._offloaded.items() if pair[1]() is not None}

    def _enter(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        given = tensors_of((args, kwargs))
        own = [*block.parameters(), *block.buffers()]
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (*given, *own)):
            self._entered.append(None)
            return
        # Other inputs than the first (tables, masks) are shared by all blocks, so they stay.
        self._staying = {storage_key(tensor) for tensor in (*given[1:], *own) if tensor.layout is torch.strided}
        self._group = OffloadedGroup(self._group)
        self._under_way.append(self._group)
        hooks = saved_tensors_hooks(self._pack, _unpack)
        hooks.__enter__()
        self._entered.append(hooks)

    def _leave(self, *_: Any) -> None:
        hooks = self._entered.pop() if self._entered else None
        if hooks is not None:
            hooks.__exit__()
            self._release(self._under_way[:-1])

    def _release_all(self, *_: Any) -> None:
        self._release(self._under_way)

    def _release(self, groups: list[OffloadedGroup]) -> None:
        """Make the current stream wait until groups are on the host, and drop their copies on the device."""
        for group in list(groups):
            self.down.wait(group.down)
            group.device_copies.clear()
            self._under_way.remove(group)

    def _expect(self, _: nn.Module, __: Any, output: Any) -> None:
        """Start the copies back of the last group when the backward of the last block begins."""
        if self._group is not None and torch.is_grad_enabled():
            group = self._group
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: group.start())

    # --- what is saved

    @torch.no_grad()
    def _pack(self, tensor: Tensor) -> Any:
        if type(tensor) not in (Tensor, nn.Parameter):  # fake tensors of a trace
            return tensor
        is_plain = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
        if (
            not is_plain
            or tensor.device.type != self.device.type
            or tensor.untyped_storage().nbytes() < min_offload_bytes()
            or storage_key(tensor) in self._staying
        ):
            return SavedTensor(tensor.detach(), tensor._version)
        return OffloadedView(
            self._offload(tensor), tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )

    def _offload(self, tensor: Tensor) -> OffloadedStorage:
        storage = tensor.untyped_storage()
        there, known = self._offloaded.get(storage._cdata, (None, None))
        sent = known() if known is not None else None
        # The address of a freed storage may belong to another one now.
        if sent is None or there is None or there() is not storage or sent.version != tensor._version:
            assert self._group is not None
            sent = OffloadedStorage(self, self._group, storage, tensor._version)
            self._offloaded[storage._cdata] = weakref.ref(storage), weakref.ref(sent)
        return sent


@torch.no_grad()
def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    if isinstance(saved, SavedTensor):
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                f"a tensor {tuple(saved.tensor.shape)} that backward needs was changed in place after it was saved: it "
                f"is at version {saved.tensor._version}, saved was {saved.version}"
            )
        return saved.tensor
    assert isinstance(saved, OffloadedView)
    storage = saved.source.fetch()
    made = torch.empty(0, dtype=saved.dtype, device=storage.device)
    return made.set_(storage, saved.offset, saved.shape, saved.stride)  # type: ignore[call-overload,no-any-return]


_OFFLOADER = Annotation[ActivationOffloader]("activation_offloader")


def offloader_of(model: nn.Module) -> ActivationOffloader | None:
    """Return the object that offloads a model's activations; None if nothing does."""
    return _OFFLOADER.get(model)

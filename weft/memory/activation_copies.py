"""Sends what blocks have saved for backward to host memory, and brings it back one sent block ahead. Byte copies.

    compute   │ block 0 │ block 1 │ block 2 │ block 3 │  loss  │ 3 back │ 2 back │ 1 back │ 0 back │
    down                │ 0 goes            │                                                          blocks 0 and 2
    down                                    │ 2 goes │                                                 are sent
    up                                                         │ 2 comes│     │ 0 comes │

autograd's hooks give each tensor that a block saves; its storage goes once, whatever views share it. The device's copy
is held until the main stream has waited for the one on the host: behind the next block that is sent, before the last
block at the latest. So no more than two blocks are ever under way, and what waits is the stream, not the host. Room for
what comes back is made on the main stream too, which waits for it where it is used. Nothing is shared between streams
but through these waits, and the allocator may use all memory again at once.

Host buffers are made in the first step, at the size of each storage, and used again in every later one.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from weft.errors import PlanError
from weft.inspection.memory_traffic import tensors_of
from weft.memory.activation_choice import least_bytes
from weft.sharding.copy_lane import CopyStream
from weft.sharding.host_memory import KEPT_FREE_BYTES, available_host_bytes, host_zeros

_ATTRIBUTE = "_weft_sender"


class Pool:
    """Host buffers by size; one that is given back is taken again."""

    def __init__(self, device: torch.device) -> None:
        self.buffers: list[Tensor] = []
        self._device = device
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def take(self, num_bytes: int) -> Tensor:
        """A buffer [num_bytes]."""
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
        """A buffer that nobody needs any more."""
        self._free[buffer.numel()].append(buffer)


class Kept(NamedTuple):
    """A saved tensor that stays, and the version that was saved: autograd does not look at it behind hooks."""

    tensor: Tensor
    version: int


class Place(NamedTuple):
    """A saved tensor as a view of a storage that was sent."""

    sent: Sent
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Group:
    """What one block has sent in one forward, and the group before it."""

    def __init__(self, before: Group | None) -> None:
        self.before = before
        self.sent: list[weakref.ref[Sent]] = []
        self.held: list[Tensor] = []  # on the device, while it goes
        self.down: Any = None  # when all of it is on the host

    def start(self) -> None:
        """Bring all of it back that is still wanted."""
        for reference in reversed(self.sent):
            sent = reference()
            if sent is not None:
                sent.start()


class Sent:
    """A storage on the host, until nothing that was saved of it is wanted."""

    def __init__(self, sender: Sender, group: Group, storage: torch.UntypedStorage, version: int) -> None:
        self.group, self.version, self._sender = group, version, sender
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.buffer = sender.pool.take(source.numel())
        self._down = group.down = sender.down.copy(self.buffer, source)
        group.held.append(source)
        group.sent.append(weakref.ref(self))
        sender.down_bytes += source.numel()
        self._up: tuple[Tensor, Any] | None = None  # the bytes on the device, and when they are there

    def start(self) -> None:
        """Begin to bring it back, if it has not begun."""
        if self._up is None:
            room = torch.empty(self.buffer.numel(), dtype=torch.uint8, device=self._sender.device)
            self._up = room, self._sender.up.copy(room, self.buffer, self._down)
            self._sender.up_bytes += room.numel()

    def back(self) -> torch.UntypedStorage:
        """The storage, there for what the current stream does next; what was sent before it comes too."""
        self.start()
        assert self._up is not None
        if self.group.before is not None:
            self.group.before.start()
            self.group.before = None
        room, event = self._up
        self._sender.up.wait(event)
        return room.untyped_storage()

    def __del__(self) -> None:
        if hasattr(self, "_up"):
            if self._up is not None:  # it may have been fetched and never used
                self._sender.up.wait(self._up[1])
            self._sender.pool.give(self.buffer)


class Sender:
    """The hooks on a model's blocks; `down_bytes` and `up_bytes` count what went."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, Pool(device)
        self.down, self.up = CopyStream(device), CopyStream(device)
        self.down_bytes = self.up_bytes = 0
        self._entered: list[saved_tensors_hooks | None] = []  # as blocks may lie in each other
        self._staying = set[int]()
        self._sent: dict[int, tuple[weakref.ref[torch.UntypedStorage], weakref.ref[Sent]]] = {}
        self._group: Group | None = None  # of the block that runs, or ran last
        self._under_way: list[Group] = []

    def install(self, model: nn.Module, sent: list[nn.Module], last: nn.Module) -> None:
        """Send what some blocks of a model save; `last` is the last of all."""
        model.register_forward_pre_hook(self._begin)
        for block in sent:
            # Hooks, and not the forward, which torch.compile replaces: they lie outside of that, and of recompute.
            block.register_forward_pre_hook(self._enter, with_kwargs=True)
            block.register_forward_hook(self._leave, always_call=True)
        last.register_forward_pre_hook(self._release_all)
        last.register_forward_hook(self._expect)
        model.register_forward_hook(self._release_all)
        model.__dict__[_ATTRIBUTE] = self

    # --- forward

    def _begin(self, *_: Any) -> None:
        self._release_all()
        self._group = None
        self._sent = {key: pair for key, pair in self._sent.items() if pair[1]() is not None}

    def _enter(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        given = tensors_of((args, kwargs))
        own = [*block.parameters(), *block.buffers()]
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (*given, *own)):
            self._entered.append(None)
            return
        # What a block is given beside the stream (tables, masks) is given to all of them.
        self._staying = {_key(tensor) for tensor in (*given[1:], *own) if tensor.layout is torch.strided}
        self._group = Group(self._group)
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

    def _release(self, groups: list[Group]) -> None:
        """Wait until groups are on the host, and hold them on the device no longer."""
        for group in list(groups):
            self.down.wait(group.down)
            group.held.clear()
            self._under_way.remove(group)

    def _expect(self, _: nn.Module, __: Any, output: Any) -> None:
        """When the last block's backward begins, what was sent last comes back."""
        if self._group is not None and torch.is_grad_enabled():
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(_start, self._group))

    # --- what is saved

    @torch.no_grad()
    def _pack(self, tensor: Tensor) -> Any:
        if type(tensor) not in (Tensor, nn.Parameter):  # of a trace
            return tensor
        is_plain = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
        if not is_plain or tensor.device.type != self.device.type or self._stays(tensor):
            return Kept(tensor.detach(), tensor._version)
        return Place(self._send(tensor), tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _stays(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().nbytes() < least_bytes() or _key(tensor) in self._staying

    def _send(self, tensor: Tensor) -> Sent:
        storage = tensor.untyped_storage()
        there, known = self._sent.get(storage._cdata, (None, None))
        sent = known() if known is not None else None
        # A storage that died has left its address to another.
        if sent is None or there is None or there() is not storage or sent.version != tensor._version:
            assert self._group is not None
            sent = Sent(self, self._group, storage, tensor._version)
            self._sent[storage._cdata] = weakref.ref(storage), weakref.ref(sent)
        return sent


@torch.no_grad()
def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    if isinstance(saved, Kept):
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                f"a tensor {tuple(saved.tensor.shape)} that backward needs was changed in place after it was saved: it "
                f"is at version {saved.tensor._version}, saved was {saved.version}"
            )
        return saved.tensor
    assert isinstance(saved, Place)
    storage = saved.sent.back()
    made = torch.empty(0, dtype=saved.dtype, device=storage.device)
    return made.set_(storage, saved.offset, saved.shape, saved.stride)  # type: ignore[call-overload,no-any-return]


def _start(group: Group, _: Tensor) -> None:
    group.start()


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def sender_of(model: nn.Module) -> Sender | None:
    """What sends a model's activations; None where nothing does."""
    return model.__dict__.get(_ATTRIBUTE)

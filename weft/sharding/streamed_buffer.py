"""A flat buffer that lives in host memory: weights come to the device when they are wanted, gradients leave it.

    host     home ─────────────┐                  ┌──────────▶ gradients ──▶ AdamW, in chunks ──▶ home
                          copy up               copy down, when the block's backward is done
    device                     └─▶ room 0 or 1 ───┘

All buffers share a few *rooms*, two for blocks that are alike: one is computed with while the next is filled. A buffer
has the same room in forward and backward, so what autograd saved of its weights is there again when it is looked at.
What a room still holds is not copied again: the last two blocks of forward are the first of backward. For `unit.py`
this is a gather and a reduction like those of `shard`.

The square root of a gradient's square sum is taken before it leaves, by the kernel that takes it of those that stay.
Gradients of several micro-batches come back to be added to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.errors import PlanError
from weft.sharding.copy_lane import Lane
from weft.sharding.flat_buffer import Flat
from weft.sharding.gradient_norm import norms
from weft.sharding.host_memory import host_zeros
from weft.sharding.layout import RoomKey, RoomSize


class Link:
    """Both directions between host and device; `up_bytes` and `down_bytes` count what went."""

    def __init__(self, device: torch.device) -> None:
        self.up, self.down = Lane(device), Lane(device)
        self.up_bytes = self.down_bytes = 0


class Room:
    """Memory of the device for one streamed buffer at a time: its weights, and in backward its gradient."""

    def __init__(self, size: RoomSize, dtype: torch.dtype, device: torch.device, link: Link) -> None:
        self.weights = torch.empty(size.numel, dtype=dtype, device=device)
        self.link = link
        self.holder: StreamedFlat | None = None  # whose weights are here, or on their way
        self.gradient: Tensor | None = None
        self.owner: StreamedFlat | None = None  # whose gradient is here, and not on the host
        self._size = size
        self._going: tuple[Tensor | None, Any] = None, None  # a gradient that leaves, and when it has

    def send(self, target: Tensor, gradient: Tensor) -> Any:
        """Let a gradient go to the host; when it is there."""
        self._going = gradient, self.link.down.copy(target, gradient)
        self.link.down_bytes += gradient.numel() * gradient.element_size()
        self.owner = None
        return self._going[1]

    def take(self, owner: StreamedFlat, dtype: torch.dtype) -> Tensor:
        """Room for another gradient; what was here goes to the host first."""
        if self.owner not in (None, owner):
            self.owner.send_gradient()
        self.link.down.wait(self._going[1])
        self._going = None, None
        if self.gradient is None or self.gradient.dtype != dtype:
            self.gradient = None
            self.gradient = torch.empty(self._size.trained_numel, dtype=dtype, device=self.weights.device)
        self.owner = owner
        return self.gradient[: owner.layout.numel]


def make_rooms(sizes: Mapping[RoomKey, RoomSize], dtype: torch.dtype, device: torch.device) -> dict[RoomKey, Room]:
    """Rooms of these sizes, filled and emptied over one link."""
    link = Link(device)
    return {key: Room(size, dtype, device, link) for key, size in sizes.items()}


class StreamedFlat(Flat):
    """A flat buffer on the host, on one rank. `home` holds the weights in the compute dtype: the optimizer's own, where
    those have it.
    """

    is_streamed = True

    def __init__(self, room: Room, *args: Any, **options: Any) -> None:
        """`args` and `options` as those of `Flat`."""
        self.room, self._link = room, room.link
        self._fetched: Any = None  # when the weights are in the room
        self._sent: Any = None  # when the gradient is on the host
        self._arriving: tuple[Tensor, Any] | None = None  # a sum on its way back, to be added to, and when it is there
        self._has_sum = False  # whether the host has a gradient that is to be added to
        options["on_host"] = True
        super().__init__(*args, **options)
        is_one = self.slice_dtype == self.compute_dtype
        self.home = self.slice if is_one else host_zeros(self.layout.numel, self.compute_dtype, self.device)

    # --- weights

    def start_gather(self) -> None:
        """Begin to bring the weights, unless someone still computes with what their room holds."""
        holder = self.room.holder
        if holder is None or (holder is not self and not holder.is_whole):
            self._fetch()

    def finish_gather(self) -> None:
        """Let the modules see whole parameters, there for what the current stream does next."""
        if self.is_whole:
            return
        if self.room.holder is not self:
            self._fetch()
        self._link.up.wait(self._fetched)
        self._install(self.whole_parameters)
        self.is_whole = True

    def release(self, stale: bool) -> None:
        """After use: another may take the room. `stale` says that the optimizer will now change the weights."""
        if self.is_whole:
            self._install(self.pieces)
            self.is_whole = False
        if stale and self.trainable:
            self._leave_room()

    def refresh(self) -> None:
        """Show the pieces, which were changed from outside."""
        self._install(self.pieces)
        self.is_whole, self._written_version = False, -1
        self._leave_room()

    @property
    def written(self) -> Tensor | None:
        """Where the optimizer writes its weights once more, in the compute dtype: on the host."""
        return None if self.home is self.slice else self.home

    def _fetch(self) -> None:
        self._write_home()
        if self.room.holder is not None and self.room.holder.is_whole:
            self.room.holder.release(stale=False)
        self.room.holder = self
        self._fetched = self._link.up.copy(self.whole, self.home, behind=self.update_done)
        self.update_done = None
        self._link.up_bytes += self.home.numel() * self.home.element_size()

    def _write_home(self) -> None:
        """Bring `home` up to the slice, where something else than the optimizer has changed that."""
        if self.home is not self.slice and self._written_version != self.slice._version:
            for event in (self.update_done, self._fetched):  # the host itself writes it
                if isinstance(event, torch.cuda.Event):
                    event.synchronize()
            self.home.copy_(self.slice)
            self.mark_written()

    def _leave_room(self) -> None:
        if self.room.holder is self:
            self._link.up.wait(self._fetched)  # it may have been fetched and not used
            self.room.holder = None

    # --- gradients

    def expect_gradient(self) -> None:
        """Backward has reached the block: what its gradients are added to comes back."""
        if self._has_sum and self.room.owner is not self:
            self._begin_gradient()

    def place_gradients(self) -> None:
        """Put what was taken into the flat gradient, when what it is added to is there."""
        if self._taken and self._arriving is not None:
            self._finish_arriving()
        super().place_gradients()

    def keep_gradient(self) -> None:
        """Backward of this micro-batch has no more: the sum goes to the host."""
        if self.room.owner is self:
            self.send_gradient()

    def send_gradient(self) -> None:
        """Let the gradient leave for the host; a parameter without one counts as zero."""
        self.place_gradients()
        if self._arriving is not None:
            self._finish_arriving()
        for index in range(len(self.whole_parameters)):
            if index not in self._filled:
                self._targets[index].zero_()
        self._filled.clear()
        gradient = self.whole_gradient
        assert gradient is not None
        (self.gradient_norm,) = norms([gradient])
        if self.slice_gradient is None or self.slice_gradient.dtype != gradient.dtype:
            if isinstance(self._sent, torch.cuda.Event):  # pages go back to the system: nothing may still read them
                torch.cuda.synchronize(self.device)
            self.slice_gradient = host_zeros(self.layout.numel, gradient.dtype, self.device)
        self._sent = self.room.send(self.slice_gradient, gradient)
        self._has_sum, self.whole_gradient, self._targets = True, None, []

    def _take(self, index: int, gradient: Tensor) -> bool:
        return False  # its norm is taken before it leaves

    def start_reduce(self) -> None:
        """Nobody else has a part of it: it only has to leave."""
        if self.room.owner is not self and not self._has_sum:
            self._begin_gradient()
        self.keep_gradient()

    def continue_reduce(self) -> None:
        """Nothing is left to do."""

    def finish_reduce(self) -> None:
        """Order what comes behind the copy, and show the optimizer its gradients."""
        self._link.down.wait(self._sent)
        self.show_gradient()

    def show_gradient(self) -> None:
        """Let the optimizer see the gradient; on a CPU pieces show it too."""
        if not self.is_read_flat:
            raise PlanError(
                f"plan.memory.weights keeps '{self.layout.parameters[0].name}' and its gradient in host memory, which "
                f"only weft.AdamW(model, ...) takes; use it, or weights = 0"
            )
        assert self.slice_gradient is not None
        if self.device.type == "cpu" and self.slice_gradient.dtype == self.slice.dtype:
            super().show_gradient()
        self.hides_gradient = True

    def forget_gradient(self) -> None:
        """The next backward begins a new sum, also where one has come back and nothing was added to it."""
        super().forget_gradient()
        self._has_sum = False
        if self.room.owner is self:
            if self._arriving is not None:
                self._finish_arriving()
            self.room.owner, self.whole_gradient, self._targets = None, None, []
            self._filled.clear()
            self._taken.clear()

    def discard_gradient(self) -> None:
        """Forget what a backward that was cut short has left, and what it was added to."""
        self.forget_gradient()
        for piece in self.pieces:
            piece.grad = None

    @property
    def device_gradients(self) -> list[Tensor | None]:
        return [self.room.gradient]

    # --- inside

    def _make_whole(self) -> Tensor:
        return self.room.weights[: self.layout.numel]

    def _begin_gradient(self) -> None:
        self.await_update()  # which reads the last gradient; or weights that were fetched behind it, and not used
        self._link.up.wait(self._fetched)
        if self._has_sum:
            self._is_alone = False
        self._take_room()
        if not self._has_sum:
            assert self.whole_gradient is not None
            self._zero_padding(self.whole_gradient)
            return
        assert self.slice_gradient is not None
        assert self.whole_gradient is not None
        arriving = self.whole_gradient
        if arriving.dtype != self.slice_gradient.dtype:  # the first sum of all, which is in few bits still
            arriving = torch.empty_like(arriving, dtype=self.slice_gradient.dtype)
        self._arriving = arriving, self._link.up.copy(arriving, self.slice_gradient, behind=self._sent)
        self._link.up_bytes += arriving.numel() * arriving.element_size()
        self._filled.update(range(len(self.whole_parameters)))

    def _finish_arriving(self) -> None:
        assert self._arriving is not None
        assert self.whole_gradient is not None
        arriving, event = self._arriving
        self._arriving = None
        self._link.up.wait(event)
        if arriving is not self.whole_gradient:
            self.whole_gradient.copy_(arriving)

    def _widen(self) -> None:
        self._is_alone = False
        if self.whole_gradient is not None and self.whole_gradient.dtype != self.master_dtype:
            before = self.whole_gradient
            self._take_room()
            self.whole_gradient.copy_(before)

    def _take_room(self) -> None:
        dtype = self.compute_dtype if self._is_alone else self.master_dtype
        self.whole_gradient = self.room.take(self, dtype)
        self._targets = [self._view(self.whole_gradient, index) for index in range(len(self.whole_parameters))]

"""A flat buffer in host memory: weights are copied to the device for each use, gradients are copied back.

    host     home ─────────────┐                  ┌──────────▶ gradients ──▶ AdamW, in chunks ──▶ home
                          copy up               copy down, when the block's backward is done
    device                     └─▶ buffer 0 or 1 ─┘

All streamed buffers share a few *device buffers*, two for blocks of equal layout: one is computed with while the other
is filled. A streamed buffer uses the same device buffer in forward and backward, so the views of weights that autograd
saved are valid again in backward. Weights that are still in a device buffer are not copied again: the last two blocks
of forward are the first two of backward. For `units.py` the copies are a gather and a reduction as those of `shard`.

The norm of a gradient is computed on the device before the copy to the host, by the same kernel as the norm of other
gradients. With several micro-batches, the sum of gradients is copied back to the device to be added to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.errors import PlanError
from weft.sharding.flat_buffer import Flat, FlatOptions
from weft.sharding.host_memory import CopyStream, host_zeros
from weft.sharding.layout import DeviceBufferKey, DeviceBufferSize
from weft.sharding.whole_gradient import norms


class HostLink:
    """Copy streams in both directions between host and device. `up_bytes` and `down_bytes` count the copied bytes."""

    def __init__(self, device: torch.device) -> None:
        self.up, self.down = CopyStream(device), CopyStream(device)
        self.up_bytes = self.down_bytes = 0


class DeviceBuffer:
    """Device memory for one streamed buffer at a time: its weights and, in backward, its gradient."""

    def __init__(self, size: DeviceBufferSize, dtype: torch.dtype, device: torch.device, link: HostLink) -> None:
        self.weights = torch.empty(size.numel, dtype=dtype, device=device)
        self.link = link
        self.weight_holder: StreamedFlat | None = None  # the buffer whose weights are here or being copied here
        self.gradient: Tensor | None = None
        self.gradient_holder: StreamedFlat | None = None  # the buffer whose gradient is here and not yet on the host
        self._size = size
        # a gradient being copied to the host, and the end of that copy
        self._outgoing: tuple[Tensor | None, Any] = None, None

    def send(self, target: Tensor, gradient: Tensor) -> Any:
        """Start the copy of a gradient to the host and return the event that ends it."""
        self._outgoing = gradient, self.link.down.copy(target, gradient)
        self.link.down_bytes += gradient.numel() * gradient.element_size()
        self.gradient_holder = None
        return self._outgoing[1]

    def take(self, owner: StreamedFlat, dtype: torch.dtype) -> Tensor:
        """Return memory for the gradient of `owner`. The gradient of another buffer is copied to the host first."""
        if self.gradient_holder not in (None, owner):
            self.gradient_holder.send_gradient()
        self.link.down.wait(self._outgoing[1])
        self._outgoing = None, None
        if self.gradient is None or self.gradient.dtype != dtype:
            self.gradient = None
            self.gradient = torch.empty(self._size.trained_numel, dtype=dtype, device=self.weights.device)
        self.gradient_holder = owner
        return self.gradient[: owner.layout.numel]


def make_device_buffers(
    sizes: Mapping[DeviceBufferKey, DeviceBufferSize], dtype: torch.dtype, device: torch.device
) -> dict[DeviceBufferKey, DeviceBuffer]:
    """Return device buffers of these sizes, which share one link to the host."""
    link = HostLink(device)
    return {key: DeviceBuffer(size, dtype, device, link) for key, size in sizes.items()}


class StreamedFlat(Flat):
    """A flat buffer in host memory, on one rank.

    `home` holds the weights in the compute dtype; it is the optimizer's slice if that has the same dtype.
    """

    is_streamed = True

    def __init__(self, device_buffer: DeviceBuffer, *args: Any, options: FlatOptions) -> None:
        """`args` and `options` are those of `Flat`; `options.on_host` is set here."""
        self.device_buffer, self._link = device_buffer, device_buffer.link
        self._fetched: Any = None  # end of the copy of the weights to the device
        self._sent: Any = None  # end of the copy of the gradient to the host
        # a gradient sum being copied back to the device, and the end of the copy
        self._arriving: tuple[Tensor, Any] | None = None
        self._has_sum = False  # True if the host holds a gradient that further ones are added to
        super().__init__(*args, options=replace(options, on_host=True))
        is_one = options.slice_dtype == options.compute_dtype
        self.home = self.slice if is_one else host_zeros(self.layout.numel, options.compute_dtype, self.device)

    # --- weights

    def start_gather(self) -> None:
        """Start the copy of the weights to the device, unless the device buffer holds weights in use."""
        holder = self.device_buffer.weight_holder
        if holder is None or (holder is not self and not holder.is_whole):
            self._fetch()

    def finish_gather(self) -> None:
        """Make the whole parameters visible to the modules. The current stream waits for their copy."""
        if self.is_whole:
            return
        if self.device_buffer.weight_holder is not self:
            self._fetch()
        self._link.up.wait(self._fetched)
        self._install(self.whole_parameters)
        self.is_whole = True

    def release(self, stale: bool) -> None:
        """Allow other buffers to use the device buffer. `stale`: the optimizer is about to change the weights."""
        if self.is_whole:
            self._install(self.pieces)
            self.is_whole = False
        if stale and self.trainable:
            self._leave_device_buffer()

    def refresh(self) -> None:
        """Make the pieces visible to the modules after a change from outside. The next use copies the weights again."""
        self._install(self.pieces)
        self.is_whole, self._written_version = False, -1
        self._leave_device_buffer()

    @property
    def written(self) -> Tensor | None:
        """A second host tensor for updated weights, in the compute dtype; None if the slice has that dtype."""
        return None if self.home is self.slice else self.home

    def _fetch(self) -> None:
        self._write_home()
        if self.device_buffer.weight_holder is not None and self.device_buffer.weight_holder.is_whole:
            self.device_buffer.weight_holder.release(stale=False)
        self.device_buffer.weight_holder = self
        self._fetched = self._link.up.copy(self.whole, self.home, behind=self.update_done)
        self.update_done = None
        self._link.up_bytes += self.home.numel() * self.home.element_size()

    def _write_home(self) -> None:
        """Copy the slice to `home` if something other than the optimizer has changed the slice."""
        if self.home is not self.slice and self._written_version != self.slice._version:
            for event in (self.update_done, self._fetched):  # the host writes `home`, so it waits itself
                if isinstance(event, torch.cuda.Event):
                    event.synchronize()
            self.home.copy_(self.slice)
            self.mark_written()

    def _leave_device_buffer(self) -> None:
        if self.device_buffer.weight_holder is self:
            self._link.up.wait(self._fetched)  # the copy may have started and not been used
            self.device_buffer.weight_holder = None

    # --- gradients

    def expect_gradient(self) -> None:
        """Start to copy the gradient sum back to the device, because backward has reached the block."""
        if self._has_sum and self.device_buffer.gradient_holder is not self:
            self._begin_gradient()

    def place_gradients(self) -> None:
        """Copy all gradients taken so far into the flat gradient, once the sum that they join is on the device."""
        if self.whole_gradient.held and self._arriving is not None:
            self._finish_arriving()
        super().place_gradients()

    def keep_gradient(self) -> None:
        """Start the copy of the gradient sum to the host, because this micro-batch adds no more to it."""
        if self.device_buffer.gradient_holder is self:
            self.send_gradient()

    def send_gradient(self) -> None:
        """Start the copy of the gradient to the host."""
        self.place_gradients()
        if self._arriving is not None:
            self._finish_arriving()
        self.whole_gradient.finish()
        gradient = self.whole_gradient.tensor
        assert gradient is not None
        (self.gradient_norm,) = norms([gradient])
        if self.slice_gradient is None or self.slice_gradient.dtype != gradient.dtype:
            if isinstance(self._sent, torch.cuda.Event):  # its pages return to the system: no copy may still use them
                torch.cuda.synchronize(self.device)
            self.slice_gradient = host_zeros(self.layout.numel, gradient.dtype, self.device)
        self._sent = self.device_buffer.send(self.slice_gradient, gradient)
        self._has_sum = True
        self.whole_gradient.free()

    def start_reduce(self) -> None:
        """Start the copy of the gradient to the host. There is no reduction, since there is one rank."""
        if self.device_buffer.gradient_holder is not self and not self._has_sum:
            self._begin_gradient()
        self.keep_gradient()

    def continue_reduce(self) -> None:
        """Does nothing: there are no other axes to reduce over."""

    def finish_reduce(self) -> None:
        """Make the current stream wait for the copy, and make the gradient visible to the optimizer."""
        self._link.down.wait(self._sent)
        self.show_gradient()

    def show_gradient(self) -> None:
        """Make the gradient visible to the optimizer. On a CPU it is also `.grad` of the pieces."""
        if not self.is_read_flat:
            raise PlanError(
                f"plan.memory.weights keeps '{self.layout.parameters[0].name}' and its gradient in host memory, which "
                f"only weft.AdamW(model, ...) takes; use it, or weights = 0"
            )
        assert self.slice_gradient is not None
        received = self.whole_gradient.received
        self.unused = frozenset(id(piece) for i, piece in enumerate(self.pieces) if i not in received)
        if self.device.type == "cpu" and self.slice_gradient.dtype == self.slice.dtype:
            super().show_gradient()
        self.hides_gradient = True

    def forget_gradient(self) -> None:
        """Mark the gradient as used, so that the next backward begins a new sum.

        A sum that was copied back is dropped too.
        """
        super().forget_gradient()
        self._has_sum = False
        if self.device_buffer.gradient_holder is self:
            if self._arriving is not None:
                self._finish_arriving()
            self.device_buffer.gradient_holder = None
            self.whole_gradient.free()
            self.whole_gradient.discard()

    def discard_gradient(self) -> None:
        """Drop the gradients of an interrupted backward, and the sum that they were added to."""
        self.forget_gradient()
        for piece in self.pieces:
            piece.grad = None

    @property
    def device_gradients(self) -> list[Tensor | None]:
        return [self.device_buffer.gradient]

    # --- internal

    def _make_whole(self) -> Tensor:
        return self.device_buffer.weights[: self.layout.numel]

    def _begin_gradient(self) -> None:
        self.await_update()  # the update reads the last gradient, and a prefetch that was not used waits for the update
        self._link.up.wait(self._fetched)
        if self._has_sum:
            self.whole_gradient.is_unsummed = False
        else:
            self.whole_gradient.received.clear()
        arriving = self._take_device_buffer()
        if not self._has_sum:
            self.whole_gradient.zero_padding()
            return
        assert self.slice_gradient is not None
        if arriving.dtype != self.slice_gradient.dtype:  # the first gradient, still in the compute dtype
            arriving = torch.empty_like(arriving, dtype=self.slice_gradient.dtype)
        self._arriving = arriving, self._link.up.copy(arriving, self.slice_gradient, behind=self._sent)
        self._link.up_bytes += arriving.numel() * arriving.element_size()
        self.whole_gradient.filled.update(range(len(self.whole_parameters)))

    def _finish_arriving(self) -> None:
        assert self._arriving is not None
        assert self.whole_gradient.tensor is not None
        arriving, event = self._arriving
        self._arriving = None
        self._link.up.wait(event)
        if arriving is not self.whole_gradient.tensor:
            self.whole_gradient.tensor.copy_(arriving)

    def _widen(self) -> None:
        self.whole_gradient.is_unsummed = False
        before = self.whole_gradient.tensor
        if before is not None and before.dtype != self.options.master_dtype:
            self._take_device_buffer().copy_(before)

    def _take_device_buffer(self) -> Tensor:
        options = self.options
        dtype = options.compute_dtype if self.whole_gradient.is_unsummed else options.master_dtype
        tensor = self.device_buffer.take(self, dtype)
        self.whole_gradient.set_tensor(tensor)
        return tensor

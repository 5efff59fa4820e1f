"""Updates of state in host memory: chunks are copied to the device, updated there, and copied back.

    up        chunk 0 │ chunk 1 │ chunk 2 │ chunk 3 ...        a ring of slots on the device,
    update            │ 0 │     │ 1 │     │ 2 │                each stream waits for the slot's event
    down                  │ chunk 0 │ chunk 1 │ ...

Copies in both directions run at the same time and the host does not wait: the next forward waits, unit by unit, for the
weights that it needs. The update kernel is the one for state on the device, so results are bit-identical. On a CPU the
same chunks go through the same slots, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from weft.sharding.layout import STAGING_SLOTS

# arguments: gradient, second tensor for new weights, tensors to update
Update = Callable[[Tensor, Tensor | None, list[Tensor]], None]


class HostStreams:
    """A ring of slots on the device, and the CUDA streams that fill, update and empty them."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, torch.dtype]],
        device: torch.device,
        extra: Sequence[tuple[int, torch.dtype]] = (),
    ) -> None:
        """`shapes`: elements and dtypes of a slot's tensors, which are copied both ways.

        They are separate tensors: with one storage a compiler would have to prove that writes do not overlap. `extra`:
        elements and dtypes of tensors copied one way, for buffers that are in host memory altogether: the gradient
        (up), and weights in the compute dtype (down).
        """
        self.slots = [_empty(shapes, device) for _ in range(STAGING_SLOTS)]
        self.extra = [_empty(extra, device) for _ in range(STAGING_SLOTS)]
        self._is_cuda, self._next = device.type == "cuda", 0
        self._up, self._update, self._down = [torch.cuda.Stream(device) if self._is_cuda else None for _ in range(3)]
        self._freed: list[torch.cuda.Event | None] = [None] * STAGING_SLOTS

    def begin(self) -> None:
        """Make all streams wait for the current stream's gradients and weights, and for the last step's copies down."""
        if self._is_cuda:
            current = torch.cuda.current_stream()
            for stream in (self._up, self._update, self._down):
                assert stream is not None
                stream.wait_stream(current)
            self._on(self._up, self._reached(self._down))

    def updating(self, scale: Tensor | None) -> AbstractContextManager[object]:
        """Return a context in which the update stream is current.

        Tensors that updates read are made in it, except `scale`.
        """
        if self._update is not None and scale is not None:
            scale.record_stream(self._update)
        return self._on(self._update, None)

    def run(
        self, on_host: Sequence[Tensor], update: Update, gradient: Tensor, written: Tensor | None, passes: bool
    ) -> None:
        """Copy tensors up, call `update` on the copies, and copy them down.

        `passes`: the gradient and `written` are in host memory as well and are copied too.
        """
        number, self._next = self._next, (self._next + 1) % STAGING_SLOTS
        rooms = self.slots[number][-len(on_host) :]  # the weights are the first tensor of a slot, if it has them
        staged = [room[: tensor.numel()] for room, tensor in zip(rooms, on_host, strict=True)]
        up, down = list(zip(staged, on_host, strict=True)), list(zip(on_host, staged, strict=True))
        if passes:
            incoming, *outgoing = self.extra[number]
            up.append((incoming.view(gradient.dtype)[: gradient.numel()], gradient))
            gradient = up[-1][0]
            if written is not None:
                down.append((written, outgoing[0][: written.numel()]))
                written = down[-1][1]
        with self._on(self._up, self._freed[number]):
            for place, tensor in up:
                place.copy_(tensor, non_blocking=True)
        with self._on(self._update, self._reached(self._up)):
            update(gradient, written, staged)
        with self._on(self._down, self._reached(self._update)):
            for tensor, place in down:
                tensor.copy_(place, non_blocking=True)
        self._freed[number] = self._reached(self._down)

    def updated(self, with_host: bool) -> torch.cuda.Event | None:
        """Return an event after all updates queued so far, or with `with_host` after their copies to the host too."""
        return self._reached(self._down if with_host else self._update)

    def synchronize(self) -> None:
        """Wait until the host has all results."""
        if self._down is not None:
            self._down.synchronize()

    def _on(self, stream: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> AbstractContextManager[object]:
        if stream is None:
            return nullcontext()
        if event is not None:
            stream.wait_event(event)
        return torch.cuda.stream(stream)

    def _reached(self, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        return None if stream is None else stream.record_event()


def _empty(shapes: Sequence[tuple[int, torch.dtype]], device: torch.device) -> list[Tensor]:
    return [torch.empty(numel, dtype=dtype, device=device) for numel, dtype in shapes]

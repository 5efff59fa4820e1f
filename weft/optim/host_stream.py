"""State that lives on the host passes through the device in chunks: up, updated there, and down again.

    up        chunk 0 │ chunk 1 │ chunk 2 │ chunk 3 ...        a ring of slots on the device,
    update            │ 0 │     │ 1 │     │ 2 │                each stream waits for the slot's event
    down                  │ chunk 0 │ chunk 1 │ ...

Both directions of the link work at once and the host waits for nothing: the next forward waits, unit by unit, for the
weights that it needs. What the device computes with and without this is one kernel, so that results are equal to the
bit. On a CPU the same chunks go through the same slots, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from weft.sharding.layout import STAGING_SLOTS

Update = Callable[[Tensor, Tensor | None, list[Tensor]], None]  # a gradient, other weights to write, what changes


class Streams:
    """The ring of slots, and the streams that fill, use and empty it."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, torch.dtype]],
        device: torch.device,
        passing: Sequence[tuple[int, torch.dtype]] = (),
    ) -> None:
        """`shapes`: elements and dtypes of what a slot takes, up and down. They are tensors of their own: a compiler
        that saw one storage would have to prove that what is written does not overlap. `passing`: of gradients, which
        only come, and of weights that only go, where those are on the host too.
        """
        self.slots = [_empty(shapes, device) for _ in range(STAGING_SLOTS)]
        self.passing = [_empty(passing, device) for _ in range(STAGING_SLOTS)]
        self._is_cuda, self._next = device.type == "cuda", 0
        self._up, self._update, self._down = [torch.cuda.Stream(device) if self._is_cuda else None for _ in range(3)]
        self._freed: list[torch.cuda.Event | None] = [None] * STAGING_SLOTS

    def begin(self) -> None:
        """Gradients and weights are there on the current stream, and the last step's state is down."""
        if self._is_cuda:
            current = torch.cuda.current_stream()
            for stream in (self._up, self._update, self._down):
                assert stream is not None
                stream.wait_stream(current)
            self._on(self._up, self._reached(self._down))

    def updating(self, scale: Tensor | None) -> AbstractContextManager[object]:
        """Where updates run: what they read besides is made here, but for `scale`, which was there before."""
        if self._update is not None and scale is not None:
            scale.record_stream(self._update)
        return self._on(self._update, None)

    def run(
        self, on_host: Sequence[Tensor], update: Update, gradient: Tensor, written: Tensor | None, passes: bool
    ) -> None:
        """Bring tensors up, let `update` change what it is given for them, and take them down. `passes`: the gradient
        and what is written besides are on the host as well.
        """
        number, self._next = self._next, (self._next + 1) % STAGING_SLOTS
        rooms = self.slots[number][-len(on_host) :]  # weights come first, where they come
        staged = [room[: tensor.numel()] for room, tensor in zip(rooms, on_host, strict=True)]
        up, down = list(zip(staged, on_host, strict=True)), list(zip(on_host, staged, strict=True))
        if passes:
            incoming, *outgoing = self.passing[number]
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
        """When what has been asked for so far is updated; or, `with_host`, down as well."""
        return self._reached(self._down if with_host else self._update)

    def synchronize(self) -> None:
        """Wait until the host has all of it."""
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

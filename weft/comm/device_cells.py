"""Memory through which ranks that share a device pass tensors to each other: host memory, or the memory of their GPU.

Each rank has `NUM_CELLS` cells of equal size, which it alone writes and the others read. On a CPU the cells are in a
file that all ranks map. On a GPU they are torch tensors that the other ranks open by torch's own handles for CUDA
memory (CUDA IPC), and events of CUDA, which other processes can wait for too, order reads and writes on the device: no
thread waits for the GPU. Handles are plain bytes; nothing is pickled.

    order_after(rank, what)   the next copies wait until `rank` has written, or read, what it has announced so far
    mark(what)                what this rank has written, or read, so far is announced
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

NUM_CELLS = 4
HOST_CELL_BYTES = 1 << 20
GPU_CELL_BYTES = 4 << 20
STAGING_BYTES = NUM_CELLS * GPU_CELL_BYTES  # of GPU memory that each rank needs for its cells
What = Literal["written", "read"]


class HostCells:
    """Cells in host memory. `memory` [ranks · NUM_CELLS · HOST_CELL_BYTES] is shared by the ranks. Tensors may be on
    any device; copies are complete on return, so nothing has to be ordered.
    """

    cell_bytes = HOST_CELL_BYTES

    def __init__(self, memory: Tensor) -> None:
        self._cells = memory.view(-1, NUM_CELLS, HOST_CELL_BYTES)

    def cell(self, rank: int, number: int) -> Tensor:
        """Returns the bytes of a rank's cell."""
        return self._cells[rank, number]

    def begin(self) -> None:
        """Copies from now on see what the caller has computed so far."""

    def end(self) -> None:
        """What the caller computes from now on sees the copies."""

    def copying(self) -> AbstractContextManager[Any]:
        """A context for copies to and from cells."""
        return nullcontext()

    def order_after(self, rank: int, what: What) -> None:
        """Order the next copies after those of another rank."""

    def mark(self, what: What) -> None:
        """Announce this rank's copies."""


class GpuCells:
    """Cells in the memory of the GPU that the ranks share. Copies run on a stream of their own."""

    cell_bytes = GPU_CELL_BYTES

    def __init__(self, index: int, device: torch.device) -> None:
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._index, self._device = index, device
        self._own = torch.zeros(NUM_CELLS, GPU_CELL_BYTES, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        events = {what: torch.cuda.Event(interprocess=True) for what in ("written", "read")}
        for event in events.values():
            event.record(self._stream)
        self._cells: list[Tensor] = []
        self._events: list[dict[str, torch.cuda.Event]] = []
        self._own_events = events

    def handles(self) -> str:
        """Returns what other ranks need to open this rank's cells and events, as JSON."""
        shared = self._own.untyped_storage()._share_cuda_()
        memory = [part.hex() if isinstance(part, bytes) else part for part in shared]
        is_bytes = [isinstance(part, bytes) for part in shared]
        events = {what: event.ipc_handle().hex() for what, event in self._own_events.items()}
        return json.dumps({"memory": memory, "is_bytes": is_bytes, "events": events})

    def open(self, handles: Sequence[str]) -> None:
        """Open the cells of all ranks by their handles, in the order of ranks."""
        for rank, text in enumerate(handles):
            if rank == self._index:
                self._cells.append(self._own)
                self._events.append(self._own_events)
                continue
            found = json.loads(text)
            parts = zip(found["memory"], found["is_bytes"], strict=True)
            _, *others = [bytes.fromhex(part) if is_bytes else part for part, is_bytes in parts]
            storage = torch.UntypedStorage._new_shared_cuda(self._device.index, *others)
            cells = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            self._cells.append(cells.view(NUM_CELLS, GPU_CELL_BYTES))
            event_of = torch.cuda.Event.from_ipc_handle
            names = found["events"].items()
            self._events.append({what: event_of(self._device, bytes.fromhex(handle)) for what, handle in names})

    def cell(self, rank: int, number: int) -> Tensor:
        """Returns the bytes of a rank's cell."""
        return self._cells[rank][number]

    def begin(self) -> None:
        """Copies from now on see what the caller has computed so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def end(self) -> None:
        """What the caller computes from now on sees the copies."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def copying(self) -> AbstractContextManager[Any]:
        """A context for copies to and from cells."""
        return torch.cuda.stream(self._stream)

    def order_after(self, rank: int, what: What) -> None:
        """Order the next copies after those of another rank."""
        self._stream.wait_event(self._events[rank][what])

    def mark(self, what: What) -> None:
        """Announce this rank's copies."""
        self._own_events[what].record(self._stream)

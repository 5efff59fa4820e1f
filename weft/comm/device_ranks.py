"""Ranks that share one device (`plan.ranks_per_device`), and how they pass tensors to each other.

NCCL refuses two ranks on one GPU. So the ranks of a device pass tensors to their first rank, the leader, through memory
that they share (`device_cells.py`). It adds them in the order of ranks. Leaders all-reduce the sums between devices,
and each hands the result back to the ranks of its device:

    rank 1, 2, ..  ──cells──▶ leader: t0 + t1 + t2 ..  ──all-reduce over leaders──▶ leader ──cells──▶ rank 1, 2, ..

A tensor goes in pieces of a cell's size. Piece n of a rank lies in its cell n mod NUM_CELLS, and is written when piece
n - NUM_CELLS has been read. Ranks tell each other how many pieces they have written and read by counters in a page of
host memory, which only their owner writes. All ranks start the same operations in the same order, as with any
collective, and each finishes them in that order (`device_sum.py`).
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from weft.comm.device_cells import HOST_CELL_BYTES, NUM_CELLS, GpuCells, HostCells
from weft.errors import LaunchError, LostRankError

LEADER = 0
_WRITTEN, _READ, _JOINED = range(3)  # a rank's counters
_COLUMNS = 8  # counters of a rank, in a cache line of its own
_TEXT_BYTES = 4096  # for what a rank says about itself
_DESCRIPTOR_BITS = 20  # of the number of a page; the other bits have the process
_SPINS = {"cpu": 20, "cuda": 2000}  # before a wait sleeps: ranks on a CPU leave it to those that compute
_PAUSE_SECONDS = 1e-4
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class _DevicePage:
    """Host memory that the ranks of a device share: counters, a text of each rank, and cells. `descriptor` is its file,
    which has no name, so nothing is left of it when the last rank has ended.
    """

    def __init__(self, descriptor: int, num_ranks: int) -> None:
        counters, texts = num_ranks * _COLUMNS * 8, num_ranks * _TEXT_BYTES
        self._memory = mmap.mmap(descriptor, _page_bytes(num_ranks))
        os.close(descriptor)
        self.counters = memoryview(self._memory)[:counters].cast("q")
        self._texts = memoryview(self._memory)[counters : counters + texts]
        self.cells = torch.frombuffer(self._memory, dtype=torch.uint8, offset=counters + texts)

    def write_text(self, rank: int, text: str) -> None:
        encoded = text.encode()
        assert len(encoded) < _TEXT_BYTES
        self._texts[rank * _TEXT_BYTES : rank * _TEXT_BYTES + len(encoded)] = encoded

    def text(self, rank: int) -> str:
        return bytes(self._texts[rank * _TEXT_BYTES : (rank + 1) * _TEXT_BYTES]).rstrip(b"\0").decode()


def _page_bytes(num_ranks: int) -> int:
    return num_ranks * (_COLUMNS * 8 + _TEXT_BYTES + NUM_CELLS * HOST_CELL_BYTES)


def create_page(num_ranks: int) -> int:
    """Create the page of a device. Returns the number by which the other ranks of the device open it."""
    descriptor = os.memfd_create("weft-device", os.MFD_CLOEXEC)
    try:  # without that, a write for which there is no memory would kill the process
        os.posix_fallocate(descriptor, 0, _page_bytes(num_ranks))
    except OSError as error:
        raise LaunchError(
            f"plan.ranks_per_device needs {_page_bytes(num_ranks):,} bytes of shared memory ({error.strerror}); free "
            f"memory, or use ranks_per_device = 1"
        ) from error
    return os.getpid() << _DESCRIPTOR_BITS | descriptor


def _open_page(page: int, num_ranks: int) -> _DevicePage:
    process, descriptor = page >> _DESCRIPTOR_BITS, page & ((1 << _DESCRIPTOR_BITS) - 1)
    if process == os.getpid():
        return _DevicePage(os.dup(descriptor), num_ranks)
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        return _DevicePage(os.open(path, os.O_RDWR | os.O_CLOEXEC), num_ranks)
    except OSError as error:
        raise LaunchError(
            f"a rank cannot open the shared memory of its device's first rank ({path}: {error.strerror}); the "
            f"{num_ranks} ranks of a device must be processes of one user on one host, with consecutive numbers"
        ) from error


class DeviceOperation(Protocol):
    """A sum that has started."""

    def run(self) -> None:
        """Go through all parts of the operation."""


class DeviceRanks:
    """The ranks of one device, as the rank at `index` sees them. Use `open_device_ranks` to make it."""

    def __init__(
        self, page: _DevicePage, index: int, num_ranks: int, device: torch.device, timeout_seconds: float
    ) -> None:
        self.index, self.num_ranks, self.device = index, num_ranks, device
        self._page, self._counters, self._timeout_seconds = page, page.counters, timeout_seconds
        self._others = [rank for rank in range(num_ranks) if rank != index]
        self._open: deque[DeviceOperation] = deque()  # operations that have started, in their order
        self._to_write: deque[tuple[DeviceOperation, Tensor]] = deque()  # pieces that wait for a free cell
        self.cells = self._agree_on_cells()

    @property
    def is_leader(self) -> bool:
        """Does this rank add up the tensors of its device?"""
        return self.index == LEADER

    def takes(self, tensor: Tensor) -> bool:
        """Is the tensor on the device of the mesh? Others go by the collective over all ranks."""
        return tensor.device.type == self.device.type

    def pieces(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yields the tensor's elements in pieces that fit a cell."""
        return iter(tensor.detach().view(-1).split(self.cells.cell_bytes // tensor.element_size()))

    # --- operations in their order

    def start(self, operation: DeviceOperation, tensor: Tensor) -> None:
        """Queue an operation. Its first pieces are written if cells are free."""
        self._open.append(operation)
        self.cells.begin()
        if not self.is_leader:
            self._to_write += [(operation, piece) for piece in self.pieces(tensor)]
            self._write_pieces(lambda: self._count(LEADER, _READ) > self._own(_WRITTEN) - NUM_CELLS)

    def finish(self, operation: DeviceOperation) -> None:
        """Finish all operations up to this one."""
        while operation in self._open:
            self._open[0].run()
            self._open.popleft()

    # --- cells

    def send_pieces(self, operation: DeviceOperation) -> None:
        """Write the pieces of an operation that are left for the leader."""

        def may_write() -> bool:
            if self._to_write[0][0] is not operation:
                return False
            self._await(LEADER, _READ, self._own(_WRITTEN) - NUM_CELLS + 1)
            return True

        self._write_pieces(may_write)

    def _write_pieces(self, may_write: Callable[[], bool]) -> None:
        with self.cells.copying():
            while self._to_write and may_write():
                self.cells.order_after(LEADER, "read")
                self._write(self._to_write.popleft()[1])

    def add_pieces(self, tensor: Tensor, reduction: str) -> None:
        """Add the tensors of the other ranks to the leader's, in the order of ranks."""
        combine = _FUNCTIONS[reduction]
        with self.cells.copying():
            for piece in self.pieces(tensor):
                number = self._own(_READ)
                for rank in self._others:
                    self._await(rank, _WRITTEN, number + 1)
                    self.cells.order_after(rank, "written")
                    combine(piece, self._piece_of(rank, number, piece), out=piece)
                self.cells.mark("read")
                self._advance(_READ)

    def publish_pieces(self, tensor: Tensor) -> None:
        """Write the leader's result for the other ranks."""
        with self.cells.copying():
            for piece in self.pieces(tensor):
                for rank in self._others:
                    self._await(rank, _READ, self._own(_WRITTEN) - NUM_CELLS + 1)
                    self.cells.order_after(rank, "read")
                self._write(piece)

    def take_pieces(self, tensor: Tensor) -> None:
        """Copy the leader's result to this rank's tensor."""
        with self.cells.copying():
            for piece in self.pieces(tensor):
                number = self._own(_READ)
                self._await(LEADER, _WRITTEN, number + 1)
                self.cells.order_after(LEADER, "written")
                piece.copy_(self._piece_of(LEADER, number, piece))
                self.cells.mark("read")
                self._advance(_READ)

    def _write(self, piece: Tensor) -> None:
        cell = self.cells.cell(self.index, self._own(_WRITTEN) % NUM_CELLS)
        cell[: piece.numel() * piece.element_size()].view(piece.dtype).copy_(piece)
        self.cells.mark("written")
        self._advance(_WRITTEN)

    def _piece_of(self, rank: int, number: int, like: Tensor) -> Tensor:
        cell = self.cells.cell(rank, number % NUM_CELLS)
        return cell[: like.numel() * like.element_size()].view(like.dtype).to(like.device)

    # --- counters

    def _count(self, rank: int, column: int) -> int:
        return self._counters[rank * _COLUMNS + column]

    def _own(self, column: int) -> int:
        return self._count(self.index, column)

    def _advance(self, column: int) -> None:
        self._counters[self.index * _COLUMNS + column] += 1

    def _await(self, rank: int, column: int, count: int) -> None:
        """Wait until a counter of another rank has reached `count`."""
        place, spins, deadline = rank * _COLUMNS + column, 0, 0.0
        while self._counters[place] < count:
            spins += 1
            if spins < _SPINS[self.device.type]:
                os.sched_yield()
                continue
            time.sleep(_PAUSE_SECONDS)
            deadline = deadline or time.monotonic() + self._timeout_seconds
            if time.monotonic() > deadline:
                raise LostRankError(
                    f"rank {rank} of the {self.num_ranks} ranks that share this device sent nothing for "
                    f"{self._timeout_seconds:.0f} s; see what it did last, or raise train.timeout_seconds"
                )

    def _agree_on_cells(self) -> HostCells | GpuCells:
        """Tell the other ranks of the device about this one, and open their cells."""
        is_cuda = self.device.type == "cuda"
        own = GpuCells(self.index, self.device) if is_cuda else HostCells(self._page.cells)
        uuid = str(torch.cuda.get_device_properties(self.device).uuid) if is_cuda else "host"
        handles = own.handles() if isinstance(own, GpuCells) else ""
        self._page.write_text(self.index, json.dumps([uuid, handles]))
        self._advance(_JOINED)
        for rank in self._others:
            self._await(rank, _JOINED, 1)
        said = [json.loads(self._page.text(rank)) for rank in range(self.num_ranks)]
        if isinstance(own, GpuCells):
            if len({uuid for uuid, _ in said}) > 1:  # a proof on several GPUs deals its ranks to all of them
                own = HostCells(self._page.cells)
            else:
                own.open([handles for _, handles in said])
        self._advance(_JOINED)
        for rank in self._others:
            self._await(rank, _JOINED, 2)
        return own


def open_device_ranks(
    page: int, index: int, num_ranks: int, device: torch.device, timeout_seconds: float
) -> DeviceRanks:
    """Join the ranks of this device. `page` is what `create_page` has returned on the first of them."""
    try:
        return DeviceRanks(_open_page(page, num_ranks), index, num_ranks, device, timeout_seconds)
    finally:
        if index == LEADER:  # all ranks have opened it, or have failed
            os.close(page & ((1 << _DESCRIPTOR_BITS) - 1))

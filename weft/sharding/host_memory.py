"""Pinned host memory of exact size, copies between it and a device, and a check that a plan's memory is available.

Torch's allocator of pinned memory rounds up to powers of two. Here pages come from the system, are registered with CUDA
as they are, and are returned with the tensor.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.errors import PlanError

KEPT_FREE_BYTES = 2 << 30  # left free on the host for the process, the data loader and the page cache
_GROUP = Path("/sys/fs/cgroup")


def host_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in host memory [numel], pinned for copies to and from a GPU."""
    if device.type != "cuda" or numel == 0:
        return torch.zeros(numel, dtype=dtype)
    size = numel * dtype.itemsize
    pages = _Pages(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages refuses and gives small ones
            pages.madvise(mmap.MADV_HUGEPAGE)
    # zero_ touches pages with all cores, which is faster
    tensor = torch.frombuffer(pages, dtype=torch.uint8, count=size).zero_()
    error = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0))
    if error:
        raise PlanError(
            f"CUDA does not pin {size:,} bytes of host memory (error {error}); keep less there (to train, plan.memory."
            f"offload, activations or weights; to serve, --swap-blocks or --stream-weights), or raise the limit of "
            f"locked memory (ulimit -l)"
        )
    pages.address = tensor.data_ptr()
    return tensor.view(dtype)


class _Pages(mmap.mmap):
    """The pages of a tensor in host memory. They are unregistered from CUDA before they are freed with the tensor."""

    address = 0

    def __del__(self) -> None:
        if self.address:
            torch.cuda.cudart().cudaHostUnregister(self.address)


def available_host_bytes() -> int | None:
    """Return the free host memory in bytes, by the kernel and by this process's cgroup; None if unknown."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit = (_GROUP / "memory.max").read_text().strip()
        if limit.isdigit():
            used = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
            found.append(
                int(limit) - int((_GROUP / "memory.current").read_text()) + int(used["file"])
            )  # the kernel can drop the page cache
    except (OSError, ValueError, KeyError):
        pass
    return min(found, default=None)


def check_memory_fits(host_bytes: int, device_bytes: int, device: torch.device, num_local_ranks: int = 1) -> None:
    """Raise PlanError if the plan's bytes per rank do not fit the host or the device.

    This runs before anything is allocated, because a host that runs out of memory kills the process without a message.
    """
    available = available_host_bytes() if host_bytes else None
    if available is not None and host_bytes * num_local_ranks > available - KEPT_FREE_BYTES:
        raise PlanError(
            f"the plan keeps {host_bytes / 2**30:.1f} GiB in host memory for each of {num_local_ranks} ranks "
            f"here, and {available / 2**30:.1f} GiB are free, of which {KEPT_FREE_BYTES / 2**30:.0f} stay free; lower "
            f"plan.memory.offload, plan.memory.activations or plan.memory.weights, keep state in fewer bits "
            f"(plan.memory.state), or shard over more ranks"
        )
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if device_bytes > free:
        raise PlanError(
            f"the plan keeps {device_bytes / 2**30:.1f} GiB of state on {device}, of whose {total / 2**30:.1f} GiB "
            f"{free / 2**30:.1f} are free; raise plan.memory.offload or plan.memory.weights, keep state in fewer bits "
            f"(plan.memory.state), or shard over more ranks"
        )


class CopyStream:
    """Runs copies in one direction, in order, on a CUDA stream of its own. On a CPU each copy happens at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor, behind: Any = None) -> Any:
        """Start a copy after all work queued on the current stream, and after the event `behind` if one is given.

        Returns the event that marks the end of the copy (None on a CPU).
        """
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        if behind is not None:
            self._stream.wait_event(behind)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, event: Any) -> None:
        """Make the current stream wait for a copy, given the event that `copy` returned."""
        if self._stream is not None and event is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(event)

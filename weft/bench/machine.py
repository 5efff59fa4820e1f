"""Rates of one process of this machine: matmuls, memory, copies to a GPU, files."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from weft.bench.statistics import Timing, measure
from weft.errors import ConfigError

MATMUL_SIDES = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
_HOST_LINK_BYTES = 256 << 20
_SLOW_SECONDS = 0.5  # a larger matmul is not tried after one that took so long


def matmul_flops(device: torch.device, dtype: str, limit_seconds: float = 1.0) -> dict[int, float]:
    """FLOP/s of square matmuls by side. On a CPU, all threads of this process are used."""
    found = {}
    for side in MATMUL_SIDES[device.type]:
        left, right = (torch.randn(side, side, device=device).to(DTYPES[dtype]) for _ in range(2))
        timing = _time(lambda left=left, right=right: left @ right, device, limit_seconds)  # type: ignore[misc]
        found[side] = 2 * side**3 / timing.median
        if timing.median > _SLOW_SECONDS:
            break
    return found


def memory_bytes_per_second(device: torch.device, limit_seconds: float = 1.0) -> float:
    """Bytes read and written per second by a copy within the device's memory."""
    source = torch.ones(_COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    timing = _time(lambda: target.copy_(source), device, limit_seconds)
    return 2 * source.numel() * 4 / timing.median


def host_link_bytes_per_second(device: torch.device, limit_seconds: float = 1.0) -> float | None:
    """Bytes per second from pinned host memory to the device; None on a CPU."""
    return None if device.type != "cuda" else _host_link(True, True, limit_seconds)


def host_link_rates(limit_seconds: float = 1.0) -> dict[str, float]:
    """Bytes per second between host memory and the GPU, by direction and kind of memory."""
    if not torch.cuda.is_available():
        raise ConfigError("no GPU was found, so there is no link between host and GPU to measure")
    return {
        f"{'to' if to_device else 'from'} the GPU, {'pinned' if pinned else 'ordinary'} memory": _host_link(
            to_device, pinned, limit_seconds
        )
        for pinned in (True, False)
        for to_device in (True, False)
    }


def _host_link(to_device: bool, pinned: bool, limit_seconds: float) -> float:
    host = torch.ones(_HOST_LINK_BYTES // 4, pin_memory=pinned)
    own = torch.empty(host.shape, device="cuda")
    source, target = (host, own) if to_device else (own, host)
    timing = _time(lambda: target.copy_(source, non_blocking=True), own.device, limit_seconds)
    return _HOST_LINK_BYTES / timing.median


def storage_bytes_per_second(folder: Path, num_bytes: int = 64 << 20) -> dict[str, float]:
    """Bytes per second of writing a file in `folder` (until it is on disk), and of reading it back.

    The file is dropped from the page cache before it is read, where the system allows that.
    """
    data = os.urandom(1 << 20) * (num_bytes >> 20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - start
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        file.read()
        read = time.perf_counter() - start
    return {"write": num_bytes / written, "read": num_bytes / read}


def _time(run: Callable[[], object], device: torch.device, limit_seconds: float) -> Timing:
    def block() -> list[float]:
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        return seconds

    block()  # warm-up
    return measure(block, limit_seconds)

"""Measures what a cluster file says of a machine: links between its ranks, and the rates of one device.

The rates are those of one process: matmuls, memory, copies to a GPU, files.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from weft.bench.cluster_file import MeasuredMachine
from weft.bench.fit import Timing, measure
from weft.bench.links import LevelAxes, LinkOptions, bench_links, measured_collectives
from weft.bench.operations import OPERATIONS
from weft.bench.report import link_of_rows
from weft.cluster.local_gpus import gpus
from weft.cluster.topology import host_memory_bytes, num_cpu_cores
from weft.comm.backends import DeviceType
from weft.errors import ConfigError
from weft.launch.environment import RankInfo
from weft.launch.local_ranks import run_local

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


TIMEOUT_SECONDS = 600.0
PEAKS = ("fp32", "bf16")
# What a step of training sends: from small sums to the buffers of a block.
SIZES = tuple(4**power for power in range(3, 12))


def num_devices(device: str) -> int:
    """The ranks that measure this machine: one for each GPU, or for each core of the CPU and at least two."""
    return len(gpus()) if device == "cuda" else max(2, num_cpu_cores())


def measure_machine(
    num_ranks: int | None,
    device: DeviceType,
    limit_seconds: float,
    date: str,
    nodes: tuple[int, LevelAxes] | None = None,
) -> tuple[MeasuredMachine, RankInfo]:
    """Measure links first, because processes that have initialised CUDA cannot fork ranks, then one device.

    Under a launcher over several hosts, the one link that is measured is that between hosts. With `nodes`, their number
    and what makes axes over them, the algorithms between nodes are measured too.
    """
    if device == "cuda" and num_ranks is None and len(gpus()) < 2:
        raise ConfigError("a machine with one GPU has no links between GPUs; give --ranks 2 to let ranks share it")
    ranks = num_ranks or num_devices(device)
    names = tuple(name for name, one in OPERATIONS.items() if one.formula is not None)
    given_nodes, axes = nodes or (None, None)
    options = LinkOptions(names, SIZES, limit_seconds)
    rows, where, backend = bench_links(options, ranks, device, level_axes=axes)
    link = link_of_rows(rows)
    on = torch.device(device)
    local = where.num_local_ranks
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else host_memory_bytes() // local
    # Ranks of a launcher measure their rates at the same time anyway, because all of them call this.
    is_alone = where.launcher == "none" and device == "cpu"
    rates = _rates_of_ranks(local, limit_seconds) if is_alone else _rates(on, limit_seconds)
    found = MeasuredMachine(
        where.num_hosts,
        local,
        memory,
        host_memory_bytes(),
        {dtype: rates[dtype] for dtype in PEAKS},
        rates["memory"],
        host_link_bytes_per_second(on, limit_seconds),
        link,
        backend,
        date,
        link if where.num_hosts > 1 else None,
        measured_collectives(rows, given_nodes or where.num_hosts),
    )
    return found, where


def _rates(device: torch.device, limit_seconds: float) -> dict[str, float]:
    """FLOP/s of the best matmul by dtype, and bytes per second of its memory, of this process."""
    found = {dtype: max(matmul_flops(device, dtype, limit_seconds).values()) for dtype in PEAKS}
    return {**found, "memory": memory_bytes_per_second(device, limit_seconds)}


def _rates_of_ranks(num_ranks: int, limit_seconds: float) -> dict[str, float]:
    """The rates of one of `num_ranks` processes on a CPU, while all compute at once on their share of its cores, as in
    training. They compete for memory, caches and shared cores, so this is less than a part of what one process reaches.
    The rates are those of the slowest, for which the others wait in every step.
    """

    def rank(_: int) -> dict[str, float]:
        torch.set_num_threads(max(1, num_cpu_cores() // num_ranks))
        return _rates(torch.device("cpu"), limit_seconds)

    ranks = run_local(rank, num_ranks, TIMEOUT_SECONDS)
    return {kind: min(one[kind] for one in ranks) for kind in ranks[0]}

"""Measures all that a cluster file says of a machine: links between its ranks, and the rates of one device."""

from __future__ import annotations

import torch

from weft.bench.cluster_file import MeasuredMachine
from weft.bench.links import LinkOptions, measured_collectives
from weft.bench.machine import host_link_bytes_per_second, matmul_flops, memory_bytes_per_second
from weft.bench.operations import OPERATIONS
from weft.bench.ranks import LevelAxes, bench_links
from weft.bench.report import link_of_rows
from weft.cluster.local_gpus import gpus
from weft.cluster.topology import host_memory_bytes, num_cpu_cores
from weft.comm.backends import DeviceType
from weft.errors import ConfigError
from weft.launch.environment import RankInfo
from weft.launch.local_ranks import run_local

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

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

# What a step of training sends: from small sums to the buffers of a block.
SIZES = tuple(4**power for power in range(3, 12))


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
    ranks = num_ranks or (len(gpus()) if device == "cuda" else max(2, num_cpu_cores()))
    names = tuple(name for name, one in OPERATIONS.items() if one.formula is not None)
    num_nodes, axes = nodes or (1, None)
    options = LinkOptions(names, SIZES, limit_seconds)
    rows, where, backend = bench_links(options, ranks, device, level_axes=axes)
    link = link_of_rows(rows)
    on = torch.device(device)
    local = where.num_local_ranks
    sharing = 1 if device == "cuda" else local  # processes on a CPU share its cores and its memory
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else host_memory_bytes() // local
    peaks = {dtype: max(matmul_flops(on, dtype, limit_seconds).values()) / sharing for dtype in ("fp32", "bf16")}
    found = MeasuredMachine(
        where.num_hosts,
        local,
        memory,
        host_memory_bytes(),
        peaks,
        memory_bytes_per_second(on, limit_seconds) / sharing,
        host_link_bytes_per_second(on, limit_seconds),
        link,
        backend,
        date,
        link if where.num_hosts > 1 else None,
        measured_collectives(rows, num_nodes),
    )
    return found, where

"""Rates of this machine's CPU, which the catalog lacks: measured for a prediction, assumed for a plan."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import lru_cache

import torch

from weft.cluster.hardware import Cluster

SIDE, SMALL_SIDE = 384, 64  # the sides of the matrices that are multiplied
LONG_SECONDS = 0.1
ASSUMED_FLOPS_PER_SECOND = 5e10  # per core
ASSUMED_BYTES_PER_SECOND = 1e10  # the bandwidth of the machine's memory


def is_cpu(cluster: Cluster) -> bool:
    """Whether the cluster's devices are processes on a CPU."""
    return cluster.node.host_link_bytes_per_second is None


def with_assumed_rates(cluster: Cluster) -> Cluster:
    """Add assumed rates to a cluster of CPU processes. Returns any other cluster unchanged.

    The rates are not measured because each rank of a run plans for itself and all must find the same plan.
    """
    node = cluster.node
    if not is_cpu(cluster) or node.device.peak_flops:
        return cluster
    flops = ASSUMED_FLOPS_PER_SECOND * node.num_cpu_cores / node.num_devices
    device = replace(
        node.device,
        peak_flops={"fp64": flops / 2, "fp32": flops, "bf16": flops},
        memory_bandwidth_bytes_per_second=ASSUMED_BYTES_PER_SECOND / node.num_devices,
        calibration=1.0,
    )
    return replace(cluster, node=replace(node, device=device))


@lru_cache
def cpu_flops_per_second(dtype: torch.dtype = torch.float32) -> float:
    """Measure the FLOP/s of a matmul on one core of this machine, in a fraction of a second.

    Uses small matrices if large ones would take long: on a CPU without bf16 instructions, a bf16 matmul takes hundreds
    of times as long as one in fp32.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = _matmul_rate(SMALL_SIDE, dtype)
        return _matmul_rate(SIDE, dtype) if 2 * SIDE**3 / found < LONG_SECONDS else found
    finally:
        torch.set_num_threads(threads)


def _matmul_rate(side: int, dtype: torch.dtype) -> float:
    left, right = (torch.randn(side, side).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - start)
    return float(2 * side**3 / best)

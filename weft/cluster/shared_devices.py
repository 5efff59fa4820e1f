"""A cluster as ranks see it that share its devices (`plan.ranks_per_device`): each has an equal part of a device."""

from __future__ import annotations

from dataclasses import replace

from weft.cluster.cpu_rates import is_cpu
from weft.cluster.hardware import Cluster
from weft.cluster.local_gpus import gpus
from weft.errors import ConfigError

CONTEXT_BYTES = 512 << 20  # GPU memory that CUDA keeps for each process, with its kernels


def with_shared_devices(cluster: Cluster, ranks_per_device: int) -> Cluster:
    """The cluster with a device for each rank: an equal part of a device's rates, and of its memory, less what CUDA
    keeps for the process.
    """
    if ranks_per_device == 1:
        return cluster
    device, num_ranks = cluster.node.device, cluster.node.num_devices * ranks_per_device
    bandwidth = device.memory_bandwidth_bytes_per_second
    kept = 0 if is_cpu(cluster) else CONTEXT_BYTES
    part = replace(
        device,
        memory_bytes=max(1, device.memory_bytes // ranks_per_device - kept),
        memory_bandwidth_bytes_per_second=None if bandwidth is None else bandwidth / ranks_per_device,
        peak_flops={dtype: flops / ranks_per_device for dtype, flops in device.peak_flops.items()},
    )
    return replace(cluster, node=replace(cluster.node, device=part, num_devices=num_ranks))


def refuse_missing_gpus(num_devices: int, ranks_per_device: int) -> None:
    """Raise ConfigError if this machine has GPUs, and fewer than the plan's ranks need."""
    found = len(gpus())
    if 0 < found < num_devices:
        raise ConfigError(
            f"plan.data = {num_devices * ranks_per_device} with plan.ranks_per_device = {ranks_per_device} needs "
            f"{num_devices} GPUs, and this machine has {found}; use plan.data = {found * ranks_per_device}, or train "
            f"on the CPU (train.device=cpu)"
        )

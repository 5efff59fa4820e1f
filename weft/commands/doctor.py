"""Examines this machine for `weft doctor`: versions, devices, memory, launcher, measured all-reduce."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.cluster.cpu_rates import cpu_flops_per_second
from weft.cluster.hardware import describe, local_cluster
from weft.cluster.local_gpus import gpus
from weft.comm import all_reduce
from weft.errors import WeftError
from weft.launch.environment import detect
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.plan import Plan
from weft.sharding.layout import COMPUTE_DTYPE

PACKAGES = ("weft", "torch", "numpy", "safetensors", "typer", "rich", "tokenizers", "pyarrow", "transformers")
MESSAGE_BYTES = (4 * 1024, 4 * 1024 * 1024)
SMALL_SHARED_MEMORY_BYTES = 1 << 30
SLOW_BF16 = 4  # warn if bf16 takes this many times as long as fp32


def examine(environ: Mapping[str, str], num_ranks: int = 2) -> dict[str, Any]:
    """Returns all findings as JSON values. It forks ranks, so it does not touch a GPU."""
    measured = measure_all_reduce(num_ranks)
    cluster = local_cluster()
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    findings: dict[str, Any] = {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "machine": describe(cluster),
        "devices": _devices(),
        "backends": [name for name in ("gloo", "nccl", "mpi", "ucc") if _has_backend(name)],
        "cpu_cores": cluster.node.num_cpu_cores,
        "core_flops_per_second": {name: cpu_flops_per_second(COMPUTE_DTYPE[name]) for name in ("fp32", "bf16")},
        "memory_free_bytes": _memory_free_bytes(),
        "shared_memory_bytes": shared.total if shared else None,
        "launcher": _launcher(environ),
        "all_reduce": measured,
    }
    return {**findings, "warnings": _warnings(findings)}


def measure_all_reduce(num_ranks: int) -> list[dict[str, float]]:
    """Returns seconds and bus bandwidth of an all-reduce between local ranks, for a small and a large message."""

    def rank(_: int) -> list[float]:
        mesh = Mesh(Plan(data=num_ranks))
        return [_time_all_reduce(mesh, num_bytes) for num_bytes in MESSAGE_BYTES]

    slowest = [max(seconds) for seconds in zip(*run_local(rank, num_ranks), strict=True)]
    factor = 2 * (num_ranks - 1) / num_ranks
    return [
        {"ranks": num_ranks, "bytes": size, "seconds": seconds, "bus_bytes_per_second": factor * size / seconds}
        for size, seconds in zip(MESSAGE_BYTES, slowest, strict=True)
    ]


def _time_all_reduce(mesh: Mesh, num_bytes: int, repeats: int = 10) -> float:
    tensor = torch.zeros(num_bytes // 4)
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        all_reduce(tensor, mesh["data"]).wait()
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[repeats // 2]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    if not gpus():
        return [{"kind": "cpu", "name": platform.processor() or platform.machine()}]
    return [
        {
            "kind": "cuda",
            "name": one.name,
            "memory_free_bytes": one.free_bytes,
            "memory_bytes": one.memory_bytes,
            "direct_links": one.num_peers,
        }
        for one in gpus()
    ]


def _has_backend(name: str) -> bool:
    return bool(dist.is_available() and getattr(dist, f"is_{name}_available", lambda: False)())


def _memory_free_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def _launcher(environ: Mapping[str, str]) -> str:
    try:
        place = detect(environ)
    except WeftError as error:
        return f"broken: {error}"
    if place is None:
        return "none; weft starts local processes itself"
    return f"{place.launcher}: rank {place.rank} of {place.num_ranks} on {place.num_hosts} host(s)"


def _warnings(findings: Mapping[str, Any]) -> list[str]:
    warnings = []
    shared = findings["shared_memory_bytes"]
    if shared is not None and shared < SMALL_SHARED_MEMORY_BYTES and findings["devices"][0]["kind"] == "cuda":
        warnings.append(f"/dev/shm has only {shared / 2**20:.0f} MiB; NCCL may need more (docker run --shm-size=8g)")
    if "gloo" not in findings["backends"]:
        warnings.append("torch has no Gloo; verification and CPU training cannot run")
    if findings["devices"][0]["kind"] == "cuda" and "nccl" not in findings["backends"]:
        warnings.append("torch sees GPUs but has no NCCL; several GPUs cannot train together")
    rates = findings["core_flops_per_second"]
    if findings["devices"][0]["kind"] == "cpu" and rates["bf16"] < rates["fp32"] / SLOW_BF16:
        slower = f"{rates['fp32'] / rates['bf16']:.0f} times"
        warnings.append(f"a matmul of bf16 takes {slower} as long as one of fp32 here; train with precision = 'fp32'")
    if os.environ.get("OMP_NUM_THREADS") == "1" and findings["cpu_cores"] > 1:
        warnings.append("OMP_NUM_THREADS = 1 keeps a single process on one core")
    return warnings

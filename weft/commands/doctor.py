"""Examines this machine for `weft doctor`: versions, devices, memory, launcher, measured all-reduce.

Where there are GPUs, `check_gpu` shows in about a minute that they, and the collectives between them, compute right: a
tiny decoder is trained under a few plans in float64, and once compiled in bf16, and compared with the sequential model
on the same GPU. Ranks share a GPU if there are fewer GPUs than ranks.
"""

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
from torch import Tensor, nn

from weft.cluster.cpu_rates import cpu_flops_per_second
from weft.cluster.hardware import describe, local_cluster
from weft.cluster.local_gpus import gpus
from weft.comm import all_reduce
from weft.comm.backends import describe_backend
from weft.errors import WeftError
from weft.launch.environment import detect
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import DecoderConfig, build, initialise
from weft.plan import Context, Memory, Pipe, Plan, Shard
from weft.plan import Tensor as TensorPlan
from weft.proof.prove import Trial, plan_to_prove, prove_plan
from weft.sharding.layout import COMPUTE_DTYPE
from weft.step.batch import Batch
from weft.step.objective import CROSS_ENTROPY

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


NUM_RANKS = 2  # of the check of GPUs, and what they train
SEQUENCE, NUM_SAMPLES = 16, 4
SECONDS = 120.0
CONFIG = DecoderConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
PLANS = {
    "data": Plan(data=NUM_RANKS, micro_batch=1),
    "shard": Plan(shard=Shard(NUM_RANKS, 3), micro_batch=1),
    "x": Plan(tensor=TensorPlan(x=NUM_RANKS), micro_batch=2),
    "context": Plan(context=Context(NUM_RANKS), micro_batch=2),
    "pipe": Plan(pipe=Pipe(NUM_RANKS), micro_batch=1),
}


def _model() -> nn.Module:
    model = build(CONFIG)
    initialise(model, 0)
    return model


def _batch(step: int) -> Batch:
    tokens: Tensor = torch.randint(64, (NUM_SAMPLES, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def check_gpu() -> dict[str, Any]:
    """Return the backend of collectives, and a row for each check: its name, whether its results are right, how many
    seconds it took, and what was found.
    """
    rows = []
    for axis, plan in PLANS.items():
        trial = Trial(plan_to_prove(plan, "fp64"), device="cuda")
        rows.append(_row(f"{axis} = {NUM_RANKS}, float64", trial))
    compiled = Plan(memory=Memory(recompute="selective"), micro_batch=2)
    rows.append(_row("one rank, bf16, compiled", Trial(plan_to_prove(compiled, "bf16"), device="cuda", compiles=True)))
    return {"backend": describe_backend("cuda", NUM_RANKS), "rows": rows}  # last, as it initialises CUDA: proofs fork


def _row(what: str, trial: Trial) -> dict[str, Any]:
    begin = time.perf_counter()
    try:
        report = prove_plan(_model, _batch, CROSS_ENTROPY, trial, SECONDS)
        failure = report.first_failure
        worst = next(check for check in report.checks if check.what == "worst gradient")
        result = f"gradients differ by {worst.found}"
        if failure is not None:
            result = f"{failure.what}: expected {failure.expected}, found {failure.found} ({failure.where})"
        is_right = report.passed
    except Exception as error:  # any error of a driver or a library is a finding
        is_right, result = False, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return {"what": what, "is_right": is_right, "seconds": time.perf_counter() - begin, "found": result}

"""What a plan will cost, before it runs: memory per device, traffic per axis, and a rough time of a step.

Memory and traffic are the sum of what the strategies state; traffic is exact. Time is rough for now: FLOPs over an
assumed fraction of the device's peak, plus collectives by the ring formulas on the cluster's links, of which a GPU
hides what fits behind its compute.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from weft.cluster import Cluster, load, local_cluster, recognise, ring_seconds
from weft.comm import Traffics, add_traffic, expand
from weft.config import Run
from weft.mesh import JOINT_AXES, level_degrees
from weft.models import ModelConfig, build, token_loss
from weft.parallel import Cost, cost, refuse
from weft.parallel.layout import COMPUTE_DTYPE
from weft.plan import Plan
from weft.profile import Profile, profile
from weft.train.documents import document_traffic
from weft.train.step import step_traffic

# The fraction of a GPU's dense peak that a training step reaches; an assumption that measurements are to replace.
ASSUMED_EFFICIENCY = 0.45
PEAK_OF = {"fp64": "fp64", "fp32": "fp32", "bf16": "bf16"}


@dataclass(frozen=True)
class Prediction:
    """A plan's cost on a cluster. `communication_seconds` is by axis; `step_seconds` counts what is not hidden."""

    cost: Cost
    traffic: Traffics
    memory_limit_bytes: int
    compute_seconds: float | None
    communication_seconds: dict[str, float]
    step_seconds: float | None

    def to_json(self) -> dict[str, Any]:
        """The prediction as plain values."""
        return {
            "memory": {
                "state_bytes": dict(self.cost.state_bytes),
                "saved_bytes": self.cost.saved_bytes,
                "transient_bytes": self.cost.transient_bytes,
                "total_bytes": self.cost.memory_bytes,
                "limit_bytes": self.memory_limit_bytes,
            },
            "traffic": [
                {"axis": axis, "operation": operation, "calls": value.calls, "bytes": value.num_bytes}
                for (axis, operation), value in self.traffic.items()
            ],
            "seconds": {
                "compute": self.compute_seconds,
                "communication": self.communication_seconds,
                "step": self.step_seconds,
            },
        }


def predict(run: Run, cluster: Cluster) -> Prediction:
    """What one step of the run costs each rank; the run's plan must fit the model."""
    model_profile = micro_batch_profile(run)
    refuse(model_profile, run.plan)
    total = cost(model_profile, run.plan, run.split)
    levels = level_degrees(run.plan, cluster.node.num_devices)
    traffic = expand(add_traffic(total.traffic, step_traffic(run.plan), document_traffic(run)), levels)
    rate = _flops_per_second(run, cluster)
    compute = total.flops / rate if rate else None
    communication = _communication_seconds(traffic, run.plan, cluster)
    told = sum(communication.values())
    hidden = 0.0 if _is_cpu(cluster) else min(told, compute or 0.0)  # a CPU computes and talks with the same cores
    step = None if compute is None else compute + told - hidden
    return Prediction(total, traffic, cluster.node.device.memory_bytes, compute, communication, step)


@lru_cache(maxsize=8)
def _profile_of(model: ModelConfig, dtype: torch.dtype, micro_batch: int, sequence: int) -> Profile:
    with torch.device("meta"):
        module = build(model).to(dtype)

    def tokens() -> Tensor:
        return torch.zeros(micro_batch, sequence, dtype=torch.long, device="cpu")

    return profile(module, lambda: (tokens(),), lambda logits: token_loss(logits, tokens()))


def micro_batch_profile(run: Run) -> Profile:
    """The profile of the run's model and loss for one micro-batch, in the dtype that computes."""
    return _profile_of(run.model, COMPUTE_DTYPE[run.plan.precision], run.split.micro_batch, run.split.sequence)


def example_tokens(run: Run) -> tuple[Tensor]:
    """The arguments of one forward of the run's model, as a rank of `context` has them."""
    return (torch.zeros(run.split.micro_batch, run.split.sequence // run.plan.context.degree, dtype=torch.long),)


def model_flops(model_profile: Profile) -> float:
    """FLOPs that one micro-batch's forward and backward need: causal attention counted half, recompute not at all."""
    attention = sum(block.attention_flops for block in model_profile.all)
    return 3 * (model_profile.flops - attention / 2)


def peak_flops(run: Run, device: torch.device) -> float | None:
    """The peak of this rank's device in the run's precision, where it is known."""
    if device.type != "cuda":
        return None
    node = recognise(torch.cuda.get_device_name(device))
    return None if node is None else node.device.peak_flops.get(PEAK_OF[run.plan.precision])


def run_cluster(run: Run, num_hosts: int = 1) -> Cluster:
    """The cluster that the run names; "local" is this machine with its part of the ranks, once for each host."""
    if run.cluster != "local":
        return load(run.cluster)
    machine = local_cluster(math.ceil(run.plan.num_ranks / num_hosts), on_cpu=run.train.device == "cpu")
    return replace(machine, num_nodes=num_hosts)


def _communication_seconds(traffic: Traffics, plan: Plan, cluster: Cluster) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for (axis, operation), value in traffic.items():
        inner, degree = _span(axis, plan, cluster.node.num_devices)
        link = cluster.axis_link(inner, degree)
        one = ring_seconds(
            operation,
            value.num_bytes / max(1, value.calls),
            degree,
            link.bandwidth_bytes_per_second,
            link.latency_seconds,
        )
        seconds[axis] = seconds.get(axis, 0.0) + one * value.calls
    return seconds


def _span(axis: str, plan: Plan, ranks_per_node: int) -> tuple[int, int]:
    """How far apart neighbours on an axis (or a level of it) are, and its degree; joint axes span all their members."""
    axis, _, level = axis.partition("/")
    if level:
        num_nodes, num_local = level_degrees(plan, ranks_per_node)[axis]
        return (ranks_per_node, num_nodes) if level == "node" else (_span(axis, plan, ranks_per_node)[0], num_local)
    if axis in JOINT_AXES:
        return 1, math.prod(plan.degree(member) for member in JOINT_AXES[axis])
    axis, _, neighbours = axis.partition(":")
    return plan.inner(axis), int(neighbours) if neighbours else plan.degree(axis)


def _flops_per_second(run: Run, cluster: Cluster) -> float | None:
    peak = cluster.node.device.peak_flops.get(PEAK_OF[run.plan.precision])
    if peak is not None:
        return peak * ASSUMED_EFFICIENCY
    if not _is_cpu(cluster) or run.cluster != "local":
        return None
    return _cpu_flops_per_second() * cluster.node.num_cpu_cores / max(cluster.node.num_cpu_cores, run.plan.num_ranks)


def _is_cpu(cluster: Cluster) -> bool:
    return cluster.node.host_link_bytes_per_second is None


@lru_cache(maxsize=1)
def _cpu_flops_per_second() -> float:
    """What one core of this machine does in a matmul, measured in a fraction of a second."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        left, right = torch.randn(384, 384), torch.randn(384, 384)
        best = float("inf")
        for _ in range(8):
            start = time.perf_counter()
            left @ right
            best = min(best, time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return float(2 * 384**3 / best)

"""Predicts the cost of a plan before it runs: memory per device, traffic per axis, and the time of a step.

Memory and traffic are sums over the strategies; traffic is exact. The planner's model gives the time if the catalog
knows the device, and for text on CPUs, whose rates are assumed. Otherwise the time is rough: FLOPs divided by a rate,
plus collectives by the ring formulas on the cluster's links. A pipeline's time comes from a simulation of its schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch

from weft.cluster.collective_choice import between_sizes
from weft.cluster.cpu_rates import cpu_flops_per_second, is_cpu, with_assumed_rates
from weft.cluster.hardware import AxisLink, Cluster, load, local_cluster, recognise, ring_seconds
from weft.cluster.shared_devices import refuse_missing_gpus, with_shared_devices
from weft.comm import Traffics, add_traffic, expand
from weft.compile.blocks import wants_compile
from weft.compile.saved_bytes import compiled_profile, needs_pieces, profile_under
from weft.data.config import DataConfig
from weft.inspection.blocks import find_blocks
from weft.memory.offload_activations import ACTIVATIONS
from weft.memory.offload_weights import link_traffic
from weft.mesh import distance_and_degree, level_degrees
from weft.models import LanguageConfig
from weft.optim.sign_compression import compressed_traffic
from weft.parallel.apply import assumptions as cost_assumptions
from weft.parallel.apply import cost, local_cost, localise, refuse
from weft.parallel.branch.axis import describe_deal, work_share
from weft.pipeline.build import Staging, stage
from weft.pipeline.cost import edge_bytes
from weft.plan import Branch, Plan
from weft.planner.closed_form_memory import margin_bytes
from weft.planner.host_link import copied_seconds, update_seconds
from weft.planner.image_model import planned_images, software_for_images
from weft.planner.kfac_cost import with_kfac
from weft.planner.model import planned_model, software_of
from weft.planner.step import StepModel
from weft.profiling import Profile
from weft.run_file import Run
from weft.schedule import Timeline, simulate
from weft.sharding.layout import COMPUTE_DTYPE, master_bytes
from weft.step.documents import document_traffic
from weft.step.examples import micro_batch_profile
from weft.step.objective import step_traffic
from weft.step.options import refuse_options
from weft.strategy import Cost

# The fraction of a GPU's dense peak that a training step reaches; an assumption, to be replaced by measurements.
ASSUMED_EFFICIENCY = 0.45
PEAK_OF = {"fp64": "fp64", "fp32": "fp32", "bf16": "bf16"}


# Axes whose groups are pairs of ranks along another axis: mirrored replicas of a stage, stages that share a parameter
# (mostly two), and a stage with its shadow.
PAIRS_ALONG = {"mirror": "pipe", "tied": "pipe", "shadow": "pipe"}


@dataclass(frozen=True)
class Prediction:
    """A plan's cost on a cluster; with `pipe`, that of the rank `pipe_rank` along it, which needs the most memory.

    `communication_seconds` is by axis. `compute_seconds` is that of the rank that computes most. `step_seconds`
    includes communication that is not hidden, and the waits of a pipeline, which `timeline` shows.
    """

    cost: Cost
    traffic: Traffics
    memory_limit_bytes: int
    compute_seconds: float | None
    communication_seconds: dict[str, float]
    step_seconds: float | None
    pipe_rank: int | None = None
    timeline: Timeline | None = None
    is_modelled: bool = False  # is the time from the planner's model, which tests compare with published measurements?
    host_limit_bytes: int = 0  # a rank's share of its host's memory
    offload: float = 0.0
    activations: float = 0.0
    weights: float = 0.0
    assumptions: tuple[str, ...] = ()  # sentences, for facts that could not be determined
    branches: str = ""  # the branches of each rank, and their imbalance
    margin_bytes: int = 0  # of device memory, beside tensors: the allocator's overhead, the CUDA context and NCCL

    @property
    def memory_bytes(self) -> int:
        """Bytes of device memory that the run needs, with the margin: what a search for plans holds to the limit."""
        return self.cost.memory_bytes + self.margin_bytes

    def to_json(self) -> dict[str, Any]:
        """Returns the prediction as plain values, for JSON."""
        found = {
            "memory": {
                "state_bytes": dict(self.cost.state_bytes),
                "saved_bytes": self.cost.saved_bytes,
                "transient_bytes": self.cost.transient_bytes,
                "total_bytes": self.cost.memory_bytes,
                "margin_bytes": self.margin_bytes,
                "limit_bytes": self.memory_limit_bytes,
                "pipe_rank": self.pipe_rank,
                "host_bytes": dict(self.cost.host_bytes),
                "host_limit_bytes": self.host_limit_bytes,
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
        if self.branches:
            found["branches"] = self.branches
        if self.assumptions:
            found["assumptions"] = list(self.assumptions)
        if self.timeline is not None:
            found["pipeline"] = {
                "schedule": self.timeline.schedule.name,
                "bubble_share": self.timeline.bubble_share,
                "makespan_seconds": self.timeline.makespan_seconds,
                "peak_activations": list(self.timeline.peak_activations),
            }
        return found


def predict(run: Run, cluster: Cluster) -> Prediction:
    """Predicts the cost of one step of the run for each rank. The run's plan must fit the model."""
    whole, plan, cluster = micro_batch_profile(run), run.plan, _with_rates(run, cluster)
    refuse_options(run)
    refuse(whole, plan)
    staging = stage(whole, plan) if plan.pipe.degree > 1 else None  # split as the run splits: by the uncompiled profile
    if _compiles(run, cluster, whole):
        whole = profile_under(compiled_profile(whole), plan)
    costs = [_with_optimizer(cost(whole, plan, run.split, rank, staging), run, whole) for rank in _different(plan)]
    worst = max(range(len(costs)), key=lambda index: costs[index].memory_bytes)
    beside = add_traffic(step_traffic(plan), document_traffic(run))
    levels = level_degrees(plan, cluster.node.num_devices, cluster)
    traffic = [expand(add_traffic(one.traffic, beside), levels) for one in costs]
    communication_by_rank = [_communication_seconds(one, plan, cluster) for one in traffic]
    rate, timeline, compute, step = _flops_per_second(run, cluster), None, None, None
    modelled, share = is_known(cluster, plan.precision), work_share(whole, plan)
    if modelled:
        steps = _step_model(run, cluster, _compiles(run, cluster, whole))
        timed = steps.step(replace(plan, micro_batch=run.split.micro_batch, branch=Branch()), run.split.accumulation)
        timeline, compute = timed.timeline, timed.where["compute"] * share
        step = timed.seconds - (timed.where["compute"] - compute) + communication_by_rank[worst].get("branch", 0.0)
    elif rate is not None:
        compute = share * max(one.flops for one in costs) / rate
        if staging is None:
            step = compute + _not_hidden(sum(communication_by_rank[0].values()), compute, cluster)
        else:
            times = _stage_seconds(run, whole, staging, cluster, rate / share)
            timeline = _run_schedule(run, staging, times, cluster)
            step = _last_end(timeline, times, communication_by_rank[:: plan.branch.degree], cluster)
    sent = costs[worst].host_bytes.get(ACTIVATIONS, 0)
    if sent or plan.memory.weights:
        moved = link_traffic(whole, plan, run.split.accumulation)
        copied, exposed = copied_seconds(sent * run.split.accumulation, moved, plan, compute or 0.0, cluster)
        communication_by_rank[worst] |= copied
        step = step if step is None else step + exposed
    if sum(costs[worst].host_bytes.values()) > sent:
        communication_by_rank[worst]["host"] = update_seconds(costs[worst], whole, plan, cluster)
        if step is not None and not modelled:  # the planner's model counts it in the update
            hidden = compute or 0.0 if plan.memory.delay else 0.0
            step += max(0.0, communication_by_rank[worst]["host"] - hidden)
    limit = cluster.node.device.memory_bytes
    host_limit = cluster.node.host_memory_bytes // min(cluster.node.num_devices, plan.num_ranks)
    pipe_rank = None if staging is None else worst // plan.branch.degree
    return Prediction(
        costs[worst],
        traffic[worst],
        limit,
        compute,
        communication_by_rank[worst],
        step,
        pipe_rank,
        timeline,
        modelled,
        host_limit,
        plan.memory.offload,
        plan.memory.activations,
        plan.memory.weights,
        (*whole.assumptions, *cost_assumptions(whole, plan)),
        describe_deal(whole, plan) if plan.branch.degree > 1 else "",
        0 if is_cpu(cluster) else margin_bytes(costs[worst].memory_bytes),
    )


def _with_rates(run: Run, cluster: Cluster) -> Cluster:
    """The cluster, with the rates of CPUs that a search for plans assumes. For images, whose operations are too small
    for them, a CPU's time is that of its FLOPs.
    """
    return with_assumed_rates(cluster) if isinstance(run.model, LanguageConfig) else cluster


def _different(plan: Plan) -> list[dict[str, int]]:
    """The coordinates of the ranks whose costs differ: each stage, and in it each rank of `branch`."""
    first, places = dict.fromkeys(plan.degrees, 0), product(range(plan.pipe.degree), range(plan.branch.degree))
    return [{**first, "pipe": pipe, "branch": branch} for pipe, branch in places]


def _with_optimizer(one: Cost, run: Run, whole: Profile) -> Cost:
    """A rank's cost with what its optimizer changes of AdamW's.

    With `train.compressed`, the traffic is that of a step in which ranks exchange signs; with `train.kfac`, that of a
    step that samples factors and renews inverses.
    """
    plan, kfac = run.plan, run.train.kfac
    if run.train.compressed is not None:
        return replace(one, traffic=compressed_traffic(one.traffic, plan.data, master_bytes(plan)))
    return one if kfac is None else with_kfac(one, kfac, plan, whole)


def refuse_run(run: Run) -> None:
    """Raises the first reason why the run cannot work: its options, its plan, or an error in its ranks' costs."""
    whole, plan = micro_batch_profile(run), run.plan
    refuse_options(run)
    refuse(whole, plan)
    staging = stage(whole, plan) if plan.pipe.degree > 1 else None
    for index in range(plan.pipe.degree):
        cost(whole, plan, run.split, {**dict.fromkeys(plan.degrees, 0), "pipe": index}, staging)


def _compiles(run: Run, cluster: Cluster, whole: Profile) -> bool:
    """Does the run compile its blocks on the cluster's devices?

    On a CPU, blocks compiled in pieces save the same activations as uncompiled ones, so they count as uncompiled.
    """
    device = torch.device("cpu" if is_cpu(cluster) else "cuda")
    if whole.model is not None and is_cpu(cluster) and needs_pieces(find_blocks(whole.model).values()):
        return False
    return wants_compile(run, device)


def _step_model(run: Run, cluster: Cluster, compiles: bool) -> StepModel:
    """Returns the planner's time model for the run's model."""
    if isinstance(run.model, LanguageConfig):
        software = software_of(run.model, cluster, run.train.compile)
        return planned_model(run.model, run.split.sequence, cluster, software, run.plan.precision).steps
    assert not isinstance(run.data, DataConfig), "the run file was checked"
    shape, software = run.data.shape(run.model.in_channels), software_for_images(run.model, cluster, compiles)
    return planned_images(run.model, shape, run.plan.precision, cluster, software).steps


# --- the time of a pipeline


class StageSeconds(NamedTuple):
    """Seconds of one micro-batch in a stage. `inside` are the seconds of collectives among the stage's ranks."""

    forward: float
    backward: float
    weight: float
    inside: float


def _stage_seconds(run: Run, whole: Profile, staging: Staging, cluster: Cluster, rate: float) -> list[StageSeconds]:
    """Seconds of each stage: forward by its FLOPs; the gradients of inputs and those of weights take as long each.

    Half of the communication belongs to forward. Recompute repeats the forward of blocks.
    """
    plan, first = run.plan, dict.fromkeys(run.plan.degrees, 0)
    levels = level_degrees(plan, cluster.node.num_devices, cluster)
    found = []
    for index in range(staging.num_stages):
        own = plan.of_stage(index)
        part = localise(staging.profile(whole, index), own, first)
        costs = [local_cost(part, replace(run.split, accumulation=n), own, first) for n in (1, 2)]
        once, twice = (sum(_communication_seconds(expand(c.traffic, levels), plan, cluster).values()) for c in costs)
        inside = twice - once  # communication for each micro-batch; the rest happens once a step
        one = part.flops / rate
        whole_backward = (costs[1].flops - costs[0].flops) / rate - one
        found.append(
            StageSeconds(
                one + _not_hidden(inside / 2, one, cluster),
                whole_backward - one + _not_hidden(inside / 2, whole_backward, cluster),
                one,
                inside,
            )
        )
    return found


def _run_schedule(run: Run, staging: Staging, times: Sequence[StageSeconds], cluster: Cluster) -> Timeline:
    """Simulates the pipeline's schedule with the times of its stages."""
    link = link_of("pipe", run.plan, cluster, is_send=True)
    return simulate(
        staging.schedule(run.split.accumulation),
        [one.forward for one in times],
        [one.backward for one in times],
        [one.weight for one in times],
        [link.latency_seconds + size / link.bandwidth_bytes_per_second for size in edge_bytes(staging)],
    )


def _last_end(
    timeline: Timeline,
    times: Sequence[StageSeconds],
    communication_by_rank: Sequence[Mapping[str, float]],
    cluster: Cluster,
) -> float:
    """The seconds until the last rank has reduced its gradients.

    A rank starts the reduction during its last backward.
    """
    ends = []
    for rank, spans in enumerate(timeline.spans):
        done = [(span.start_seconds, span.end_seconds, span.action) for span in spans if span.action != "wait"]
        inside = sum(times[action.stage].inside for _, _, action in done if action.kind == "forward")
        once = sum(seconds for axis, seconds in communication_by_rank[rank].items() if axis != "pipe") - inside
        start, end, last = done[-1]
        behind = end - start if last.kind == "backward" else 0.0
        ends.append(end + _not_hidden(max(0.0, once), behind, cluster))
    return max(ends)


def _not_hidden(communication: float, compute: float, cluster: Cluster) -> float:
    """Seconds that communication adds to compute at the same time.

    A CPU hides none of it: it communicates with the cores that compute.
    """
    return communication if is_cpu(cluster) else max(0.0, communication - compute)


# --- rates and links


def peak_flops(run: Run, device: torch.device) -> float | None:
    """The peak FLOP/s of this rank's device in the run's precision; None if it is not known."""
    if device.type != "cuda":
        return None
    node = recognise(torch.cuda.get_device_name(device))
    return None if node is None else node.device.peak_flops.get(PEAK_OF[run.plan.precision])


def run_cluster(run: Run, num_hosts: int = 1) -> Cluster:
    """The cluster that the run names. "local" is this machine with its share of the ranks, once for each host."""
    per_device, on_cpu = run.plan.ranks_per_device, run.train.device == "cpu"
    if run.cluster != "local":
        return with_shared_devices(load(run.cluster), per_device)
    num_devices = math.ceil(run.plan.num_ranks / per_device / num_hosts)
    if per_device > 1 and not on_cpu:
        refuse_missing_gpus(num_devices, per_device)
    machine = local_cluster(num_devices, on_cpu=on_cpu, share=run.train.share_gpus)
    return replace(with_shared_devices(machine, per_device), num_nodes=num_hosts)


def _communication_seconds(traffic: Traffics, plan: Plan, cluster: Cluster) -> dict[str, float]:
    """Seconds of communication by axis: as measured, where the cluster has it, or by the ring formulas."""
    seconds: dict[str, float] = {}
    for (axis, operation), value in traffic.items():
        inner, degree = (1, 2) if axis in PAIRS_ALONG else _span(axis, plan, cluster.node.num_devices)
        num_bytes, measured = value.num_bytes / max(1, value.calls), cluster.measured(operation, inner, degree)
        if measured is not None:
            one = between_sizes(measured, num_bytes)
        else:
            link = link_of(axis, plan, cluster, operation == "send")
            one = ring_seconds(operation, num_bytes, degree, link.bandwidth_bytes_per_second, link.latency_seconds)
        seconds[axis] = seconds.get(axis, 0.0) + one * value.calls
    return seconds


def link_of(axis: str, plan: Plan, cluster: Cluster, is_send: bool = False) -> AxisLink:
    """The link of an axis. The two ranks of a pair may be as far apart as the ends of the axis along which they are."""
    return cluster.axis_link(*_span(PAIRS_ALONG.get(axis, axis), plan, cluster.node.num_devices), is_send)


def _span(axis: str, plan: Plan, ranks_per_node: int) -> tuple[int, int]:
    """Returns (the distance in ranks between neighbours on an axis or on a level of it, its degree)."""
    axis, _, level = axis.partition("/")
    inner, degree = distance_and_degree(plan, axis)
    if level:
        levels = level_degrees(plan, ranks_per_node)[axis]
        if levels.shares_device:
            return (levels.num_local, levels.num_nodes) if level == "leaders" else (inner, levels.num_local)
        return (ranks_per_node, levels.num_nodes) if level == "node" else (inner, levels.num_local)
    return inner, degree


def is_known(cluster: Cluster, precision: str) -> bool:
    """Can the planner time kernels on the cluster's devices?"""
    device = cluster.node.device
    return device.memory_bandwidth_bytes_per_second is not None and precision in device.peak_flops


def _flops_per_second(run: Run, cluster: Cluster) -> float | None:
    """The FLOP/s of a rank in training; None if they are not known."""
    peak = cluster.node.device.peak_flops.get(PEAK_OF[run.plan.precision])
    if peak is not None:
        return peak * ASSUMED_EFFICIENCY
    if not is_cpu(cluster) or run.cluster != "local":
        return None
    rate = cpu_flops_per_second(COMPUTE_DTYPE[run.plan.precision])
    return rate * cluster.node.num_cpu_cores / max(cluster.node.num_cpu_cores, run.plan.num_ranks)

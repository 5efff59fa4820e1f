"""The planner's answer to a question: the best plans, why they are best, which plans were rejected, and how more
hardware would change the result.

`ask` answers a question. `weft plan --json` prints `Answer.to_json`, and the plan page draws it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.cluster.hardware import Cluster
from weft.comm import Traffics
from weft.compile.saved_bytes import profile_under
from weft.errors import PlanError
from weft.models import LanguageConfig, ModelConfig
from weft.parallel.apply import assumptions as cost_assumptions
from weft.planner.candidate import Candidate, SearchResult
from weft.planner.explain import Rejected, Sensitivity, fewer_nodes, rejections, sensitivities, smaller, why
from weft.planner.goodput import failures
from weft.planner.image_model import planned_images, software_for_images
from weft.planner.model import planned_model, software_of
from weft.planner.predict import link_of
from weft.planner.question import Objective, Question
from weft.planner.search import Model, search
from weft.schema import to_table

MAX_SPANS = 20_000  # a longer timeline is left out of the answer
NUM_KEPT = 48  # plans that the search keeps; the answer shows one of each layout
HOUR = 3600
KERNEL_SHARE = 0.9  # kernels of plans for fewer nodes take at least this share of the least device-seconds for all
# Device-hours are given per billion tokens or per million images.
MANY = {"tokens": (1e9, "billion"), "images": (1e6, "million")}
Progress = Callable[[str], None]


@dataclass(frozen=True)
class ScalingPoint:
    """The best plan on a cluster of some size; `best` is None if no plan fits."""

    cluster: Cluster
    best: Candidate | None


@dataclass(frozen=True)
class Answer:
    """The result of a search for a question, with the reasons for it."""

    name: str
    model: Model
    question: Question
    objective: Objective
    found: SearchResult
    why: str
    rejected: tuple[Rejected, ...]
    search_seconds: float
    sensitivities: tuple[Sensitivity, ...] = ()
    scaling: tuple[ScalingPoint, ...] = ()
    traffic: Traffics = field(default_factory=dict)  # of the first plan, per step and rank

    @property
    def best(self) -> Candidate:
        """The first plan. Raises PlanError with the reasons and a remedy if there is no plan."""
        if not self.found.best:
            remedies = [f"{one.reason}; {one.remedy}" for one in self.rejected if one.remedy]
            raise PlanError(" ".join([self.why, *remedies[:1]]))
        return self.found.best[0]

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions, as sentences, that the search makes about what could not be traced or measured."""
        found = self.model.profile.assumptions
        if not self.found.best:
            return found
        plan = self.best.plan
        across = tuple(
            f"{axis} = {plan.degree(axis)} crosses nodes, for which no published run was compared: its time rests on "
            f"the bandwidth between nodes alone"
            for axis in ("x", "y")
            if plan.degree(axis) > 1 and link_of(axis, plan, self.model.cluster).crosses_nodes
        )
        return (*found, *across, *cost_assumptions(profile_under(self.model.profile, plan), plan))

    def layouts(self, most: int = 8) -> list[Candidate]:
        """Returns the best plan of each layout, at most `most`. Plans with equal degrees and equal schedule are one
        layout.
        """
        first = {(*one.plan.degrees.items(), one.plan.pipe.schedule): one for one in reversed(self.found.best)}
        return sorted(first.values(), key=lambda one: self.found.best.index(one))[:most]

    def to_json(self) -> dict[str, Any]:
        """Returns the answer as plain values, for JSON."""
        cluster, question = self.model.cluster, self.question
        node = cluster.node
        return {
            "model": {"name": self.name, "parameters": self.model.numel, "blocks": self.model.num_blocks},
            "cluster": {
                "name": cluster.name,
                "nodes": cluster.num_nodes,
                "devices": cluster.num_devices,
                "devices_per_node": node.num_devices,
                "device": node.device.name,
                "memory_limit_bytes": node.device.memory_bytes,
                "intra_bytes_per_second": node.intra.bandwidth_bytes_per_second,
                "inter_bytes_per_second": node.inter.bandwidth_bytes_per_second,
            },
            "question": {
                "asked": question.describe(),
                "unit": question.unit,
                "batch": question.batch,
                f"{question.unit}_per_step": question.batch * question.sequence,
                "precision": question.precision,
                "objective": self.objective,
                "constraints": [one.text for one in question.constraints],
            },
            "considered": self.found.num_considered,
            "search_seconds": self.search_seconds,
            "plans": [self._candidate(one, index == 0) for index, one in enumerate(self.layouts())],
            "why": self.why,
            "assumptions": list(self.assumptions),
            "rejected": [
                {
                    "axes": one.candidate.plan.describe_axes(),
                    "plan": to_table(one.candidate.plan),
                    "micro_batch": one.candidate.plan.micro_batch,
                    "recompute": one.candidate.plan.memory.recompute_words,
                    "reason": one.reason,
                    "remedy": one.remedy,
                    "seconds": one.candidate.seconds,
                    "memory": one.candidate.memory.parts(),
                    "memory_bytes": one.candidate.memory.total_bytes,
                }
                for one in self.rejected
            ],
            "refused": [{"axes": what, "reason": reason} for what, reason in self.found.refused],
            "sensitivities": [vars(one) for one in self.sensitivities],
            "scaling": [self._point(point) for point in self.scaling],
        }

    def _candidate(self, one: Candidate, is_first: bool) -> dict[str, Any]:
        step = one.step
        assert step is not None
        return {
            "plan": to_table(one.plan),
            "axes": one.plan.describe_axes(),
            "num_devices": one.plan.num_ranks,
            "micro_batch": one.plan.micro_batch,
            "num_micro_batches": one.num_micro_batches,
            "recompute": one.plan.memory.recompute_words,
            "offload": one.plan.memory.offload,
            **self.rates(one),
            "where": step.where,
            "memory": one.memory.parts(),
            "memory_bytes": one.memory.total_bytes,
            "margin_bytes": one.memory.total_bytes - one.memory.tensor_bytes,
            "bubble_share": step.wait_share,
            "traffic": list(self._traffic(one)) if is_first else [],
            "timeline": _timeline(one) if is_first else None,
        }

    def rates(self, one: Candidate) -> dict[str, float | None]:
        """Returns the seconds of a step, samples per second, device-hours and MFU (None if the device's peak is not
        known).
        """
        count, unit = self.question.batch * self.question.sequence, self.question.unit
        many, words = MANY[unit]
        device = self.model.cluster.node.device
        peak = None if device.name == "CPU" else device.peak_flops.get(self.question.precision)
        flops = self.model.flops * self.question.batch
        return {
            "seconds": one.seconds,
            f"{unit}_per_second": count / one.seconds,
            f"device_hours_per_{words}_{unit}": many / count * one.seconds * one.plan.num_ranks / HOUR,
            "mfu": None if peak is None else flops / (one.seconds * one.plan.num_ranks * peak),
        }

    def _point(self, point: ScalingPoint) -> dict[str, Any]:
        found: dict[str, Any] = {"devices": point.cluster.num_devices, "nodes": point.cluster.num_nodes}
        if point.best is None:
            return {**found, "axes": "", "fits": False}
        return {**found, "axes": point.best.plan.describe_axes(), **self.rates(point.best), "fits": True}

    def _traffic(self, one: Candidate) -> Iterator[dict[str, Any]]:
        for (axis, operation), value in self.traffic.items():
            link = "inter" if link_of(axis, one.plan, self.model.cluster).crosses_nodes else "intra"
            yield {"axis": axis, "operation": operation, "calls": value.calls, "bytes": value.num_bytes, "link": link}


def ask(
    name: str,
    config: ModelConfig,
    cluster: Cluster,
    question: Question,
    objective: Objective = "time",
    say: Progress = lambda what: None,
    mtbf_seconds: float | None = None,
) -> Answer:
    """Searches the best plans for a model on a cluster.

    `name` is the model's name, for the answer. The objective "time" uses the whole cluster, "cost" the part of it with
    the fewest device-seconds a step, and "devices" the smallest part on which a plan fits. `say` shows a line of
    progress. `mtbf_seconds` is the mean time between failures of one device; if given, plans are ranked by a step's
    time divided by the goodput under these failures.
    """
    start = time.perf_counter()
    say(f"profiling {name}")
    model = planned(config, cluster, question)
    model, found = _best(model, question, objective, say, mtbf_seconds)
    seconds = time.perf_counter() - start
    reason = why(model, question, found)
    if model.cluster.num_nodes < cluster.num_nodes and objective == "time":
        idle = f"Use {model.cluster.num_nodes} of {cluster.num_nodes} nodes: no plan for all of them is faster."
        reason = f"{idle} {reason}"
    return Answer(name, model, question, objective, found, reason, tuple(rejections(model, found)), seconds)


def planned(config: ModelConfig, cluster: Cluster, question: Question) -> Model:
    """Profiles the model of a question and returns it with its cost model on a cluster."""
    if isinstance(config, LanguageConfig):
        software = software_of(config, cluster, question.compiles)
        return planned_model(config, question.sequence, cluster, software, question.precision)
    assert question.shape is not None
    software = software_for_images(config, cluster, question.compiles)
    return planned_images(config, question.shape, question.precision, cluster, software)


def with_more(answer: Answer, say: Progress) -> Answer:
    """Returns the answer with sensitivities: how much time faster links, more memory or more nodes would save."""
    say("what faster links, more memory or more nodes would change")
    return replace(answer, sensitivities=tuple(sensitivities(answer.model, answer.question, answer.found)))


def with_scaling(answer: Answer, say: Progress) -> Answer:
    """Returns the answer with the best plans on fewer and on more devices."""
    points = []
    for cluster in _scales(answer.model.cluster):
        say(f"scaling: {cluster.num_devices} devices")
        if cluster == answer.model.cluster:
            best: Sequence[Candidate] = answer.found.best
        else:
            best = search(answer.model.on(cluster), answer.question, keep=1).best
        points.append(ScalingPoint(cluster, best[0] if best else None))
    return replace(answer, scaling=tuple(points))


def effective_seconds(model: Model, question: Question, one: Candidate, mtbf_seconds: float | None) -> float:
    """A step's time including its share of the time that failures cost.

    `mtbf_seconds` is the mean time between failures of one device. If it is None, this is the step's time.
    """
    if mtbf_seconds is None:
        return one.seconds
    of_cluster = mtbf_seconds / model.cluster.num_devices
    cost = failures(model.numel, question.precision, model.cluster, of_cluster, one.plan.memory.offload)
    return one.seconds / max(cost.best.goodput, 1e-12)


def _search(model: Model, question: Question, say: Progress, mtbf_seconds: float | None) -> SearchResult:
    say(f"searching plans for {model.cluster.num_devices} devices")
    found = search(model, question, keep=NUM_KEPT)
    best = sorted(found.best, key=lambda one: effective_seconds(model, question, one, mtbf_seconds))
    return replace(found, best=tuple(best))


def _best(
    model: Model, question: Question, objective: Objective, say: Progress, mtbf_seconds: float | None
) -> tuple[Model, SearchResult]:
    """Searches the whole cluster, or the part of it that is best for the objective; returns the model there and the
    result.
    """
    if objective == "time":
        return _fastest(model, question, say, mtbf_seconds)
    tried: list[tuple[Model, SearchResult]] = []
    for cluster in smaller(model.cluster):
        here = model.on(cluster)
        found = _search(here, question, say, mtbf_seconds)
        if found.best and objective == "devices":
            return here, found
        tried.append((here, found))
    fitting = [pair for pair in tried if pair[1].best]
    if not fitting:
        return tried[-1]

    def device_seconds(pair: tuple[Model, SearchResult]) -> float:
        here, found = pair
        return effective_seconds(here, question, found.best[0], mtbf_seconds) * here.cluster.num_devices

    return min(fitting, key=device_seconds)


def _fastest(model: Model, question: Question, say: Progress, mtbf_seconds: float | None) -> tuple[Model, SearchResult]:
    """Searches the whole cluster, and parts with fewer nodes for plans that are faster.

    A part may be faster if the number of devices has a factor that divides neither the batch nor the blocks, or if a
    small model communicates longer than it computes. Parts on which kernels alone would take longer are left out.
    """
    best = model, _search(model, question, say, mtbf_seconds)
    count, whole = model.cluster.num_devices, best[1]
    if not whole.best and question.batch * model.num_blocks % (count // (count & -count)) == 0:
        return best
    for cluster in fewer_nodes(model.cluster):
        limit = best[1].best[0].seconds if best[1].best else math.inf
        if KERNEL_SHARE * whole.least_device_seconds >= limit * cluster.num_devices:
            break
        say(f"searching plans for {cluster.num_devices} of {model.cluster.num_devices} devices")
        here = model.on(cluster)
        found = search(here, question, keep=NUM_KEPT, limit_seconds=limit)
        if found.best:
            best = here, found
    return best


def _scales(cluster: Cluster) -> list[Cluster]:
    """Returns clusters with 1/8 to 4 times the nodes; for a single node also parts of the node."""
    inside = [one for one in smaller(cluster) if one.num_nodes == 1 and one.num_devices < cluster.node.num_devices]
    counts = sorted({cluster.num_nodes * times // 8 for times in (1, 2, 4, 8, 16, 32)} - {0})
    return [*(inside if cluster.num_nodes == 1 else []), *(replace(cluster, num_nodes=count) for count in counts)]


def _timeline(one: Candidate) -> dict[str, Any] | None:
    """Returns the pipeline's timeline as plain values; None without a pipeline or with more than MAX_SPANS spans."""
    assert one.step is not None
    timeline = one.step.timeline
    if timeline is None or sum(map(len, timeline.spans)) > MAX_SPANS:
        return None
    return {
        "num_ranks": len(timeline.spans),
        "makespan_seconds": timeline.makespan_seconds,
        "ranks": [
            [
                {"start": span.start_seconds, "end": span.end_seconds, "kind": "wait"}
                if span.action == "wait"
                else {
                    "start": span.start_seconds,
                    "end": span.end_seconds,
                    "kind": span.action.kind,
                    "stage": span.action.stage,
                    "micro_batch": span.action.micro_batch,
                }
                for span in spans
            ]
            for spans in timeline.spans
        ],
    }

"""Explains a search's result: why a plan is best, why others were rejected, and how more hardware would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.cluster.hardware import Cluster, Link
from weft.plan import Memory as MemoryPolicy
from weft.plan import Plan
from weft.planner.candidate import Candidate, SearchResult
from weft.planner.closed_form_memory import RankMemory
from weft.planner.question import Question
from weft.planner.search import Model, search

GB = 1e9
TENTH_MORE = 1.1
MAX_TIMES = 64
LEAST_LONGER = 0.0005  # of a step: plans that differ by less take as long
WORDS = {
    "compute": "compute",
    "bubble": "waiting in the pipeline",
    "optimizer": "the optimizer",
    "data": "gradients over data and shard",
    "host": "copies to the host and back",
}


@dataclass(frozen=True)
class Rejected:
    """A plan that does not fit, the reason, and a change that would make it fit."""

    candidate: Candidate
    reason: str
    remedy: str | None


@dataclass(frozen=True)
class Sensitivity:
    """The effect of a little more hardware on the best plan's step time."""

    change: str
    seconds: float  # of a step of the best plan after the change
    saved_seconds: float
    axes: str


def why(model: Model, question: Question, found: SearchResult) -> str:
    """Returns two sentences: where the time of the best plan's step goes, and why the next layout is slower.

    Without any plan that fits, returns `why_none`.
    """
    if not found.best:
        return why_none(model, question, found)
    first = found.best[0]
    where, total = _where(first), first.seconds
    lost = sorted(
        (name for name in where if name != "compute" and where[name] > 0.005 * total), key=lambda n: -where[n]
    )
    losses = " and ".join(f"{_word(name)} ({where[name] / total:.1%})" for name in lost[:2]) or "nothing else"
    compute = where["compute"] / total
    opening = f"{short(first.plan)} computes for {compute:.0%} of its step and gives most of the rest to {losses}."
    opening += _stages_by_memory(model, first)
    other = next((one for one in found.best[1:] if one.plan.degrees != first.plan.degrees), None)
    if other is None:
        return f"{opening} No other layout of the axes is among the best."
    changes = {name: _where(other).get(name, 0.0) - where.get(name, 0.0) for name in {**where, **_where(other)}}
    worse, seconds = max(sorted(changes.items()), key=lambda pair: pair[1])
    longer = other.seconds - total
    if longer < LEAST_LONGER * total:
        return f"{opening} The next layout, {short(other.plan)}, takes as long."
    because = f", mostly by {_word(worse)} (+{min(seconds, longer):.3g} s)" if seconds > 0.001 * total else ""
    if seconds > 2 * longer:  # it takes longer for one thing, and less long for another
        better, saved = min(sorted(changes.items()), key=lambda pair: pair[1])
        because = f": {seconds:.3g} s more by {_word(worse)}, and {-saved:.3g} s less by {_word(better)}"
    return f"{opening} The next layout, {short(other.plan)}, takes {longer / total:.1%} longer{because}."


def _stages_by_memory(model: Model, candidate: Candidate) -> str:
    """Says why the plan's stages are not those of equal time; empty if they are, or if memory did not decide."""
    plan, limit = candidate.plan, model.cluster.node.device.memory_bytes
    if not plan.pipe.split or model.steps.units is None:
        return ""
    counts = [units.num_blocks for units in model.steps.stage_units(plan)]
    found = f" Its stages have {min(counts)} to {max(counts)} blocks, the first {counts[0]} and the last {counts[-1]}"
    equal = replace(plan, pipe=replace(plan.pipe, split=()))
    if plan.memory.recompute_stages is not None:
        return f"{found}.{_recompute_in_stages(model, candidate, equal)}"
    needed = model.held(equal, candidate.num_micro_batches).total_bytes
    return f"{found}: stages of equal time need {needed / GB:.1f} of {limit / GB:.4g} GB."


def _recompute_in_stages(model: Model, candidate: Candidate, equal: Plan) -> str:
    """Says why only some stages recompute: what none of them, and all of them, would need. `equal` has equal stages."""
    policy, count = equal.memory, candidate.num_micro_batches
    nowhere = replace(equal, memory=replace(policy, recompute="none", recompute_stages=None))
    tensor = replace(equal.tensor, regather=False)
    everywhere = replace(equal, tensor=tensor, memory=replace(policy, recompute_stages=None))
    needed, limit = model.held(nowhere, count).total_bytes, model.cluster.node.device.memory_bytes
    longer = model.step(everywhere, count).seconds / candidate.seconds - 1
    return (
        f" {policy.recompute_stages} of {equal.pipe.num_stages} stages recompute, the first ones, which hold the most "
        f"micro-batches: without recompute it needs {needed / GB:.1f} of {limit / GB:.4g} GB, and with recompute in "
        f"all stages it takes {longer:.1%} longer."
    )


def why_none(model: Model, question: Question, found: SearchResult) -> str:
    """Returns why no plan was found, and a remedy: drop a constraint, use more nodes, or use another batch."""
    problem = "No plan divides the batch and the model over all devices."
    if found.too_large:
        nearest = found.too_large[0]
        problem = (
            f"No plan fits: the one that holds least ({short(nearest.plan)}) needs "
            f"{nearest.memory.total_bytes / GB:.1f} of {model.cluster.node.device.memory_bytes / GB:.4g} GB."
        )
    for constraint in question.constraints:
        rest = tuple(one for one in question.constraints if one != constraint)
        without = search(model, replace(question, constraints=rest), keep=1)
        if without.best:
            reason = found.unmet.get(constraint.text)
            because = "" if reason is None else f": {reason}"
            best = short(without.best[0].plan)
            return f"No plan satisfies '{constraint.text}'{because}. Without it the best is {best}."
    if not found.too_large:
        samples = "sequences" if question.shape is None else "images"
        batches = f"a batch of {question.batch} {samples} over {model.cluster.num_devices} devices"
        return f"{problem} Use another batch ({batches} is asked), or other devices."
    larger = _larger_that_fits(model, question)
    if larger is None:
        return f"{problem} Up to {MAX_TIMES}× the nodes do not fit it either."
    return f"{problem} {larger.cluster.num_nodes} nodes ({larger.cluster.num_devices} devices) would fit it."


def _larger_that_fits(model: Model, question: Question) -> Model | None:
    """The model on the next cluster of this kind that has a plan for it."""
    times = sorted(base << shift for base in (2, 3) for shift in range(MAX_TIMES.bit_length() - 2))
    for more in times:
        larger = model.on(replace(model.cluster, num_nodes=model.cluster.num_nodes * more))
        if search(larger, question, keep=1).best:
            return larger
    return None


def short(plan: Plan) -> str:
    """Describes a plan's axes, micro-batch and memory policy in a few words."""
    batch = "" if plan.micro_batch is None else f", micro-batch {plan.micro_batch}"
    return f"{plan.describe_axes()}{batch}{plan.memory.words}"


def _word(name: str) -> str:
    return WORDS.get(name, f"communication over {name}")


def _where(candidate: Candidate) -> dict[str, float]:
    return candidate.step.where if candidate.step is not None else {}


# --- rejected plans


def rejections(model: Model, found: SearchResult) -> list[Rejected]:
    """Returns the fastest plans that do not fit, each with a change that would make it fit, if there is one."""
    limit = model.cluster.node.device.memory_bytes
    return [Rejected(one, too_large(one.memory, limit), _remedy(model, one, limit)) for one in found.too_large]


def too_large(memory: RankMemory, limit_bytes: float) -> str:
    """Describes memory over the limit, e.g. `does not fit: 91.2 of 80 GB, activations 61 GB`."""
    name, size = max(memory.parts().items(), key=lambda pair: pair[1])
    return f"does not fit: {memory.total_bytes / GB:.1f} of {limit_bytes / GB:.4g} GB, {name} {size / GB:.1f} GB"


def _remedy(model: Model, candidate: Candidate, limit_bytes: float) -> str | None:
    for words, plan, count in _lighter(candidate):
        if model.held(plan, count).total_bytes <= limit_bytes:
            return f"{words} would fit"
    return None


def _lighter(candidate: Candidate) -> Iterator[tuple[str, Plan, int]]:
    """Yields (words, plan, number of micro-batches) for changes that reduce a plan's memory, the cheapest first."""
    plan, count = candidate.plan, candidate.num_micro_batches
    if plan.tensor.x > 1 and not plan.tensor.sequence:
        yield "tensor.sequence = true", replace(plan, tensor=replace(plan.tensor, sequence=True)), count
    if plan.tensor.sequence and not plan.tensor.regather and plan.memory.recompute == "none":
        yield "tensor.regather = true", replace(plan, tensor=replace(plan.tensor, regather=True)), count
    if plan.tensor.regather:  # recompute gathers again anyway, so it excludes regather
        plan = replace(plan, tensor=replace(plan.tensor, regather=False))
    recomputes: list[Any] = ["none", "selective", "full"]
    for recompute in recomputes[recomputes.index(plan.memory.recompute) + 1 :]:
        yield f"recompute = {recompute}", replace(plan, memory=MemoryPolicy(recompute)), count
    stages: list[Any] = [stage for stage in (2, 3) if stage > plan.shard.stage and plan.shard.degree > 1]
    for stage in stages:
        yield f"shard.stage = {stage}", replace(plan, shard=replace(plan.shard, stage=stage)), count
    if plan.micro_batch is not None and plan.micro_batch % 2 == 0:
        half = replace(plan, micro_batch=plan.micro_batch // 2)
        yield f"micro_batch = {half.micro_batch}", half, 2 * count
        full = replace(half, memory=MemoryPolicy("full"))
        yield f"micro_batch = {half.micro_batch} with recompute = full", full, 2 * count
    if plan.data > 1:
        whole = replace(plan, data=1, shard=replace(plan.shard, degree=plan.data * plan.shard.degree))
        yield f"shard = {whole.shard.degree} in place of data = {plan.data}", whole, count
        deep = replace(whole, shard=replace(whole.shard, stage=3), memory=MemoryPolicy("full"))
        yield f"shard = {whole.shard.degree} with stage 3 and recompute = full", deep, count


# --- sensitivities


def sensitivities(model: Model, question: Question, found: SearchResult) -> list[Sensitivity]:
    """Returns the effect of links a tenth faster, a tenth more memory, one more node and twice the nodes."""
    if not found.best:
        return []
    node, best = model.cluster.node, found.best[0].seconds
    found_changes = []
    links = {"links inside a node a tenth faster": replace(node, intra=_faster(node.intra))}
    if model.cluster.num_nodes > 1:
        links["links between nodes a tenth faster"] = replace(node, inter=_faster(node.inter))
    for words, faster in links.items():
        again = model.on(replace(model.cluster, node=faster))
        found_changes.append(_changed(words, _timed_again(again, found.best), best))
    device = replace(node.device, memory_bytes=int(node.device.memory_bytes * TENTH_MORE))
    roomier = model.on(replace(model.cluster, node=replace(node, device=device)))
    more = search(roomier, question, keep=1, limit_seconds=best).best
    found_changes.append(_changed("a tenth more memory for each device", [*more, found.best[0]], best))
    for words, num_nodes in (("one more node", 1), ("twice the nodes", model.cluster.num_nodes)):
        larger = replace(model.cluster, num_nodes=model.cluster.num_nodes + num_nodes)
        found_changes.append(_changed(words, search(model.on(larger), question, keep=1, limit_seconds=best).best, best))
    return found_changes


def _faster(link: Link) -> Link:
    return replace(link, bandwidth_bytes_per_second=link.bandwidth_bytes_per_second * TENTH_MORE)


def _timed_again(model: Model, candidates: Sequence[Candidate]) -> list[Candidate]:
    steps = (model.step(one.plan, one.num_micro_batches) for one in candidates)
    return [replace(one, seconds=step.seconds, step=step) for one, step in zip(candidates, steps, strict=True)]


def _changed(change: str, candidates: Sequence[Candidate], before: float) -> Sensitivity:
    if not candidates:
        return Sensitivity(change, before, 0.0, "as before; no plan for all devices is faster")
    now = min(candidates, key=lambda one: one.seconds)
    return Sensitivity(change, now.seconds, before - now.seconds, short(now.plan))


# --- smaller clusters


def fewer_nodes(cluster: Cluster) -> list[Cluster]:
    """Returns parts of the cluster, the largest first: up to 16 nodes, and numbers that batches divide well over."""
    counts = {*range(1, 17), *(base << shift for base in (1, 3) for shift in range(cluster.num_nodes.bit_length()))}
    fewer = sorted((count for count in counts if count < cluster.num_nodes), reverse=True)
    return [replace(cluster, num_nodes=count) for count in fewer]


def smaller(cluster: Cluster) -> list[Cluster]:
    """Returns the cluster's sizes from one device up to the whole cluster.

    They are divisors of a node, then 1, 2, 3, 4, 6, 8, 12, ... nodes.
    """
    inside = [
        replace(cluster, node=replace(cluster.node, num_devices=count), num_nodes=1)
        for count in range(1, cluster.node.num_devices)
        if cluster.node.num_devices % count == 0
    ]
    powers = {base << shift for base in (1, 3) for shift in range(cluster.num_nodes.bit_length())}
    counts = sorted({count for count in powers if count < cluster.num_nodes} | {cluster.num_nodes})
    return [*inside, *(replace(cluster, num_nodes=count) for count in counts)]

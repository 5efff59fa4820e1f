"""A plan with its cost, as the search compares plans, and the result of a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weft.cluster.hardware import Node
from weft.plan import Plan
from weft.planner.closed_form_memory import RankMemory
from weft.planner.common_costs import CommonCosts
from weft.planner.step import StepTime
from weft.sharding.host_memory import KEPT_FREE_BYTES

NUM_TOO_LARGE = 5  # plans that do not fit and are reported


@dataclass(frozen=True)
class Candidate:
    """A plan with its cost. `step` is set if its schedule was simulated."""

    plan: Plan
    num_micro_batches: int
    seconds: float
    memory: RankMemory
    step: StepTime | None = None


@dataclass(frozen=True)
class SearchResult:
    """The best plans, plans that would be as fast but do not fit (the nearest to fit first), and the number of plans
    tried. `least_device_seconds`: no plan takes fewer seconds times devices. `unmet`: by the text of each constraint
    that no plan satisfied, the reason.
    """

    best: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...]  # (plans that the model does not allow, reason)
    num_considered: int
    least_device_seconds: float = 0.0
    unmet: Mapping[str, str] = field(default_factory=dict)


def with_share(candidate: Candidate, share: float, common: CommonCosts) -> Candidate:
    """Returns the candidate with a share of its state in host memory."""
    plan = candidate.plan.changed(memory=replace(candidate.plan.memory, offload=share))
    return replace(candidate, plan=plan, memory=common.memory(plan))


def offloaded(candidate: Candidate, common: CommonCosts, shares: Sequence[float], node: Node) -> Candidate | None:
    """Returns the candidate with the smallest of the shares of its state in host memory with which it fits.

    Its time is that without them. Returns None if there is no such share.
    """
    limit_bytes = node.device.memory_bytes
    if node.host_link_bytes_per_second is None or not shares or candidate.memory.least_bytes > limit_bytes:
        return None
    held = candidate.memory.total_bytes
    hosted = held - with_share(candidate, 1.0, common).memory.total_bytes
    least = max(0.0, (held - limit_bytes) / hosted) if hosted > 0 else 2.0
    share = next((share for share in shares if share >= least), None)
    room = node.host_memory_bytes / node.num_devices - KEPT_FREE_BYTES
    if share is None or hosted * share > room:
        return None
    found = with_share(candidate, share, common)
    if found.memory.total_bytes > limit_bytes:
        return None
    return found


def nearest_to_fit(
    large: Sequence[Candidate], limit_seconds: float, time: Callable[[Candidate], float]
) -> list[Candidate]:
    """Returns the plans of different layouts that are nearest to fit, of those that would be faster than
    `limit_seconds`; of all, if none would.

    The candidates have lower bounds of their times, those returned have the times that `time` gives.
    """
    found: dict[tuple[int, ...], Candidate] = {}
    for limit in (limit_seconds, math.inf):
        for one in sorted(large, key=lambda candidate: candidate.memory.total_bytes):
            key = tuple(one.plan.degrees.values())
            if len(found) == NUM_TOO_LARGE:
                break
            if key not in found and one.seconds < limit and (seconds := time(one)) < limit:
                found[key] = replace(one, seconds=seconds)
        if found:
            break
    return [*found.values()]


def rank(candidate: Candidate) -> tuple[float, int, float, str]:
    """Returns a sort key: the step time, then the plainest plan, then the memory, then the name of the plan.

    Times that differ by rounding alone are equal.
    """
    seconds = float(f"{candidate.seconds:.9g}")
    return seconds, num_settings(candidate.plan), candidate.memory.total_bytes, candidate.plan.describe_axes()


def num_settings(plan: Plan) -> int:
    """The number of a plan's settings, other than degrees and the micro-batch, that are not the simplest ones."""
    pipe, memory, tensor = plan.pipe, plan.memory, plan.tensor
    given = (
        memory.recompute != "none",
        memory.recompute == "full",
        memory.recompute_stages is not None,
        memory.keep_collectives,
        memory.offload > 0,
        tensor.sequence,
        tensor.regather,
        plan.shard.degree > 1,
        plan.shard.degree > 1 and plan.shard.stage > 1,
        plan.shard.degree > 1 and plan.shard.stage > 2,
        pipe.schedule != "1f1b",
        pipe.in_flight is not None,
        bool(pipe.split),
        bool(plan.expert_over),
    )
    return sum(given)

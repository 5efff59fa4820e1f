"""A plan with its cost, as the search compares plans, and the result of a search."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.plan import Plan
from weft.planner.closed_form_memory import RankMemory
from weft.planner.common_costs import CommonCosts
from weft.planner.step import StepTime


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
    tried. `least_device_seconds`: no plan takes fewer seconds times devices.
    """

    best: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...]  # (plans that the model does not allow, reason)
    num_considered: int
    least_device_seconds: float = 0.0


def with_share(candidate: Candidate, share: float, common: CommonCosts) -> Candidate:
    """Returns the candidate with a share of its state in host memory."""
    plan = replace(candidate.plan, memory=replace(candidate.plan.memory, offload=share))
    return replace(candidate, plan=plan, memory=common.memory(plan))


def rank(candidate: Candidate) -> tuple[float, float, str]:
    """Returns a sort key: the step time, then the memory, then the name of the plan."""
    return candidate.seconds, candidate.memory.total_bytes, candidate.plan.describe_axes()

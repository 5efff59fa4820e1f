"""What a search for plans finds: plans with their costs."""

from __future__ import annotations

from dataclasses import dataclass

from weft.plan import Plan
from weft.planner.closed_form_memory import RankMemory
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
    tried.
    """

    best: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...]  # (plans that the model does not allow, reason)
    num_considered: int

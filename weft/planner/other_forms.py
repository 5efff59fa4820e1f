"""Other forms of the plans that the search has found, which it tries before it times them.

Folded experts are split over context, x and y, too (`plan.expert_over`). A folded plan needs less memory than the plan
that it is made of, and sends rows over more ranks; one that would fit only if folded is not found. Interleaved
pipelines are tried with more stages on each rank than the search tries: shorter waits, more messages and memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Literal, Protocol

from weft.errors import PlanError
from weft.plan import Plan
from weft.planner.candidate import Candidate
from weft.planner.common_costs import CommonCosts

LARGEST_CHUNKS = 4  # stages on a rank that the search tries by itself
FOLDABLE: tuple[Literal["context", "x", "y"], ...] = ("context", "x", "y")


class PlannedModel(Protocol):
    """The part of a model to plan (`search.Model`) that other forms need."""

    @property
    def num_experts(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    def common(self, plan: Plan, num_micro_batches: int) -> CommonCosts: ...


def with_other_forms(
    found: Iterable[Candidate],
    model: PlannedModel,
    limit_bytes: float,
    reason: Callable[[Plan], str | None],
    is_asked: Callable[[Plan], bool],
) -> Iterator[Candidate]:
    """Yields the plans that were found, each followed by its other forms that the model allows and that fit.

    `reason(plan)` says why the model does not allow a plan, and `is_asked(plan)` whether it meets the constraints.
    """
    for one in found:
        yield one
        for plan in (*folded_plans(one.plan, model.num_experts), *longer_plans(one.plan, model.num_blocks)):
            if is_asked(plan) and reason(plan) is None:
                costs = model.common(plan, one.num_micro_batches)
                held = costs.memory(plan)
                if held.total_bytes <= limit_bytes:
                    yield replace(one, plan=plan, seconds=costs.seconds(plan), memory=held)


def folded_plans(plan: Plan, num_experts: int) -> Iterator[Plan]:
    """Yields a plan that is not folded with its experts split over each of its axes in `FOLDABLE`, and over all."""
    axes = tuple(axis for axis in FOLDABLE if plan.degree(axis) > 1 and not plan.expert_over)
    for over in dict.fromkeys((*((axis,) for axis in axes), axes)):
        if over and num_experts % (plan.expert * math.prod(map(plan.degree, over))) == 0:
            with suppress(PlanError):  # some settings of x and y do not allow it
                yield replace(plan, expert_over=over)


def longer_plans(plan: Plan, num_blocks: int) -> Iterator[Plan]:
    """Yields an interleaved plan with twice its stages on each rank, four times, and so on, down to a block a stage."""
    pipe, chunks = plan.pipe, plan.pipe.chunks or 2
    if pipe.schedule != "interleaved" or chunks != LARGEST_CHUNKS or pipe.in_flight or pipe.split:
        return
    while (chunks := 2 * chunks) * pipe.degree <= num_blocks:
        yield replace(plan, pipe=replace(pipe, chunks=chunks))

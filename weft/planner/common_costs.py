"""Costs that plans share which differ only in `data`, `shard` and the share of their state in host memory.

The search tries many such plans. Their pipeline stages, the time of a micro-batch and the memory without state are the
same, so they are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from weft.plan import Plan, Recompute
from weft.planner.closed_form_memory import RankMemory, Sizes, WorkingMemory, least_bytes, memory, working
from weft.planner.memory_stages import StageCosts
from weft.planner.step import PlannedStages, StepModel


class CommonCosts:
    """Times and memory of plans that differ from `plan` only in `data`, `shard` and `memory.offload`.

    `steps` and `held` compute the time and the memory of any plan. `smaller_forms` are the costs of the same plans
    with other settings that need less memory: in each list, each form needs at most as much as the one before. The
    search fills it when it needs it.
    """

    smaller_forms: list[list[CommonCosts]] | None = None

    def __init__(
        self,
        plan: Plan,
        num_micro_batches: int,
        steps: StepModel,
        held: Callable[[Plan, int], RankMemory],
    ) -> None:
        self.num_micro_batches = num_micro_batches
        self._plan, self._steps, self._held = plan, steps, held

    @property
    def least_seconds(self) -> float:
        """A lower bound of `seconds` under any data, shard and offloaded state, if `plan.shard` has all of the ranks
        that these share.
        """
        return self._steps.bound(self._plan, self.num_micro_batches)

    def least_seconds_of(self, plan: Plan, is_closer: bool = False) -> float:
        """A lower bound of `seconds(plan)`; if `is_closer`, a higher one that takes longer."""
        return self.least_seconds

    @property
    def floor_bytes(self) -> float:
        """A lower bound of `memory` under any data, shard and offloaded state."""
        return 0.0

    @property
    def halved_floor_bytes(self) -> float:
        """A lower bound of `memory` less half of the saved activations."""
        return 0.0

    def stage_costs(self, recompute: Recompute) -> StageCosts | None:
        """Costs of pipeline ranks for any number of blocks, if the first stages recompute this.

        With "none", all stages follow the plan's own policy. Returns None if the model's blocks are not equal.
        """
        return None

    def form_of(self, plan: Plan) -> Plan:
        """Returns a plan with the data, shard and memory policy of `plan`, and all other settings of these costs."""
        mine = self._plan
        if plan.pipe == mine.pipe and plan.tensor == mine.tensor:
            return plan
        return plan.changed(pipe=mine.pipe, tensor=mine.tensor)

    def seconds(self, plan: Plan) -> float:
        """Seconds of a step."""
        return self._steps.step_seconds(plan, self.num_micro_batches)

    def memory(self, plan: Plan) -> RankMemory:
        """Memory of the rank that needs most under `form_of(plan)`."""
        return self._held(self.form_of(plan), self.num_micro_batches)


class TextCosts(CommonCosts):
    """The common costs of a language model's plans."""

    def __init__(self, plan: Plan, num_micro_batches: int, steps: StepModel, sizes_of: Callable[[Plan], Sizes]) -> None:
        self.num_micro_batches = num_micro_batches
        self._plan, self._steps, self._sizes_of = plan, steps, sizes_of

    @cached_property
    def _planned(self) -> PlannedStages:
        return self._steps.planned_stages(self._plan)

    @cached_property
    def _sizes(self) -> Sizes:
        return self._sizes_of(self._plan)

    @cached_property
    def _working(self) -> tuple[WorkingMemory, ...]:
        stages = self._steps.stage_units(self._plan)
        kept_bytes = self._steps.kept_bytes(self._plan)
        return largest(working(self._sizes, self._plan, stages, self.num_micro_batches, kept_bytes))

    @cached_property
    def _least_makespan(self) -> float:
        return self._steps.least_makespan(self._plan, self.num_micro_batches, self._planned)

    @property
    def least_seconds(self) -> float:
        return self.least_seconds_of(self._plan)

    def least_seconds_of(self, plan: Plan, is_closer: bool = False) -> float:
        if is_closer:
            return self._steps.closer_bound(plan, self.num_micro_batches, self._planned)
        return self._steps.bound(plan, self.num_micro_batches, self._planned, self._least_makespan)

    @cached_property
    def floor_bytes(self) -> float:
        return max(least_bytes(rank) for rank in self._working)

    @cached_property
    def halved_floor_bytes(self) -> float:
        return min(least_bytes(rank) - rank.saved / 2 for rank in self._working)

    @cached_property
    def _stage_costs(self) -> dict[Recompute, StageCosts | None]:
        return {}

    def stage_costs(self, recompute: Recompute) -> StageCosts | None:
        if recompute not in self._stage_costs:
            plan = self._plan
            if recompute != "none":
                plan = replace(plan, memory=replace(plan.memory, recompute=recompute, recompute_stages=1))
            self._stage_costs[recompute] = costs_of_stages(plan, self.num_micro_batches, self._steps, self._sizes_of)
        return self._stage_costs[recompute]

    def seconds(self, plan: Plan) -> float:
        return self._steps.step_seconds(plan, self.num_micro_batches, self._planned)

    def memory(self, plan: Plan) -> RankMemory:
        # The state follows from data, shard, the memory policy and the number of stages, which all forms share.
        return memory(self._working, self._sizes, plan, self.num_micro_batches)


def costs_of_stages(
    plan: Plan, num_micro_batches: int, steps: StepModel, sizes_of: Callable[[Plan], Sizes]
) -> StageCosts | None:
    """Returns the costs of the plan's pipeline ranks for any stages; None if the model's blocks are not equal."""
    if steps.units is None:
        return None
    return StageCosts(plan, sizes_of(plan), steps.units, steps.unit_seconds(plan), num_micro_batches)


def largest(ranks: Sequence[WorkingMemory]) -> tuple[WorkingMemory, ...]:
    """Returns the ranks without those that need at most as much of everything as an earlier or a larger one.

    State and transient memory grow with each of these quantities, so under no shard does a rank left out need most.
    """
    found: list[WorkingMemory] = []
    for rank in ranks:
        if any(_is_within(rank, other) for other in found):
            continue
        found = [other for other in found if not _is_within(other, rank)] + [rank]
    return tuple(found)


def _is_within(rank: WorkingMemory, other: WorkingMemory) -> bool:
    """Does `rank` need at most as much of everything as `other`? Both save the same bytes for a block."""
    return rank.kept == other.kept and all(mine <= its for mine, its in zip(rank, other, strict=True))

"""Forms of a plan that need less memory: stages by memory, fewer micro-batches in flight, inputs of matmuls gathered
again, and recompute in some stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from weft.plan import Plan, Recompute
from weft.planner.asked import AskedFields
from weft.planner.closed_form_memory import RankMemory
from weft.planner.common_costs import CommonCosts
from weft.planner.memory_stages import StageChoice
from weft.planner.other_forms import PlannedModel
from weft.schedule.schedules import least_in_flight

REGATHER, IN_FLIGHT = "tensor.regather", "pipe.in_flight"
STAGES = ("pipe.balance", "pipe.split", "memory.recompute_stages")
CAPPED, MIN_CAPPED = ("1f1b", "interleaved"), 4  # schedules and degrees that are capped
RECOMPUTES: tuple[Recompute, ...] = ("selective", "full")


class SmallerForms:
    """Finds forms of plans that do not fit which need at most `limit_bytes`.

    `is_slow(seconds)` says whether plans that take so long are no longer of interest.
    """

    def __init__(
        self, model: PlannedModel, asked: AskedFields, limit_bytes: float, is_slow: Callable[[float], bool]
    ) -> None:
        self._model, self._asked, self._limit_bytes, self._is_slow = model, asked, limit_bytes, is_slow

    def fitting(self, plan: Plan, common: CommonCosts) -> Iterator[tuple[Plan, CommonCosts]]:
        """Yields a plan that does not fit with other stages, fewer micro-batches in flight, and `regather`, if it then
        fits.

        `regather` saves fewer inputs of matmuls. Each is tried with all micro-batches in flight first.
        """
        recomputes = may_recompute(plan, self._asked.names)
        for forms in self._forms(plan, common):
            if self._is_too_large(forms) and not recomputes:
                continue
            fits_somewhere = forms[-1].floor_bytes <= self._limit_bytes  # the last form needs least
            for form in forms if fits_somewhere else forms[:1]:  # a lower cap is slower
                held = form.memory(plan)
                if held.total_bytes <= self._limit_bytes:
                    yield form.form_of(plan), form
                    break
                if form is forms[0]:
                    yield from self._with_other_stages(form.form_of(plan), held, form)
                    if recomputes:
                        yield from self._with_recompute(form.form_of(plan), form)

    def _forms(self, plan: Plan, common: CommonCosts) -> list[list[CommonCosts]]:
        """Returns the costs of the plan's smaller forms, which plans with the same common costs share."""
        if common.smaller_forms is None:
            count = common.num_micro_batches
            plans = smaller_forms(plan, count, self._asked.names)
            common.smaller_forms = [[self._model.common(one, count) for one in forms] for forms in plans]
        return common.smaller_forms

    def _is_too_large(self, forms: list[CommonCosts]) -> bool:
        """Does none of these forms of a plan fit, without any state, and the first not with other stages either?"""
        return min(forms[-1].floor_bytes, forms[0].halved_floor_bytes) > self._limit_bytes

    def _with_other_stages(self, plan: Plan, held: RankMemory, form: CommonCosts) -> Iterator[tuple[Plan, CommonCosts]]:
        """Yields the plan, which needs `held`, with stages that fit, if there are such.

        The first rank of 1f1b holds up to twice as many micro-batches as ranks do in the mean, which other stages
        cannot change. So a plan that would not fit with half of its activations is left out.
        """
        is_far = held.total_bytes - held.saved_bytes / 2 > self._limit_bytes
        if is_far or not self._asked.names.isdisjoint(STAGES):
            return
        costs = form.stage_costs("none")
        choice = None if costs is None else StageChoice.of(costs, plan, self._limit_bytes)
        shares = None if choice is None else choice.shares()
        if choice is not None and shares is not None:
            yield from self._with_stages(choice, 0, shares)

    def _with_recompute(self, plan: Plan, form: CommonCosts) -> Iterator[tuple[Plan, CommonCosts]]:
        """Yields a plan that does not fit with recompute in as few stages as it fits with."""
        for kind in RECOMPUTES:
            costs = form.stage_costs(kind)
            if costs is None or not all(one.holds(costs.plan) for one in self._asked.inner):
                continue
            choice = StageChoice.of(costs, plan, self._limit_bytes)
            found = choice.recompute(self._is_slow)
            if found is not None:
                yield from self._with_stages(choice, *found)

    def _with_stages(
        self, choice: StageChoice, count: int, shares: Sequence[int]
    ) -> Iterator[tuple[Plan, CommonCosts]]:
        """Yields a plan with other stages, of which the first `count` recompute, if it fits and may be fast."""
        if self._is_slow(choice.bound(count, shares)):
            return
        plan = choice.plan_of(count, shares)
        common = self._model.common(plan, choice.costs.num_micro_batches)
        if common.memory(plan).total_bytes <= self._limit_bytes:
            yield plan, common


def smaller_forms(plan: Plan, num_micro_batches: int, asked: Collection[str]) -> list[list[Plan]]:
    """Returns the plan with fewer micro-batches in flight, and the same with `regather` where it saves memory.

    In each list, a plan needs at most as much memory as the one before. Fields in `asked` stay as they are.
    """
    forms = [[plan, *_capped(plan, num_micro_batches, asked)]]
    # With recompute, or without `sequence`, `regather` changes nothing.
    if REGATHER not in asked and plan.tensor.sequence and plan.memory.recompute == "none":
        again = replace(plan, tensor=replace(plan.tensor, regather=True))
        forms.append([again, *_capped(again, num_micro_batches, asked)])
    return forms


def may_recompute(plan: Plan, asked: Collection[str]) -> bool:
    """Is a plan that does not fit tried with recompute in some of its stages?"""
    is_pipeline = plan.pipe.degree > 1 and plan.pipe.schedule in CAPPED
    return is_pipeline and plan.memory.recompute == "none" and not set(asked) & set(STAGES)


def _capped(plan: Plan, num_micro_batches: int, asked: Collection[str]) -> list[Plan]:
    """Returns the plan with caps on the micro-batches in flight, the highest first."""
    pipe = plan.pipe
    if pipe.degree < MIN_CAPPED or pipe.schedule not in CAPPED or IN_FLIGHT in asked:
        return []
    # Those of one group at all stages but the last, and of 1 to 1/2 of a group at the last.
    full, step = pipe.num_stages, pipe.degree // 4
    caps = range(full if pipe.num_stages > pipe.degree else full - step, full - pipe.degree // 2 - 1, -step)
    least = least_in_flight(pipe.degree, num_micro_batches, pipe.num_stages // pipe.degree)
    return [replace(plan, pipe=replace(pipe, in_flight=cap)) for cap in caps if cap >= least]

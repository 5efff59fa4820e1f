"""What a question asks of plans, as the search uses it: constraints by the moment at which they are checked, values of
fields that the search does not try by itself, and why no plan satisfies a constraint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from weft.errors import PlanError
from weft.plan import Pipe, Plan
from weft.planner.question import NOT_TRIED, SHARE_STEP, Constraint, asked_fields, with_fields

OFFLOAD, SHARES = "memory.offload", [round(share * SHARE_STEP, 2) for share in range(round(1 / SHARE_STEP) + 1)]
LAID_OUT = ("data", "pipe", "shard")  # tables that the search replaces when it lays a plan out
NUM_SHOWN = 8  # values of a field that are named


class AskedFields:
    """The constraints of a question. It remembers which of them some plan satisfied, and which values were tried.

    `inner` concern settings that are chosen before pipe, shard and data. `fields` are values of fields that the search
    does not try by itself, `names` all constrained fields, and `shares` the allowed shares of state in host memory.
    """

    def __init__(self, constraints: Sequence[Constraint]) -> None:
        self.inner = [one for one in constraints if one.is_inner]
        self._outer = [one for one in constraints if not one.is_inner and one.name != OFFLOAD]
        self._of_pipe = [one for one in constraints if one.name in ("pipe.schedule", "pipe.chunks")]
        self._limits = [one for one in constraints if one.name == OFFLOAD]
        self.fields = asked_fields(constraints)
        self.names = frozenset(one.name for one in constraints)
        stated = {one.value for one in self._limits if isinstance(one.value, int | float) and one.value <= 1}
        self.shares = [one for one in sorted({*SHARES, *stated}) if all(limit.compare(one) for limit in self._limits)]
        self._met: set[Constraint] = set()
        self._values: dict[str, set[Any]] = {}  # by field, the values that were tried
        self._refusals: Counter[str] = Counter()  # reasons why plans with `fields` are refused

    def holds_inner(self, plan: Plan, table: str = "") -> bool:
        """Does the plan satisfy the inner constraints, or those on one table?"""
        return self._holds([one for one in self.inner if one.name.startswith(table)] if table else self.inner, plan)

    def holds_outer(self, plan: Plan) -> bool:
        """Does the plan satisfy the constraints on pipe, shard, data and the fields that the search does not try?"""
        return self._holds(self._outer, plan)

    def holds_pipe(self, plan: Plan) -> bool:
        """Does the plan satisfy the constraints on the pipeline's schedule?"""
        return self._holds(self._of_pipe, plan)

    def _holds(self, constraints: Iterable[Constraint], plan: Plan) -> bool:
        holds = True
        for one in constraints:
            if one.holds(plan):
                self._met.add(one)
            else:
                holds = False
                self._values.setdefault(one.name, set()).add(one.value_in(plan))
        return holds

    def shaped(self, plan: Plan) -> Plan:
        """Returns the plan with the asked fields that do not depend on its layout, so that bounds count them.

        Those that the plan's rules refuse are left out: a layout may allow them.
        """
        for name in sorted(self.fields, key=lambda name: (name != "exact", "." in name)):
            if name.partition(".")[0] not in LAID_OUT:
                with suppress(PlanError):
                    plan = with_fields(plan, {name: self.fields[name]})
        return plan

    def piped(self, plan: Plan) -> Plan:
        """Returns a plan with a pipeline with the asked fields of `pipe`, so that bounds count them, as `shaped`."""
        own = {name: value for name, value in self.fields.items() if name.startswith("pipe.")}
        with suppress(PlanError):
            return with_fields(plan, own) if own and plan.pipe.degree > 1 else plan
        return plan

    def refuse(self, reason: str) -> None:
        """Remembers why a plan with the asked fields is refused."""
        self._refusals[reason] += 1

    def is_met(self, constraint: Constraint) -> bool:
        """Did any plan that was tried satisfy the constraint, whether it fits or not?"""
        return constraint in self._met or (constraint in self._limits and bool(self.shares))

    def alone(self, constraint: Constraint, base: Plan, reason: Callable[[Plan], str | None]) -> str | None:
        """The reason why a plan with nothing but the value that the constraint states is refused; None if it is not."""
        if not constraint.is_equal or constraint.name == "tile.degree":
            return None
        try:
            if constraint.name in NOT_TRIED and constraint.name.startswith("pipe."):  # which no pipeline does not have
                base = replace(base, pipe=Pipe(2))
            return reason(with_fields(base, {constraint.name: constraint.value}))
        except PlanError as error:
            return str(error)

    def reason(self, constraint: Constraint, alone: str | None) -> str:
        """Says why no plan that was tried satisfies the constraint.

        `alone` is the reason why a plan with nothing but the stated value is refused, if it is.
        """
        if constraint.name in self.fields and (alone is not None or self._refusals):
            return alone or self._refusals.most_common(1)[0][0]
        if constraint in self._limits:
            return "a share lies between 0 and 1"
        values = self._values.get(constraint.name, set())
        if alone is not None or not values:
            return alone or "no plan divides the batch and the model over all devices"
        shown = sorted(values, key=lambda value: (0 if value is None or isinstance(value, str) else value, str(value)))
        more = f", ... ({len(shown)} values)" * (len(shown) > NUM_SHOWN)
        words = ", ".join("none" if value is None else f"{value}" or "''" for value in shown[:NUM_SHOWN])
        return f"plans with {constraint.name} = {words}{more} were tried"

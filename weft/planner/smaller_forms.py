"""Forms of a plan that need less memory: fewer micro-batches in flight, inputs of matmuls gathered again, and
recompute in some stages.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from weft.plan import Plan
from weft.schedule.schedules import least_in_flight

REGATHER, IN_FLIGHT = "tensor.regather", "pipe.in_flight"
STAGES = ("pipe.balance", "pipe.split", "memory.recompute_stages")
CAPPED, MIN_CAPPED = ("1f1b", "interleaved"), 4  # schedules and degrees that are capped


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

"""Collectives that are on the links at the same time: how long they take together, and which keep others waiting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from weft.plan import Plan
from weft.planner.micro_batch import MicroBatchModel, Seconds, place
from weft.planner.question import inner_settings
from weft.profiling.workload import Call


def crosses_nodes(model: MicroBatchModel, axis: str, plan: Plan) -> bool:
    """Do ranks of different nodes communicate on this axis of the plan?"""
    inner, degree = place(plan, axis, model.software.pipe_outside)
    return degree > 1 and model.cluster.axis_link(inner, degree).crosses_nodes


def between_nodes(model: MicroBatchModel, plan: Plan) -> Seconds:
    """Seconds of a block's collectives between nodes beside which it does not compute, such as experts' all-to-alls.

    They occupy the NICs, so collectives over flat buffers between nodes cannot run at the same time.
    """
    assert plan.micro_batch is not None
    forward = backward = 0.0
    for call in model.calls(model.workload.blocks[-1], plan, plan.micro_batch):
        if call.beside == "nothing" and crosses_nodes(model, call.axis, plan):
            seconds = call.times * model.seconds(call.axis, call.operation, call.num_bytes, plan)
            forward += seconds * (call.phase == "forward")
            backward += seconds * (call.phase != "forward")
    return Seconds(forward, backward)


def waits(model: MicroBatchModel, plan: Plan, axes: Iterable[str], known: dict[object, Seconds]) -> Seconds:
    """Seconds of a block in which collectives over flat buffers on these axes wait for the block's own.

    `known` are those of other plans.
    """
    if not any(crosses_nodes(model, axis, plan) for axis in axes):
        return Seconds()
    key = (inner_settings(plan), plan.memory.recompute, plan.memory.keep_collectives)
    if key not in known:
        known[key] = between_nodes(model, plan)
    return known[key]


def seconds_of(model: MicroBatchModel, calls: Sequence[Call], plan: Plan) -> float:
    """Seconds of collectives over a flat buffer: one after the other, or if the software does so, at once.

    At once they share the links, and take as long as all their bytes, or as the longest of them.
    """
    each = [model.seconds(call.axis, call.operation, call.num_bytes, plan) for call in calls]
    if not model.software.shards_over_expert or not each:
        return sum(each)
    twice = [model.seconds(call.axis, call.operation, 2 * call.num_bytes, plan) for call in calls]
    return max(sum(twice) - sum(each), *each)  # the difference has the time of the bytes, and no latency


def divide(added: float, seconds: Mapping[str, float]) -> dict[str, float]:
    """Divides the seconds that several axes add together in proportion to those of their collectives."""
    if len(seconds) == 1:
        return dict.fromkeys(seconds, added)
    total = sum(seconds.values())
    return {axis: added * own / total for axis, own in seconds.items() if own}

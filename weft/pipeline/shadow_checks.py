"""Refuses plans and stages whose ranks cannot keep a copy of the next rank's stage (`plan.pipe.shadow`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.plan import Plan
from weft.schedule.actions import Edge
from weft.schedule.shadow import SHADOWED_SCHEDULES


def refuse_shadows(plan: Plan) -> str | None:
    """Return why ranks cannot keep the next rank's stage under this plan; None if they can."""
    if plan.pipe.degree == 1:
        return "pipe.shadow = true keeps the next rank's stage, and pipe = 1 has none; leave it out"
    beside = ", ".join(f"{axis} = {degree}" for axis, degree in plan.degrees.items() if degree > 1 and axis != "pipe")
    if beside:
        return f"pipe.shadow = true works for pipe alone, and the plan has {beside}; use restarts with these axes"
    if plan.pipe.schedule not in SHADOWED_SCHEDULES:
        return (
            f"pipe.shadow = true works with pipe.schedule = {' or '.join(map(repr, SHADOWED_SCHEDULES))}, and it is "
            f"'{plan.pipe.schedule}'; use one of them"
        )
    if plan.precision == "bf16":
        return "pipe.shadow = true works in fp32 and fp64, and precision is 'bf16'; use one of them"
    if plan.memory.offload or plan.memory.state != "master":
        return (
            f"pipe.shadow = true keeps plain state, and memory.offload = {plan.memory.offload:g}, memory.state = "
            f"'{plan.memory.state}'; use offload = 0 and state = 'master'"
        )
    return None


def refuse_stages(edges: Sequence[Edge], tied: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return why these stages cannot be shadowed; None if they can.

    A rank can shadow a stage only if all the stage needs is what the rank itself computes.
    """
    for edge in edges:
        if edge.target != edge.source + 1:
            return (
                f"pipe.shadow = true, but stage {edge.target} takes a tensor from stage {edge.source}, which the rank "
                f"before it does not have; leave pipe.shadow out, or cut the model elsewhere (pipe.split)"
            )
    for name, stages in tied.items():
        return (
            f"pipe.shadow = true, but stages {' and '.join(map(str, stages))} share the parameter '{name}', whose "
            f"gradients they sum; leave pipe.shadow out, or untie it"
        )
    return None

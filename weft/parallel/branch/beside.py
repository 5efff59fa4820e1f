"""What `branch` does not run beside."""

from __future__ import annotations

from weft.inspection.rng import has_dropout
from weft.plan import Plan
from weft.profiling import Profile

_REASONS = {  # why an axis does not run beside `branch`
    "expert": "which tokens go to which expert depends on values, and a trace has none",
    "rows": "operations on tiles communicate, also those that a rank of branch skips",
    "columns": "operations on tiles communicate, also those that a rank of branch skips",
    "context": "attention communicates inside of blocks, also where a rank of branch skips it",
    "y": "features between layers are split over y, and results of branches meet whole",
}


def refuse_beside(profile: Profile, plan: Plan) -> str | None:
    """Returns which other axis or policy of a plan `branch` does not run beside; None if there is none."""
    given = f"branch = {plan.branch.degree}"
    for axis, reason in _REASONS.items():
        if (degree := plan.degree(axis)) > 1:
            return f"{given} beside {axis} = {degree}, which weft does not do: {reason}; use {axis} = 1, or branch = 1"
    if plan.has_batch_statistics:
        return f"{given} beside statistics = 'batch', which weft does not do; use statistics = 'rank', or branch = 1"
    if plan.pipe.degree > 1 and plan.pipe.schedule == "zero-bubble":
        return (
            f"{given} beside pipe.schedule = 'zero-bubble', which puts weight gradients off in layers that a rank of "
            f"branch may skip; use another schedule"
        )
    for field in ("activations", "weights"):
        if share := getattr(plan.memory, field):
            return f"{given} beside memory.{field} = {share:g}, which weft does not do; use 0, or branch = 1"
    if plan.matmul != "compute":
        return f"{given} beside matmul = '{plan.matmul}', which weft does not do; use 'compute', or branch = 1"
    return _refuse_beside_x(profile, plan) if plan.tensor.x > 1 else None


def _refuse_beside_x(profile: Profile, plan: Plan) -> str | None:
    given = f"branch = {plan.branch.degree} beside tensor.x = {plan.tensor.x}"
    if plan.tensor.sequence:
        return (
            f"{given} and tensor.sequence = true: tokens between blocks are split over x, and results of branches meet "
            f"whole; use tensor.sequence = false"
        )
    if profile.model is not None and has_dropout(profile.model):
        return (
            f"{given}, and the model has dropout: ranks of x draw other numbers inside of split layers than outside, "
            f"and a rank that skips such a layer would not follow; set dropout to 0, or use tensor.x = 1"
        )
    return None

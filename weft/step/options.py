"""Refuses options of [train] that a plan does not allow, before a prediction, a proof or a rank starts."""

from __future__ import annotations

from weft.errors import PlanError
from weft.parallel.tensor.vocabulary import refuse_z_loss
from weft.run_file import Run
from weft.step.layer_drop import refuse_layer_drop


def refuse_options(run: Run) -> None:
    """Raises PlanError with the first reason why the plan does not allow the run's options."""
    reason = refuse_z_loss(run.train.z_loss, run.plan.tensor.x)
    if reason is None and run.train.layer_drop is not None:
        reason = refuse_layer_drop(run.plan)
    if reason is not None:
        raise PlanError(reason)

"""Checks of a delayed update in a parameter's saved state: its gradient, its scale and its number.

`pending_step` counts updates from 1. It must be `step` + 1; otherwise the gradient is stale, because a run without
delay has continued since it was saved. A stale gradient is never applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from torch import Tensor

from weft.errors import CheckpointError

KINDS = ("pending", "pending_scale", "pending_step")


def is_pending(state: Mapping[str, Tensor]) -> bool:
    """Return whether a state contains a delayed update."""
    return "pending" in state


def stale_reason(state: Mapping[str, Tensor]) -> str | None:
    """Return why the delayed update in a state is not the next one; None if it is."""
    if "pending_step" not in state or "pending_scale" not in state:
        return "does not say which update it is"
    number, done = int(state["pending_step"]), int(state["step"])
    return None if number == done + 1 else f"belongs to update {number}, and the state is that of {done} updates"


def refuse_undelayed(name: str) -> NoReturn:
    """Refuse a delayed update in a run without delay: dropping it would change the run."""
    raise CheckpointError(
        f"the state of '{name}' has a gradient whose update was put off by plan.memory.delay = true, and now it is "
        f"false; resume with delay = true"
    )

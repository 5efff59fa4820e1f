"""Balance without a loss: routers count the tokens of the whole batch for each expert, and change biases by it.

The counts of all routers on a rank are summed once a step over all ranks with different tokens: 8 bytes for each expert
(`models/router.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.comm import Traffic
from weft.models.router import routers_of
from weft.plan import BatchSplit, Plan
from weft.profiling import Profile
from weft.strategy import Cost, Strategy

COUNT_BYTES = 8


class RouterBalance(Strategy):
    """Sums the counts that the biases of routers follow."""

    name = "router_balance"

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        if not (plan.pipe.is_mirrored or plan.pipe.shadow) or not _num_balanced(profile):
            return None
        copies = "pipe.shadow" if plan.pipe.shadow else f"pipe.schedule = '{plan.pipe.schedule}'"
        return (
            f"{copies} has two copies of each stage, and biases of routers (router_bias_update_rate) follow from the "
            f"tokens of one; use another schedule without shadows, or router_bias_update_rate = 0"
        )

    def cost(self, profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int]) -> Cost:
        num_experts = _num_balanced(profile)
        if not num_experts or plan.num_parts("samples", "pixels", "tokens") == 1:
            return Cost()
        return Cost({("tokens", "all_reduce"): Traffic(1, COUNT_BYTES * num_experts)})


def _num_balanced(profile: Profile) -> int:
    """Returns the number of experts of all routers whose biases a step changes."""
    assert profile.model is not None
    return sum(router.num_experts for router in routers_of(profile.model).values() if router.bias_rate)

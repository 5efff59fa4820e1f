"""Routers of a split model: which parts of their tokens they can compute on, what they sum over y, and their balance.

Under y each rank has a part of the features of every token. The logits are partial sums over y, which are all-reduced;
all ranks of y then choose the same experts. Their weights multiply a rank's features only, so the gradients of the
weights are partial sums over y, too.

Balance without a loss: routers count the tokens of the whole batch for each expert, and change biases by it. The counts
of all routers on a rank are summed once a step over all ranks with different tokens (`models/router.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from weft.comm import Axis, Traffic
from weft.models.router import Router, routers_of
from weft.parallel.tensor.operations import enter, leave
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


def refuse_split_sequences(model: nn.Module, given: str) -> str | None:
    """Returns why routers need whole sequences, which the setting `given` splits; None if they do not."""
    for router in routers_of(model).values():
        if router.balance:
            return (
                f"{given} splits sequences, over whose tokens routers balance their experts "
                f"(router_aux_loss_coef); use router_aux_loss_coef = 0, or {_without(given)}"
            )
        if router.capacity:
            return (
                f"{given} splits sequences, and experts take a part of the tokens of each sequence "
                f"(model.capacity); leave model.capacity out, or use {_without(given)}"
            )
        if router.z_loss and "sequence" in given:  # losses are summed over ranks of context, and not over those of x
            return (
                f"{given} gives each rank of x its own tokens, and losses of routers (router_z_loss_coef) are not "
                f"summed over x; use router_z_loss_coef = 0, or {_without(given)}"
            )
    return None


def _without(given: str) -> str:
    return "tensor.sequence = false" if "sequence" in given else f"{given.partition(' ')[0]} = 1"


class SplitRouter:
    """Replaces `Router.logits` and `Router.forward` of a router of whose tokens each rank of y has a part."""

    def __init__(self, router: Router, y: Axis) -> None:
        self._y, self._forward, self._logits = y, router.forward, router.logits
        setattr(router, "logits", self.logits)  # noqa: B010 (methods to mypy)
        setattr(router, "forward", self.forward)  # noqa: B010

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of all features."""
        return leave(self._logits(hidden), self._y)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns weights and experts as `Router.forward`; gradients of the weights are summed over y."""
        weights, experts = self._forward(hidden)
        return enter(weights, self._y), experts


def split_routers(model: nn.Module, y: Axis) -> None:
    """Let the routers of a model compute on parts of the features."""
    if y.degree > 1:
        for router in routers_of(model).values():
            SplitRouter(router, y)

"""Routers under axes that split their tokens: which parts they can compute on their own, and what they sum over y.

Under y each rank has a part of the features of every token. The logits are partial sums over y, which are all-reduced;
all ranks of y then choose the same experts. Their weights multiply a rank's features only, so the gradients of the
weights are partial sums over y, too.
"""

from __future__ import annotations

from torch import Tensor, nn

from weft.comm import Axis
from weft.models.router import Router, routers_of
from weft.parallel.tensor.operations import enter, leave


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

"""Refuses gradients of gradients where a backward communicates, because a second backward through it would be wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from weft.errors import PlanError

Backward = Callable[..., Any]


def first_order(option: str) -> Callable[[Backward], Backward]:
    """Returns a decorator for the backward of an autograd function of the plan's `option`.

    Autograd runs a backward with gradients enabled only if its result will be differentiated again
    (create_graph=True). The backward then raises a PlanError.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def checked(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():
                raise PlanError(
                    f"the loss uses gradients of gradients (create_graph=True, as a gradient penalty does), and under "
                    f"{option} weft computes first gradients only; use data, shard or both for this loss, or leave the "
                    f"penalty out"
                )
            return backward(ctx, *gradients)

        return checked

    return decorate

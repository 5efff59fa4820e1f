"""Refuses gradients of gradients where a backward communicates, because a second backward through it would be wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from weft.errors import PlanError

Backward = Callable[..., Any]


def first_order(option: str) -> Callable[[Backward], Backward]:
    """Returns a decorator for the backward of an autograd function of the plan's `option`."""

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def checked(ctx: Any, *gradients: Any) -> Any:
            _refuse_second_order(option)
            return backward(ctx, *gradients)

        return checked

    return decorate


def _refuse_second_order(option: str) -> None:
    """Raise a PlanError in a backward whose result will be differentiated again (create_graph=True).

    Autograd runs only such a backward with gradients enabled.
    """
    if torch.is_grad_enabled():
        raise PlanError(
            f"the loss uses gradients of gradients (create_graph=True, as a gradient penalty does), and under "
            f"{option} weft computes first gradients only; use data, shard or both for this loss, or leave the "
            f"penalty out"
        )


@dataclass(frozen=True)
class Transposable:
    """A linear operation on a tensor that communicates, and its transpose, by which backward gets its gradient.

    Both are given the tensor and the same settings. `option` is that of the plan that needs the operation.
    """

    forward: Callable[..., Tensor]
    backward: Callable[..., Tensor]
    option: str

    def apply(self, value: Tensor, *settings: Any) -> Tensor:
        """Returns the result for a tensor."""
        result: Tensor = _Transposed.apply(value, self, settings)
        return result


class _Transposed(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, operation: Transposable, settings: tuple[Any, ...]) -> Tensor:
        ctx.operation, ctx.settings = operation, settings
        return operation.forward(value, *settings)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _refuse_second_order(ctx.operation.option)
        return ctx.operation.backward(gradients[0], *ctx.settings), None, None

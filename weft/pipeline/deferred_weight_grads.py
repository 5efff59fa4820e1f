"""Weight gradients computed after backward, for zero-bubble schedules: a linear's dW is deferred.

Backward computes only what other stages wait for: dI of each linear, and the small gradients of all other modules. Each
linear keeps its dO and I, and `finish` multiplies them when the schedule says so. (The head that computes the loss has
its gradients as soon as the loss is there.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from weft.models.loss_head import is_loss_head

Deliver = Callable[[Tensor], None]


class DeferredWeightGrads:
    """The linears of one stage, and the weight gradients that they have deferred since the last `collect`."""

    def __init__(self, model: nn.Module, deliver: Deliver) -> None:
        self._deliver = deliver
        self._deferred: list[Callable[[], None]] = []
        for module in model.modules():
            if type(module) is nn.Linear and not is_loss_head(module):
                setattr(module, "forward", partial(self._linear, module))  # noqa: B010 (a method to mypy)

    def collect(self) -> Callable[[], None]:
        """Return a function that computes all weight gradients deferred so far."""
        work, self._deferred = self._deferred, []

        def finish() -> None:
            for one in work:
                one()
            work.clear()

        return finish

    def _linear(self, module: nn.Linear, input: Tensor) -> Tensor:  # named as in nn.Linear: callers may pass it by name
        if not torch.is_grad_enabled() or not module.weight.requires_grad:
            return F.linear(input, module.weight, module.bias)
        out: Tensor = _DeferredLinear.apply(input, module.weight, module.bias, self)
        return out

    def defer(self, value: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Defer the gradients of a weight [out, in] and bias [out], which follow from I [..., in] and dO [..., out]."""
        self._deferred.append(partial(self._finish, value, gradient, weight, bias))

    def _finish(self, value: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        rows = gradient.reshape(-1, gradient.shape[-1])  # [rows, out]
        self._add(weight, rows.t() @ value.reshape(-1, value.shape[-1]))
        if bias is not None and bias.requires_grad:
            self._add(bias, rows.sum(0))

    def _add(self, parameter: Tensor, gradient: Tensor) -> None:
        parameter.grad = gradient
        self._deliver(parameter)


class _DeferredLinear(Function):
    """A linear whose backward computes dI only."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, deferred: DeferredWeightGrads) -> Tensor:
        ctx.save_for_backward(value)
        # Not saved for backward: a saved tensor may come back as another one (recompute, offload).
        ctx.weight, ctx.bias, ctx.deferred = weight, bias, deferred
        return F.linear(value, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        (value,), (gradient,) = ctx.saved_tensors, gradients
        ctx.deferred.defer(value, gradient, ctx.weight, ctx.bias)
        return (gradient @ ctx.weight if ctx.needs_input_grad[0] else None), None, None, None

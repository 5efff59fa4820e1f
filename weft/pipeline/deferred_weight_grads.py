"""Weight gradients split off from backward, for zero-bubble schedules: a linear's dW is put down and done later.

Backward computes only what other stages wait for: dI of each linear, and the small gradients of everything else. Each
linear puts its dO and I down, and `finish` multiplies them when the schedule says so. (The head that gives the loss has
its gradients when the loss is there.)
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


class Deferred:
    """The linears of one stage, and what their backwards have put down since `collect`."""

    def __init__(self, model: nn.Module, deliver: Deliver) -> None:
        self._deliver = deliver
        self._put_down: list[Callable[[], None]] = []
        for module in model.modules():
            if type(module) is nn.Linear and not is_loss_head(module):
                setattr(module, "forward", partial(self._linear, module))  # noqa: B010 (a method to mypy)

    def collect(self) -> Callable[[], None]:
        """What has been put down, as one piece of work for later."""
        work, self._put_down = self._put_down, []

        def finish() -> None:
            for one in work:
                one()
            work.clear()

        return finish

    def _linear(self, module: nn.Linear, input: Tensor) -> Tensor:  # named as nn.Linear's, which may be used
        if not torch.is_grad_enabled() or not module.weight.requires_grad:
            return F.linear(input, module.weight, module.bias)
        out: Tensor = _Linear.apply(input, module.weight, module.bias, self)
        return out

    def put_down(self, value: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Remember to compute the gradients of a weight [out, in] and bias [out] from I [..., in] and dO [..., out]."""
        self._put_down.append(partial(self._finish, value, gradient, weight, bias))

    def _finish(self, value: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        rows = gradient.reshape(-1, gradient.shape[-1])  # [rows, out]
        self._add(weight, rows.t() @ value.reshape(-1, value.shape[-1]))
        if bias is not None and bias.requires_grad:
            self._add(bias, rows.sum(0))

    def _add(self, parameter: Tensor, gradient: Tensor) -> None:
        parameter.grad = gradient
        self._deliver(parameter)


class _Linear(Function):
    """A linear whose backward gives dI only."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, deferred: Deferred) -> Tensor:
        ctx.save_for_backward(value)
        # Not saved, for what is saved may come back as another tensor (recompute, offload).
        ctx.weight, ctx.bias, ctx.deferred = weight, bias, deferred
        return F.linear(value, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        (value,), (gradient,) = ctx.saved_tensors, gradients
        ctx.deferred.put_down(value, gradient, ctx.weight, ctx.bias)
        return (gradient @ ctx.weight if ctx.needs_input_grad[0] else None), None, None, None

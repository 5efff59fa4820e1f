"""The autograd operations of the tensor axes. Each pairs a collective forward with its transpose backward.

    enter(x): identity forward, all-reduce backward          (into a region whose weights are split over the axis)
    leave(x): all-reduce forward, identity backward          (out of it: partial sums become the result)
    gather / scatter: along a dim, for sequence-sharded activations and gathered outputs

`linear` computes dI first and leaves dW to be computed while dI's all-reduce travels (AxoNN's overlapped all-reduce):
it hands the weight gradient to the `Region` of its input, which starts the all-reduce, runs what was left, and waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from weft.comm import Axis, all_gather, all_reduce, reduce_scatter


class Region:
    """One pass through a parallel region: the work that its linears leave for the time of the all-reduce of dI."""

    def __init__(self) -> None:
        self._left: list[Callable[[], None]] = []

    def leave_for_later(self, work: Callable[[], None]) -> None:
        """Remember work that needs nothing but its own inputs."""
        self._left.append(work)

    def finish(self) -> None:
        """Do what was left."""
        while self._left:
            self._left.pop(0)()


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis, region: Region | None) -> Tensor:
        ctx.axis, ctx.region = axis, region
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0].contiguous().clone()
        pending = all_reduce(gradient, ctx.axis)
        if ctx.region is not None:
            ctx.region.finish()
        pending.wait()
        return gradient, None, None


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis) -> Tensor:
        value = value.contiguous().clone()
        all_reduce(value, axis).wait()
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class _Gather(Function):
    """All-gather along a dim; backward takes our part of the gradient, summed over the axis where uses differ."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis, dim: int, reduce: bool, region: Region | None) -> Tensor:
        ctx.axis, ctx.dim, ctx.reduce, ctx.region = axis, dim, reduce, region
        return gather_along(value, axis, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0]
        if not ctx.reduce:
            return slice_along(gradient, ctx.axis, ctx.dim).contiguous(), None, None, None, None
        whole = gradient.movedim(ctx.dim, 0).contiguous()
        part = whole.new_empty(whole.shape[0] // ctx.axis.degree, *whole.shape[1:])
        pending = reduce_scatter(part.view(-1), whole.view(-1), ctx.axis)
        if ctx.region is not None:
            ctx.region.finish()
        pending.wait()
        return part.movedim(0, ctx.dim), None, None, None, None


class _ReduceScatter(Function):
    """Partial sums to our part of the sum along a dim; backward gathers."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        whole = value.movedim(dim, 0).contiguous()
        part = whole.new_empty(whole.shape[0] // axis.degree, *whole.shape[1:])
        reduce_scatter(part.view(-1), whole.view(-1), axis).wait()
        return part.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gather_along(gradients[0], ctx.axis, ctx.dim), None, None


class _Slice(Function):
    """Our part along a dim of what all ranks hold alike; backward gathers."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return slice_along(value, axis, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gather_along(gradients[0], ctx.axis, ctx.dim), None, None


class _Linear(Function):
    """I·Wᵀ whose weight gradient is left to the region. `weight` is [out, in], or [in, out] if `turned`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, turned: bool, region: Region) -> Tensor:
        ctx.save_for_backward(value, weight)
        ctx.turned, ctx.region, ctx.weight = turned, region, weight
        return value @ (weight if turned else weight.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0]
        value, weight = ctx.saved_tensors
        of_input = gradient @ (weight.t() if ctx.turned else weight)
        if ctx.needs_input_grad[1]:
            parameter, turned = ctx.weight, ctx.turned

            def of_weight() -> None:
                rows, columns = gradient.flatten(0, -2), value.flatten(0, -2)
                deliver(parameter, columns.t() @ rows if turned else rows.t() @ columns)

            ctx.region.leave_for_later(of_weight)
        return of_input, None, None, None


def deliver(parameter: Tensor, gradient: Tensor) -> None:
    """Do what autograd does when it reaches a leaf: accumulate, then call the leaf's hooks."""
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)


def gather_along(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """The parts of all ranks of the axis, one after the other along a dim (equal parts)."""
    if axis.degree == 1:
        return value
    part = value.movedim(dim, 0).contiguous()
    whole = part.new_empty(part.shape[0] * axis.degree, *part.shape[1:])
    all_gather(whole.view(-1), part.view(-1), axis).wait()
    return whole.movedim(0, dim)


def slice_along(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """Our part of equal parts along a dim."""
    size = value.shape[dim] // axis.degree
    return value.narrow(dim, axis.index * size, size)


def enter(value: Tensor, axis: Axis, region: Region | None = None) -> Tensor:
    """Into a region: identity; the gradient is summed over the axis."""
    return value if axis.degree == 1 and region is None else _Enter.apply(value, axis, region)


def leave(value: Tensor, axis: Axis) -> Tensor:
    """Out of a region: the sum over the axis; the gradient passes as it is."""
    return value if axis.degree == 1 else _Leave.apply(value, axis)


def gather(value: Tensor, axis: Axis, dim: int, reduce: bool, region: Region | None = None) -> Tensor:
    """All parts along a dim; `reduce` where every rank uses the whole in its own way, so that gradients add up."""
    return value if axis.degree == 1 and region is None else _Gather.apply(value, axis, dim, reduce, region)


def scatter_sum(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """Our part along a dim of the sum over the axis."""
    return value if axis.degree == 1 else _ReduceScatter.apply(value, axis, dim)


def scatter(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """Our part along a dim of a value that all ranks hold alike."""
    return value if axis.degree == 1 else _Slice.apply(value, axis, dim)


def linear(value: Tensor, weight: Tensor, turned: bool, region: Region | None) -> Tensor:
    """A matmul with the local weight; with a region, its weight gradient waits for the all-reduce of dI."""
    if region is None or not (torch.is_grad_enabled() and value.requires_grad):  # no dI, so nothing to hide dW behind
        return value @ (weight if turned else weight.t())
    out: Tensor = _Linear.apply(value, weight, turned, region)
    return out

"""Autograd operations of the tensor axes. Each has a collective in forward and its transpose in backward.

    enter: identity forward, all-reduce backward             (before layers whose weights are split over the axis)
    leave: all-reduce forward, identity backward             (after them: sums the partial results)
    gather, scatter, scatter_sum: along a dim, for activations split along the sequence and for gathered outputs

Matmuls that overlap with their collectives are in `overlapped_matmul.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from weft.comm import Axis, all_gather, all_reduce, reduce_scatter
from weft.inspection.first_order import first_order
from weft.inspection.parameter_cut import share


class _AllReduceGradient(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return value.view_as(value)

    @staticmethod
    @first_order("tensor.x and tensor.y")
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0].contiguous().clone()
        all_reduce(gradient, ctx.axis).wait()
        return gradient, None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis) -> Tensor:
        value = value.contiguous().clone()
        all_reduce(value, axis).wait()
        return value

    @staticmethod
    @first_order("tensor.x and tensor.y")
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class _Gather(Function):
    """Gathers the parts along a dim. Every rank uses the result in the same way; backward takes this rank's part."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        # Contiguous, and not a view: the next module may change it in place, as nn.ReLU(inplace=True) does.
        return gather_along(value, axis, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @first_order("tensor.x and tensor.y")
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return slice_along(gradients[0], ctx.axis, ctx.dim).contiguous(), None, None


class _ReduceScatter(Function):
    """Sums over the axis and returns this rank's part along a dim; backward gathers."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        whole = value.movedim(dim, 0).contiguous()
        part = whole.new_empty(whole.shape[0] // axis.degree, *whole.shape[1:])
        reduce_scatter(part.view(-1), whole.view(-1), axis).wait()
        return part.movedim(0, dim)

    @staticmethod
    @first_order("tensor.x and tensor.y")
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gather_along(gradients[0], ctx.axis, ctx.dim), None, None


class _Slice(Function):
    """Returns this rank's part along a dim of a value that all ranks hold; backward gathers."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return slice_along(value, axis, dim).contiguous()

    @staticmethod
    @first_order("tensor.x and tensor.y")
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gather_along(gradients[0], ctx.axis, ctx.dim), None, None


@torch._disable_dynamo  # type: ignore[attr-defined]  # torch.compiler.disable would import the compiler with weft
def apply(operation: type[Function], *args: Any) -> Any:
    """Run an operation that communicates. torch.compile does not trace it."""
    return operation.apply(*args)


def linear(value: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """Returns the product with a weight [out, in], or [in, out] if `transposed`."""
    return value @ (weight if transposed else weight.t())


def gather_along(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """Returns the equal parts of all ranks of the axis, concatenated along a dim; without autograd."""
    if axis.degree == 1:
        return value
    part = value.movedim(dim, 0).contiguous()
    whole = part.new_empty(part.shape[0] * axis.degree, *part.shape[1:])
    all_gather(whole.view(-1), part.view(-1), axis).wait()
    return whole.movedim(0, dim)


def slice_along(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """Returns this rank's part of equal parts along a dim; without autograd."""
    size = value.shape[dim] // axis.degree
    return value.narrow(dim, axis.index * size, size)


def enter(value: Tensor, axis: Axis) -> Tensor:
    """Returns the value unchanged; backward sums the gradient over the axis."""
    return value if axis.degree == 1 else apply(_AllReduceGradient, value, axis)


def leave(value: Tensor, axis: Axis) -> Tensor:
    """Returns the sum over the axis; backward leaves the gradient unchanged."""
    return value if axis.degree == 1 else apply(_AllReduce, value, axis)


def gather(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """Returns all parts along a dim. Every rank must use the result in the same way."""
    return value if axis.degree == 1 else apply(_Gather, value, axis, dim)


def scatter_sum(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """Returns this rank's part along a dim of the sum over the axis."""
    return value if axis.degree == 1 else apply(_ReduceScatter, value, axis, dim)


def scatter(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """Returns this rank's part along a dim of a value that all ranks hold."""
    return value if axis.degree == 1 else apply(_Slice, value, axis, dim)


def own_part(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """Like `scatter`, for sizes that the degree need not divide.

    The gradients of uneven parts, each filled up with zeros, are all-reduced instead of gathered.
    """
    size = value.shape[dim]
    if size % axis.degree == 0:
        return scatter(value, axis, dim)
    begin, end = share(size, axis.degree, axis.index)
    return enter(value, axis).narrow(dim, begin, end - begin)

"""The autograd operations of the tensor axes. Each pairs a collective forward with its transpose backward.

    enter: identity forward, all-reduce backward             (into a region whose weights are split over the axis)
    leave: all-reduce forward, identity backward             (out of it: partial sums become the result)
    gather, scatter, scatter_sum: along a dim, for sequence-sharded activations and gathered outputs

Matmuls that hide their collectives are in `region.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from weft.comm import Axis, all_gather, all_reduce, reduce_scatter
from weft.inspection.parameter_cut import share


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0].contiguous().clone()
        all_reduce(gradient, ctx.axis).wait()
        return gradient, None


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
    """All parts along a dim, which every rank uses alike; backward takes our part of the gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        # In order, and no view: what follows may change it in place, as nn.ReLU(inplace=True) does.
        return gather_along(value, axis, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return slice_along(gradients[0], ctx.axis, ctx.dim).contiguous(), None, None


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


@torch._disable_dynamo  # type: ignore[attr-defined]  # as torch.compiler.disable, but that imports the compiler for all who import weft
def apply(operation: type[Function], *args: Any) -> Any:
    """Run an operation that says something; torch.compile steps around it."""
    return operation.apply(*args)


def linear(value: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """A product with a weight [out, in], or [in, out] if `transposed`."""
    return value @ (weight if transposed else weight.t())


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


def enter(value: Tensor, axis: Axis) -> Tensor:
    """Identity; the gradient is summed over the axis."""
    return value if axis.degree == 1 else apply(_Enter, value, axis)


def leave(value: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis; the gradient passes as it is."""
    return value if axis.degree == 1 else apply(_Leave, value, axis)


def gather(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """All parts along a dim, to be used alike on every rank."""
    return value if axis.degree == 1 else apply(_Gather, value, axis, dim)


def scatter_sum(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """Our part along a dim of the sum over the axis."""
    return value if axis.degree == 1 else apply(_ReduceScatter, value, axis, dim)


def scatter(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """Our part along a dim of a value that all ranks hold alike."""
    return value if axis.degree == 1 else apply(_Slice, value, axis, dim)


def own_part(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """As `scatter`, in parts as even as can be; uneven ones sum their gradients, each with zeros for the others."""
    size = value.shape[dim]
    if size % axis.degree == 0:
        return scatter(value, axis, dim)
    begin, end = share(size, axis.degree, axis.index)
    return enter(value, axis).narrow(dim, begin, end - begin)

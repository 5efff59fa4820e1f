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
from weft.inspection.first_order import Transposable
from weft.inspection.parameter_cut import share


@torch._disable_dynamo  # type: ignore[attr-defined]  # torch.compiler.disable would import the compiler with weft
def apply(operation: type[Function] | Transposable, *args: Any) -> Any:
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


def _all_parts(value: Tensor, axis: Axis, dim: int) -> Tensor:
    # Contiguous, and not a view: the next module may change it in place, as nn.ReLU(inplace=True) does.
    return gather_along(value, axis, dim).clone(memory_format=torch.contiguous_format)


def _own_part(value: Tensor, axis: Axis, dim: int) -> Tensor:
    return slice_along(value, axis, dim).contiguous()


def own_part_of_sum(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """Returns this rank's part along a dim of the sum over the axis; without autograd."""
    whole = value.movedim(dim, 0).contiguous()
    part = whole.new_empty(whole.shape[0] // axis.degree, *whole.shape[1:])
    reduce_scatter(part.view(-1), whole.view(-1), axis).wait()
    return part.movedim(0, dim)


def _sum(value: Tensor, axis: Axis) -> Tensor:
    value = value.contiguous().clone()
    all_reduce(value, axis).wait()
    return value


_OPTION = "tensor.x and tensor.y"
_ENTER = Transposable(lambda value, _: value.view_as(value), _sum, _OPTION)
_LEAVE = Transposable(_sum, lambda gradient, _: gradient, _OPTION)
_GATHER = Transposable(_all_parts, _own_part, _OPTION)
_SCATTER_SUM = Transposable(own_part_of_sum, gather_along, _OPTION)
_SCATTER = Transposable(_own_part, gather_along, _OPTION)


def enter(value: Tensor, axis: Axis) -> Tensor:
    """Returns the value unchanged; backward sums the gradient over the axis."""
    return value if axis.degree == 1 else apply(_ENTER, value, axis)


def leave(value: Tensor, axis: Axis) -> Tensor:
    """Returns the sum over the axis; backward leaves the gradient unchanged."""
    return value if axis.degree == 1 else apply(_LEAVE, value, axis)


def gather(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """Returns all parts along a dim. Every rank must use the result in the same way."""
    return value if axis.degree == 1 else apply(_GATHER, value, axis, dim)


def scatter_sum(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """Returns this rank's part along a dim of the sum over the axis."""
    return value if axis.degree == 1 else apply(_SCATTER_SUM, value, axis, dim)


def scatter(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """Returns this rank's part along a dim of a value that all ranks hold."""
    return value if axis.degree == 1 else apply(_SCATTER, value, axis, dim)


def own_part(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """Like `scatter`, for sizes that the degree need not divide.

    The gradients of uneven parts, each filled up with zeros, are all-reduced instead of gathered.
    """
    size = value.shape[dim]
    if size % axis.degree == 0:
        return scatter(value, axis, dim)
    begin, end = share(size, axis.degree, axis.index)
    return enter(value, axis).narrow(dim, begin, end - begin)

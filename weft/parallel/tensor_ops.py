"""The autograd operations of the tensor axes. Each pairs a collective forward with its transpose backward.

    enter: identity forward, all-reduce backward             (into a region whose weights are split over the axis)
    leave: all-reduce forward, identity backward             (out of it: partial sums become the result)
    gather, scatter, scatter_sum: along a dim, for sequence-sharded activations and gathered outputs

A `Region` is `enter` (or a gather along the sequence) with the linears behind it, and hides their weight gradients
behind the all-reduce of dI (AxoNN's overlapped all-reduce). Autograd runs what is ready youngest first, so the order
in which forward makes the nodes is, reversed, the order of backward:

    forward    wait(I)            late(W) ...      start(I)            linears
    backward   dI has arrived  ◀  dW of each   ◀   dI starts to sum ◀  dI of each
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from weft.comm import Axis, Pending, all_gather, all_reduce, reduce_scatter
from weft.cut import share


class Region:
    """One pass of an input into the linears of a region, which enters once however many they are.

    With `dim` the input is a part along that dim: it is gathered, and backward scatters the sum. `keep_part` then saves
    the part for backward instead of the whole, which is gathered again behind dI.
    """

    def __init__(self, axis: Axis, dim: int | None = None, keep_part: bool = False) -> None:
        self.axis, self.dim, self.keep_part = axis, dim, keep_part
        self.summing: Pending | None = None
        self._late: dict[int, tuple[Tensor, _Left]] = {}
        self._num_linears = 0
        self._part: Tensor | None = None
        self._again: weakref.ref[_Again] | None = None

    def enter(self, value: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The input as the linears with these weights are to be given it."""
        if self.axis.degree == 1:
            return value
        if not (torch.is_grad_enabled() and value.requires_grad):  # no dI, so nothing to hide dW behind
            return value if self.dim is None else gather_along(value, self.axis, self.dim)
        self._num_linears = len(weights)
        self._part = value.detach() if self.keep_part and self.dim is not None else None
        waiting: Tensor = _Wait.apply(value, self)
        for weight in weights:
            left = _Left()
            self._late[id(weight)] = _Late.apply(weight, left), left
        started: Tensor = _Start.apply(waiting, self)
        return started

    def linear(self, value: Tensor, weight: Tensor, turned: bool) -> Tensor:
        """The product of the entered input with a weight [out, in], or [in, out] if `turned`."""
        late, left = self._late.pop(id(weight), (None, None))
        if late is None or left is None:
            return linear(value, weight, turned)
        part, self._num_linears = self._part, self._num_linears - 1
        if self._num_linears == 0:
            self._part = None  # autograd holds it from here on, and only as long as it must
        out: Tensor = _Linear.apply(value, late, part, turned, left, self)
        return out

    def gather_again(self, part: Tensor) -> _Again:
        """The whole input once more, for as long as one of the linears needs it."""
        again = self._again() if self._again is not None else None
        if again is None:
            assert self.dim is not None
            again = _Again(part, self.axis, self.dim)
            self._again = weakref.ref(again)
        return again


class _Left:
    """What a linear leaves for the time of dI's all-reduce: the gradient of its output, and its input."""

    def __init__(self) -> None:
        self.work: tuple[Tensor, Tensor | _Again, bool] | None = None


class _Again:
    """A gather under way."""

    def __init__(self, part: Tensor, axis: Axis, dim: int) -> None:
        self._dim = dim
        part = part.movedim(dim, 0).contiguous()
        self._whole = part.new_empty(part.shape[0] * axis.degree, *part.shape[1:])
        self._pending = all_gather(self._whole.view(-1), part.view(-1), axis)

    def wait(self) -> Tensor:
        """The whole."""
        self._pending.wait()
        return self._whole.movedim(0, self._dim)


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, region: Region) -> Tensor:
        ctx.region = region
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.region.summing is not None:
            ctx.region.summing.wait()
            ctx.region.summing = None
        return gradients[0], None


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, region: Region) -> Tensor:
        ctx.region = region
        return value.view_as(value) if region.dim is None else gather_along(value, region.axis, region.dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        region: Region = ctx.region
        if region.dim is None:
            gradient = gradients[0].contiguous().clone()
            region.summing = all_reduce(gradient, region.axis)
            return gradient, None
        whole = gradients[0].movedim(region.dim, 0).contiguous()
        part = whole.new_empty(whole.shape[0] // region.axis.degree, *whole.shape[1:])
        region.summing = reduce_scatter(part.view(-1), whole.view(-1), region.axis)
        return part.movedim(0, region.dim), None


class _Late(Function):
    """The weight, whose gradient is computed here from what its linear left."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, left: _Left) -> Tensor:
        ctx.left = left
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        work, ctx.left.work = ctx.left.work, None
        if work is None:  # this backward did not come through the linear
            return None, None
        gradient, value, turned = work
        if isinstance(value, _Again):
            value = value.wait()
        rows, columns = gradient.flatten(0, -2), value.flatten(0, -2)
        return columns.t() @ rows if turned else rows.t() @ columns, None


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: Tensor, part: Tensor | None, turned: bool, left: _Left, region: Region
    ) -> Tensor:
        ctx.save_for_backward(value if part is None else part, weight)
        ctx.is_part, ctx.turned, ctx.left, ctx.region = part is not None, turned, left, region
        return linear(value, weight, turned)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0]
        value, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.left.work = gradient, ctx.region.gather_again(value) if ctx.is_part else value, ctx.turned
        return linear(gradient, weight, not ctx.turned), None, None, None, None, None


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


def linear(value: Tensor, weight: Tensor, turned: bool) -> Tensor:
    """A product with a weight [out, in], or [in, out] if `turned`."""
    return value @ (weight if turned else weight.t())


def gather_along(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """The parts of all ranks of the axis, one after the other along a dim (equal parts)."""
    return value if axis.degree == 1 else _Again(value, axis, dim).wait()


def slice_along(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """Our part of equal parts along a dim."""
    size = value.shape[dim] // axis.degree
    return value.narrow(dim, axis.index * size, size)


def enter(value: Tensor, axis: Axis) -> Tensor:
    """Identity; the gradient is summed over the axis."""
    return value if axis.degree == 1 else _Enter.apply(value, axis)


def leave(value: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis; the gradient passes as it is."""
    return value if axis.degree == 1 else _Leave.apply(value, axis)


def gather(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """All parts along a dim, to be used alike on every rank."""
    return value if axis.degree == 1 else _Gather.apply(value, axis, dim)


def scatter_sum(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """Our part along a dim of the sum over the axis."""
    return value if axis.degree == 1 else _ReduceScatter.apply(value, axis, dim)


def scatter(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """Our part along a dim of a value that all ranks hold alike."""
    return value if axis.degree == 1 else _Slice.apply(value, axis, dim)


def own_part(value: Tensor, axis: Axis, dim: int) -> Tensor:
    """As `scatter`, in parts as even as can be; uneven ones sum their gradients, each with zeros for the others."""
    size = value.shape[dim]
    if size % axis.degree == 0:
        return scatter(value, axis, dim)
    begin, end = share(size, axis.degree, axis.index)
    return enter(value, axis).narrow(dim, begin, end - begin)

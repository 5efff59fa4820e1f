"""The only file that calls torch.distributed's collectives. Every call names its axis and enters the ledger.

An operation over an axis of degree 1 costs nothing, says nothing and enters nothing. Each returns a `Pending`: the
caller goes on computing and waits where it needs the result (on a GPU, waiting orders streams and blocks no thread).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from weft.comm.ledger import Ledger

Reduction = Literal["sum", "max", "min"]
# torch 2.13 renamed two calls and warns at the old names; torch 2.11 knows only those.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True)
class Axis:
    """A named axis of the mesh as one rank sees it: its degree, the rank's index on it, and the group that talks."""

    name: str
    degree: int
    index: int
    group: dist.ProcessGroup | None
    ledger: Ledger


class Pending:
    """An operation under way."""

    def __init__(self, work: dist.Work | None, axis: Axis, operation: str) -> None:
        self._work, self._axis, self._operation = work, axis, operation

    def wait(self) -> None:
        """Return when the result may be used. May be called again."""
        if self._work is None:
            return
        ledger = self._axis.ledger
        ledger.doing = f"{self._operation} over {self._axis.name}"
        self._work.wait()
        ledger.doing = ""
        self._work = None


def all_reduce(tensor: Tensor, axis: Axis, reduction: Reduction = "sum") -> Pending:
    """Combine `tensor` in place over the axis."""
    if axis.degree == 1:
        return Pending(None, axis, "all_reduce")
    _enter(axis, "all_reduce", tensor)
    work = dist.all_reduce(tensor, _REDUCTIONS[reduction], group=axis.group, async_op=True)
    return Pending(work, axis, "all_reduce")


def all_gather(whole: Tensor, part: Tensor, axis: Axis) -> Pending:
    """Fill `whole` with the parts of all ranks in order; `part` may be this rank's place inside `whole`."""
    assert whole.numel() == part.numel() * axis.degree
    if axis.degree == 1:
        if whole.data_ptr() != part.data_ptr():
            whole.copy_(part)
        return Pending(None, axis, "all_gather")
    _enter(axis, "all_gather", whole)
    work = _ALL_GATHER(whole, part, group=axis.group, async_op=True)
    return Pending(work, axis, "all_gather")


def reduce_scatter(part: Tensor, whole: Tensor, axis: Axis) -> Pending:
    """Sum `whole` over the axis and leave this rank's part of it in `part`."""
    assert whole.numel() == part.numel() * axis.degree
    if axis.degree == 1:
        if whole.data_ptr() != part.data_ptr():
            part.copy_(whole)
        return Pending(None, axis, "reduce_scatter")
    _enter(axis, "reduce_scatter", whole)
    work = _REDUCE_SCATTER(part, whole, group=axis.group, async_op=True)
    return Pending(work, axis, "reduce_scatter")


def broadcast(tensor: Tensor, axis: Axis, source: int = 0) -> Pending:
    """Give every rank of the axis the tensor of the rank with index `source`."""
    if axis.degree == 1:
        return Pending(None, axis, "broadcast")
    _enter(axis, "broadcast", tensor)
    work = dist.broadcast(tensor, group=axis.group, group_src=source, async_op=True)
    return Pending(work, axis, "broadcast")


def _enter(axis: Axis, operation: str, whole: Tensor) -> None:
    axis.ledger.record(axis.name, operation, whole.numel() * whole.element_size())

"""The only file that calls torch.distributed's collectives. Every call names its axis and enters the ledger.

The package's all_gather, reduce_scatter and all_reduce are those of `two_level.py`, which builds on these.
An operation over an axis of degree 1 costs nothing, says nothing and enters nothing. Each returns a `Pending`: the
caller goes on computing and waits where it needs the result (on a GPU, waiting orders streams and blocks no thread).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.ledger import Ledger

Reduction = Literal["sum", "max", "min"]
_MAX_NAMED = 8  # ranks that a waiting rank names
# torch 2.13 renamed two calls and warns at the old names; torch 2.11 knows only those.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def sends_from_host(group: dist.ProcessGroup | None, tensor: Tensor) -> bool:
    """Must this tensor go through host memory? Gloo sends and receives tensors on the host only, and of its collectives
    some are for the host alone.
    """
    return tensor.is_cuda and group is not None and "cuda:gloo" in dist.get_backend_config(group).split(",")


@dataclass(frozen=True)
class Axis:
    """A named axis of the mesh as one rank sees it: its degree, the rank's index on it, and the group that talks.

    `levels`, where the axis crosses nodes in two levels: between nodes among equal local indices, and inside the node.
    On a `dry` axis nothing is said: calls enter the ledger, and what they would receive is left as it is.
    `through_host` says which tensors are copied to the host before an operation, and back behind it.
    """

    name: str
    degree: int
    index: int
    group: dist.ProcessGroup | None
    ledger: Ledger
    levels: tuple[Axis, Axis] | None = None
    dry: bool = False
    through_host: Callable[[dist.ProcessGroup | None, Tensor], bool] = sends_from_host


def uses_nccl(axis: Axis, device: torch.device) -> bool:
    """Do messages of tensors on this device go over NCCL?"""
    return device.type == "cuda" and not axis.through_host(axis.group, torch.empty(0, device=device))


class _HostCopies:
    """The host copies of one operation's tensors, where the axis sends them through the host; else the tensors."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._sent: list[Tensor] = []  # Gloo reads them until the operation is complete
        self._received: list[tuple[Tensor, Tensor]] = []

    def to_send(self, tensor: Tensor) -> Tensor:
        """What to send: the copy is complete on return."""
        if not self._axis.through_host(self._axis.group, tensor):
            return tensor
        self._sent.append(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach()))
        return self._sent[-1]

    def to_receive(self, tensor: Tensor) -> Tensor:
        """Where to receive."""
        if not self._axis.through_host(self._axis.group, tensor):
            return tensor
        self._received.append((tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")))
        return self._received[-1][1]

    def to_change(self, tensor: Tensor) -> Tensor:
        """What to combine in place."""
        copy = self.to_receive(tensor)
        return copy if copy is tensor else copy.copy_(tensor.detach())

    def finish(self) -> None:
        """Copy what has been received to where it belongs, on the caller's stream."""
        for tensor, copy in self._received:
            tensor.detach().copy_(copy)
        self._sent, self._received = [], []


class Pending:
    """An operation under way; with `peer`, a message of its own name from or to the rank at that index."""

    def __init__(
        self,
        work: dist.Work | list[dist.Work] | None,
        axis: Axis,
        operation: str,
        peer: int | None = None,
        copies: _HostCopies | None = None,
    ) -> None:
        self._works = work if isinstance(work, list) else [work] if work is not None else []
        self._axis, self._operation, self._peer, self._copies = axis, operation, peer, copies
        self._entry = axis.ledger.entered() if peer is None else None
        self._error: RuntimeError | None = None

    def wait(self) -> None:
        """Return when the result may be used. May be called again."""
        if self._error is not None:
            raise self._error
        ledger = self._axis.ledger
        for work in self._works:
            peers = () if ledger.status is None else _peers(self._axis, self._peer)
            ledger.wait_begins(self._axis.name, self._operation, self._entry, peers)
            work.wait()
            ledger.wait_ends()
        self._works = []
        if self._copies is not None:
            self._copies.finish()

    def block(self) -> None:
        """`wait` for a thread of its own: the ledger does not show it, and an error waits for who calls `wait`."""
        try:
            for work in self._works:
                work.wait()
            self._works = []
        except RuntimeError as error:
            self._error = error

    def is_done(self) -> bool:
        """Whether `wait` would return at once. Of Gloo's messages this is not known before."""
        return all(work.is_completed() for work in self._works)


def all_reduce(tensor: Tensor, axis: Axis, reduction: Reduction = "sum") -> Pending:
    """Combine `tensor` in place over the axis."""
    if axis.degree == 1:
        return Pending(None, axis, "all_reduce")
    _enter(axis, "all_reduce", tensor)
    if axis.dry:
        return Pending(None, axis, "all_reduce")
    copies = _HostCopies(axis)
    work = dist.all_reduce(copies.to_change(tensor), _REDUCTIONS[reduction], group=axis.group, async_op=True)
    return Pending(work, axis, "all_reduce", copies=copies)


def all_gather(whole: Tensor, part: Tensor, axis: Axis) -> Pending:
    """Fill `whole` with the parts of all ranks in order; `part` may be this rank's place inside `whole`."""
    assert whole.numel() == part.numel() * axis.degree
    if axis.degree == 1:
        if whole.data_ptr() != part.data_ptr():
            whole.copy_(part)
        return Pending(None, axis, "all_gather")
    _enter(axis, "all_gather", whole)
    if axis.dry:
        return Pending(None, axis, "all_gather")
    copies = _HostCopies(axis)
    work = _ALL_GATHER(copies.to_receive(whole), copies.to_send(part), group=axis.group, async_op=True)
    return Pending(work, axis, "all_gather", copies=copies)


def reduce_scatter(part: Tensor, whole: Tensor, axis: Axis, reduction: Reduction = "sum") -> Pending:
    """Combine `whole` over the axis and leave this rank's part of it in `part`."""
    assert whole.numel() == part.numel() * axis.degree
    if axis.degree == 1:
        if whole.data_ptr() != part.data_ptr():
            part.copy_(whole)
        return Pending(None, axis, "reduce_scatter")
    _enter(axis, "reduce_scatter", whole)
    copies = _HostCopies(axis)
    ours, given = copies.to_receive(part), copies.to_send(whole)
    work = _REDUCE_SCATTER(ours, given, _REDUCTIONS[reduction], group=axis.group, async_op=True)
    return Pending(work, axis, "reduce_scatter", copies=copies)


def all_to_all(received: Tensor, sent: Tensor, axis: Axis) -> Pending:
    """Give the i-th of equal parts of `sent` (along its first dim) to rank i of the axis, and take its part for us."""
    assert received.shape == sent.shape
    assert sent.shape[0] % axis.degree == 0
    if axis.degree == 1:
        received.copy_(sent)
        return Pending(None, axis, "all_to_all")
    _enter(axis, "all_to_all", sent)
    copies = _HostCopies(axis)
    work = dist.all_to_all_single(copies.to_receive(received), copies.to_send(sent), group=axis.group, async_op=True)
    return Pending(work, axis, "all_to_all", copies=copies)


def shift(received: Sequence[Tensor], sent: Sequence[Tensor], axis: Axis, by: int = 1) -> Pending:
    """Send tensors to the rank `by` places further on the axis (a ring), and receive as many from the one before."""
    assert len(received) == len(sent)
    if axis.degree == 1:
        for target, source in zip(received, sent, strict=True):
            target.copy_(source)
        return Pending(None, axis, "send")
    after, before = (axis.index + by) % axis.degree, (axis.index - by) % axis.degree
    for tensor in sent:
        _enter(axis, "send", tensor)
    return _trade([(before, tensor) for tensor in received], [(after, tensor) for tensor in sent], axis, "send")


def exchange(received: Sequence[tuple[int, Tensor]], sent: Sequence[tuple[int, Tensor]], axis: Axis) -> Pending:
    """Send tensors to ranks of the axis, and receive others, all at once: (index of the peer, tensor), one a peer."""
    for _, tensor in sent:
        _enter(axis, "send", tensor)
    if axis.dry or not (received or sent):
        return Pending(None, axis, "exchange")
    return _trade(received, sent, axis, "exchange")


def send(tensor: Tensor, axis: Axis, peer: int, what: str) -> Pending:
    """Begin to send a tensor to the rank at index `peer` of the axis; it must live until then. `what` is for messages.

    Receives from a peer complete in the order in which it sent.
    """
    _enter(axis, "send", tensor)
    copies = _HostCopies(axis)
    work = dist.isend(copies.to_send(tensor), group=axis.group, group_dst=peer)
    return Pending(work, axis, what, peer, copies)


def receive(tensor: Tensor, axis: Axis, peer: int, what: str) -> Pending:
    """Begin to receive what the rank at index `peer` of the axis sends next; the sender counts it."""
    copies = _HostCopies(axis)
    work = dist.irecv(copies.to_receive(tensor), group=axis.group, group_src=peer)
    return Pending(work, axis, what, peer, copies)


def broadcast(tensor: Tensor, axis: Axis, source: int = 0) -> Pending:
    """Give every rank of the axis the tensor of the rank with index `source`."""
    if axis.degree == 1:
        return Pending(None, axis, "broadcast")
    _enter(axis, "broadcast", tensor)
    copies = _HostCopies(axis)
    work = dist.broadcast(copies.to_change(tensor), group=axis.group, group_src=source, async_op=True)
    return Pending(work, axis, "broadcast", copies=copies)


def meet() -> None:
    """Return when every process of the world has come here. For setting up; it is not in the ledger."""
    dist.barrier()


def _trade(
    received: Sequence[tuple[int, Tensor]], sent: Sequence[tuple[int, Tensor]], axis: Axis, operation: str
) -> Pending:
    """Send and receive (index of the peer, tensor) as one batch."""
    copies = _HostCopies(axis)
    operations = [
        dist.P2POp(dist.isend, copies.to_send(tensor), group=axis.group, group_peer=peer) for peer, tensor in sent
    ] + [
        dist.P2POp(dist.irecv, copies.to_receive(tensor), group=axis.group, group_peer=peer)
        for peer, tensor in received
    ]
    return Pending(dist.batch_isend_irecv(operations), axis, operation, copies=copies)


def _peers(axis: Axis, peer: int | None) -> list[int]:
    """The world's numbers of the ranks that an operation waits for, where they are few enough to be named."""
    if axis.group is None or (peer is None and axis.degree > _MAX_NAMED):
        return []
    ranks = dist.get_process_group_ranks(axis.group)
    return [ranks[peer]] if peer is not None else [rank for index, rank in enumerate(ranks) if index != axis.index]


def _enter(axis: Axis, operation: str, whole: Tensor) -> None:
    axis.ledger.record(axis.name, operation, whole.numel() * whole.element_size())

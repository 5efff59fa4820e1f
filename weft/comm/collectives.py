"""The only file that calls torch.distributed's collectives. Every call names its axis and is counted in the ledger.

`weft.comm` exports all_gather, reduce_scatter, all_reduce and all_to_all of `hierarchical.py`, which use the ones of
this file.
An operation over an axis of degree 1 sends nothing and is not counted. Each operation returns a `Pending`: the caller
continues and waits where it needs the result (on a GPU, the wait orders streams and blocks no thread).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from weft.cluster.collective_choice import Levels
from weft.cluster.small_choice import SmallChoice
from weft.comm.device_ranks import DeviceRanks
from weft.comm.ledger import Ledger
from weft.comm.recorder import RECEIVE
from weft.comm.symmetric_buffer import SymmetricBuffer

Reduction = Literal["sum", "max", "min"]
_MAX_NAMED = 8  # the status page of a waiting rank lists its peers up to this number
# torch 2.13 renamed two functions and warns about the old names; torch 2.11 has only the old ones.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def sends_from_host(group: dist.ProcessGroup | None, tensor: Tensor) -> bool:
    """Must this tensor be copied to host memory? Gloo sends and receives host tensors only, and some of its collectives
    take only those.
    """
    return tensor.is_cuda and group is not None and "cuda:gloo" in dist.get_backend_config(group).split(",")


@dataclass(frozen=True)
class Axis:
    """A named axis of the mesh as one rank sees it: its degree, the rank's index on it, and its process group.

    If collectives of the axis run in two levels, `levels` has an axis between nodes, among ranks of equal local index,
    and an axis inside the node, and `choice` says which algorithm each operation uses. `small` says which sums of small
    tensors are one or two other calls or one kernel over `symmetric` memory (`small_sums.py`).
    On a `dry` axis nothing is sent: calls are counted, and their outputs stay unchanged. `device_ranks` are the ranks
    of the axis, if they share one device. `through_host` says which tensors are copied to the host before an operation,
    and back after it.
    """

    name: str
    degree: int
    index: int
    group: dist.ProcessGroup | None
    ledger: Ledger
    levels: tuple[Axis, Axis] | None = None
    choice: Levels | None = None
    small: SmallChoice | None = None
    symmetric: SymmetricBuffer | None = None
    dry: bool = False
    device_ranks: DeviceRanks | None = None
    through_host: Callable[[dist.ProcessGroup | None, Tensor], bool] = sends_from_host


def through_host(axis: Axis) -> Axis:
    """Returns the axis with tensors on GPUs copied to the host before an operation, and back after it."""
    return replace(axis, through_host=lambda group, tensor: tensor.is_cuda)


def uses_nccl(axis: Axis, device: torch.device) -> bool:
    """Does the axis send tensors on this device by NCCL?"""
    return device.type == "cuda" and not axis.through_host(axis.group, torch.empty(0, device=device))


class _HostCopies:
    """Host copies of one operation's tensors, if the axis sends them through host memory; else the tensors."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._sent: list[Tensor] = []  # kept alive because Gloo reads them until the operation is complete
        self._received: list[tuple[Tensor, Tensor]] = []

    def to_send(self, tensor: Tensor) -> Tensor:
        """Returns the tensor to send. If it is a copy, the copy is complete on return."""
        if not self._axis.through_host(self._axis.group, tensor):
            return tensor
        self._sent.append(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach()))
        return self._sent[-1]

    def to_receive(self, tensor: Tensor) -> Tensor:
        """Returns the tensor to receive into."""
        if not self._axis.through_host(self._axis.group, tensor):
            return tensor
        self._received.append((tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")))
        return self._received[-1][1]

    def to_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the tensor to reduce in place."""
        copy = self.to_receive(tensor)
        return copy if copy is tensor else copy.copy_(tensor.detach())

    def finish(self) -> None:
        """Copy received host copies to their tensors, on the caller's stream."""
        for tensor, copy in self._received:
            tensor.detach().copy_(copy)
        self._sent, self._received = [], []


class Pending:
    """An operation that has started. With `peer`, it is a message to or from the rank at that index of the axis, and
    `operation` names the message.
    """

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
        self._call_id = axis.ledger.call_id() if peer is None else None
        self._recorder = axis.ledger.recorder
        self._recorded = [] if self._recorder is None else self._recorder.take_started()
        self._error: RuntimeError | None = None

    def wait(self) -> None:
        """Return when the result may be used. May be called again."""
        if self._error is not None:
            raise self._error
        ledger, recorder, recorded = self._axis.ledger, self._recorder, self._recorded
        if recorder is not None and recorded:
            recorder.wait_begins(recorded)
        for work in self._works:
            peers = () if ledger.status is None else _peers(self._axis, self._peer)
            ledger.wait_begins(self._axis.name, self._operation, self._call_id, peers)
            work.wait()
            ledger.wait_ends()
        self._works = []
        if self._copies is not None:
            self._copies.finish()
        if recorder is not None and recorded:
            recorder.wait_ends(recorded)
            self._recorded = []

    def block(self) -> None:
        """Wait in another thread than the caller of `wait`. The ledger does not show this wait, and `wait` raises an
        error of it.
        """
        try:
            for work in self._works:
                work.wait()
            self._works = []
        except RuntimeError as error:
            self._error = error

    def is_done(self) -> bool:
        """Returns whether `wait` would return at once. For Gloo's messages this is not known before the wait."""
        return all(work.is_completed() for work in self._works)


def all_reduce(tensor: Tensor, axis: Axis, reduction: Reduction = "sum") -> Pending:
    """Reduce `tensor` in place over the axis."""
    if axis.degree == 1:
        return Pending(None, axis, "all_reduce")
    record(axis, "all_reduce", tensor)
    if axis.dry:
        return Pending(None, axis, "all_reduce")
    copies = _HostCopies(axis)
    work = dist.all_reduce(copies.to_reduce(tensor), _REDUCTIONS[reduction], group=axis.group, async_op=True)
    return Pending(work, axis, "all_reduce", copies=copies)


def all_gather(whole: Tensor, part: Tensor, axis: Axis) -> Pending:
    """Fill `whole` with the parts of all ranks in order. `part` may be this rank's slice of `whole`."""
    assert whole.numel() == part.numel() * axis.degree
    if axis.degree == 1:
        if whole.data_ptr() != part.data_ptr():
            whole.copy_(part)
        return Pending(None, axis, "all_gather")
    record(axis, "all_gather", whole)
    if axis.dry:
        return Pending(None, axis, "all_gather")
    copies = _HostCopies(axis)
    work = _ALL_GATHER(copies.to_receive(whole), copies.to_send(part), group=axis.group, async_op=True)
    return Pending(work, axis, "all_gather", copies=copies)


def reduce_scatter(part: Tensor, whole: Tensor, axis: Axis, reduction: Reduction = "sum") -> Pending:
    """Reduce `whole` over the axis and write this rank's part of the result to `part`."""
    assert whole.numel() == part.numel() * axis.degree
    if axis.degree == 1:
        if whole.data_ptr() != part.data_ptr():
            part.copy_(whole)
        return Pending(None, axis, "reduce_scatter")
    record(axis, "reduce_scatter", whole)
    copies = _HostCopies(axis)
    ours, given = copies.to_receive(part), copies.to_send(whole)
    work = _REDUCE_SCATTER(ours, given, _REDUCTIONS[reduction], group=axis.group, async_op=True)
    return Pending(work, axis, "reduce_scatter", copies=copies)


def all_to_all(
    received: Tensor, sent: Tensor, axis: Axis, rows: tuple[Sequence[int], Sequence[int]] | None = None
) -> Pending:
    """Send the i-th part of `sent` (along its first dim) to rank i of the axis, and receive its part for this rank.

    Parts are equal, or have as many rows as `rows` says: (those received from each rank, those sent to each rank).
    """
    assert rows is not None or (received.shape == sent.shape and sent.shape[0] % axis.degree == 0)
    if axis.degree == 1:
        received.copy_(sent)
        return Pending(None, axis, "all_to_all")
    record(axis, "all_to_all", sent, is_equal=rows is None)
    copies = _HostCopies(axis)
    ours, given = copies.to_receive(received), copies.to_send(sent)
    received_rows, sent_rows = (None, None) if rows is None else map(list, rows)
    work = dist.all_to_all_single(ours, given, received_rows, sent_rows, group=axis.group, async_op=True)
    return Pending(work, axis, "all_to_all", copies=copies)


def shift(received: Sequence[Tensor], sent: Sequence[Tensor], axis: Axis, by: int = 1) -> Pending:
    """Send tensors to the rank at index + `by` of the axis (a ring), and receive as many from index - `by`."""
    assert len(received) == len(sent)
    if axis.degree == 1:
        for target, source in zip(received, sent, strict=True):
            target.copy_(source)
        return Pending(None, axis, "send")
    after, before = (axis.index + by) % axis.degree, (axis.index - by) % axis.degree
    for tensor in sent:
        record(axis, "send", tensor, after)
    for tensor in received:
        _record_receive(axis, tensor, before)
    return _send_and_receive(
        [(before, tensor) for tensor in received], [(after, tensor) for tensor in sent], axis, "send"
    )


def exchange(received: Sequence[tuple[int, Tensor]], sent: Sequence[tuple[int, Tensor]], axis: Axis) -> Pending:
    """Send tensors to ranks of the axis and receive others in one batch. Both lists have (index of the peer, tensor),
    at most one per peer.
    """
    for peer, tensor in sent:
        record(axis, "send", tensor, peer)
    for peer, tensor in received:
        _record_receive(axis, tensor, peer)
    if axis.dry or not (received or sent):
        return Pending(None, axis, "exchange")
    return _send_and_receive(received, sent, axis, "exchange")


def send(tensor: Tensor, axis: Axis, peer: int, what: str) -> Pending:
    """Start to send a tensor to the rank at index `peer` of the axis. The tensor must live until the send is complete.
    `what` names the message on the status page.

    Receives from a peer complete in the order in which it sent.
    """
    record(axis, "send", tensor, peer)
    copies = _HostCopies(axis)
    work = dist.isend(copies.to_send(tensor), group=axis.group, group_dst=peer)
    return Pending(work, axis, what, peer, copies)


def receive(tensor: Tensor, axis: Axis, peer: int, what: str) -> Pending:
    """Start to receive the next tensor from the rank at index `peer` of the axis. Only the sender counts it."""
    _record_receive(axis, tensor, peer)
    copies = _HostCopies(axis)
    work = dist.irecv(copies.to_receive(tensor), group=axis.group, group_src=peer)
    return Pending(work, axis, what, peer, copies)


def broadcast(tensor: Tensor, axis: Axis, source: int = 0) -> Pending:
    """Copy the tensor of the rank with index `source` to every rank of the axis."""
    if axis.degree == 1:
        return Pending(None, axis, "broadcast")
    record(axis, "broadcast", tensor)
    copies = _HostCopies(axis)
    work = dist.broadcast(copies.to_reduce(tensor), group=axis.group, group_src=source, async_op=True)
    return Pending(work, axis, "broadcast", copies=copies)


def barrier() -> None:
    """Return when every process of the world group has called this. For set-up only: the ledger does not count it."""
    dist.barrier()


def _send_and_receive(
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
    """Returns the global ranks that an operation waits for; empty if they are more than `_MAX_NAMED`."""
    if axis.group is None or (peer is None and axis.degree > _MAX_NAMED):
        return []
    ranks = dist.get_process_group_ranks(axis.group)
    return [ranks[peer]] if peer is not None else [rank for index, rank in enumerate(ranks) if index != axis.index]


def record(axis: Axis, operation: str, whole: Tensor, peer: int | None = None, is_equal: bool = True) -> None:
    """Count a call, to the rank at index `peer` of the axis if it is a message. `is_equal`: all ranks of the axis give
    as many bytes.
    """
    num_bytes, ledger = whole.numel() * whole.element_size(), axis.ledger
    ledger.record(axis.name, operation, num_bytes)
    if ledger.order is not None and axis.group is not None and operation != "send":
        inside = "" if ledger.status is None else ledger.status.inside
        equal_bytes = num_bytes if is_equal else None
        ledger.order.add(dist.get_process_group_ranks(axis.group), axis.name, operation, equal_bytes, inside)
    if ledger.recorder is not None:
        _begin_record(axis, operation, num_bytes, peer)


def _record_receive(axis: Axis, tensor: Tensor, peer: int) -> None:
    """Record a message that will arrive. The ledger counts it at its sender."""
    if axis.ledger.recorder is not None:
        _begin_record(axis, RECEIVE, tensor.numel() * tensor.element_size(), peer)


def _begin_record(axis: Axis, operation: str, num_bytes: int, peer: int | None) -> None:
    recorder = axis.ledger.recorder
    assert recorder is not None
    key = (axis.name, operation, axis.group, axis.degree, peer)
    site = recorder.site_by_group.get(key)
    if site is None:
        ranks = range(axis.degree) if axis.group is None else dist.get_process_group_ranks(axis.group)
        site = recorder.site(axis.name, operation, ranks, None if peer is None else ranks[peer])
        recorder.site_by_group[key] = site
    recorder.begin(site, num_bytes)

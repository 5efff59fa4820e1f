"""Messages between the ranks of a pipeline: one tensor each, in the order of its channel, without tags.

A channel goes from one rank to another in one direction of the pipeline (forward or backward). Each has a process group
of its two ranks: on NCCL a group runs one message after another, so messages of one group must have one order on both
ranks. `nccl_order.py` proves that no rank then waits in a circle, and that coarser groups would have cycles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.comm import Axis, Ledger, Pending, receive, send, uses_nccl
from weft.errors import LostRankError
from weft.mesh import Mesh
from weft.pipeline.trace import Value
from weft.schedule.actions import Channel, Message, Schedule, channel_of

Key = tuple[int, int, int, str]


@dataclass
class _Posted:
    message: Message
    tensor: Tensor
    pending: Pending


class Transport:
    """This rank's ends of all channels."""

    def __init__(self, mesh: Mesh, schedule: Schedule) -> None:
        self.axis, self.device, self.rank = mesh["pipe"], mesh.device, mesh.rank
        self.ranks = mesh.global_ranks("pipe")  # the global ranks along this rank's pipe
        self.can_poll = uses_nccl(self.axis, self.device)  # whether it can be asked if a message has come
        self._channels: dict[Channel, Axis] = {}
        for channel in schedule.channels:  # every rank makes all groups, in one order
            axis = mesh.pair("pipe", channel.source, channel.target, channel.direction)
            if axis is not None:
                self._channels[channel] = axis
        self._posted: dict[Key, _Posted] = {}
        self._sent: dict[Key, _Posted] = {}
        self._connect()

    def _connect(self) -> None:
        """Send one number through each channel, in one order on all ranks.

        NCCL connects two ranks at their first message, and the host of one waits there for the other. In a schedule's
        own order ranks could wait in a circle.
        """
        for channel, axis in self._channels.items():
            number, unrecorded = torch.zeros(1, device=self.device), replace(axis, ledger=Ledger())
            is_send = channel.source == self.axis.index
            with self._named(is_send, channel.target if is_send else channel.source, "the first of its channel"):
                begin = send if is_send else receive
                begin(number, unrecorded, 1 - axis.index, "first message").wait()

    def post(self, message: Message, value: Value) -> None:
        """Begin to receive a message; does not block."""
        tensor = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        axis = self._channels[channel_of(self.axis.index, message)]
        with self._failing(message):
            pending = receive(tensor, axis, 1 - axis.index, str(message))
        self._posted[message.key] = _Posted(message, tensor, pending)

    def pending(self, key: Key) -> Pending:
        """A posted message under way."""
        return self._posted[key].pending

    @contextmanager
    def waiting(self, keys: Iterable[Key]) -> Iterator[None]:
        """Whoever watches sees that this rank waits for any of these posted messages."""
        messages = [self._posted[key].message for key in keys]
        peers = [self.ranks[message.peer] for message in messages]
        self.axis.ledger.wait_begins(self.axis.name, " or ".join(map(str, messages)), peers=peers)
        yield
        self.axis.ledger.wait_ends()

    def take(self, key: Key) -> Tensor:
        """What a posted message brought; waits for it."""
        posted = self._posted.pop(key)
        with self._failing(posted.message):
            posted.pending.wait()
        return posted.tensor

    def send(self, message: Message, tensor: Tensor) -> None:
        """Begin to send; does not block. The tensor lives until the message is known to have gone."""
        tensor = tensor.detach().contiguous()
        axis = self._channels[channel_of(self.axis.index, message)]
        with self._failing(message):
            pending = send(tensor, axis, 1 - axis.index, str(message))
        self._sent[message.key] = _Posted(message, tensor, pending)

    def answered(self, keys: Iterable[Key]) -> None:
        """These messages have been used by whoever took them: nothing waits, and what they held is free."""
        for key in keys:
            sent = self._sent.pop(key, None)
            if sent is not None:
                with self._failing(sent.message):
                    sent.pending.wait()

    def finish(self) -> None:
        """Wait until all that was sent has gone."""
        self.answered(list(self._sent))
        assert not self._posted

    def _failing(self, message: Message) -> AbstractContextManager[None]:
        return self._named(message.is_send, message.peer, str(message))

    @contextmanager
    def _named(self, is_send: bool, peer: int, message: str) -> Iterator[None]:
        """A connection that breaks, or waits too long, is told by the message that did not come or go."""
        try:
            yield
        except RuntimeError as error:
            what = "sending" if is_send else "waiting for"
            raise LostRankError(
                f"rank {self.rank} (pipe rank {self.axis.index}) was {what} a message when the connection to rank "
                f"{self.ranks[peer]} (pipe rank {peer}) failed: {message}; {str(error).strip().splitlines()[0]}"
            ) from error

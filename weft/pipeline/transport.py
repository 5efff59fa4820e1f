"""Messages between the ranks of a pipeline: one tensor each, in the order of its channel, without tags.

A channel goes from one rank to another in one direction of the pipeline (forward or backward). Each channel has a
process group of its two ranks. On NCCL a group runs one message after another, so both ranks must have the messages of
a group in the same order. `schedule/nccl_order.py` checks that ranks then never wait in a cycle; coarser groups would
have cycles.

The first step of each kind goes through host memory. NCCL's receive is a kernel that runs until its message comes, and
the first launch of any other kernel makes the host wait until no kernel runs (seen on an H200 with CUDA 13; launches
after the first, and allocations, do not wait). Ranks whose next messages depend on each other, as under `message` and
`bidirectional`, would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.comm import Axis, Ledger, Pending, receive, send, through_host, uses_nccl
from weft.errors import LostRankError
from weft.mesh import Mesh
from weft.pipeline.trace import TracedTensor
from weft.schedule.actions import Channel, Message, Schedule

Key = tuple[int, int, int, str]


@dataclass
class _MessageInFlight:
    message: Message
    tensor: Tensor
    pending: Pending


class Transport:
    """This rank's ends of all channels."""

    def __init__(self, mesh: Mesh, schedule: Schedule) -> None:
        self.axis, self.device, self.rank = mesh["pipe"], mesh.device, mesh.rank
        self.ranks = mesh.global_ranks("pipe")  # the global ranks along this rank's pipe
        self.uses_host = False  # whether messages go through host memory
        self._channels: dict[Channel, Axis] = {}
        for channel in schedule.channels:  # every rank makes all groups, in one order
            axis = mesh.pair("pipe", channel.source, channel.target, channel.direction)
            if axis is not None:
                self._channels[channel] = axis
        self._posted: dict[Key, _MessageInFlight] = {}
        self._sent: dict[Key, _MessageInFlight] = {}
        self._last: dict[Channel, Key] = {}  # the last message that this rank has sent through each channel
        self._connect()

    def _connect(self) -> None:
        """Send one number through each channel, in one order on all ranks.

        NCCL connects two ranks at their first message, and the host of one waits there for the other. In a schedule's
        own order ranks could wait in a cycle.
        """
        for channel, axis in self._channels.items():
            number, unrecorded = torch.zeros(1, device=self.device), replace(axis, ledger=Ledger())
            is_send = channel.source == self.axis.index
            with self._named(is_send, channel.target if is_send else channel.source, "the first of its channel"):
                begin = send if is_send else receive
                begin(number, unrecorded, 1 - axis.index, "first message").wait()

    @property
    def can_poll(self) -> bool:
        """Whether the backend can tell if a message has arrived."""
        return uses_nccl(self.axis, self.device) and not self.uses_host

    def _channel(self, message: Message) -> Axis:
        axis = self._channels[message.channel]
        return through_host(axis) if self.uses_host else axis

    def post(self, message: Message, value: TracedTensor) -> None:
        """Start to receive a message; does not block."""
        tensor = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        axis = self._channel(message)
        with self._failing(message):
            pending = receive(tensor, axis, 1 - axis.index, str(message))
        self._posted[message.key] = _MessageInFlight(message, tensor, pending)

    def pending(self, key: Key) -> Pending:
        """Return the pending receive of a posted message."""
        return self._posted[key].pending

    @contextmanager
    def waiting(self, keys: Iterable[Key]) -> Iterator[None]:
        """Record in the ledger, during the context, that this rank waits for one of these posted messages."""
        messages = [self._posted[key].message for key in keys]
        peers = [self.ranks[message.peer] for message in messages]
        self.axis.ledger.wait_begins(self.axis.name, " or ".join(map(str, messages)), peers=peers)
        yield
        self.axis.ledger.wait_ends()

    def take(self, key: Key) -> Tensor:
        """Wait for a posted message and return its tensor."""
        posted = self._posted.pop(key)
        with self._failing(posted.message):
            posted.pending.wait()
        return posted.tensor

    def await_last(self, message: Message) -> None:
        """Wait until the message before this one in its channel has arrived, and free its tensor.

        On NCCL the stream waits and not the host: what is computed next may use the memory.
        """
        last = self._last.get(message.channel)
        self.release([] if last is None else [last])

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start to send; does not block. The tensor is kept alive until the message is known to have arrived."""
        self._last[message.channel] = message.key
        tensor = tensor.detach().contiguous()
        axis = self._channel(message)
        with self._failing(message):
            pending = send(tensor, axis, 1 - axis.index, str(message))
        self._sent[message.key] = _MessageInFlight(message, tensor, pending)

    def release(self, keys: Iterable[Key]) -> None:
        """Free the tensors of these sends, which their receivers have already used; this does not block."""
        for key in keys:
            sent = self._sent.pop(key, None)
            if sent is not None:
                with self._failing(sent.message):
                    sent.pending.wait()

    def finish(self) -> None:
        """Wait until all sends are complete."""
        self.release(list(self._sent))
        self._last.clear()
        assert not self._posted

    def _failing(self, message: Message) -> AbstractContextManager[None]:
        return self._named(message.is_send, message.peer, str(message))

    @contextmanager
    def _named(self, is_send: bool, peer: int, message: str) -> Iterator[None]:
        """Turn a connection that breaks or times out into a LostRankError that names the message."""
        try:
            yield
        except RuntimeError as error:
            what = "sending" if is_send else "waiting for"
            raise LostRankError(
                f"rank {self.rank} (pipe rank {self.axis.index}) was {what} a message when the connection to rank "
                f"{self.ranks[peer]} (pipe rank {peer}) failed: {message}; {str(error).strip().splitlines()[0]}"
            ) from error

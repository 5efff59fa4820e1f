"""Messages between the ranks of a pipeline: one tensor each, in the order of its channel, without tags.

A channel is a way between two ranks in one direction of the pipeline (forward or backward). Each of the four pairs of
that direction and the way along the axis (up or down) has a process group of its own, so that on NCCL, where a group
does one thing after another, a send never waits behind a receive that its peer can only serve after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import Axis, Pending, receive, send
from weft.errors import LostRankError
from weft.mesh import Mesh
from weft.pipeline.actions import Message, Schedule
from weft.pipeline.trace import Value

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
        self.ranks = mesh.line("pipe")  # the global ranks along this rank's pipe
        # NCCL can be asked whether a message has come; Gloo, also for tensors on a GPU, cannot.
        is_gpu, probe = self.device.type == "cuda", torch.empty(0, device=self.device)
        self.can_poll = is_gpu and not self.axis.through_host(self.axis.group, probe)
        # Every rank makes all groups, in one order.
        ways = sorted(set(_ways(schedule)))
        self._axes: dict[tuple[str, str], Axis] = {way: mesh.again("pipe", " ".join(way)) for way in ways}
        self._posted: dict[Key, _Posted] = {}
        self._sent: dict[Key, _Posted] = {}

    def post(self, message: Message, value: Value) -> None:
        """Begin to receive a message; does not block."""
        tensor = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        axis = self._axes[_way(self.axis.index, message)]
        with self._named(message):
            self._posted[message.key] = _Posted(message, tensor, receive(tensor, axis, message.peer, str(message)))

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
        with self._named(posted.message):
            posted.pending.wait()
        return posted.tensor

    def send(self, message: Message, tensor: Tensor) -> None:
        """Begin to send; does not block. The tensor lives until the message is known to have gone."""
        tensor = tensor.detach().contiguous()
        axis = self._axes[_way(self.axis.index, message)]
        with self._named(message):
            self._sent[message.key] = _Posted(message, tensor, send(tensor, axis, message.peer, str(message)))

    def answered(self, keys: Iterable[Key]) -> None:
        """These messages have been used by whoever took them: nothing waits, and what they held is free."""
        for key in keys:
            sent = self._sent.pop(key, None)
            if sent is not None:
                with self._named(sent.message):
                    sent.pending.wait()

    def finish(self) -> None:
        """Wait until all that was sent has gone."""
        self.answered(list(self._sent))
        assert not self._posted

    @contextmanager
    def _named(self, message: Message) -> Iterator[None]:
        """A connection that breaks, or waits too long, is told by the message that did not come or go."""
        try:
            yield
        except RuntimeError as error:
            what = "sending" if message.is_send else "waiting for"
            raise LostRankError(
                f"rank {self.rank} (pipe rank {self.axis.index}) was {what} a message when the connection to rank "
                f"{self.ranks[message.peer]} (pipe rank {message.peer}) failed: {message}; "
                f"{str(error).strip().splitlines()[0]}"
            ) from error


def _way(here: int, message: Message) -> tuple[str, str]:
    """The group of a message: its direction in the pipeline, and its way along the axis."""
    source, target = (here, message.peer) if message.is_send else (message.peer, here)
    return message.direction, "down" if source < target else "up"


def _ways(schedule: Schedule) -> Iterator[tuple[str, str]]:
    """The groups that the messages of any step need, whatever its number of micro-batches."""
    for ranks in schedule.placement:
        for edge in schedule.edges:
            if ranks[edge.source] == ranks[edge.target]:
                continue
            is_down = ranks[edge.source] < ranks[edge.target]
            yield "forward", "down" if is_down else "up"
            yield "backward", "up" if is_down else "down"

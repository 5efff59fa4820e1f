"""The bytes that a rank of a pipeline holds beside its state, over its list of actions.

A forward adds what its stage saves, which lives until its backward, and its result, which lives until it is sent. A
receive holds its buffer from where it is posted to the end of its action; what the action saves of it is among the
saved bytes. A sent tensor lives until it is known to have arrived. No message confirms that, but a rank that has sent
us something has run all earlier actions of its list, and so has used what we had sent it for them. In awaited channels
a rank also waits before each send for the message before it. If weight gradients are separate actions, backward leaves
their inputs. If ranks have shadows, all results for other ranks and all that shadows save live
until the step ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weft.schedule.actions import SHADOW, Action, Channel, Message, Schedule

Key = tuple[int, int, int, str]


def confirmed_sends(schedule: Schedule, rank: int) -> dict[Key, list[Key]]:
    """For each message that the rank receives, return its own sends that have arrived by then.

    Each send is listed once.
    """
    found: dict[Key, list[Key]] = {}
    for peer in range(schedule.num_ranks):
        if peer == rank:
            continue
        used: list[Key] = []
        for action in schedule.compute(peer):
            received, sent = schedule.messages(action)
            used += [message.key for message in received if message.peer == rank]
            for message in sent:
                if message.peer == rank:
                    found[message.key], used = used, []
    return found


class StageBytes(NamedTuple):
    """Bytes of a micro-batch at a stage: saved, held beside that in backward, left for separate weight gradients."""

    saved_bytes: int
    peak_bytes: int
    late_bytes: int


def peak_held_bytes(schedule: Schedule, rank: int, stages: Mapping[int, StageBytes], edge_bytes: Sequence[int]) -> int:
    """Return the most bytes held at once over the rank's list."""
    sent = _SentBytes(schedule, rank, edge_bytes)
    held = most = 0
    for step in schedule.lists[rank]:
        if isinstance(step, Message):
            held += sent.send(step) if step.is_send else edge_bytes[step.edge]
            most = max(most, held)
            continue
        own, received = stages[step.stage], schedule.messages(step)[0]
        held -= sent.freed_before(step)
        given = sum(edge_bytes[message.edge] for message in received)
        made = sum(edge_bytes[edge] for edge in schedule.edges_out_of[step.stage])
        if step.kind == "forward":
            held += own.saved_bytes - given + made  # what is saved of what was received is among the saved bytes
            sent.keep(step)
        elif step.kind == "backward":
            held -= given  # part of what backward holds
            most = max(most, held + own.peak_bytes)
            held -= own.saved_bytes
            held += own.late_bytes if step.stage in schedule.split_stages else 0
        elif step.kind == SHADOW:
            shared = sum(edge_bytes[edge] for edge in schedule.edges_into[step.stage])  # the rank's own result
            held += own.saved_bytes - shared + made
        else:
            held -= own.late_bytes
        most = max(most, held)
    return most


class _SentBytes:
    """Tensors of a rank that it has sent, or has made for another of its stages, until they are freed."""

    def __init__(self, schedule: Schedule, rank: int, edge_bytes: Sequence[int]) -> None:
        self.schedule, self.rank, self.edge_bytes = schedule, rank, edge_bytes
        self.arrived = {} if schedule.has_shadows else confirmed_sends(schedule, rank)
        self._alive: dict[Key, int] = {}
        self._last: dict[Channel, Key] = {}

    def keep(self, forward: Action) -> None:
        """Count the results of a forward for stages of the same rank, which need no message."""
        for edge in self.schedule.edges_out_of[forward.stage]:
            if self.schedule.rank_of(self.schedule.edges[edge].target, forward.replica) == self.rank:
                key = (edge, forward.micro_batch, forward.replica, "forward")
                self._alive[key] = 0 if self.schedule.has_shadows else self.edge_bytes[edge]

    def send(self, message: Message) -> int:
        """Return by how many bytes the rank holds more after a send. The result of a forward is counted already."""
        channel, freed = message.channel, 0
        if channel in self.schedule.awaited and channel in self._last:
            freed = self._alive.pop(self._last[channel], 0)
        self._last[channel] = message.key
        self._alive[message.key] = self.edge_bytes[message.edge]
        return (0 if message.kind == "send_forward" else self.edge_bytes[message.edge]) - freed

    def freed_before(self, action: Action) -> int:
        """Return the bytes that are known to be used when the inputs of an action have arrived."""
        received, inputs = self.schedule.messages(action)[0], self.schedule.edges_into[action.stage]
        gone = [key for message in received for key in self.arrived.get(message.key, ())]
        if self.schedule.name == "message":  # a rank that chooses its order has used a tensor whose gradient it sends
            gone = [key for key in gone if key[-1] == "backward"]
            gone += [(*message.key[:3], "forward") for message in received if message.direction == "backward"]
        if action.kind == "forward":
            gone += [(edge, action.micro_batch, action.replica, "forward") for edge in inputs]
        return sum(self._alive.pop(key, 0) for key in gone)

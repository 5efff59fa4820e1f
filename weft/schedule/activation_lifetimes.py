"""The bytes that a rank of a pipeline holds beside its state, over its list of actions.

A forward adds what its stage saves and its result; both live until its backward. A receive holds its buffer from where
it is posted. A sent tensor lives until it is known to have arrived. No message confirms that, but a rank that has sent
us something has run all earlier actions of its list, and so has used what we had sent it for them. If weight gradients
are separate actions, backward leaves their inputs. If ranks have shadows, all results for other ranks and all that
shadows save live until the step ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weft.schedule.actions import SHADOW, Message, Schedule

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
    arrived = {} if schedule.has_shadows else confirmed_sends(schedule, rank)
    held = most = 0
    for step in schedule.lists[rank]:
        if isinstance(step, Message):
            # a forward send is the stage's result, counted already
            held += edge_bytes[step.edge] * (step.kind != "send_forward")
            most = max(most, held)
            continue
        own, received = stages[step.stage], schedule.messages(step)[0]
        gone = [key for message in received for key in arrived.get(message.key, ()) if key[-1] == "backward"]
        held -= sum(edge_bytes[edge] for edge, *_ in gone)
        given = sum(edge_bytes[message.edge] for message in received)
        made = sum(edge_bytes[edge] for edge in schedule.edges_out_of[step.stage])
        if step.kind == "forward":
            held += own.saved_bytes - given + made  # what was received is among what is saved
        elif step.kind == "backward":
            held -= given  # part of what backward holds
            most = max(most, held + own.peak_bytes)
            held -= own.saved_bytes + (0 if schedule.has_shadows else made)
            held += own.late_bytes if step.stage in schedule.split_stages else 0
        elif step.kind == SHADOW:
            shared = sum(edge_bytes[edge] for edge in schedule.edges_into[step.stage])  # the rank's own result
            held += own.saved_bytes - shared + made
        else:
            held -= own.late_bytes
        most = max(most, held)
    return most

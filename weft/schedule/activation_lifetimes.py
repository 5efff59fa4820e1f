"""What a rank of a pipeline holds beside its state, and until when.

A forward leaves what its stage has saved, and its result, which lives until its backward. Receives hold their place
from where they are posted. What was sent lives until it is known to have arrived: no message says so, but a rank that
has sent us something has done all that comes before it in its list, and used what we had sent it for that. Where weight
gradients are actions of their own, backward leaves their inputs. Where ranks have shadows, all that was made for others
lives until the step ends, and so does what shadows have saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weft.schedule.actions import SHADOW, Message, Schedule

Key = tuple[int, int, int, str]


def answers(schedule: Schedule, rank: int) -> dict[Key, list[Key]]:
    """For each message that the rank takes, those that it has sent and that have arrived by then; each once."""
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
    """Of one micro-batch: what a stage saves, what its backward holds beside that, and leaves for weight gradients."""

    saved_bytes: int
    peak_bytes: int
    late_bytes: int


def most_held(schedule: Schedule, rank: int, stages: Mapping[int, StageBytes], edge_bytes: Sequence[int]) -> int:
    """The most bytes at once over the rank's list."""
    arrived = {} if schedule.has_shadows else answers(schedule, rank)
    held = most = 0
    for step in schedule.lists[rank]:
        if isinstance(step, Message):
            held += edge_bytes[step.edge] * (step.kind != "send_forward")  # which is the stage's result
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
            held -= given  # it is among what backward holds
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

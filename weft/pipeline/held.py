"""The most that a rank of a pipeline holds beside its state: its own list replayed, action by action.

A forward leaves what its stage has saved, and its result, which lives until the backward that it gets its gradient in.
Receives hold their place from where they are posted. A gradient that was sent lives until the step ends, because the
sender is not told when it has arrived. Where weight gradients are actions of their own, backward leaves their inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weft.pipeline.actions import Message, Schedule


class StageBytes(NamedTuple):
    """Of one micro-batch: what a stage saves, what its backward holds beside that, and leaves for weight gradients."""

    saved_bytes: int
    peak_bytes: int
    late_bytes: int


def most_held(schedule: Schedule, rank: int, stages: Mapping[int, StageBytes], edge_bytes: Sequence[int]) -> int:
    """The most bytes at once over the rank's list."""
    held = most = 0
    for step in schedule.lists[rank]:
        if isinstance(step, Message):
            held += edge_bytes[step.edge] * (step.kind != "send_forward")  # which is the stage's result
            most = max(most, held)
            continue
        own = stages[step.stage]
        received = sum(edge_bytes[message.edge] for message in schedule.messages(step)[0])
        made = sum(edge_bytes[edge] for edge in schedule.edges_out_of[step.stage])
        if step.kind == "forward":
            held += own.saved_bytes - received + made  # what was received is among what is saved
        elif step.kind == "backward":
            held -= received  # it is among what backward holds
            most = max(most, held + own.peak_bytes)
            held -= own.saved_bytes + made
            held += own.late_bytes if step.stage in schedule.split_stages else 0
        else:
            held -= own.late_bytes
        most = max(most, held)
    return most

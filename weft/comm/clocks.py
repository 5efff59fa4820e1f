"""The differences between the clocks of ranks, so that times of different hosts can be compared.

Rank 0 sends a message to each other rank, which answers with its clock. The answer was given about half way between the
send and the receive of rank 0, and best so in the fastest of several rounds (as in Cristian's algorithm).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from weft.comm.collectives import Axis, broadcast, receive, send
from weft.comm.ledger import Ledger

ROUNDS = 8


def clock_offset(axis: Axis, clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns this rank's clock minus that of the axis' first rank, in seconds. All ranks of the axis call it."""
    axis = replace(axis, ledger=Ledger(), levels=None)  # not in the ledger of the run
    offsets = torch.zeros(axis.degree, dtype=torch.float64)
    answer = torch.zeros(1, dtype=torch.float64)
    for peer in range(1, axis.degree):
        if axis.index == peer:
            for _ in range(ROUNDS):
                receive(answer, axis, 0, "clock").wait()
                send(torch.tensor([clock()], dtype=torch.float64), axis, 0, "clock").wait()
        elif axis.index == 0:
            rounds = []
            for _ in range(ROUNDS):
                sent = clock()
                send(answer, axis, peer, "clock").wait()
                receive(answer, axis, peer, "clock").wait()
                rounds.append((sent, float(answer), clock()))
            offsets[peer] = offset_of(rounds)
    broadcast(offsets, axis).wait()
    return float(offsets[axis.index])


def offset_of(rounds: Sequence[tuple[float, float, float]]) -> float:
    """Returns the other clock's offset, from (own clock at the send, other clock, own clock at the receive) of each
    round.
    """
    sent, other, received = min(rounds, key=lambda one: one[2] - one[0])
    return other - (sent + received) / 2

"""Collectives as rounds of messages in a circle of N nodes: rings, and recursive doubling for any N (Bruck).

A node holds N blocks. Block `offset` of node r belongs to node (r + offset) % N, so offset 0 is its own.

    all_gather       in each round, a node receives the next blocks from the node at +distance, which has them already
    reduce_scatter   the same rounds backwards: each node sends the sums of blocks that others own, and adds what comes
    all_to_all       a block moves by the binary digits of its offset, one digit a round

Rounds of a gather and their bytes: a ring has N - 1 rounds of one block; doubling has ceil(log2 N) rounds, and the same
N - 1 blocks in all. All-to-all by doubling sends up to N/2 blocks in each of ceil(log2 N) rounds, more than the N - 1
blocks that direct messages send. See Bruck et al. (1997) and Thakur, Rabenseifner and Gropp (2005).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

Algorithm = Literal["flat", "library", "ring", "doubling"]
MESSAGES: tuple[Algorithm, ...] = ("ring", "doubling")  # the algorithms between nodes that are made of messages


class GatherRound(NamedTuple):
    """Receive `num_blocks` blocks from the node at +`distance`. They begin at our block `first`, which is block `first`
    minus `distance` of that node.
    """

    distance: int
    first: int
    num_blocks: int


@lru_cache
def gather_rounds(algorithm: Algorithm, num_nodes: int) -> tuple[GatherRound, ...]:
    """The rounds of an all-gather. A reduce-scatter goes through them from the last to the first."""
    rounds, held = [], 1
    while held < num_nodes:
        distance = 1 if algorithm == "ring" else held
        rounds.append(GatherRound(distance, held, min(distance, num_nodes - held)))
        held += rounds[-1].num_blocks
    return tuple(rounds)


@lru_cache
def exchange_rounds(algorithm: Algorithm, num_nodes: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The rounds of an all-to-all: (distance to the receiver, offsets of the blocks that go there)."""
    if algorithm == "ring":
        return tuple((offset, (offset,)) for offset in range(1, num_nodes))
    distances = [1 << digit for digit in range((num_nodes - 1).bit_length())]
    return tuple((one, tuple(offset for offset in range(num_nodes) if offset & one)) for one in distances)


def blocks_sent(algorithm: Algorithm, operation: str, num_nodes: int) -> list[int]:
    """The number of blocks in each message of a rank. A block is the N-th part of the operation's tensor."""
    if operation == "all_to_all":
        return [len(offsets) for _, offsets in exchange_rounds(algorithm, num_nodes)]
    counts = [one.num_blocks for one in gather_rounds(algorithm, num_nodes)]
    return {"all_gather": counts, "reduce_scatter": counts[::-1], "all_reduce": [*counts[::-1], *counts]}[operation]

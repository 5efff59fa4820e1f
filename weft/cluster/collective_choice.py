"""Chooses how a collective over several nodes is carried out, and says which calls it is made of.

For N nodes with L ranks each, and W bytes of the whole tensor (of one rank's tensor for all_to_all):

    flat      one call of the library over all N L ranks
    library   two levels: the library's call between nodes, among equal local indices, and its call inside the node
    ring      two levels, with messages in a ring between nodes
    doubling  two levels, with messages over doubling distances between nodes

If L ranks share each of N devices, an all-reduce is a reduction to the first rank of the device, its leader, an
all-reduce over leaders, which only they call, and a broadcast on the device. Other operations are flat.

`calls_of` is the one description of the calls: the runtime makes them, the ledger counts them, and their prices add up
to the time that is compared. Times are those that `weft bench` measured for the same operation, nodes and ranks, read
between the two nearest sizes; without them, they follow from the links of the cluster.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from weft.cluster.communication import Between
from weft.cluster.hardware import AxisLink, MeasuredCollective, ring_seconds
from weft.cluster.rounds import MESSAGES, Algorithm, blocks_sent

ALGORITHMS: tuple[Algorithm, ...] = ("flat", "library", "ring", "doubling")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# Parts of an all-reduce start at multiples of this, as GPU links prefer. The padding depends on the bytes only.
ALIGNMENT_BYTES = 16
# Rows of tokens for experts: ranks send different numbers of them, which only the flat operation takes.
UNEVEN = {("expert", "all_to_all"), ("experts", "all_to_all")}


class LevelCall(NamedTuple):
    """A call of an operation: over the whole axis (level ""), "node" or "local", or "leaders" or "device". Messages are
    calls of "send".
    """

    level: str
    operation: str
    num_bytes: int


@dataclass(frozen=True)
class Levels:
    """How collectives of one axis use its nodes, or the devices that ranks share (`shares_device`). `links` has the
    link of the axis (""), of "node" and of "local"; without links, "fastest" is "library".
    """

    num_nodes: int
    num_local: int
    between: Between = "library"
    axis: str = ""
    links: Mapping[str, AxisLink] | None = field(default=None, hash=False)
    measured: tuple[MeasuredCollective, ...] = ()
    shares_device: bool = False

    def algorithm(self, operation: str, num_bytes: int) -> Algorithm:
        """The algorithm of one call. It is a function of the operation and its bytes, so all ranks choose alike."""
        if operation not in OPERATIONS or self.shares_device or (self.axis, operation) in UNEVEN:
            return "flat"
        if operation == "all_reduce" and num_bytes < ALIGNMENT_BYTES * self.num_nodes * self.num_local:
            return "flat"  # so few bytes per rank that several operations would only add latency
        if self.between != "fastest":
            return self.between
        if self.links is None:
            return "library"
        return min(ALGORITHMS, key=lambda one: self.seconds(one, operation, num_bytes))

    def calls(self, operation: str, num_bytes: int) -> tuple[LevelCall, ...]:
        """The calls that replace one call of the flat operation."""
        if self.shares_device and operation == "all_reduce":
            between = [LevelCall("leaders", operation, num_bytes)] if self.num_nodes > 1 else []
            return (LevelCall("device", "reduce", num_bytes), *between, LevelCall("device", "broadcast", num_bytes))
        return calls_of(self.algorithm(operation, num_bytes), operation, num_bytes, self.num_nodes, self.num_local)

    def seconds(self, algorithm: Algorithm, operation: str, num_bytes: float) -> float:
        """The time of one operation by an algorithm: measured, or by the links of the levels."""
        if (found := self._measured(operation)) is not None:
            return between_sizes(found[algorithm], num_bytes)
        assert self.links is not None
        degrees = {"": self.num_nodes * self.num_local, "node": self.num_nodes, "local": self.num_local}
        calls = calls_of(algorithm, operation, int(num_bytes), self.num_nodes, self.num_local)
        total = 0.0
        for level, name, size in calls:
            bandwidth, latency, _ = self.links[level]
            total += ring_seconds(name, size, degrees[level], bandwidth, latency)
        return total

    def is_measured(self, operation: str) -> bool:
        """Are there measured times of all algorithms for this operation?"""
        return self._measured(operation) is not None

    def _measured(self, operation: str) -> dict[Algorithm, MeasuredCollective] | None:
        """What was measured of all algorithms of this operation; None if one is missing."""
        shape = (operation, self.num_nodes, self.num_local)
        rows = {one.algorithm: one for one in self.measured if (one.operation, one.num_nodes, one.num_local) == shape}
        return rows if len(rows) == len(ALGORITHMS) else None


@lru_cache(maxsize=4096)
def calls_of(
    algorithm: Algorithm, operation: str, num_bytes: int, num_nodes: int, num_local: int
) -> tuple[LevelCall, ...]:
    """The calls that replace one call of a flat operation, in their order."""
    if algorithm == "flat":
        return (LevelCall("", operation, num_bytes),)
    inside, across = num_bytes, num_bytes // num_local
    if operation == "all_reduce":
        inside = padded_bytes(num_bytes, num_nodes if algorithm in MESSAGES else 1, num_local)
        between = _between(algorithm, operation, inside // num_local, num_nodes)
        calls = [LevelCall("local", "reduce_scatter", inside), *between, LevelCall("local", "all_gather", inside)]
    elif operation == "all_gather":
        calls = [*_between(algorithm, operation, across, num_nodes), LevelCall("local", operation, inside)]
    elif operation == "reduce_scatter":
        calls = [LevelCall("local", operation, inside), *_between(algorithm, operation, across, num_nodes)]
    else:
        calls = [LevelCall("local", operation, inside), *_between(algorithm, operation, num_bytes, num_nodes)]
    return tuple(call for call in calls if call.level != "local" or num_local > 1)


def _between(algorithm: Algorithm, operation: str, num_bytes: int, num_nodes: int) -> list[LevelCall]:
    if num_nodes == 1:
        return []
    if algorithm == "library":
        return [LevelCall("node", operation, num_bytes)]
    block = num_bytes // num_nodes
    return [LevelCall("node", "send", block * count) for count in blocks_sent(algorithm, operation, num_nodes)]


def padded_bytes(num_bytes: int, num_nodes: int, num_local: int) -> int:
    """The bytes of an all-reduce's tensor, padded to equal, aligned parts for all ranks of a node. With messages
    between nodes, these parts divide into equal, aligned blocks for all nodes.
    """
    unit = ALIGNMENT_BYTES * num_nodes * num_local
    return -(-num_bytes // unit) * unit


def between_sizes(measured: MeasuredCollective, num_bytes: float) -> float:
    """The measured time at a size: linear between the nearest two sizes, in proportion beyond the largest."""
    sizes, seconds = measured.sizes, measured.seconds
    place = bisect.bisect_left(sizes, num_bytes)
    if place == 0:
        return seconds[0]
    if place == len(sizes):
        return seconds[-1] * num_bytes / sizes[-1]
    share = (num_bytes - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
    return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])


def describe_choices(levels: Levels, operation: str, sizes: Sequence[int]) -> list[tuple[Algorithm, int, int]]:
    """The fastest algorithm from one size to another: (algorithm, first size, last size), in order of size."""
    found: list[tuple[Algorithm, int, int]] = []
    for size in sizes:
        best = min(ALGORITHMS, key=lambda one: levels.seconds(one, operation, size))
        if found and found[-1][0] == best:
            found[-1] = (best, found[-1][1], size)
        else:
            found.append((best, size, size))
    return found

"""The choice of activations that `memory.activations` offloads to host memory: which blocks, and how many bytes.

It is pure arithmetic, shared by runtime and cost. An offloaded block has until the next offloaded block to be copied to
the host, and is copied back one such interval ahead of its backward, so offloaded blocks are spread over the chain
(Sentinel's migration interval, Ren et al. 2021: copies hide behind the compute of an interval). The last interval stays
on the device: backward needs it first, and there would be no time to copy it.

    share 1/3:   sent  │  .  │  .  │ sent │  .  │  .  │ sent │  .  │  .  │  .
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from weft.plan import Plan
from weft.profiling.parts import Block, Profile
from weft.sharding.layout import evenly_spaced

MIN_OFFLOAD_BYTES = 1 << 20  # smaller storages stay: their copy takes longer to start than to run
_least: list[int] = [MIN_OFFLOAD_BYTES]  # the last one is in force


def min_offload_bytes() -> int:
    """The smallest storage that is offloaded, in bytes."""
    return _least[-1]


@contextmanager
def offload_from(num_bytes: int) -> Iterator[None]:
    """While the context is active, offload storages of at least `num_bytes`.

    Proofs need it: they run on tiny models.
    """
    _least.append(num_bytes)
    try:
        yield
    finally:
        _least.pop()


def offloaded_blocks(num_blocks: int, share: float) -> tuple[int, ...]:
    """Return the indices of the blocks whose saved activations are offloaded.

    They are the given share of all blocks without the last interval: at least one, and never the last block.
    """
    if not share:
        return ()
    last = max(1, num_blocks - math.ceil(1 / share - 1e-9))
    return tuple(place for place in evenly_spaced(num_blocks, share) if place < min(last, num_blocks - 1))


def offloaded_bytes(profile: Profile, plan: Plan) -> dict[str, int]:
    """Return the bytes that one micro-batch offloads, by block.

    A storage is copied once, with the first block that saves it.
    """
    found: dict[str, int] = {}
    seen = set[Any]()
    least = min_offload_bytes()
    for place in offloaded_blocks(len(profile.blocks), plan.memory.activations):
        block = profile.blocks[place]
        mine = {
            key: size for key, size in offloadable_storages(block, plan).items() if size >= least and key not in seen
        }
        seen |= {*mine}
        found[block.name] = sum(mine.values()) if block.in_backward else 0
    return found


def offloadable_storages(block: Block, plan: Plan) -> Mapping[Any, int]:
    """Return the storages of any size that a block may offload, with their bytes.

    In an uncompiled block, selective recompute keeps results where no hook sees them, so only the block's input is
    offloaded.
    """
    policy = plan.memory.recompute
    is_seen = policy != "selective" or block.backward_bytes is not None
    return block.sendable.get(policy if is_seen else "full", {})


def returning_bytes(blocks: Sequence[Block], sent: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes that are copied back during each block's backward: those of the nearest offloaded block
    before.
    """
    found, nearest = {}, 0
    for block in blocks:
        found[block.name] = nearest
        nearest = sent.get(block.name, nearest)
    return found

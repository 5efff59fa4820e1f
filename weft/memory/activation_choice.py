"""What `memory.activations` sends to host memory: which blocks, and of what they save, how many bytes. Pure arithmetic,
which runtime and cost share.

A block that is sent has until the next such block to go, and comes back one such interval ahead of its backward, so
they are spread over the chain (Sentinel's migration interval, Ren et al. 2021: copies hide behind the compute of an
interval). The last interval stays: backward wants it first, and it would have no time to go.

    share 1/3:   sent  │  .  │  .  │ sent │  .  │  .  │ sent │  .  │  .  │  .
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from weft.plan import Plan
from weft.profile.parts import Block, Profile
from weft.sharding.layout import evenly_spaced

LEAST_BYTES = 1 << 20  # what is smaller stays: a copy of it takes longer to start than to run
_least: list[int] = [LEAST_BYTES]  # the last is in force


def least_bytes() -> int:
    """The smallest storage that is sent."""
    return _least[-1]


@contextmanager
def sending_from(num_bytes: int) -> Iterator[None]:
    """While it lasts, storages of so many bytes and more are sent: proofs run on tiny models."""
    _least.append(num_bytes)
    try:
        yield
    finally:
        _least.pop()


def sent_blocks(num_blocks: int, share: float) -> tuple[int, ...]:
    """The places of the blocks that send what they save: the share of all, but for those of the last interval; one at
    least, and never the last.
    """
    if not share:
        return ()
    last = max(1, num_blocks - math.ceil(1 / share - 1e-9))
    return tuple(place for place in evenly_spaced(num_blocks, share) if place < min(last, num_blocks - 1))


def sent_bytes(profile: Profile, plan: Plan) -> dict[str, int]:
    """The bytes that one micro-batch sends, by block; a storage goes once, with the first that saves it."""
    found: dict[str, int] = {}
    seen = set[Any]()
    least = least_bytes()
    for place in sent_blocks(len(profile.blocks), plan.memory.activations):
        block = profile.blocks[place]
        mine = {key: size for key, size in sendable(block, plan).items() if size >= least and key not in seen}
        seen |= {*mine}
        found[block.name] = sum(mine.values()) if block.in_backward else 0
    return found


def sendable(block: Block, plan: Plan) -> Mapping[Any, int]:
    """The storages of any size that a block may send. Uncompiled, selective recompute keeps results where no hook sees
    them, and a block's input is all that goes.
    """
    policy = plan.memory.recompute
    is_seen = policy != "selective" or block.backward_bytes is not None
    return block.sendable.get(policy if is_seen else "full", {})


def ahead_bytes(blocks: Sequence[Block], sent: Mapping[str, int]) -> dict[str, int]:
    """For each block, what is on its way back in its backward: the bytes of the nearest block before it that went."""
    found, nearest = {}, 0
    for block in blocks:
        found[block.name] = nearest
        nearest = sent.get(block.name, nearest)
    return found

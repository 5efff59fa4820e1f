"""Memory policy `activations`: saved activations of a share of the blocks are kept in host memory. Exact.

It works with any `recompute`: with `full` a block's input is offloaded, the fewest bytes for what it saves; with `none`
all that it saves. `activation_copies.py` copies.

The choice of blocks is pure arithmetic, shared by runtime and cost. An offloaded block has until the next offloaded
block to be copied to the host, and is copied back one such interval ahead of its backward, so offloaded blocks are
spread over the chain (Sentinel's migration interval, Ren et al. 2021: copies hide behind the compute of an interval).
The last interval stays on the device: backward needs it first, and there would be no time to copy it.

    share 1/3:   sent  │  .  │  .  │ sent │  .  │  .  │ sent │  .  │  .  │  .
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from weft.inspection.blocks import find_blocks
from weft.memory.activation_copies import ActivationOffloader, min_offload_bytes
from weft.mesh import Mesh
from weft.plan import BatchSplit, Plan
from weft.profiling import Block, Profile
from weft.sharding.layout import evenly_spaced
from weft.strategy import Cost, Strategy, Values

ACTIVATIONS = "activations"  # key of host bytes


class ActivationPolicy(Strategy):
    """The strategy of `memory.activations`, a share of the blocks."""

    name = "activations"

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        share = plan.memory.activations
        if not share:
            return None
        if len(profile.blocks) < 2:
            return (
                f"memory.activations = {share:g} sends what blocks save, all but the last, and the model has "
                f"{len(profile.blocks)} (nn.ModuleList or nn.Sequential with parameters); use 0"
            )
        beside = {axis: degree for axis, degree in plan.degrees.items() if degree > 1 and axis not in ("data", "shard")}
        found = ", ".join(f"{axis} = {degree}" for axis, degree in beside.items())
        if plan.has_batch_statistics:
            found = "statistics = 'batch'"
        if found:
            return (
                f"memory.activations = {share:g} works beside data and shard, and the plan has {found}: use "
                f"activations = 0 there, or memory.recompute"
            )
        return None

    def cost(self, profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int]) -> Cost:
        sent = sum(offloaded_bytes(profile, plan).values())
        return Cost(saved_bytes=-sent, host_bytes={ACTIVATIONS: sent} if sent else {})

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        blocks = list(find_blocks(model).values())
        places = offloaded_blocks(len(blocks), plan.memory.activations)
        if places:
            ActivationOffloader(mesh.device).install(model, [blocks[place] for place in places], blocks[-1])
        return model


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

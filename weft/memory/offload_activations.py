"""Memory policy `activations`: saved activations of a share of the blocks are kept in host memory. Exact.

It works with any `recompute`: with `full` a block's input is offloaded, the fewest bytes for what it saves; with `none`
all that it saves. `activation_choice.py` chooses the blocks, `activation_copies.py` copies.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from weft.inspection.blocks import find_blocks
from weft.memory.activation_choice import offloaded_blocks, offloaded_bytes
from weft.memory.activation_copies import ActivationOffloader
from weft.mesh import Mesh
from weft.plan import BatchSplit, Plan
from weft.profiling import Profile
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

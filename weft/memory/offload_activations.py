"""Memory policy `activations`: what a share of the blocks save for backward waits in host memory. Exact.

Beside any `recompute`: with `full` a block's input goes, which is the least for what it saves; with `none` all that it
has saved. `sent.py` says which blocks and how much, `sending.py` does it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from weft.inspection.blocks import find_blocks
from weft.memory.activation_choice import sent_blocks, sent_bytes
from weft.memory.activation_copies import Sender
from weft.mesh import Mesh
from weft.plan import BatchSplit, Plan
from weft.profile import Profile
from weft.strategy import Cost, Strategy, Values

ACTIVATIONS = "activations"  # the kind of host memory


class ActivationPolicy(Strategy):
    """`memory.activations`, the share of blocks."""

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
        sent = sum(sent_bytes(profile, plan).values())
        return Cost(saved_bytes=-sent, host_bytes={ACTIVATIONS: sent} if sent else {})

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        blocks = list(find_blocks(model).values())
        places = sent_blocks(len(blocks), plan.memory.activations)
        if places:
            Sender(mesh.device).install(model, [blocks[place] for place in places], blocks[-1])
        return model

"""Memory policy `recompute`: keep fewer activations and compute them again in backward. Exact, dropout included.

`full` keeps each block's inputs only and runs its forward twice (Chen et al. 2016). `selective` also keeps the results
of matmuls, convolutions and attention, and recomputes only what is cheap: norms, activations, rotary embedding
(after Korthikanti et al. 2022). Applied to blocks; the root keeps all.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from weft.blocks import find_blocks
from weft.mesh import Mesh
from weft.plan import BatchSplit, Plan
from weft.profile import KEPT_OPERATIONS, Profile
from weft.strategy import Cost, Strategy, Values


class RecomputePolicy(Strategy):
    """`memory.recompute` = none, selective or full."""

    name = "recompute"

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        if plan.memory.recompute != "none" and not profile.blocks:
            return (
                f"memory.recompute = '{plan.memory.recompute}' works on blocks, and the model has none "
                f"(no nn.ModuleList or nn.Sequential with parameters); use 'none'"
            )
        return None

    def cost(self, profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int]) -> Cost:
        saved = sum((block.saved_bytes or {}).get(plan.memory.recompute, 0) for block in profile.all)
        again = sum(block.flops for block in profile.blocks) if plan.memory.recompute == "full" else 0
        transient = 0
        if plan.memory.recompute != "none" and profile.counted:  # the block in backward has all its activations back
            transient = max((block.saved_bytes or {}).get("none", 0) for block in profile.blocks)
        return Cost(
            saved_bytes=saved, transient_bytes=transient, flops=(3 * profile.flops + again) * split.accumulation
        )

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        if plan.memory.recompute == "none":
            return model
        keywords: dict[str, Any] = {"use_reentrant": False}
        if plan.memory.recompute == "selective":
            keywords["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        for block in find_blocks(model).values():
            # The forward is wrapped, not the module: hooks stay outside and state_dict keys stay as they are.
            block.forward = partial(checkpoint, block.forward, **keywords)
        return model


def _policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE

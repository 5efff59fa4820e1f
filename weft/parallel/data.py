"""Axis `data`: the batch split over replicas that hold the same state (data parallelism).

After its reduction over `shard`, each rank's slice of every block's gradient is all-reduced over `data`. This happens
once a step, and overlaps with the backward of earlier blocks. With `shard` > 1 that is hybrid sharding (HSDP). A
trained flat buffer of N elements in slices of N/shard needs one all-reduce of N/shard · m bytes, where m is the bytes
of an element of master state.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from weft.comm.ledger import Key
from weft.mesh import Mesh
from weft.plan import BatchSplit, Plan
from weft.profile import Profile
from weft.sharding.layout import master_bytes, trained_layouts
from weft.sharding.units import units_of
from weft.strategy import Cost, Strategy, Values, reductions_per_step, refuse_batch_mixers, tally


class DataAxis(Strategy):
    """Splits the batch over `data`."""

    name = "data"

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        return refuse_batch_mixers(profile, plan, "data", plan.data)

    def cost(self, profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int]) -> Cost:
        pairs: list[tuple[Key, int]] = []
        if plan.data > 1:
            for layout in trained_layouts(profile, plan):
                one = (("data", "all_reduce"), layout.slice_numel * master_bytes(plan))
                pairs += [one] * reductions_per_step(plan, split)
        return Cost(tally(pairs))

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        units = units_of(model)
        if plan.data > 1:
            assert units is not None
            for flat in units.flats:
                flat.mean_over.append(mesh["data"])
        return model

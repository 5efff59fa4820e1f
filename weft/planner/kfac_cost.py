"""What K-FAC (`train.kfac`) changes of AdamW's cost on a rank: traffic, and the optimizer's state."""

from __future__ import annotations

from dataclasses import replace

from weft.comm import add_traffic
from weft.optim.kfac_layers import KfacLayer, find_layers
from weft.optim.kfac_placement import kfac_state_bytes, kfac_traffic
from weft.optim.kfac_ranks import gathered_layouts
from weft.plan import Plan
from weft.profiling import Profile
from weft.run_tables import Kfac
from weft.sharding.layout import master_bytes, trained_layouts
from weft.strategy import Cost


def kfac_layers(options: Kfac, plan: Plan, whole: Profile) -> list[KfacLayer]:
    """The layers of the profile's model that K-FAC preconditions."""
    assert whole.model is not None
    names = {parameter.name for layout in trained_layouts(whole, plan) for parameter in layout.parameters}
    return find_layers(whole.model, names, options.exclude, options.max_size)


def with_kfac(one: Cost, options: Kfac, plan: Plan, whole: Profile) -> Cost:
    """A rank's cost in a step that samples factors and renews inverses, given that with AdamW."""
    layouts, layers = [*trained_layouts(whole, plan)], kfac_layers(options, plan, whole)
    slices = []
    for index in range(plan.shard.degree):
        parts = [part for layout in layouts for part in layout.parts(index)]
        slices.append({one.parameter.name: one.numel for one in parts if one.numel})
    own = {name for layer in layers for name in layer.parameter_names}
    gathered = [layout.numel for layout in gathered_layouts(layouts, own)]
    more = kfac_traffic(layers, options, plan.degrees, master_bytes(plan), gathered)
    optimizer = kfac_state_bytes(layers, slices, options, plan.data, master_bytes(plan))
    state = {**one.state_bytes, "optimizer": optimizer}
    return replace(one, traffic=add_traffic(one.traffic, more), state_bytes=state)

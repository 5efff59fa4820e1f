"""Axis `data`: the batch split over replicas that hold the same state (data parallelism).

After its reduction over `shard`, each rank's slice of every block's gradient is all-reduced over `data`. This happens
once a step, and overlaps with the backward of earlier blocks. With `shard` > 1 that is hybrid sharding (HSDP). A
trained flat buffer of N elements in slices of N/shard needs one all-reduce of N/shard · m bytes, where m is the bytes
of an element of master state. Software that shards the optimizer state over the replicas, the ranks of `data`, `expert`
and `context` (for experts those of them that hold the same), reduce-scatters gradients and all-gathers parameters over
them instead. Gradients that are rounded for the link (`plan.communication.reduce`) go by an all-to-all and an
all-gather (`comm/rounded.py`). Ranks that share a device (`plan.ranks_per_device`) sum gradients on it first, through
memory that each of them needs besides (`comm/device_sum.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import nn

from weft.cluster.wire_formats import message_bytes
from weft.comm.device_cells import STAGING_BYTES
from weft.mesh import Mesh
from weft.parallel.buffer_traffic import buffer_traffic
from weft.parallel.model_state import all_flats
from weft.plan import BatchSplit, Plan
from weft.profiling import Profile
from weft.profiling.software import Software
from weft.profiling.workload import Call
from weft.strategy import Buffer, Cost, Strategy, Transient, Values, refuse_batch_mixers, tally


class DataAxis(Strategy):
    """Splits the batch over `data`."""

    name = "data"

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        return refuse_batch_mixers(profile, plan, "data", plan.data)

    def cost(self, profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int]) -> Cost:
        staging = Transient(step_bytes=STAGING_BYTES if plan.ranks_per_device > 1 else 0)
        return Cost(tally(buffer_traffic(self, profile, plan, split)), transient=staging)

    def buffer_calls(self, buffer: Buffer, plan: Plan, software: Software) -> Iterable[Call]:
        own = buffer.numel / plan.shard.degree
        if software.shards_optimizer:
            experts = buffer.expert_numel / plan.shard.degree
            for axis, numel in (("replicas", own - experts), ("expert replicas", experts)):
                if numel:  # where there is one replica, these take no time
                    yield Call(axis, "reduce_scatter", numel * buffer.gradient_bytes, "reduce")
                    yield Call(axis, "all_gather", numel * buffer.compute_bytes, "reduce")
        elif plan.data > 1 and plan.communication.reduce != "exact":
            num_bytes = plan.data * message_bytes(math.ceil(own / plan.data), plan.communication.reduce)
            yield Call("data", "all_to_all", num_bytes, "reduce")
            yield Call("data", "all_gather", num_bytes, "reduce")
        elif plan.data > 1:
            yield Call("data", "all_reduce", own * buffer.gradient_bytes, "reduce")

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        if plan.data > 1:
            for flat in all_flats(model):
                flat.mean_over.append(mesh["data"])
        return model

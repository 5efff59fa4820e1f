"""Axis `expert`: the batch, and the experts of each layer, split over ranks.

Each rank has its own samples, as under `data`, and num_experts / expert of the experts of every layer. Tokens travel to
the ranks of their experts and back (`dispatch.py`). All other parameters are on every rank of the axis.

`plan.expert_over` folds other axes in: the experts are split over all ranks of `expert` × these axes, over which tokens
travel, and all else keeps the layout of these axes. Ranks of x hold the same tokens, so each sends a part of them
(`row_shares.py`). Ranks of y hold parts of the features of the tokens, and first exchange features for rows.

For E experts and rows of `hidden` elements with c bytes, k rows for each of a rank's tokens, a layer and micro-batch
has these all-to-alls. Bytes are those that a rank sends; r is the number of rows that arrive at the rank, which depends
on the routing and is k · tokens if all experts get the same:

    forward    8 · E (how many rows go to each expert)     k · tokens · hidden · c     r · hidden · c (results)
    backward                                               k · tokens · hidden · c     r · hidden · c

Experts with a capacity of C tokens of each sequence take E · C · sequences rows, also where fewer tokens chose them.
These are both k · tokens and r above, and no counts are sent.

Recompute repeats those of forward. Gradients are means over the samples of all ranks: those of experts have been summed
by the dispatch already, others are summed by one all-reduce of each trained slice a step.

A layer with fewer experts than ranks has its experts on each of several parts of the axis, of as many neighbours as it
has experts. Its all-to-alls go over a part (`expert:4`), and gradients of its experts are summed over the ranks at the
same place in all parts (`expert%4`).

Under y, each layer also has two all-to-alls over y each way, and sums of the router's logits (`traffic.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from weft.mesh import Mesh
from weft.parallel.cut_parameters import cut_parameters, cut_profile, global_shapes, profiled_shapes
from weft.parallel.expert.layers import (
    RowAxes,
    distribute,
    expert_cuts,
    expert_degree,
    expert_layers,
    num_experts_of,
    refuse_layer,
    row_parts,
)
from weft.parallel.expert.routing import refuse_split_sequences, split_routers
from weft.parallel.expert.row_shares import refusal
from weft.parallel.expert.traffic import COUNT_BYTES, GATHER_KEY, layer_traffics, refuse_uncounted
from weft.plan import BatchSplit, Plan
from weft.profiling import Profile
from weft.profiling.software import BlockPass, Software
from weft.profiling.workload import Call
from weft.sharding.layout import COMPUTE_DTYPE
from weft.strategy import (
    Buffer,
    Cost,
    SearchSpace,
    Strategy,
    Values,
    divisors,
    refuse_batch_mixers,
    tally,
    uncounted_traffic,
)


class ExpertAxis(Strategy):
    """Splits experts, and the batch, over `expert`."""

    name = "expert"
    axes = ("expert",)

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        degree, given = plan.num_expert_parts, _given(plan)
        if plan.tensor.drop_duplicates and (degree == 1 or plan.tensor.x == 1):
            return (
                f"tensor.drop_duplicates = true drops copies that ranks of x send over expert; given x = "
                f"{plan.tensor.x} and expert = {degree}, use both above 1, or drop_duplicates = false"
            )
        assert profile.model is not None
        layers = expert_layers(profile.model)
        if plan.expert_over and not layers:
            return (
                f"plan.expert_over = {list(plan.expert_over)} splits experts, but {type(profile.model).__name__} has "
                f"no layer of experts that weft can split; leave expert_over out"
            )
        if not _is_active(profile.model, plan) and degree == 1:
            return None
        if not layers:
            return (
                f"{given}, but {type(profile.model).__name__} has no layer of experts that weft can split "
                f"(weft.models' StackedExperts, or transformers' stacked experts); use expert = 1, and data or shard"
            )
        for name, layer in layers.items():
            num_experts, reason = num_experts_of(layer), refuse_layer(name, layer)
            if reason is not None:
                return f"{given}, but {reason}; use expert = 1, and data or shard"
            if expert_degree(plan, num_experts) is None:
                return f"{given} does not divide the {num_experts} experts of '{name}'; use a divisor of {num_experts}"
        if (reason := refuse_uncounted(profile, layers)) is not None:
            return f"{given}, but {reason}; or use expert = 1, and data or shard"
        fewest = min(map(num_experts_of, layers.values()))
        if fewest < degree and plan.pipe.degree > 1:
            return (
                f"{given} is more than the {fewest} experts of a layer, whose ranks then form groups of their own, and "
                f"stages of pipe = {plan.pipe.degree} would form different ones; use expert = {fewest}, or pipe = 1"
            )
        if plan.tensor.sequence and (reason := refuse_split_sequences(profile.model, "tensor.sequence = true")):
            return reason
        return _refuse_rows(profile, plan) or refuse_batch_mixers(profile, plan, "expert", plan.expert)

    def localise(self, profile: Profile, plan: Plan, coordinates: Mapping[str, int]) -> Profile:
        assert profile.model is not None
        if not _is_active(profile.model, plan):
            return profile
        return cut_profile(profile, expert_cuts(profile.model, profiled_shapes(profile), plan, coordinates))

    def cost(self, profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int]) -> Cost:
        assert profile.model is not None
        if not _is_active(profile.model, plan):
            return Cost()
        if not profile.counted and expert_layers(profile.model):
            source = "the rows that a forward sends to experts"
            raise uncounted_traffic(_given(plan), source, "expert = 1, and data or shard")
        calls = [call for traffic in layer_traffics(profile, plan) for call in traffic.collectives(traffic.num_rows)]
        return Cost(tally(calls * split.accumulation))

    def settings(self, space: SearchSpace) -> Iterable[Mapping[str, Any]]:
        degrees = divisors(math.gcd(space.num_devices, space.num_experts))
        return [{}, *({"expert": degree} for degree in degrees[1:])]

    def block_calls(self, block: BlockPass, plan: Plan) -> Iterable[Call]:
        splits_experts = block.software.splits_experts and plan.tensor.x > 1
        is_local = plan.num_expert_parts == 1 and plan.tensor.y == 1 and not splits_experts
        if is_local or not block.work.routed_numel:
            return
        scale = block.micro_batch / plan.num_parts("tokens")
        rows_bytes = block.work.routed_numel * scale * COMPUTE_DTYPE[plan.precision].itemsize
        gather = Call(*GATHER_KEY, rows_bytes, "forward", beside="nothing")
        over_x, over_y = row_parts(plan)
        gather = gather._replace(num_bytes=rows_bytes / over_y)
        rows_bytes /= over_x * over_y * (plan.tensor.x if plan.tensor.sequence else 1)
        rows = Call(plan.expert_axis, "all_to_all", rows_bytes, "forward", beside="nothing")
        forward = [rows, rows]  # rows, and their results
        if not block.work.is_routed_evenly:
            counts = rows._replace(num_bytes=COUNT_BYTES * block.work.num_experts)
            forward = [rows, rows._replace(num_bytes=rows_bytes * block.software.imbalance), counts]
        forward = forward * (plan.num_expert_parts > 1)
        gathers = [gather] * (over_x > 1) + [rows._replace(axis="y")] * (2 * (over_y > 1))
        if splits_experts:  # rows of all ranks of x, and the sums of their results
            whole = gather._replace(num_bytes=rows_bytes * plan.tensor.x)
            gathers += [whole, whole._replace(operation="reduce_scatter")]
        yield from (*forward, *gathers)
        yield from (call._replace(phase="backward") for call in (*forward[:2], *gathers))
        if plan.memory.repeats_collectives:
            yield from (call._replace(phase="backward") for call in (*forward, *gathers))

    def buffer_calls(self, buffer: Buffer, plan: Plan, software: Software) -> Iterable[Call]:
        experts, others = buffer.expert_numel / plan.shard.degree, buffer.numel - buffer.expert_numel
        # Else `DataAxis` reduces over all replicas, or `ShardAxis` over `expert`, too.
        if plan.expert > 1 and not (software.shards_optimizer or software.shards_over_expert):
            yield Call("expert", "all_reduce", others / plan.shard.degree * buffer.gradient_bytes, "reduce")
        is_whole = not software.splits_experts and "x" not in plan.expert_over
        if experts and (plan.tensor.drop_duplicates or (plan.tensor.sequence and is_whole)):
            yield Call("x", "all_reduce", experts * buffer.gradient_bytes, "reduce")
        if experts and plan.tensor.y > 1 and "y" not in plan.expert_over:
            yield Call("y", "all_reduce", experts * buffer.gradient_bytes, "reduce")

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        if not _is_active(model, plan):
            return model
        layers = expert_layers(model)
        num_experts = {name: num_experts_of(layer) for name, layer in layers.items()}
        cut_parameters(model, expert_cuts(model, global_shapes(model), plan, mesh.coordinates))
        for name, layer in layers.items():
            distribute(layer, num_experts[name], RowAxes.of(plan, mesh, num_experts[name]))
        split_routers(model, mesh["y"])
        return model


def _is_active(model: nn.Module, plan: Plan) -> bool:
    """Does the plan split the experts of a model, the tokens that ranks of x or y have of them, or samples?

    Ranks of `expert` have different samples also in a pipeline stage without experts.
    """
    is_split = plan.num_expert_parts > 1 or plan.tensor.y > 1 or (plan.tensor.sequence and plan.tensor.x > 1)
    return plan.expert > 1 or (is_split and bool(expert_layers(model)))


def _given(plan: Plan) -> str:
    """Returns the degrees that experts are split over, in words."""
    return " × ".join(f"{axis} = {plan.degree(axis)}" for axis in plan.expert_axes) or "expert = 1"


def _refuse_rows(profile: Profile, plan: Plan) -> str | None:
    """Returns why ranks of x or y cannot send different rows of a micro-batch; None if they can, or need not."""
    over_x, over_y = row_parts(plan)
    if over_x * over_y == 1 or len(profile.stream_shape) != 3:
        return None
    batch, sequence, _ = profile.stream_shape
    sequence //= plan.context.degree * (plan.tensor.x if plan.tensor.sequence else 1)
    for experts in (one for block in profile.blocks for one in block.experts):
        rows = experts.num_rows(batch, sequence) // (1 if experts.capacity is None else experts.num_experts)
        if rows % over_x:
            return refusal(rows, "x", over_x)
        if rows // over_x % over_y:
            return refusal(rows // over_x, "y", over_y)
    return None

"""Axis `toy`: ranks that compute the same. They add up the results of each block, and average equal gradients.

It is no part of weft. `tests/planner/test_toy_axis.py` adds it to a copy of weft, as its next axis would be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from weft.comm import Axis, all_reduce
from weft.inspection.blocks import find_blocks
from weft.mesh import Mesh
from weft.parallel.buffer_traffic import buffer_traffic
from weft.plan import BatchSplit, Plan
from weft.profiling import Profile
from weft.profiling.software import BlockPass, Software
from weft.profiling.workload import Call
from weft.sharding.layout import COMPUTE_DTYPE
from weft.sharding.units import units_of
from weft.strategy import Buffer, Cost, SearchSpace, Strategy, Values, divisors, tally

LARGEST = 2


class ToyAxis(Strategy):
    """Repeats the work over `toy`."""

    name = "toy"
    axes = ("toy",)

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        degree = plan.degree("toy")
        return f"toy = {degree}; use at most {LARGEST}" if degree > LARGEST else None

    def settings(self, space: SearchSpace) -> Iterable[Mapping[str, Any]]:
        return ({"toy": degree} for degree in divisors(space.num_devices))

    def cost(self, profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int]) -> Cost:
        if plan.degree("toy") == 1:
            return Cost()
        one = (("toy", "all_reduce"), profile.stream_numel * COMPUTE_DTYPE[plan.precision].itemsize)
        of_blocks = [one] * len(profile.blocks) * split.accumulation
        return Cost(tally([*of_blocks, *buffer_traffic(self, profile, plan, split)]))

    def block_calls(self, block: BlockPass, plan: Plan) -> Iterable[Call]:
        if plan.degree("toy") > 1 and block.is_block:
            first = block.work.products[0]
            yield Call("toy", "all_reduce", 2 * block.micro_batch * first.rows * first.inputs, "forward")

    def buffer_calls(self, buffer: Buffer, plan: Plan, software: Software) -> Iterable[Call]:
        if plan.degree("toy") > 1:
            own = buffer.numel / plan.shard.degree
            yield Call("toy", "all_reduce", own * buffer.gradient_bytes, "reduce")

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        axis = mesh["toy"]
        if axis.degree == 1:
            return model
        for block in find_blocks(model).values():
            block.register_forward_hook(lambda _, __, result: _add_up(result, axis))
        units = units_of(model)
        assert units is not None
        for flat in units.flats:
            flat.mean_over.append(axis)
        return model


def _add_up(result: Tensor, axis: Axis) -> None:
    all_reduce(result.detach().clone(), axis).wait()

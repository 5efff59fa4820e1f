"""Axis `toy`: ranks of the same samples, each of which holds its rows of some weights and gathers them for use.

The weights are those of linears in blocks with more outputs than inputs. Each rank computes with all rows, so the
gradient of its own rows needs no sum. A weight of N elements with c bytes is all-gathered, N · c bytes, before each
product in forward and in recompute.

It is no part of weft. `tests/planner/test_toy_axis.py` adds it to a copy of weft, as its next axis would be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm import Axis
from weft.inspection.blocks import find_blocks
from weft.inspection.parameter_cut import Cut, share
from weft.mesh import Mesh
from weft.parallel.cut_parameters import cut_parameters
from weft.parallel.tensor.operations import gather
from weft.plan import BatchSplit, Plan
from weft.profiling import PARAMETER_CUTS, Block, Profile
from weft.profiling.software import BlockPass
from weft.profiling.workload import Call
from weft.sharding.layout import COMPUTE_DTYPE
from weft.strategy import Cost, SearchSpace, Strategy, Values, divisors, tally

LARGEST = 2


class ToyAxis(Strategy):
    """Splits the rows of some weights over `toy`."""

    name = "toy"
    axes = ("toy",)

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        degree = plan.degree("toy")
        if degree == 1:
            return None
        if degree > LARGEST:
            return f"toy = {degree}; use at most {LARGEST}"
        if plan.tensor.x * plan.tensor.y > 1:
            return f"toy = {degree} splits rows of weights that the tensor axes split, too; use tensor.x = tensor.y = 1"
        assert profile.model is not None
        for name, linear in _linears(profile.model).items():
            if linear.out_features % degree:
                return f"toy = {degree} does not divide the {linear.out_features} outputs of '{name}'; use toy = 1"
        return None

    def settings(self, space: SearchSpace) -> Iterable[Mapping[str, Any]]:
        is_alone = space.plan.tensor.x * space.plan.tensor.y == 1
        return ({"toy": degree} for degree in divisors(space.num_devices if is_alone else 1))

    def localise(self, profile: Profile, plan: Plan, coordinates: Mapping[str, int]) -> Profile:
        if plan.degree("toy") == 1:
            return profile
        assert profile.model is not None
        parameters = [parameter for block in profile.all for parameter in block.parameters]
        shapes = {one.name: one.cut.shape if one.cut else one.shape for one in parameters}
        own = _cuts(profile.model, shapes, plan.degree("toy"), coordinates["toy"])
        cuts = {one.name: own[one.name].beside(one.cut) for one in parameters}

        def local(block: Block) -> Block:
            mine = (replace(one, shape=cuts[one.name].local_shape, cut=cuts[one.name]) for one in block.parameters)
            return replace(block, parameters=tuple(mine))

        return replace(profile, root=local(profile.root), blocks=tuple(map(local, profile.blocks)))

    def cost(self, profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int]) -> Cost:
        if plan.degree("toy") == 1:
            return Cost()
        assert profile.model is not None
        again = {block.name for block in profile.blocks if plan.memory.repeats_collectives and block.in_backward}
        calls = []
        for block in find_blocks(profile.model):
            for name, linear in _linears(profile.model, block).items():
                times = len(profile.layer_calls[name]) * (2 if block in again else 1) * split.accumulation
                num_bytes = linear.out_features * linear.in_features * COMPUTE_DTYPE[plan.precision].itemsize
                calls += [(("toy", "all_gather"), num_bytes)] * times
        return Cost(tally(calls))

    def block_calls(self, block: BlockPass, plan: Plan) -> Iterable[Call]:
        if plan.degree("toy") > 1 and block.is_block:
            for product in block.work.products:
                if product.outputs > product.inputs:
                    num_bytes = product.inputs * product.outputs * COMPUTE_DTYPE[plan.precision].itemsize
                    yield Call("toy", "all_gather", num_bytes, "forward")
                    if plan.memory.repeats_collectives:
                        yield Call("toy", "all_gather", num_bytes, "backward")

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        axis = mesh["toy"]
        if axis.degree == 1:
            return model
        before, linears = PARAMETER_CUTS.get(model) or {}, _linears(model)
        shapes = {
            name: before[name].shape if name in before else tuple(one.shape) for name, one in model.named_parameters()
        }
        cut_parameters(model, _cuts(model, shapes, axis.degree, axis.index))
        for linear in linears.values():
            linear.forward = partial(_forward, linear, axis)
        return model


def _linears(model: nn.Module, block: str | None = None) -> dict[str, nn.Linear]:
    """The linears of blocks, or of one of them, whose weights are split."""
    blocks = find_blocks(model)
    return {
        f"{outer}.{inner}" if inner else outer: module
        for outer in ([block] if block else blocks)
        for inner, module in blocks[outer].named_modules()
        if isinstance(module, nn.Linear) and module.out_features > module.in_features
    }


def _cuts(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], degree: int, index: int) -> dict[str, Cut]:
    """The part of each parameter that a rank of the axis holds. All ranks hold the others, with equal gradients."""
    split = {f"{name}.weight" for name in _linears(model)}
    cuts = {name: replace(Cut.whole(shape), replicas=degree, is_first=index == 0) for name, shape in shapes.items()}
    for name in split & shapes.keys():
        rows = share(shapes[name][0], degree, index)
        cuts[name] = Cut(shapes[name], ((rows,), *Cut.whole(shapes[name]).intervals[1:]))
    return cuts


def _forward(linear: nn.Linear, axis: Axis, input: Tensor) -> Tensor:
    return F.linear(input, gather(linear.weight, axis, 0), linear.bias)

"""The layers of experts that can be split over ranks: their parameters on each rank, and how rows reach the experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from weft.comm import Axis
from weft.inspection.annotations import Annotation
from weft.inspection.parameter_cut import Cut, share
from weft.mesh import Mesh
from weft.models.experts import StackedExperts
from weft.models.router import routers_of
from weft.parallel.expert.dispatch import Compute, compute_on_owners
from weft.parallel.expert.interface import compute_interface, is_interface, refuse_interface
from weft.parallel.expert.row_shares import compute_own_rows, own_ends
from weft.plan import Plan

_NUM_EXPERTS = Annotation[int]("num_experts")  # of all ranks, on a layer whose experts are on several
_ROW_AXES = Annotation["RowAxes"]("row_axes")


def expert_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules whose parameters are stacked by expert, by name: weft's own and those of transformers."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, StackedExperts) or is_interface(module)
    }


def routed_parameters(model: nn.Module) -> frozenset[str]:
    """Returns the names of the parameters of experts and of weft's routers, which need not be whole under x and y."""
    inside = tuple(f"{name}." for name in (*expert_layers(model), *routers_of(model)))
    return frozenset(name for name, _ in model.named_parameters() if name.startswith(inside))


def refuse_layer(name: str, layer: nn.Module) -> str | None:
    """Returns why weft cannot compute a layer with its experts on several ranks; None if it can."""
    return None if isinstance(layer, StackedExperts) else refuse_interface(name, layer)


@dataclass(frozen=True)
class RowAxes:
    """The axes between the tokens of a layer and its experts, in the order in which rows pass them.

    `x`: ranks hold the same rows, and each sends a part of them. `y`: ranks hold parts of the rows' features, and each
    sends a part of the rows. `experts`: ranks hold different experts, to which rows are sent.
    """

    x: Axis | None
    y: Axis | None
    experts: Axis

    @staticmethod
    def of(plan: Plan, mesh: Mesh, num_experts: int) -> RowAxes:
        """Returns the axes of a layer with so many experts."""
        over_x, over_y = row_parts(plan)
        return RowAxes(
            mesh["x"] if over_x > 1 else None,
            mesh["y"] if over_y > 1 else None,
            mesh.part(expert_axis(plan, num_experts)),
        )


def expert_degree(plan: Plan, num_experts: int) -> int | None:
    """Returns over how many ranks the experts of a layer are split; None if the plan's degree does not allow it.

    If `expert` has more ranks than the layer has experts, neighbouring ranks form groups of as many as there are
    experts, and each group holds all of them, one on each rank.
    """
    parts = plan.num_expert_parts
    if num_experts % parts == 0:
        return parts
    return num_experts if plan.expert_axes == ("expert",) and parts % num_experts == 0 else None


def expert_axis(plan: Plan, num_experts: int) -> str:
    """Returns the name of the axis over which a layer with so many experts sends rows."""
    degree = expert_degree(plan, num_experts)
    return plan.expert_axis if degree == plan.num_expert_parts else f"expert:{degree}"


def row_parts(plan: Plan) -> tuple[int, int]:
    """Returns into how many parts ranks of x, and ranks of y, divide rows before these are sent to experts.

    Over x they do so if they hold the same rows, and the plan asks for it.
    """
    takes_part = (plan.tensor.drop_duplicates or "x" in plan.expert_over) and not plan.tensor.sequence
    return plan.tensor.x if takes_part else 1, plan.tensor.y


def distribute(layer: Any, num_experts: int, axes: RowAxes) -> None:
    """Replace a layer's forward by one that computes with the experts of all ranks."""
    _NUM_EXPERTS.set(layer, num_experts)
    _ROW_AXES.set(layer, axes)

    def everywhere(own: Compute) -> Compute:
        whole = partial(compute_on_owners, own, axes.experts, num_experts) if axes.experts.degree > 1 else own
        for axis in (axes.y, axes.x):
            whole = whole if axis is None else partial(compute_own_rows, whole, axis, num_experts)
        return whole

    is_ours = isinstance(layer, StackedExperts)
    interface = partial(compute_interface, layer, num_experts, everywhere)
    layer.forward = everywhere(layer.forward) if is_ours else interface


def num_experts_of(layer: nn.Module) -> int:
    """Returns the number of experts of a layer on this rank."""
    return next(layer.parameters()).shape[0]


def distributed_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers whose experts are on several ranks, by name."""
    return {name: module for name, module in model.named_modules() if _NUM_EXPERTS.get(module) is not None}


def axis_of_rows(layer: nn.Module) -> Axis:
    """Returns the axis over which a distributed layer sends rows to experts."""
    axes = _ROW_AXES.get(layer)
    assert axes is not None
    return axes.experts


def routed_counts(layer: nn.Module, rows: Tensor, chosen: Tensor | None, *_: Any) -> Tensor | None:
    """Returns how many rows this rank sends to each expert of all ranks in a call of a distributed layer [experts].

    `chosen` says before which row each expert ends or, for transformers' layers, the experts of each token. It is None,
    and so is the result, if all experts have equally many rows.
    """
    if chosen is None:
        return None
    ends, axes = chosen.long(), _ROW_AXES.get(layer)
    assert axes is not None
    if not isinstance(layer, StackedExperts):
        ends = chosen.flatten().bincount(minlength=_NUM_EXPERTS.get(layer) or 0).cumsum(0)
    for axis in (axes.x, axes.y):
        ends = ends if axis is None else own_ends(ends, axis)
    return ends.diff(prepend=ends.new_zeros(1))


def expert_cuts(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], plan: Plan, coordinates: Mapping[str, int]
) -> dict[str, Cut]:
    """Returns, by name, the part of every parameter of global shape that the rank at `coordinates` holds.

    Gradients of all but experts are partial sums over `expert`, because its ranks have different samples. Those of
    experts are partial sums over ranks that send different rows and hold the same experts: ranks of x and y, and those
    of `expert` in a layer with fewer experts than ranks.
    """
    inside = tuple(f"{name}." for name in expert_layers(model))
    index = 0
    for axis in plan.expert_axes:
        index = index * plan.degree(axis) + coordinates[axis]
    own = [axis for axis in plan.expert_axes if axis in ("expert", "context")]  # others are of the tensor axes
    others = Cut(
        (),
        (),
        math.prod(plan.degree(axis) for axis in own),
        ("expert",) if plan.expert > 1 else (),
        not any(coordinates[axis] for axis in own),
    )
    beside = [axis for axis in ("x", "y") if plan.degree(axis) > 1 and axis not in plan.expert_over]
    sums = tuple(axis for axis in beside if axis == "y" or plan.tensor.drop_duplicates or plan.tensor.sequence)
    experts = Cut(
        (),
        (),
        math.prod(plan.degree(axis) for axis in beside),
        sums,
        not any(coordinates[axis] for axis in beside),
        tuple(axis for axis in plan.expert_axes if axis == "context"),
        is_final=True,
    )

    def cut(name: str, shape: tuple[int, ...]) -> Cut:
        whole = Cut.whole(shape).intervals
        if not name.startswith(inside):
            return replace(others, shape=shape, intervals=whole)
        degree = expert_degree(plan, shape[0])
        assert degree is not None
        intervals = ((share(shape[0], degree, index % degree),), *whole[1:])
        if degree == plan.num_expert_parts:
            return replace(experts, shape=shape, intervals=intervals)
        return replace(
            experts,
            shape=shape,
            intervals=intervals,
            replicas=experts.replicas * plan.expert // degree,
            sums=(*sums, f"expert%{degree}"),
            is_first=experts.is_first and index < degree,
        )

    return {name: cut(name, shape) for name, shape in shapes.items()}

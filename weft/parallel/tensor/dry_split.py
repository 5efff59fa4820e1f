"""A copy of a model that is split over `x`, without values and without ranks: its collectives only count.

A forward of it on fake tensors shows the shapes that one rank of the split model has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from weft.comm import Axis, Ledger
from weft.inspection.pairing import pair
from weft.mesh import Mesh
from weft.parallel.tensor.axis import split_model
from weft.pipeline.stand_in import skeleton
from weft.plan import Plan


class _DryMesh(Mesh):
    """The mesh of the rank at `coordinates`, without process groups: collectives of its axes only count."""

    def __init__(self, plan: Plan, coordinates: Mapping[str, int]) -> None:
        self.plan, self.coordinates = plan, dict(coordinates)
        self.device, self.ledger = torch.device("cpu"), Ledger()

    def __getitem__(self, name: str) -> Axis:
        return Axis(name, self.plan.degree(name), self.coordinates[name], None, self.ledger, dry=True)


def dry_split(model: nn.Module, plan: Plan, x: int, proofs: dict[Any, Any]) -> nn.Module:
    """Returns the copy of a model that rank `x` of the axis would hold. `proofs` are as for `pair`.

    Hooks that the split adds to the model itself are left out: they mark its result for the loss.
    """
    made = skeleton(model)
    hooks = [(made.__dict__[kind], dict(made.__dict__[kind])) for kind in _HOOKS]
    split_model(made, pair(made, proofs), plan, _DryMesh(plan, {**dict.fromkeys(plan.degrees, 0), "x": x}))
    for held, before in hooks:
        held.clear()
        held.update(before)
    return made


_HOOKS = ("_forward_pre_hooks", "_forward_hooks")

"""How a model is to be viewed on a rank: written down with it before a plan is applied, and kept by its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from weft.plan import Plan
from weft.profile import Profile
from weft.spatial.dry_run import dry_run
from weft.spatial.view import Position
from weft.spatial.windows import Extra

_ATTRIBUTE = "_weft_tiling"


@dataclass(frozen=True)
class Tiling:
    """Of a model: the sizes of its images, how its result lies ("tile", "whole" on every rank, or "batch"), and what
    its layers compute beside their own pixels, so that later ones need not ask. `point`: see `View`.
    """

    sizes: tuple[int, int]
    output: str
    extras: Mapping[Position, Extra] = field(default_factory=dict)
    point: int | None = None


def tiling_of(model: nn.Module) -> Tiling | None:
    """How a model is tiled, or None for one that is not."""
    return model.__dict__.get(_ATTRIBUTE)


def tiling_for(whole: Profile, plan: Plan) -> Tiling | None:
    """How a plan that was not refused tiles a model; None where it does not."""
    if not plan.is_viewed:
        return None
    found = dry_run(whole, plan, {"rows": 0, "columns": 0})
    return Tiling(found.sizes, found.output, found.extras, found.point)


def mark(model: nn.Module, tiling: Tiling) -> None:
    """Write down how a model is tiled."""
    model.__dict__[_ATTRIBUTE] = tiling


def localise_tile(profile: Profile, plan: Plan, coordinates: Mapping[str, int]) -> Profile:
    """What the rank at these coordinates computes and keeps of a forward."""
    if not plan.is_viewed or not profile.counted:
        return profile
    return dry_run(profile, plan, coordinates).profile

"""How a plan tiles a model: stored with the model before the plan is applied, and copied to its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from weft.inspection.annotations import Annotation
from weft.plan import Plan
from weft.profiling import Profile
from weft.spatial.dry_run import dry_run
from weft.spatial.view import Position
from weft.spatial.windows import Extra


@dataclass(frozen=True)
class Tiling:
    """How a model is tiled.

    `sizes` are those of its images. `output` is the layout of its result: "tile", "whole" on every rank, or "batch".
    `extras` are the pixels beside their own that layers compute, so that later ones need not fetch them. `point`: see
    `View`.
    """

    sizes: tuple[int, int]
    output: str
    extras: Mapping[Position, Extra] = field(default_factory=dict)
    point: int | None = None


_TILING = Annotation[Tiling]("tiling")


def tiling_of(model: nn.Module) -> Tiling | None:
    """Return how a model is tiled; None if it is not."""
    return _TILING.get(model)


def tiling_for(whole: Profile, plan: Plan) -> Tiling | None:
    """Return how a plan that was not refused tiles a model; None if it does not."""
    if not plan.is_viewed:
        return None
    found = dry_run(whole, plan, {"rows": 0, "columns": 0})
    return Tiling(found.sizes, found.output, found.extras, found.point)


def mark(model: nn.Module, tiling: Tiling) -> None:
    """Store with a model how it is tiled."""
    _TILING.set(model, tiling)


def localise_tile(profile: Profile, plan: Plan, coordinates: Mapping[str, int]) -> Profile:
    """Return the profile of a forward on the rank at these coordinates."""
    if not plan.is_viewed or not profile.counted:
        return profile
    return dry_run(profile, plan, coordinates).profile

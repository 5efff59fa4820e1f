"""The search over plans for image models.

It tries grids of tiles (with where tiles end, how they are handed over, and how many layers share an exchange),
`branch` with equal and with different samples, `pipe`, `shard` and `data`, and pipeline schedules with one and with two
mirrored replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from weft.errors import PlanError
from weft.plan import Pipe, Plan, Tile
from weft.planner.candidate import Candidate
from weft.planner.image_step import ImageSteps
from weft.planner.search import Search
from weft.strategy import Strategy

FUSED = (1, 2, 4)  # layers that share one halo exchange
MIRRORED: tuple[Any, ...] = ("bidirectional", "gems")


class ImageSearch(Search):
    """Searches over tiles, and over pipeline schedules with stages that differ."""

    steps: ImageSteps

    @property
    def _base(self) -> Plan:
        return Plan(precision=self.question.precision, exact=self.question.exact)

    def _allowed(self, strategy: Strategy, fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        if "branch" in fields:
            return self._branches(fields)
        if "tile" not in fields:
            return super()._allowed(strategy, fields)
        return ({"tile": tile} for tile in self._tiles(fields["tile"].rows, fields["tile"].columns))

    def _refuses(self, plan: Plan, reason: str | None = None) -> bool:
        return super()._refuses(replace(plan, tile=Tile()), reason)  # a dry run of tiles was made before

    def _may_pipe(self, inner: Plan, pipe: Pipe) -> bool:
        return super()._may_pipe(replace(inner, tile=Tile()), pipe)

    def _branches(self, fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yields the fields if the model has such branches. Why it has not is an answer only to who asks for them."""
        key, is_asked = tuple(fields.items()), any(name.startswith("branch.") for name in self._names)
        if not is_asked and not any(block.branches for block in self.model.profile.all):
            return
        if key not in self._reasons:
            self._reasons[key] = self._reason(replace(self._base, **fields))
        reason = self._reasons[key]
        if reason is None:
            yield fields
        elif is_asked:
            self._refused.setdefault(reason, f"branch {fields['branch'].degree}")

    def _policies(self, inner: Plan) -> Iterator[Plan]:
        if inner.branch.degree == 1:
            yield from super()._policies(inner)
        elif inner.tile.degree == 1:  # tiles do not run beside branches
            for plan in super()._policies(inner):
                if plan.memory.recompute == "none" or self._has_branches_in_blocks(inner):
                    yield plan

    def _has_branches_in_blocks(self, inner: Plan) -> bool:
        """Are there branches that begin and meet in one block, as pipelines and recompute need?"""
        key = "in blocks", inner.branch
        if key not in self._reasons:
            self._reasons[key] = self._reason(replace(self._base, branch=inner.branch, pipe=Pipe(2)))
        return self._reasons[key] is None

    def _tiles(self, rows: int, columns: int) -> Iterator[Tile]:
        """Yields the tilings to try on a grid: layers per exchange, where tiles end, and how they are handed over."""
        if rows * columns == 1:
            yield Tile()
            return
        sections, name = self.steps.sections, f"tile {rows} × {columns}"
        if rows > sections.sizes[0] or columns > sections.sizes[1]:
            self._refused.setdefault("more tiles than the image has pixels", name)
            return
        if sections.no_point:
            self._refused.setdefault(sections.no_point, "tile.until")
        for fused in FUSED:
            for until in ("", *sections.points):
                for hand_over in ("gather", "batch"):
                    tile = Tile(rows, columns, until, hand_over, fused)  # type: ignore[arg-type]
                    is_whole = sections.handed_over_at(tile) < len(sections.whole)
                    if (hand_over == "batch" and not is_whole) or not self._asked.holds_inner(Plan(tile=tile), "tile."):
                        continue
                    try:
                        sections.under(tile)
                    except PlanError as error:
                        self._refused.setdefault(str(error), name)
                        return
                    yield tile

    def _pipes(self, degree: int, inner: Plan) -> list[Pipe]:
        if degree == 1:
            return [Pipe()]
        if inner.branch.degree > 1:
            return [Pipe(degree)] if self._has_branches_in_blocks(inner) else []
        if inner.tile.degree > 1 and self._refuses_pipe is not None:
            self._refused.setdefault(self._refuses_pipe, "tiles and pipe")
            return []
        return [Pipe(degree), *(Pipe(degree, name) for name in MIRRORED if degree % 2 == 0)]

    @cached_property
    def _refuses_pipe(self) -> str | None:
        """The reason why the model does not allow `pipe` together with tiles; None if it does."""
        return self._reason(Plan(tile=Tile(1, 2), pipe=Pipe(2), exact=False))

    def _allows(self, plan: Plan, num_micro_batches: int) -> bool:
        if plan.pipe.schedule == "gems" and num_micro_batches % 2 and num_micro_batches > 1:
            return False
        mixer = self.model.profile.batch_mixers
        if plan.num_batch_ranks > 1 and plan.exact and mixer and plan.statistics == "rank":
            self._refused.setdefault(
                f"layer '{mixer[0]}' takes statistics over the batch, which they split; use norm = \"group\" or "
                f"GroupNorm, --where statistics=batch for statistics over all ranks, or --where exact=false for those "
                f"of each rank",
                "data and shard",
            )
            return False
        return True

    def _time(self, candidate: Candidate) -> Candidate:
        """Times the candidate, and names its stages in `pipe.split` so that a run uses the stages that were timed."""
        plan = candidate.plan
        if plan.pipe.degree > 1:
            plan = replace(plan, pipe=replace(plan.pipe, split=self.steps.split(plan)))
        return super()._time(replace(candidate, plan=plan))

"""The search over plans for models of images: grids of tiles with their hand-over and fused layers, beside pipe, shard
and data; schedules of one and of two mirrored replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from weft.errors import PlanError
from weft.plan import Memory, Pipe, Plan, Tile
from weft.planner.image_step import ImageSteps
from weft.planner.search import MAX_MICRO_BATCH, Candidate, Search, divisors

MAX_TILES = 64  # of an image
FUSED = (1, 2, 4)  # layers of one exchange
MIRRORED: tuple[Any, ...] = ("bidirectional", "gems")


class ImageSearch(Search):
    """Over tiles, and the schedules of stages that differ."""

    steps: ImageSteps

    def _inner_plans(self) -> Iterator[tuple[float, Plan]]:
        for degree in divisors(self.num_devices):
            for rows in divisors(degree) if degree <= MAX_TILES else ():
                for tile in self._tiles(rows, degree // rows):
                    yield from self._policies(tile)

    def _tiles(self, rows: int, columns: int) -> Iterator[Tile]:
        """The ways to work with a grid: which layers share an exchange, and where tiles end."""
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
                    if (hand_over == "batch" and not is_whole) or not self._is_asked(Plan(tile=tile), "tile."):
                        continue
                    try:
                        sections.under(tile)
                    except PlanError as error:
                        self._refused.setdefault(str(error), name)
                        return
                    yield tile

    def _policies(self, tile: Tile) -> Iterator[tuple[float, Plan]]:
        batch = self.question.batch
        for micro_batch in divisors(batch):
            if micro_batch > MAX_MICRO_BATCH:
                break
            if tile.hand_over == "batch" and micro_batch % tile.degree:
                continue
            for recompute in ("none", "selective", "full"):
                plan = Plan(
                    tile=tile,
                    micro_batch=micro_batch,
                    memory=Memory(recompute),  # type: ignore[arg-type]
                    precision=self.question.precision,
                    exact=self.question.exact,
                )
                if all(one.holds(plan) for one in self._inner):
                    seconds = sum(self.steps.chain(plan))
                    yield batch / micro_batch * seconds * tile.degree / self.num_devices, plan

    def _is_asked(self, plan: Plan, fields: str) -> bool:
        return all(one.holds(plan) for one in self._inner if one.name.startswith(fields))

    def _pipes(self, degree: int, inner: Plan) -> list[Pipe]:
        if degree == 1:
            return [Pipe()]
        if inner.tile.degree > 1 and self._refuses_pipe is not None:
            self._refused.setdefault(self._refuses_pipe, "tiles and pipe")
            return []
        return [Pipe(degree), *(Pipe(degree, name) for name in MIRRORED if degree % 2 == 0)]

    @cached_property
    def _refuses_pipe(self) -> str | None:
        """Why there is no pipe beside tiles, where there is none."""
        return self._reason(Plan(tile=Tile(1, 2), pipe=Pipe(2), exact=False))

    def _allows(self, plan: Plan, num_micro_batches: int) -> bool:
        if plan.pipe.schedule == "gems" and num_micro_batches % 2 and num_micro_batches > 1:
            return False
        mixer = self.model.profile.batch_mixers
        if plan.num_batch_ranks > 1 and plan.exact and mixer:
            self._refused.setdefault(
                f"layer '{mixer[0]}' takes statistics over the batch, which they split; use norm = \"group\" or "
                f"GroupNorm, or --where exact=false for statistics of each rank",
                "data and shard",
            )
            return False
        return True

    def _time(self, candidate: Candidate) -> Candidate:
        """With the stages named, so that a run has those that were timed."""
        plan = candidate.plan
        if plan.pipe.degree > 1:
            plan = replace(plan, pipe=replace(plan.pipe, split=self.steps.split(plan)))
        return super()._time(replace(candidate, plan=plan))

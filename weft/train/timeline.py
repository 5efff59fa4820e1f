"""Draws the timeline of a pipeline: the actions of every rank in one step, measured and simulated.

Ranks time their actions anyway. After training, the ranks of the first pipeline gather the times, outside of the
ledger. The simulation uses the mean measured times of each stage, so differences come from the pipeline itself:
messages, uneven actions, cores that ranks share. Clocks of different hosts are only as synchronous as the hosts keep
them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from weft.comm import Ledger, all_gather
from weft.errors import PlanError
from weft.mesh import Mesh
from weft.pipeline.runtime import Pipeline
from weft.plan import Plan
from weft.schedule.actions import Action
from weft.schedule.draw import heading, refuse_path, write
from weft.schedule.simulate import Span, Timeline, simulate_like, timeline_of


def refuse_timeline(plan: Plan, path: Path | None) -> None:
    """Raises, before any work, if the plan has no pipeline or the path cannot be drawn to."""
    if plan.pipe.degree == 1:
        raise PlanError(
            f"a timeline shows the schedule of a pipeline, and this plan ({plan.describe_axes()}) has none; "
            f"set plan.pipe, or leave the timeline out"
        )
    if path is not None:
        refuse_path(path)


def measured(model: Pipeline, mesh: Mesh, num_micro_batches: int) -> Timeline:
    """Returns the timeline of this pipeline's last training step. All ranks of the pipeline call it."""
    schedule = model.schedule(num_micro_batches)
    axis = replace(mesh["pipe"], ledger=Ledger(), levels=None)  # not in the ledger of the run
    found = {span.action: span for span in model.spans if isinstance(span.action, Action)}
    rows = max(len(schedule.compute(rank)) for rank in range(schedule.num_ranks))
    own = torch.zeros(rows, 2, dtype=torch.float64)  # [actions of the list, start and end]
    for row, action in enumerate(schedule.compute(axis.index)):
        own[row, 0] = model.began + found[action].start_seconds
        own[row, 1] = model.began + found[action].end_seconds
    whole = torch.empty(axis.degree * rows, 2, dtype=torch.float64, device=mesh.device)
    all_gather(whole, own.to(mesh.device), axis).wait()
    times = [part[: len(schedule.compute(rank))].tolist() for rank, part in enumerate(whole.split(rows))]
    first = min(start for one in times for start, _ in one)
    busy = []
    for rank, one in enumerate(times):
        pairs = zip(schedule.compute(rank), one, strict=True)
        spans = [Span(start - first, end - first, action) for action, (start, end) in pairs]
        busy.append(sorted(spans, key=lambda span: span.start_seconds))
    return timeline_of(schedule, busy)


def draw_step(model: Pipeline, mesh: Mesh, num_micro_batches: int, path: Path) -> bool:
    """Draws the last training step. The ranks of the first pipeline call it. Returns whether this rank wrote the
    file.
    """
    found = measured(model, mesh, num_micro_batches)
    if not mesh.is_first:
        return False
    write(path, {f"simulated, {heading(found)}": simulate_like(found), "measured": found})
    return True

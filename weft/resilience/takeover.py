"""Recovers from the loss of a rank: the others form a new world group, compare their progress, and finish the step.

A rank that loses a connection closes all others, so that every waiting rank notices. Then it waits until the agent says
which rank was lost. The remaining ranks form a new world group and exchange their progress (`pipeline/sections.py`),
and the rank that shadowed the lost rank's stage takes it over (`schedule/shadow.py`). If that is not possible, the
error ends the rank, and the agent restarts all ranks.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]  # as documented

from weft.checkpoint import Saver
from weft.errors import LostRankError, PlanError
from weft.health.rank_status import FOLDER_VARIABLE, LostRank, StageTakeover, read_lost_rank, write_takeover
from weft.launch.environment import RankInfo, current_store, rejoin_world, shutdown
from weft.mesh import Mesh
from weft.pipeline.rank_model import pipeline_of
from weft.pipeline.runtime import Pipeline
from weft.pipeline.sections import Numbers, Sections
from weft.schedule.actions import Action

_POLL_SECONDS = 0.005
_LOST_RANK_SECONDS = 30.0  # how long to wait for the agent to report the lost rank


@dataclass(frozen=True)
class _Progress:
    """The progress of a rank."""

    number: int  # the number of its section
    last: Numbers  # the results of the section before
    done: list[dict[str, Any]]  # the actions of a training step that it has done in its section
    has_gradients: bool  # whether its shadow has the gradients of that step
    num_saves: int  # the number of saves that it has begun


class LostRankRecovery:
    """Recovers one rank from the loss of another. `step` returns the number of steps that are done."""

    def __init__(
        self, model: Pipeline, mesh: Mesh, saver: Saver, folder: Path, step: Callable[[], int], timeout: timedelta
    ) -> None:
        self._model, self._mesh, self._saver, self._folder, self._step = model, mesh, saver, folder, step
        self._timeout = timeout
        self._rank = mesh.rank  # the rank at the start, by which the agent knows this process
        self._has_lost = False
        self.sections = Sections(self._recover)
        model.sections = self.sections

    def _recover(self, why: str) -> Numbers | None:
        """Form a new world group without the lost rank and take over its stage. `why` is the error of the connection.
        Returns the results of this rank's section if others have finished it; None if it must be repeated. `Sections`
        calls this.
        """
        if self._has_lost:
            raise LostRankError(f"{why}; a rank had been lost before, and there are no shadows any more")
        self._has_lost = True
        store, mesh = current_store(), self._mesh
        num_ranks = mesh.plan.num_ranks
        self._model.let_go()
        mesh.release_groups()
        shutdown()
        gc.collect()  # process groups are closed when they are no longer referenced
        lost = self._await_lost_rank(why)
        new_rank = self._rank - (self._rank > lost.rank)
        named = rejoin_world(store, f"weft/without-{lost.rank}", new_rank, num_ranks - 1, self._timeout)
        progress = self._exchange_progress(named, [rank for rank in range(num_ranks) if rank != lost.rank])
        newest = max(one.number for one in progress.values())
        if any(one.number < newest - 1 for one in progress.values()):
            numbers = {rank: one.number for rank, one in progress.items()}
            raise LostRankError(f"{why}; ranks are in sections that do not follow each other: {numbers}")
        ahead = [one for one in progress.values() if one.number == newest]
        done = [Action(**action) for one in ahead for action in one.done]
        before = progress[lost.rank - 1]
        mesh.drop_pipe_rank()
        self._model.take_over(lost.rank, newest, done, before.has_gradients and before.number == newest)
        self._saver.continue_without(lost.rank, [one.num_saves for one in progress.values()])
        if self._rank == lost.rank - 1:
            seconds = time.monotonic() - lost.at
            write_takeover(self._folder, StageTakeover(lost.rank, self._rank, self._step() + 1, seconds))
        return None if self.sections.number == newest else ahead[0].last

    def _await_lost_rank(self, why: str) -> LostRank:
        """Wait until the agent reports the lost rank. The agent kills this process if no rank can take over."""
        deadline = time.monotonic() + _LOST_RANK_SECONDS
        while (lost := read_lost_rank(self._folder)) is None:
            if time.monotonic() > deadline:
                raise LostRankError(f"{why}; nobody said within {_LOST_RANK_SECONDS:.0f} s that a rank was lost")
            time.sleep(_POLL_SECONDS)
        return lost

    def _exchange_progress(self, store: Store, ranks: list[int]) -> dict[int, _Progress]:
        done, has_gradients = self._model.progress()
        actions, sections = [action._asdict() for action in done], self.sections
        own = _Progress(sections.number, sections.last, actions, has_gradients, self._saver.num_saves)
        store.set(f"state/{self._rank}", json.dumps(asdict(own)))
        return {rank: _Progress(**json.loads(store.get(f"state/{rank}"))) for rank in ranks}


def take_over_losses(
    model: nn.Module, mesh: Mesh, saver: Saver, rank_info: RankInfo, step: Callable[[], int], timeout: timedelta
) -> Sections | None:
    """Make a run with shadows (`pipe.shadow`) go on when a rank is lost, and return the sections that its steps run in.

    None if the plan has no shadows, or if the ranks were not started by weft's agent, which reports lost ranks. `step`
    returns the number of finished steps; `timeout` limits every collective.
    """
    folder, pipeline = os.environ.get(FOLDER_VARIABLE), pipeline_of(model)
    if pipeline is None or not mesh.plan.pipe.shadow:
        return None
    if mesh.device.type != "cpu":
        raise PlanError("plan.pipe.shadow = true works on CPUs, with Gloo; use train.device = 'cpu', or leave it out")
    if folder is None or rank_info.launcher != "weft":
        return None
    return LostRankRecovery(pipeline, mesh, saver, Path(folder), step, timeout).sections

"""Going on without a rank: those that are left form the world anew, agree on where they were, and finish the step.

Whoever loses a connection lets go of all others, so that every rank that waits learns of it, and waits for the agent's
word on who was lost. Then the ranks meet again, tell each other how far they have come (`sections.py`), and the rank
that shadowed the lost one's stage takes it over (`schedule/shadow.py`). Where that cannot be, the error ends the rank,
and the agent starts all again.
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

from torch.distributed import Store  # type: ignore[attr-defined]  # as documented

from weft.checkpoint import Saver
from weft.errors import LostRankError, PlanError
from weft.health.rank_status import FOLDER_VARIABLE, Lost, TakenOver, read_lost, tell_taken_over
from weft.launch.environment import Place, current_store, meet_again, shutdown
from weft.mesh import Mesh
from weft.pipeline.runtime import Pipeline
from weft.pipeline.sections import Numbers, Sections
from weft.schedule.actions import Action

_POLL_SECONDS = 0.005
_WORD_SECONDS = 30.0  # for the agent to say who was lost


@dataclass(frozen=True)
class _Progress:
    """How far a rank has come: its section, what the one before ended with, what it has done of a training step in it,
    whether its shadow has that step's gradients, and how many saves it has begun.
    """

    number: int
    last: Numbers
    done: list[dict[str, Any]]
    has_gradients: bool
    num_saves: int


class TakeOver:
    """What one rank needs to go on without another."""

    def __init__(
        self, model: Pipeline, mesh: Mesh, saver: Saver, folder: Path, step: Callable[[], int], timeout: timedelta
    ) -> None:
        self._model, self._mesh, self._saver, self._folder, self._step = model, mesh, saver, folder, step
        self._timeout = timeout
        self._rank = mesh.rank  # as the agent knows it
        self._has_lost = False
        self.sections = Sections(self._recover)
        model.sections = self.sections

    def _recover(self, why: str) -> Numbers | None:
        """See `Sections`."""
        if self._has_lost:
            raise LostRankError(f"{why}; a rank had been lost before, and there are no shadows any more")
        self._has_lost = True
        store, mesh = current_store(), self._mesh
        num_ranks = mesh.plan.num_ranks
        self._model.let_go()
        mesh.release_groups()
        shutdown()
        gc.collect()  # groups are closed when nobody holds them
        lost = self._await_word(why)
        new_rank = self._rank - (self._rank > lost.rank)
        named = meet_again(store, f"weft/without-{lost.rank}", new_rank, num_ranks - 1, self._timeout)
        told = self._tell_all(named, [rank for rank in range(num_ranks) if rank != lost.rank])
        newest = max(one.number for one in told.values())
        if any(one.number < newest - 1 for one in told.values()):
            numbers = {rank: one.number for rank, one in told.items()}
            raise LostRankError(f"{why}; ranks are in sections that do not follow each other: {numbers}")
        ahead = [one for one in told.values() if one.number == newest]
        done = [Action(**action) for one in ahead for action in one.done]
        before = told[lost.rank - 1]
        mesh.drop_pipe_rank()
        self._model.take_over(lost.rank, newest, done, before.has_gradients and before.number == newest)
        self._saver.without(lost.rank, [one.num_saves for one in told.values()])
        if self._rank == lost.rank - 1:
            seconds = time.monotonic() - lost.at
            tell_taken_over(self._folder, TakenOver(lost.rank, self._rank, self._step() + 1, seconds))
        return None if self.sections.number == newest else ahead[0].last

    def _await_word(self, why: str) -> Lost:
        """Who was lost, by the agent, which ends this process if nobody can take over."""
        deadline = time.monotonic() + _WORD_SECONDS
        while (lost := read_lost(self._folder)) is None:
            if time.monotonic() > deadline:
                raise LostRankError(f"{why}; nobody said within {_WORD_SECONDS:.0f} s that a rank was lost")
            time.sleep(_POLL_SECONDS)
        return lost

    def _tell_all(self, store: Store, ranks: list[int]) -> dict[int, _Progress]:
        done, has_gradients = self._model.progress()
        actions, sections = [action._asdict() for action in done], self.sections
        own = _Progress(sections.number, sections.last, actions, has_gradients, self._saver.num_saves)
        store.set(f"state/{self._rank}", json.dumps(asdict(own)))
        return {rank: _Progress(**json.loads(store.get(f"state/{rank}"))) for rank in ranks}


def take_over_losses(
    model: Pipeline, mesh: Mesh, saver: Saver, place: Place, step: Callable[[], int], timeout: timedelta
) -> Sections | None:
    """Let a run with shadows outlive the loss of a rank, where an agent would tell of it. `step` gives the steps that
    are done; `timeout` bounds every collective.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if not mesh.plan.pipe.shadow:
        return None
    if mesh.device.type != "cpu":
        raise PlanError("plan.pipe.shadow = true works on CPUs, with Gloo; use train.device = 'cpu', or leave it out")
    if folder is None or place.launcher != "weft":
        return None
    return TakeOver(model, mesh, saver, Path(folder), step, timeout).sections

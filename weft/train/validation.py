"""Evaluation by validators: snapshots are sent after every `train.evaluate_every` steps, and measures come back later.

Each measure is logged under the step of its snapshot, with the step at which it was known.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed import Store  # type: ignore[attr-defined]  # as documented

from weft.checkpoint import Piece
from weft.health.rank_status import VALIDATING
from weft.optim.saved_state import weights_to_send
from weft.roles.snapshots import SnapshotResult, SnapshotSender
from weft.step.task import task_of
from weft.train.metrics import MetricsLog
from weft.train.parts import Evaluation, is_due
from weft.train.role_links import RoleLinks, timeout_of
from weft.train.state import TrainState


class Validation(Evaluation):
    """Sends snapshots to validators and logs what comes back. Lost validators lose measures, and nothing else."""

    def __init__(self, state: TrainState, log: MetricsLog | None, sender: SnapshotSender) -> None:
        super().__init__(state, log)
        self._sender, self._is_first = sender, state.mesh.is_first
        self._outdated: set[int] = set()  # steps that the run went back over, and whose measures have not come

    def went_back(self, step: int) -> None:
        super().went_back(step)
        self._outdated |= {one for one in self._sender.outstanding if one > step}

    def after_step(self, step: int, stops: bool) -> bool:
        state, config = self._state, self._state.run.train
        self._take(step, self._sender.results())
        if not is_due(step, config.evaluate_every, config.steps):
            return False
        state.status.phase("sending a snapshot")
        if step == config.steps and self._is_first:  # training is over: nothing is held up
            state.status.phase(VALIDATING)
            self._take(step, self._sender.results(config.timeout_seconds))
        if not self._sender.offer(step) and self._is_first:
            why = "every validator is still busy" if self._sender.has_validators else "no validator is there"
            state.say(f"step {step} is not evaluated: {why}")
        return True

    def end(self) -> None:
        self._state.status.phase(VALIDATING)
        while found := self._sender.results(self._state.run.train.timeout_seconds):
            self._take(self._state.step, found)
        self._sender.close(timeout_of(self._state.run))

    def _take(self, step: int, results: list[SnapshotResult]) -> None:
        """Logs results at a step."""
        for result in results:
            if result.measures is None:
                self._state.say(
                    f"{result.validator} was lost; step {result.step} is not evaluated, and training goes on"
                )
                self._outdated.discard(result.step)
                continue
            if result.step in self._outdated:
                self._outdated.remove(result.step)
                self._state.say(f"step {result.step} is not evaluated: its snapshot is of before the run went back")
                continue
            means = dict(zip(self._objective.measures, result.measures, strict=True))
            self.means = means
            if self._log is not None:
                self._log.write("evaluation", result.step, {**means, "known_at_step": step, "by": result.validator})
                self._judge(result.step, step)
            words = ", ".join(f"{key} {value:.4f}" for key, value in means.items())
            self._state.say(f"step {result.step}: held-out {words} (by {result.validator}, known at step {step})")


def make_evaluation(
    state: TrainState, log: MetricsLog | None, links: RoleLinks | None, store: Store | None
) -> Evaluation:
    """Returns the evaluation of a run: by its validators, or by the training ranks."""
    if links is None or not links.validators:
        return Evaluation(state, log)
    assert store is not None
    num_measures = len(task_of(state.run).objective.measures)
    world = state.mesh["world"]

    def pieces() -> Iterator[Piece]:
        return weights_to_send(state.model, state.optimizer, state.mesh)

    return Validation(state, log, SnapshotSender(links.validators, links.digest, pieces, num_measures, world, store))

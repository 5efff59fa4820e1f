"""Parts that run alongside every training step, in one ordered tuple. A part never changes the step or the control
flow.

A new part is a class here (or in its own file) and a line in `make_parts`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from weft.inspection.rng import derive_seed, seed_rng
from weft.pipeline.rank_model import pipeline_of
from weft.resilience.faults import Faults
from weft.step.task import task_of
from weft.step.train_step import evaluate
from weft.train.learning_rate import learning_rate
from weft.train.metrics import MetricsLog
from weft.train.state import TrainState
from weft.train.timeline import draw_step


def is_due(step: int, every: int | None, last: int) -> bool:
    """Is an event that happens every `every` steps, and after the last step, due after this step?"""
    return step == last or (every is not None and step % every == 0)


class TrainingPart:
    """The base class of parts, which does nothing.

    `step` counts finished steps, so `before_step` gets the number of the step from 0.
    """

    def before_step(self, step: int) -> None:
        """Runs before the batches of a step are loaded."""

    def before_micro_batch(self, step: int, index: int) -> None:
        """Runs before the forward of a micro-batch."""

    def pauses_after(self, step: int) -> bool:
        """Must training wait for the device after this step, because `after_step` is slow or needs its results?"""
        return False

    def after_step(self, step: int, stops: bool) -> bool:
        """Runs after a good step. `stops` is true if the run ends here because it was asked to.

        Returns whether this took time that does not count as training.
        """
        return False

    def end(self) -> None:
        """Runs after the last step."""


class TrainingParts(TrainingPart):
    """All parts of a run, called in order."""

    def __init__(self, parts: Iterable[TrainingPart]) -> None:
        self._parts = tuple(parts)

    def before_step(self, step: int) -> None:
        for part in self._parts:
            part.before_step(step)

    def before_micro_batch(self, step: int, index: int) -> None:
        for part in self._parts:
            part.before_micro_batch(step, index)

    def pauses_after(self, step: int) -> bool:
        return any(part.pauses_after(step) for part in self._parts)

    def after_step(self, step: int, stops: bool) -> bool:
        found = [part.after_step(step, stops) for part in self._parts]
        return any(found)

    def end(self) -> None:
        for part in self._parts:
            part.end()


class InjectedFaults(TrainingPart):
    """Injects the faults that `weft chaos` asks for on this rank: a NaN in a gradient, a flipped bit of a parameter."""

    def __init__(self, state: TrainState) -> None:
        self._faults, self._model = Faults.of(os.environ, state.mesh.rank), state.model

    def before_step(self, step: int) -> None:
        if self._faults is not None:
            self._faults.strike(self._model)


class LearningRate(TrainingPart):
    """Sets the learning rate of each step."""

    def __init__(self, state: TrainState) -> None:
        self._config, self._optimizer = state.run.train, state.optimizer

    def before_step(self, step: int) -> None:
        config = self._config
        rate = learning_rate(
            step,
            peak=config.learning_rate,
            schedule=config.schedule,
            steps=config.steps,
            warmup=config.warmup_steps,
            decay=config.decay_steps,
            final=config.final_learning_rate,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate


class RandomStates(TrainingPart):
    """Seeds the random number generators by (seed, step, micro-batch, batch rank).

    So a resumed run repeats its dropout and its skipped layers. If ranks of one batch hold different elements,
    `inspection/rng.py` gives them different random numbers.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state

    def before_micro_batch(self, step: int, index: int) -> None:
        state = self._state
        if state.gates is not None:
            state.gates.begin(step, index)
        seed_rng(derive_seed(state.run.train.seed, step, index, state.mesh["batch"].index), state.mesh.device)


class StepTimeline(TrainingPart):
    """Times every action of the last step and draws them beside the simulated schedule (`train.timeline`)."""

    def __init__(self, state: TrainState) -> None:
        self._state, self._path = state, state.run.train.timeline

    def before_step(self, step: int) -> None:
        pipeline = pipeline_of(self._state.model)
        if pipeline is not None:
            pipeline.timed = self._path is not None and step == self._state.run.train.steps - 1

    def end(self) -> None:
        state = self._state
        pipeline = pipeline_of(state.model)
        if pipeline is None or not pipeline.timed or not state.mesh.is_first_of_stage:
            return
        if not pipeline.spans:  # a rank was lost in this step
            return
        assert self._path is not None
        if draw_step(pipeline, state.mesh, state.run.split.accumulation, Path(self._path)):
            state.say(f"drew the last step to {self._path}")


class Evaluation(TrainingPart):
    """Evaluates on the held-out data every so many steps, and at the end."""

    def __init__(self, state: TrainState, log: MetricsLog | None) -> None:
        self._state, self._log = state, log
        self._objective = task_of(state.run).objective
        self.means: dict[str, float] = {}

    def pauses_after(self, step: int) -> bool:
        config = self._state.run.train
        return is_due(step, config.evaluate_every, config.steps)

    def after_step(self, step: int, stops: bool) -> bool:
        if not self.pauses_after(step):
            return False
        state = self._state
        state.status.phase("evaluating")
        held_out = state.data.evaluation_batches(state.run, state.mesh["batch"], state.mesh.device)
        if held_out:
            means = evaluate(state.model, held_out, state.mesh, self._objective).flatten().tolist()
            self.means = dict(zip(self._objective.measures, means, strict=True))
        if self._log is not None and self.means:
            self._log.write("evaluation", step, self.means)
            state.say(f"step {step}: held-out " + ", ".join(f"{key} {value:.4f}" for key, value in self.means.items()))
        return True


def make_parts(state: TrainState, evaluation: Evaluation, checkpoints: TrainingPart) -> TrainingParts:
    """Returns all parts of a run, in the order in which they run."""
    return TrainingParts(
        (
            InjectedFaults(state),
            LearningRate(state),
            RandomStates(state),
            evaluation,
            checkpoints,
            StepTimeline(state),
        )
    )

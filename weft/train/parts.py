"""Parts that run alongside every training step, in one ordered tuple. A part never changes the step or the control
flow.

A new part is a class here (or in its own file) and a line in `make_parts`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from weft.comm import all_reduce
from weft.inspection.rng import derive_seed, seed_rng
from weft.mesh import Mesh
from weft.models.router import take_routed
from weft.optim.kfac import KFAC
from weft.optim.stepper import stepper
from weft.pipeline.rank_model import pipeline_of, rank_model
from weft.resilience.faults import Faults
from weft.run_tables import TrainConfig
from weft.step.task import task_of
from weft.step.train_step import evaluate
from weft.train.early_stopping import EarlyStopping
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
    """Sets the learning rate of each step. A group of the optimizer may have a `peak` of its own (K-FAC's layers)."""

    def __init__(self, state: TrainState) -> None:
        self._config, self._optimizer = state.run.train, state.optimizer

    def before_step(self, step: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._config, step, group.get("peak", self._config.learning_rate))


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
        try:
            if draw_step(pipeline, state.mesh, state.run.split.accumulation, Path(self._path)):
                state.say(f"drew the last step to {self._path}")
        except OSError as error:  # the run is saved; only the rank that writes comes here, after the last collective
            state.say(f"the last step cannot be drawn to {self._path} ({error.strerror or error})")


class Evaluation(TrainingPart):
    """Evaluates on the held-out data every so many steps, and at the end."""

    def __init__(self, state: TrainState, log: MetricsLog | None) -> None:
        self._state, self._log = state, log
        self._objective = task_of(state.run).objective
        self.means: dict[str, float] = {}
        self.seconds, self.count = 0.0, 0  # spent on evaluations, and their number
        self.early = None if log is None else EarlyStopping(state.run, state.step)  # on rank 0, which decides

    def wants_stop(self) -> bool:
        """Has rank 0 found that the run should stop early?"""
        return self.early is not None and self.early.wants_stop()

    def went_back(self, step: int) -> None:
        """The run has gone back to a step."""
        if self.early is not None:
            self.early.went_back(step)

    def mark(self, step: int) -> None:
        """Notes that the run has stopped early at this step, if it has."""
        if self.early is not None and self.early.wants_stop() and step < self._state.run.train.steps:
            self.early.mark(step)

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
            began, self.count = time.perf_counter(), self.count + 1
            with stepper(state.optimizer).sharing_weights():
                means = evaluate(state.model, held_out, state.mesh, self._objective).flatten().tolist()
            self.means = dict(zip(self._objective.measures, means, strict=True))
            self.seconds += time.perf_counter() - began
        if self._log is not None and self.means:
            self._log.write("evaluation", step, self.means)
            self._judge(step, step)
            state.say(f"step {step}: held-out " + ", ".join(f"{key} {value:.4f}" for key, value in self.means.items()))
        return True

    def _judge(self, step: int, known_at: int) -> None:
        """Judges the newest means, which are those of `step`."""
        if self.early is not None and not self.early.wants_stop():
            self.early.judge(step, self.means["loss"], known_at)
            if self.early.reason is not None:
                self._state.say(f"stopping early: {self.early.reason}")


class ExpertLoads(TrainingPart):
    """Logs how evenly routers send tokens to experts, every `train.log_every` steps.

    `load`: the tokens of the busiest expert of any layer divided by the mean. `imbalance`: the same of the ranks of
    `expert`. `entropy`: of the routers' probabilities, the mean over tokens and layers. `dropped`: the share of the
    tokens' choices that experts did not take because of their capacity. Padding does not count (`step/used_tokens.py`).
    They are written one step late, so that the host does not wait for the device.
    """

    def __init__(self, state: TrainState, log: MetricsLog | None) -> None:
        self._state, self._log = state, log
        self._is_sparse = getattr(state.run.model, "num_experts", 0) > 0
        self._pending: tuple[int, Tensor] | None = None

    def after_step(self, step: int, stops: bool) -> bool:
        self._write()
        config = self._state.run.train
        if self._is_sparse and is_due(step, config.log_every, config.steps):
            self._pending = step, expert_loads(self._state.model, self._state.mesh)
        return False

    def end(self) -> None:
        self._write()

    def _write(self) -> None:
        if self._pending is not None and self._log is not None:
            values = dict(zip(("load", "imbalance", "entropy", "dropped"), self._pending[1].tolist(), strict=True))
            self._log.write("experts", self._pending[0], values)
        self._pending = None


def expert_loads(model: nn.Module, mesh: Mesh) -> Tensor:
    """Returns the largest load and imbalance, the mean entropy and the share of dropped choices since the last call.

    They are of all routers [4].
    """
    largest = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    sums = torch.zeros(4, dtype=torch.float64, device=mesh.device)  # choices, dropped, entropy, tokens times layers
    if routed := [one for own in rank_model(model).models for one in take_routed(own)]:
        whole = torch.cat(routed)  # of each layer [experts + 3]
        all_reduce(whole, mesh["tokens"]).wait()
        if mesh.plan.tensor.sequence:
            all_reduce(whole, mesh["x"]).wait()
        for layer in whole.split([len(one) for one in routed]):
            counts = layer[:-3]
            of_ranks = counts.unflatten(0, (min(len(counts), mesh.plan.num_expert_parts), -1)).sum(-1)
            largest = torch.maximum(
                largest, torch.stack([each.amax() / each.mean().clamp(min=1e-9) for each in (counts, of_ranks)])
            )
            sums += torch.cat([counts.sum()[None], layer[-3:]])
    all_reduce(largest, mesh["pipe"], "max").wait()
    all_reduce(sums, mesh["pipe"]).wait()
    return torch.cat([largest, sums[2:3] / sums[3:], sums[1:2] / sums[:1]])


class KfacStatistics(TrainingPart):
    """Logs statistics of K-FAC's factors after each step that renewed their inverses."""

    def __init__(self, state: TrainState, log: MetricsLog | None) -> None:
        self._optimizer, self._log = state.optimizer, log

    def after_step(self, step: int, stops: bool) -> bool:
        if self._log is not None and isinstance(self._optimizer, KFAC):
            values = self._optimizer.take_statistics()
            if values is not None:
                self._log.write("kfac", step, values)
        return False

    def end(self) -> None:
        if isinstance(self._optimizer, KFAC) and self._optimizer.sub_grid is not None:
            self._optimizer.sub_grid.inverter.close()


def make_parts(
    state: TrainState,
    evaluation: Evaluation,
    checkpoints: TrainingPart,
    profile: TrainingPart,
    log: MetricsLog | None,
    *more: TrainingPart,
) -> TrainingParts:
    """Returns all parts of a run, in the order in which they run: `more` at the end."""
    return TrainingParts(
        (
            InjectedFaults(state),
            LearningRate(state),
            RandomStates(state),
            profile,
            ExpertLoads(state, log),
            KfacStatistics(state, log),
            evaluation,
            checkpoints,
            StepTimeline(state),
            *more,
        )
    )


def learning_rate(config: TrainConfig, step: int, peak: float) -> float:
    """Returns the rate of step `step` (from 0): warm-up, then cosine, WSD (warm-up, stable, decay) or constant.

    WSD holds the peak and decays linearly over the last `decay_steps` (a tenth of all, unless given).
    """
    steps, warmup, final = config.steps, config.warmup_steps, config.final_learning_rate
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.schedule == "constant":
        return peak
    if config.schedule == "cosine":
        done = (step - warmup) / max(1, steps - warmup)
        return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
    length = config.decay_steps or max(1, steps // 10)
    into = step - (steps - length)
    return peak if into < 0 else peak * (1 - (1 - final) * min(1.0, (into + 1) / length))

"""Reads, logs and judges the results of finished steps.

On a GPU they are read one step late, so that the host can queue the next step in the meantime.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from weft.models import LanguageConfig
from weft.resilience.bad_numbers import Bad, Policy
from weft.step.batch import Batch
from weft.step.task import task_of
from weft.step.train_step import StepResult
from weft.train.metrics import MetricsLog, StepMetrics, memory_bytes
from weft.train.parts import is_due
from weft.train.prefetch import PendingResult
from weft.train.setup import make_clock
from weft.train.state import TrainState

MEAN_SHARE = 0.1  # the share of the newest reading in the mean time of a step
MAX_NAMED = 100  # most names of skipped images in the log


class Reporter(Protocol):
    """Shows a run's progress to a person. Only rank 0 calls it."""

    def step(self, metrics: StepMetrics) -> None:
        """Shows the metrics of a step that is logged."""

    def say(self, message: str) -> None:
        """Shows a line."""


class StepResults:
    """Reads the results of finished steps and writes them to the log and to the reporter."""

    def __init__(self, state: TrainState, policy: Policy, reporter: Reporter) -> None:
        is_first = state.mesh.is_first
        self.log: MetricsLog | None = MetricsLog(state.run, state.step) if is_first else None
        self.loss: float | None = None  # loss of the last step that was read
        self._state, self._policy, self._reporter = state, policy, reporter
        self._clock = make_clock(state.run, state.mesh, state.step)
        self._pending: PendingResult | None = None
        self._mean_seconds: float | None = None  # of a step, for the time that is left
        model = state.run.model
        self._num_classes = model.vocab_size if isinstance(model, LanguageConfig) else model.num_classes
        if self.log is not None and state.data.skipped:
            self._report_skipped(self.log)

    def add(self, step: int, result: StepResult, batches: Sequence[Batch], wait: bool) -> Bad | None:
        """Takes a step's results, and reads those of the step before; with `wait`, or on a CPU, also this step's.

        Returns the bad step if the run must go back because of it. A bad step whose update was only skipped is reported
        here.
        """
        rate = self._state.optimizer.param_groups[0]["lr"]
        ready = [] if self._pending is None else [self._pending]
        self._pending = PendingResult(step, rate, result, self._clock.moment(), batches)
        self._clock.done(step, self._pending.moment)
        if wait or self._state.mesh.device.type == "cpu":
            ready, self._pending = [*ready, self._pending], None
        for one in ready:
            bad = self._read(one)
            if bad is not None and bad.follows != "skip":
                return bad
        return None

    def went_back(self, bad: Bad, step: int) -> None:
        """Reports that the run went back to `step` because of a bad step."""
        self._pending = None
        self._clock.skip(step)
        if self.log is None:
            return
        left_out = [list(interval) for interval in self._policy.left_out]
        values = {"bad": bad.step, "what": str(bad), "num_bad": self._policy.num_bad, "left_out": left_out}
        self.log.write("numbers", step, values)
        words = ", ".join(f"{first} to {stop - 1}" for first, stop in self._policy.left_out)
        what_now = "to do it again" if bad.follows == "repeat" else f"batches left out from now on: {words}"
        self._reporter.say(f"{bad}: back to step {step}; {what_now}")

    def skip_time(self, step: int) -> None:
        """Excludes the time since the last step from the rates."""
        self._clock.skip(step)

    def close(self) -> None:
        """Closes the log."""
        if self.log is not None:
            self.log.close()

    def _read(self, done: PendingResult) -> Bad | None:
        """Waits for a step's results, logs them if that is due, and judges them."""
        run, status = self._state.run, self._state.status
        status.wait_begins(f"the device's work of step {done.step}")
        self.loss, norm, verdict = done.read()
        status.wait_ends()
        if self.log is not None and is_due(done.step, run.train.log_every, run.train.steps):
            metrics = self._metrics(done, self.loss, norm)
            self.log.step(metrics)
            self._reporter.step(metrics)
        wrong_labels = partial(done.wrong_labels, self._num_classes)
        bad = self._policy.after(done.step, verdict, self.loss, norm, wrong_labels)
        if bad is not None and self.log is not None and bad.follows == "skip":
            num_bad = self._policy.num_bad
            self.log.write("numbers", done.step, {"bad": bad.step, "what": str(bad), "num_bad": num_bad})
            self._reporter.say(f"{bad}: its update was skipped on all ranks (bad steps so far: {num_bad})")
        return bad

    def _metrics(self, done: PendingResult, loss: float, grad_norm: float) -> StepMetrics:
        run = self._state.run
        rates = self._clock.read(done.step, done.moment)
        if not rates.is_start:  # a mean that moves: single steps may take far longer or shorter
            mean = self._mean_seconds or rates.step_seconds
            self._mean_seconds = mean + MEAN_SHARE * (rates.step_seconds - mean)
        return StepMetrics(
            step=done.step,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=done.rate,
            units_per_second=rates.units_per_second,
            units_per_second_per_device=rates.units_per_second_per_device,
            tflops_per_second_per_device=rates.tflops_per_second_per_device,
            mfu=rates.mfu,
            memory_bytes=memory_bytes(self._state.mesh.device),
            seconds_left=(run.train.steps - done.step) * (self._mean_seconds or rates.step_seconds),
            unit=task_of(run).unit,
            start_seconds=rates.step_seconds if rates.is_start else None,
        )

    def _report_skipped(self, log: MetricsLog) -> None:
        """Reports once how many images are left out of the data, with the name and reason of the first."""
        skipped, description = self._state.data.skipped, self._state.data.description
        name, reason = next(iter(skipped.items()))
        self._reporter.say(f"{len(skipped)} of the images of {description} are left out, {name} first: {reason}")
        log.write("data", self._state.step, {"skipped": len(skipped), "names": list(skipped)[:MAX_NAMED]})

"""Says after a run whether ranks of other roles would have paid, with the numbers that decide it.

Loaders pay if training waits for batches and the loaders sustain its demand: as many as load all training ranks'
batches in the time that the rest of a step takes. A validator pays if evaluation takes a share of the run, and no
longer than the training between two evaluations.
"""

from __future__ import annotations

import math
import time

from weft.run_file import Run
from weft.train.parts import Evaluation, TrainingPart
from weft.train.prefetch import Batches
from weft.train.state import TrainState

SHARE = 0.1  # of the time, below which no role is suggested
HIDDEN_SHARE = 0.9  # of a step on a GPU, which computes while batches are loaded
MIN_STEPS = 10  # steps without which nothing is said


def loader_advice(run: Run, load_seconds: float, step_seconds: float, is_gpu: bool) -> str | None:
    """Returns words about loaders; None if they would not pay. Both times are of one step, the second without
    evaluations and saves.
    """
    share = load_seconds / step_seconds
    if share < (HIDDEN_SHARE if is_gpu else SHARE):
        return None
    rest = step_seconds if is_gpu else step_seconds - load_seconds
    now = run.roles.loader
    if now:
        return (
            f"training waits {load_seconds * 1e3:.0f} ms of a step's {step_seconds * 1e3:.0f} ms ({share:.0%}) for "
            f"roles.loader = {now} rank{'s' * (now > 1)}; more would hide it, if there are cores for them"
        )
    needed = max(1, math.ceil(run.plan.num_ranks * load_seconds / max(rest, 1e-9)))
    return (
        f"loading takes {load_seconds * 1e3:.0f} ms of a step's {step_seconds * 1e3:.0f} ms ({share:.0%}); "
        f"roles.loader={needed} would load beside training, with the same result, if there are cores for "
        f"{'it' if needed == 1 else 'them'}"
    )


def validator_advice(run: Run, evaluate_seconds: float, interval_seconds: float) -> str | None:
    """Returns words about a validator; None if it would not pay. The times are those of one evaluation, and of the
    training between two.
    """
    share = evaluate_seconds / (evaluate_seconds + interval_seconds)
    if run.roles.validator or share < SHARE:
        return None
    took = f"an evaluation takes {evaluate_seconds:.2f} s, {share:.0%} of the time"
    if evaluate_seconds * run.plan.num_ranks > interval_seconds:
        return (
            f"{took}; a validator would need about {evaluate_seconds * run.plan.num_ranks:.2f} s for it, more than the "
            f"{interval_seconds:.2f} s between two, so it does not pay: evaluate less often (train.evaluate_every) or "
            f"on less (train.evaluate_sequences)"
        )
    return f"{took}; roles.validator=1 would evaluate beside training, which lasts {interval_seconds:.2f} s between two"


class RoleAdvice(TrainingPart):
    """Measures how long a run loads and evaluates, and says at its end which role would pay."""

    def __init__(self, state: TrainState, batches: Batches, evaluation: Evaluation) -> None:
        self._state, self._batches, self._evaluation = state, batches, evaluation
        self._began: tuple[float, float] | None = None  # when the second step began, and the seconds of loading
        self._num_steps = 0

    def before_step(self, step: int) -> None:
        self._num_steps += 1
        if self._num_steps == 2:  # the first step also compiles, connects and allocates
            self._began = time.perf_counter(), self._batches.seconds
            self._evaluation.seconds, self._evaluation.count = 0.0, 0

    def end(self) -> None:
        state, run = self._state, self._state.run
        if self._began is None or self._num_steps < MIN_STEPS or not state.mesh.is_first:
            return
        began_at, loaded_before = self._began
        num_steps = self._num_steps - 1
        evaluated = self._evaluation.seconds
        step_seconds = (time.perf_counter() - began_at - evaluated) / num_steps
        load_seconds = (self._batches.seconds - loaded_before) / num_steps
        words = [loader_advice(run, load_seconds, step_seconds, state.mesh.device.type == "cuda")]
        if self._evaluation.count and run.train.evaluate_every is not None:
            interval = step_seconds * run.train.evaluate_every
            words.append(validator_advice(run, evaluated / self._evaluation.count, interval))
        for text in filter(None, words):
            state.say(text)

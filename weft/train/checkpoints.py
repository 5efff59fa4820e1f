"""A run's checkpoints, on disk and in memory: resuming, saving, and going back after a bad step.

A failed save is reported in one line, and training continues: the checkpoint before is complete, and a full disk may
have space again by the next save. Only a run's last save must succeed, or nothing would be left to go on from.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from weft.checkpoint import Piece, Saver
from weft.errors import CheckpointError
from weft.health.rank_status import GOING_BACK, RESERVING, SAVING
from weft.launch.environment import RankInfo
from weft.optim.saved_state import pieces_to_save
from weft.resilience.bad_numbers import Bad, Guard, Policy
from weft.run_file import Run
from weft.schema import to_table
from weft.train.batches import TrainingData
from weft.train.parts import TrainingPart, is_due
from weft.train.resume import go_back, resume
from weft.train.setup import make_saver, memory_copies
from weft.train.state import TrainState

logger = logging.getLogger("weft")
LONG_SECONDS = 2.0  # the end of a run says how long its last save took, if longer than this


class Checkpoints(TrainingPart):
    """Saves when a save is due, when the run stops and at its end. Copies in memory are saved as well."""

    def __init__(self, state: TrainState, rank_info: RankInfo, guard: Guard, policy: Policy) -> None:
        run = state.run
        self.saver: Saver = make_saver(run, state.mesh)
        self._state, self._guard, self._policy = state, guard, policy
        self._last_save = (0, 0.0)  # its step, and when it began
        self._is_only_in_memory = False  # is the state one that was loaded from memory, and is not on disk?
        self._memory = memory_copies(run, state.run_id, state.mesh, rank_info, state.say)
        # State in host memory is not copied there a second time: it is written while training waits.
        self._is_asynchronous = run.checkpoint.asynchronous and not run.plan.memory.keeps_state_on_host

    def resume(self) -> int:
        """Loads the newest checkpoint, if there is one. Returns the step to continue from."""
        state = self._state
        resumed = resume(state, self._memory, state.say)
        state.step, self._is_only_in_memory = resumed.step, resumed.is_only_in_memory
        self._policy.load(resumed.saved.get("numbers", {}), self._guard)
        if state.run.numbers.on_bad in ("repeat", "rollback") and not resumed.saved:
            # A bad step needs one to go back to.
            self.saver.save(state.step, self._pieces(), self._values(state.step), asynchronous=False)
        return state.step

    def go_back(self, bad: Bad) -> int:
        """Loads the state before a bad step. Returns the step to continue from."""
        state = self._state
        state.status.phase(GOING_BACK)
        is_far = bad.follows == "rollback"
        resumed = go_back(state, self.saver, self._memory, state.say, far=is_far)
        state.step, self._is_only_in_memory = resumed.step, resumed.is_only_in_memory
        self._policy.went_back(bad, state.step, resumed.saved.get("numbers", {}), self._guard)
        return state.step

    def pauses_after(self, step: int) -> bool:
        config, last = self._state.run.checkpoint, self._state.run.train.steps
        return is_due(step, config.every, last) or is_due(step, config.memory_every, last)

    def after_step(self, step: int, stops: bool) -> bool:
        run, status = self._state.run, self._state.status
        self._is_only_in_memory = False  # the run goes on from it, and saves its last step
        if self._memory is not None and step % (run.checkpoint.memory_every or 1) == 0:
            # The first copy locks pages, which may take long: no deadline holds for RESERVING.
            status.phase("copying to memory" if self._memory.has_saved else RESERVING)
            self._memory.save(step, self._pieces(), self._values(step))
        if not is_due(step, run.checkpoint.every, run.train.steps) and not stops:
            return False
        self._save(step, is_last=step == run.train.steps or stops)
        return True

    def _save(self, step: int, is_last: bool) -> None:
        self._state.status.phase(SAVING)
        self._last_save = (step, time.monotonic())
        pieces = self._pieces()
        self._policy.saved()
        save_or_tell(self.saver, step, pieces, self._values(step), self._is_asynchronous, is_last)

    def end(self) -> None:
        self._state.status.phase(SAVING)
        if self._is_only_in_memory:  # it was loaded, and no step was done since
            self._save(self._state.step, is_last=True)
        self.saver.wait(published=True)
        step, began = self._last_save
        seconds = time.monotonic() - began
        if step and seconds > LONG_SECONDS:
            self._state.say(f"saved step {step} in {seconds:.0f} s")
        if self._memory is not None:
            self._memory.close()

    def _pieces(self) -> Any:
        return pieces_to_save(self._state.model, self._state.optimizer, self._state.mesh)

    def _values(self, step: int) -> dict[str, Any]:
        state = self._state
        numbers = self._policy.to_state(self._guard)
        return checkpoint_values(state.run, state.run_id, state.data, step, state.source, numbers)


def save_or_tell(
    saver: Saver, step: int, pieces: Iterable[Piece], state: dict[str, Any], asynchronous: bool, is_last: bool
) -> None:
    """Saves a step. Warns if this save, or the one before, failed. Raises if this one failed and is the last."""
    tell = "weft: a checkpoint was not saved: %s; training %s"
    try:
        saver.wait()
    except CheckpointError as error:
        logger.warning(tell, error, "went on, and tries again now")
    try:
        saver.save(step, pieces, state, asynchronous)
    except CheckpointError as error:
        if is_last:
            raise
        logger.warning(tell, error, "goes on, and tries again at the next save")


def checkpoint_values(
    run: Run, run_id: str, data: TrainingData, step: int, source: str, numbers: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the values of a checkpoint other than its tensors. `numbers` is the state of the policy on bad steps."""
    return {
        "run_id": run_id,
        "data": {
            "fingerprint": data.fingerprint,
            "contents": data.contents,
            "samples": step * run.split.batch,
            **data.made_with,
        },
        "numbers": dict(numbers),
        "seed": run.train.seed,
        "model": to_table(run.model),
        "source": source,
        "tuning": to_table(run.tuning),
        "plan": run.plan.to_toml(),
        "run": run.to_toml(),
    }

"""Detects bad steps: a loss or gradient norm that is NaN or infinite, and a loss far above those before (a spike).

Each step is judged on the device, before its update, and all ranks take the maximum of their verdicts. So all ranks
skip an update or none does, and no host waits for the verdict. A loss is a spike if it exceeds median + k · MAD (the
median absolute deviation) of the last `window` good losses, once there are that many. The training loop reads the
verdict with the step's other numbers and acts on it: it stops, skips, repeats or rolls back.

    train_step(.., guard)  ->  StepResult.verdict  ->  Policy.after(..)  ->  continue, roll back, or an error
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from weft.comm import all_reduce
from weft.errors import NumbersError
from weft.mesh import Mesh
from weft.run_tables import NumbersConfig

GOOD, NOT_FINITE, SPIKE = 0, 1, 2
Interval = tuple[int, int]  # the numbers of consecutive batches: first, stop


class Guard:
    """Judges steps, by comparison with the last good losses."""

    def __init__(self, config: NumbersConfig, mesh: Mesh) -> None:
        self._factor, self._world = config.spike, mesh["world"]
        if mesh.plan.pipe.shadow:  # all ranks have the same numbers, and none may wait for a rank that may be lost
            self._world = replace(self._world, degree=1, group=None)
        size = config.window if config.spike is not None else 0
        self._losses = torch.full((size,), math.nan, dtype=torch.float64, device=mesh.device)  # the newest last

    def judge(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Returns the verdict of all ranks on a step []: GOOD, NOT_FINITE or SPIKE."""
        loss = loss.double()
        verdict = (~(loss.isfinite() & grad_norm.isfinite())).double() * NOT_FINITE
        if self._factor is not None:
            median = self._losses.median()  # NaN until there are enough losses; no loss compares greater than NaN
            deviation = (self._losses - median).abs().median()
            is_spike = loss.isfinite() & (loss > median + self._factor * deviation)
            verdict = torch.where(is_spike, float(SPIKE), verdict)
        all_reduce(verdict, self._world, "max").wait()
        if self._factor is not None:
            longer = torch.cat([self._losses[1:], loss.view(1)])
            self._losses = torch.where(verdict == GOOD, longer, self._losses)
        return verdict

    @property
    def losses(self) -> list[float]:
        """The last good losses, to store in a checkpoint."""
        return [loss for loss in self._losses.tolist() if not math.isnan(loss)]

    @losses.setter
    def losses(self, given: Sequence[float]) -> None:
        given = list(given)[-len(self._losses) :] if len(self._losses) else []
        missing = [math.nan] * (len(self._losses) - len(given))
        self._losses.copy_(torch.tensor([*missing, *given], dtype=torch.float64))


@dataclass(frozen=True)
class Bad:
    """A bad step: its numbers, and the action that follows. Its update is skipped, or the run goes back to a checkpoint
    to repeat its batch or leave it out.
    """

    step: int
    verdict: int
    loss: float
    grad_norm: float
    follows: Literal["skip", "repeat", "rollback"] = "skip"
    cause: str | None = None  # None if it is not known

    def __str__(self) -> str:
        kind = "a spike of the loss" if self.verdict == SPIKE else "no finite number"
        cause = "" if self.cause is None else f": {self.cause}"
        return f"{kind} in step {self.step} (loss {self.loss:g}, gradient norm {self.grad_norm:g}){cause}"


class Policy:
    """Counts bad steps and decides on the action that follows. Its state is part of the checkpoint."""

    def __init__(self, config: NumbersConfig) -> None:
        self.config = config
        self.left_out: list[Interval] = []  # batches that are not used, in order
        self.num_bad = 0
        self._num_in_a_row = 0  # bad steps since a good step or, with rollbacks, since a new checkpoint
        self._repeated: set[int] = set()  # batches that were bad once; not saved, so a restart repeats them once more
        self._last_bad = 0

    def after(
        self, step: int, verdict: int, loss: float, grad_norm: float, cause: Callable[[], str | None] = lambda: None
    ) -> Bad | None:
        """Check a finished step. Returns None for a good step and `Bad` for a bad one. Raises NumbersError if the run
        must stop. `cause` is called for a NaN loss and returns its cause, if it finds one.
        """
        if verdict == GOOD:
            if self.config.on_bad != "rollback" and step > self._last_bad:
                self._num_in_a_row = 0
            return None
        found = cause() if math.isnan(loss) else None
        bad = Bad(step, verdict, loss, grad_norm, self._what_follows(step), found)
        self.num_bad += 1
        self._num_in_a_row += 1
        self._last_bad = step
        if self.config.on_bad == "stop":
            raise NumbersError(
                f"{bad}; its update was not made. Look at the data and the learning rate, and run again to go on from "
                f"the last checkpoint; numbers.on_bad = 'skip' or 'rollback' would go on without it"
            )
        if self._num_in_a_row > self.config.limit:
            between = "since the same checkpoint" if self.config.on_bad == "rollback" else "in a row"
            raise NumbersError(
                f"{bad}: that is more than numbers.limit = {self.config.limit} bad steps {between}; look at the data "
                f"and the learning rate"
            )
        return bad

    def _what_follows(self, step: int) -> Literal["skip", "repeat", "rollback"]:
        if self.config.on_bad == "repeat":  # a batch that is bad twice is bad itself, not by chance
            return "skip" if self.batch_of(step - 1) in self._repeated else "repeat"
        return "rollback" if self.config.on_bad == "rollback" else "skip"

    def saved(self) -> None:
        """Record that there is a new checkpoint to go back to."""
        if self.config.on_bad == "rollback":
            self._num_in_a_row = 0

    def went_back(self, bad: Bad, step: int, state: Mapping[str, Any], guard: Guard) -> None:
        """Record that the run went back to the checkpoint of `step`. The bad step's batch is repeated; or it is left
        out from now on, together with up to `leave_out` - 1 batches before it. `state` is the checkpoint's `to_state`.
        """
        if bad.follows == "repeat":
            self._repeated.add(self.batch_of(bad.step - 1))  # finished steps count from 1, batches from 0
        else:
            first = max(step, bad.step - self.config.leave_out)
            batches = [self.batch_of(at) for at in range(first, bad.step)]
            self.left_out = join([*self.left_out, *((batch, batch + 1) for batch in batches)])
        guard.losses = [float(loss) for loss in state.get("losses", [])]

    def batch_of(self, step: int) -> int:
        """The number of the batch of a step (both from 0): the `step`-th batch that is not left out."""
        for first, stop in self.left_out:
            if step < first:
                break
            step += stop - first
        return step

    def to_state(self, guard: Guard) -> dict[str, Any]:
        """The state to store in a checkpoint, so that a resumed run decides as this one would have."""
        return {
            "left_out": [list(interval) for interval in self.left_out],
            "num_bad": self.num_bad,
            "num_in_a_row": self._num_in_a_row,
            "losses": guard.losses,
        }

    def load(self, state: Mapping[str, Any], guard: Guard) -> None:
        """Restore the state from a checkpoint. Older checkpoints may lack it, or parts of it."""
        self.left_out = [(int(first), int(stop)) for first, stop in state.get("left_out", [])]
        self.num_bad = int(state.get("num_bad", 0))
        self._num_in_a_row = int(state.get("num_in_a_row", 0))
        guard.losses = [float(loss) for loss in state.get("losses", [])]


def join(intervals: Sequence[Interval]) -> list[Interval]:
    """Sort intervals and merge those that overlap or touch."""
    joined: list[Interval] = []
    for first, stop in sorted(intervals):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((first, stop))
    return joined

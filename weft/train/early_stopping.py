"""Early stopping: a run ends when its held-out loss has not improved for `train.patience` evaluations.

Training rank 0 decides, and the ranks' vote on stopping carries the decision. Evaluations inside the run are acted on
one step later. A validator's are known later: how late is stated, and when the run stops may then differ from one
start to the next.
"""

from __future__ import annotations

import json
import logging
import math

from weft.mesh import Mesh
from weft.run_file import Run
from weft.train.agreement import text_of_rank_0
from weft.train.metrics import read_events

logger = logging.getLogger("weft")

MARK = "stopped-early.json"  # in the run's folder: the step at which the run stopped, and why


class EarlyStopping:
    """Judges the held-out losses of a run that goes on at a step, in the order in which they are known."""

    def __init__(self, run: Run, step: int) -> None:
        self._patience, self._folder = run.train.patience, run.folder
        self._judged: list[tuple[int, float, int]] = []  # what `judge` was given
        self._best: tuple[float, int] | None = None  # loss and step
        self._num_worse = 0
        self.reason: str | None = None
        if self._patience is not None:
            # Of the same run before a restart. A full disk may have kept lines of steps that were then done again.
            judged: dict[int, tuple[int, float, int]] = {}
            for event in read_events(run.folder / "metrics.jsonl"):
                at = event["step"]
                if event["kind"] == "evaluation":
                    judged.pop(at, None)
                    judged[at] = (at, event["loss"], event.get("known_at_step", at))
                elif event["kind"] == "numbers" and "left_out" in event:
                    judged = {one: judged[one] for one in judged if one <= at}
            self._judged = list(judged.values())
            self.went_back(step)

    def judge(self, step: int, loss: float, known_at: int) -> None:
        """Takes the held-out loss of a step, known at that step or a later one. NaN is worse than any number."""
        self._judged.append((step, loss, known_at))
        loss = math.inf if math.isnan(loss) else loss
        if self._best is None or loss < self._best[0]:
            self._best, self._num_worse = (loss, step), 0
            return
        self._num_worse += 1
        if self._patience is not None and self._num_worse >= self._patience and self.reason is None:
            best, at = self._best
            lag = f", known {known_at - step} steps later" if known_at > step else ""
            self.reason = (
                f"the held-out loss has not fallen below {best:.4f} (step {at}) in {self._num_worse} evaluations "
                f"(train.patience); the last is that of step {step}{lag}"
            )

    def went_back(self, step: int) -> None:
        """The run has gone back to a step: evaluations of later ones do not count."""
        kept = [one for one in self._judged if one[0] <= step]
        self._judged, self._best, self._num_worse, self.reason = [], None, 0, None
        for one in kept:
            self.judge(*one)

    def wants_stop(self) -> bool:
        """Should the run stop?"""
        return self.reason is not None

    def mark(self, step: int) -> None:
        """Notes in the run's folder that the run has stopped early, so that it is not continued."""
        words = {"step": step, "patience": self._patience, "why": self.reason}
        path = self._folder / MARK
        try:
            path.write_text(json.dumps(words) + "\n", encoding="utf-8")
        except OSError as error:  # the step is saved, and the run ends
            reason = error.strerror or error
            logger.warning("weft: %s cannot be written (%s): a second start of the run goes on", path, reason)


def stopped_early(run: Run, step: int) -> str | None:
    """Returns why a run has stopped early at this step with this patience; None if it has not."""
    try:
        found = json.loads((run.folder / MARK).read_text(encoding="utf-8"))
        is_same, why = found["step"] == step and found["patience"] == run.train.patience, str(found["why"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return why if is_same and run.train.patience is not None else None


def has_stopped_early(run: Run, step: int, mesh: Mesh) -> bool:
    """Has the run stopped early at this step? Rank 0 tells, because another host may see an old mark, or none."""
    if run.train.patience is None:
        return False
    return bool(text_of_rank_0(stopped_early(run, step) or "" if mesh.is_first else "", mesh["world"]))

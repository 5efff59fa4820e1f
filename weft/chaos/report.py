"""The report of `weft chaos`: measured and predicted goodput, recoveries, and whether two runs end with equal bits."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from weft.chaos.storm import HARMLESS, KINDS, ROLE, FaultRecord, Storm
from weft.checkpoint import Checkpoint
from weft.planner.goodput import goodput


@dataclass(frozen=True)
class GoodputPrediction:
    """The goodput of a storm by Young's and Daly's formula, from the measured times of its recoveries."""

    interval_seconds: float  # training time between two copies of the state
    restart_seconds: float  # the mean time from a fault until training continues
    write_seconds: float  # from a copy's step until the copy is usable, derived from the steps that were done again
    mtbf_seconds: float  # the mean time between faults that stop training
    goodput: float

    @staticmethod
    def of(storm: Storm, step_seconds: float, mtbf_seconds: float) -> GoodputPrediction | None:
        """The prediction; None if there was no complete recovery. The time by which a save delays a step is also part
        of the baseline's steps, so it is not counted here.
        """
        whole = [one for one in storm.records if one.seconds is not None and not one.cut_short]
        stopping = [kind for kind in storm.kinds if kind not in HARMLESS]
        if not whole:
            return None
        # The mean of each kind, weighted by its number of faults: long recoveries are cut short more often, and a plain
        # mean would count them too rarely.
        taken = {
            kind: [(one.seconds or 0) - (one.redone + 1) * step_seconds for one in whole if one.kind == kind]
            for kind in stopping
        }
        means = {kind: statistics.mean(seconds) for kind, seconds in taken.items() if seconds}
        restart = statistics.mean(means[one.kind] for one in storm.records if one.kind in means)
        every = storm.run.checkpoint.memory_every or 1
        interval = every * step_seconds
        late = (statistics.mean(one.redone for one in whole) - (every - 1) / 2) * step_seconds
        restart, write = max(0.0, restart), max(0.0, late)
        mtbf = mtbf_seconds * len(storm.kinds) / len(stopping)
        return GoodputPrediction(interval, restart, write, mtbf, goodput(interval, 0.0, restart, mtbf, write))


def differences(ours: Path, theirs: Path) -> tuple[int, list[str]]:
    """Compare two checkpoints bit for bit. Returns the number of tensors and the names of those that differ."""
    one, other = Checkpoint(ours), Checkpoint(theirs)
    keys = {(entry.kind, entry.name) for entry in one.entries()}
    others = {(entry.kind, entry.name) for entry in other.entries()}
    differ = [f"{kind} {name}" for kind, name in keys ^ others]
    for kind, name in sorted(keys & others):
        a, b = (checkpoint.read(name, kind).contiguous() for checkpoint in (one, other))
        same = a.shape == b.shape and a.dtype == b.dtype
        if not same or not torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)):
            differ.append(f"{kind} {name}")
    return len(keys | others), sorted(differ)


def by_kind(records: Sequence[FaultRecord]) -> dict[str, dict[str, Any]]:
    """A table for each kind of fault: how many there were, how many recoveries the next fault cut short, and the times
    of the other recoveries.
    """
    table: dict[str, dict[str, Any]] = {}
    for kind in (*KINDS, ROLE, "all"):
        ones = [one for one in records if kind in ("all", one.kind)]
        times = [one.seconds for one in ones if one.seconds is not None and not one.cut_short]
        if ones:
            ninth = statistics.quantiles(times, n=10, method="inclusive")[-1] if len(times) > 1 else None
            table[kind] = {
                "faults": len(ones),
                "cut_short": sum(one.cut_short for one in ones),
                "recovered": len(times),
                "median_seconds": statistics.median(times) if times else None,
                "ninth_decile_seconds": ninth,
                "longest_seconds": max(times, default=None),
            }
    return table


@dataclass(frozen=True)
class BaselineRun:
    """The run without faults: its folder, its time from the end of its first step, and the median time of a step."""

    folder: str
    seconds: float
    step_seconds: float


@dataclass(frozen=True)
class ChaosReport:
    """The results of a storm, compared with the run without faults."""

    baseline: BaselineRun
    storm: Storm
    mtbf_seconds: float
    seed: int
    predicted: GoodputPrediction | None
    status: int
    num_tensors: int
    differ: list[str]
    log: Path
    differ_undisturbed: list[str] | None = None  # between two runs without faults; None if they were not compared

    @property
    def goodput(self) -> float:
        """The effective training time ratio: the baseline's time divided by the time under faults."""
        return self.baseline.seconds / self.storm.seconds if self.storm.seconds else 0.0

    @property
    def training_share(self) -> float:
        """The share of the time under faults that was not spent on recoveries. It equals the goodput if steps take as
        long as in the baseline.
        """
        return 1 - self.storm.recovering_seconds / self.storm.seconds if self.storm.seconds else 0.0

    @property
    def passed(self) -> bool:
        """Whether the run had a fault, and ended with the same bits as the baseline."""
        return self.ended and bool(self.storm.records) and not self.differ

    @property
    def ended(self) -> bool:
        """Whether the run did all its steps."""
        return self.status == 0 and self.num_tensors > 0

    def to_json(self) -> dict[str, Any]:
        """The report as values that JSON can represent."""
        run = self.storm.run
        found = {"run": run.name, "folder": str(run.folder), "log": str(self.log), "plan": run.plan.degrees}
        asked = {"mtbf_seconds": self.mtbf_seconds, "kinds": list(self.storm.kinds), "seed": self.seed}
        steps = statistics.median(self.storm.step_seconds) if self.storm.step_seconds else None
        measured = {"seconds": self.storm.seconds, "step_seconds": steps, "restarts": self.storm.restarts}
        return {
            **found,
            **asked,
            "steps": run.train.steps,
            "undisturbed": asdict(self.baseline),
            **measured,
            "goodput": self.goodput,
            "training_share": self.training_share,
            "recovering_seconds": self.storm.recovering_seconds,
            "predicted": None if self.predicted is None else asdict(self.predicted),
            "by_kind": by_kind(self.storm.records),
            "faults": [asdict(one) for one in self.storm.records],
            "status": self.status,
            "passed": self.passed,
            "equal": self.ended and not self.differ,
            "num_tensors": self.num_tensors,
            "differ": self.differ,
            "differ_undisturbed": self.differ_undisturbed,
        }

"""Training runs that are widely known, from `famous_runs.csv`: the plan of each, and the speed that was published.

`compare` predicts such a plan on the same machine with weft's own runtime and, where its software is known, with the
framework that ran it. It also searches for weft's best plan for the same model and batch. All times come from the same
cost model.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.cluster.hardware import load
from weft.errors import ConfigError
from weft.models import GPT2Config, TransformerConfig
from weft.models.catalog import load_model
from weft.plan import Plan
from weft.planner.answer import Answer, Progress, ask, planned
from weft.planner.candidate import Candidate
from weft.planner.explain import GB, WORDS, short, too_large
from weft.planner.frameworks import FRAMEWORKS
from weft.planner.model import planned_model
from weft.planner.question import Question, parse_constraints, with_fields
from weft.schema import nearest_of_all, to_table

TABLE = Path(__file__).parent / "famous_runs.csv"


@dataclass(frozen=True)
class FamousRun:
    """One published run.

    `framework` is a name of `frameworks.FRAMEWORKS`, or empty if the software of the run is not known. `tflops` are
    those of a device as published; with `recompute_counts` they include recomputed forwards. `seconds` of a step are
    None if they were not printed. `dropout` is that of GPT-2's blocks. `missing` names features of the run's software
    that weft's runtime lacks; a plan that needs them may not fit with weft. `note` says what is assumed.
    """

    name: str
    model: str
    dropout: float
    cluster: str
    sequences: int
    sequence: int
    plan: Plan
    framework: str
    tflops: float
    recompute_counts: bool
    seconds: float | None
    missing: str
    source: str
    note: str

    @property
    def config(self) -> TransformerConfig:
        """The run's model, with its dropout."""
        config = load_model(self.model)
        assert isinstance(config, TransformerConfig)
        return replace(config, resid_pdrop=self.dropout) if isinstance(config, GPT2Config) else config

    @property
    def question(self) -> Question:
        """The question to the planner that the run's batch is."""
        return Question(self.sequences, self.sequence, self.plan.precision)

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of each rank in a step."""
        return self.sequences // (self.plan.num_batch_ranks * (self.plan.micro_batch or 1))


def famous_runs() -> dict[str, FamousRun]:
    """Returns the runs of the table by name."""
    with TABLE.open(encoding="utf-8", newline="") as lines:
        return {row["name"]: _read(row) for row in csv.DictReader(lines)}


def famous_run(name: str) -> FamousRun:
    """Returns a run of the table. Raises ConfigError, with the known names, if there is none of this name."""
    runs = famous_runs()
    if name not in runs:
        raise ConfigError(f"no famous run is called '{name}'{nearest_of_all(name, runs)}")
    return runs[name]


def _read(row: dict[str, str]) -> FamousRun:
    fields = {one.name: one.value for one in parse_constraints([row["plan"]])}
    return FamousRun(
        row["name"],
        row["model"],
        float(row["dropout"] or 0),
        row["cluster"],
        int(row["sequences"]),
        int(row["sequence"]),
        with_fields(Plan(precision="bf16"), fields),
        row["framework"],
        float(row["tflops"]),
        row["recompute_counts"] == "yes",
        float(row["seconds"]) if row["seconds"] else None,
        row["missing"],
        row["source"],
        row["note"],
    )


@dataclass(frozen=True)
class Comparison:
    """A famous run's plan as weft predicts it, and weft's answer for the same model, batch and machine.

    `framework_seconds` is the prediction for the framework that ran it; None if its software is not known.
    """

    run: FamousRun
    theirs: Candidate
    published_seconds: float
    framework_seconds: float | None
    answer: Answer

    @property
    def limit_bytes(self) -> float:
        """The memory of a device."""
        return self.answer.model.cluster.node.device.memory_bytes

    @property
    def fits(self) -> bool:
        """Does the published plan fit with weft's runtime?"""
        return self.theirs.memory.total_bytes <= self.limit_bytes

    @cached_property
    def lines(self) -> tuple[tuple[str, str], ...]:
        """The comparison as (title, sentence)."""
        run, theirs, best = self.run, self.theirs, self.answer.best
        memory = f"{theirs.memory.total_bytes / GB:.1f} of {self.limit_bytes / GB:.4g} GB"
        fits = f"fits: {memory}" if self.fits else too_large(theirs.memory, self.limit_bytes)
        times = [f"predicted for weft {self._predicted(theirs.seconds)}"]
        if self.framework_seconds is not None:
            times.append(f"predicted for {run.framework} {self._predicted(self.framework_seconds)}")
        if run.missing:
            fits += f"; their software has what weft lacks: {run.missing}"
        printed = "printed" if run.seconds is not None else f"from {run.tflops:g} TFLOP/s a device"
        return (
            ("run", f"{run.name}: {run.model}, {run.question.describe()} a step on {run.cluster}; {run.source}"),
            ("plan", f"{short(theirs.plan)} × {theirs.num_micro_batches}"),
            ("time", f"published {self.published_seconds:.2f} s a step ({printed}), {', '.join(times)}"),
            ("memory", f"with weft's runtime it {fits}"),
            ("best", f"weft would choose {short(best.plan)} × {best.num_micro_batches}: {best.seconds:.2f} s, "
                     f"{best.memory.total_bytes / GB:.1f} GB; {self._difference(best)}"),
            ("note", run.note),
        )  # fmt: skip

    def _predicted(self, seconds: float) -> str:
        return f"{seconds:.2f} s ({seconds / self.published_seconds - 1:+.1%})"

    def _difference(self, best: Candidate) -> str:
        """Says by how much the best plan is faster than theirs, and where the time goes."""
        assert best.step is not None
        assert self.theirs.step is not None
        mine, other = best.step.where, self.theirs.step.where
        saved = {name: other.get(name, 0.0) - mine.get(name, 0.0) for name in sorted({*mine, *other})}
        gained, lost = max(saved, key=lambda name: saved[name]), min(saved, key=lambda name: saved[name])
        words = [f"{_word(name)} {-saved[name]:+.2f} s" for name in (gained, lost) if abs(saved[name]) > 0.005]
        ratio = best.seconds / self.theirs.seconds - 1
        compared = "slower" if ratio > 0 else "faster"
        return f"{abs(ratio):.1%} {compared} than their plan ({', '.join(words) or 'the same in each part'})"

    def to_json(self) -> dict[str, Any]:
        """Returns the comparison as plain values, for JSON; the answer is that of `weft plan --json`."""
        run, theirs = self.run, self.theirs
        return {
            "like": {
                "name": run.name,
                "source": run.source,
                "note": run.note,
                "plan": to_table(run.plan),
                "published_tflops": run.tflops,
                "published_seconds": self.published_seconds,
                "predicted_seconds": theirs.seconds,
                "predicted_framework_seconds": self.framework_seconds,
                "memory_bytes": theirs.memory.total_bytes,
                "fits": self.fits,
                "missing": run.missing,
                "where": theirs.step.where if theirs.step is not None else {},
                "words": dict(self.lines),
            },
            **self.answer.to_json(),
        }


def _word(name: str) -> str:
    return WORDS.get(name, f"communication over {name}")


def compare(run: FamousRun, say: Progress = lambda what: None) -> Comparison:
    """Predicts a famous run's plan, and searches for the best plan for the same model and batch on its machine."""
    answer = ask(run.model, run.config, load(run.cluster), run.question, say=say)
    return Comparison(run, predicted(run), published_seconds(run), framework_seconds(run), answer)


def predicted(run: FamousRun) -> Candidate:
    """The run's plan with its predicted time and memory under weft's runtime."""
    model, count = planned(run.config, load(run.cluster), run.question), run.num_micro_batches
    step = model.steps.step(run.plan, count)
    return Candidate(run.plan, count, step.seconds, model.held(run.plan, count), step)


def published_seconds(run: FamousRun) -> float:
    """The published seconds of a step: as printed, or from the FLOP/s of a device.

    Published FLOPs count attention whole, though causal attention needs half of it: PaLM's definition of MFU, which
    Llama 3's paper cites, and the formulas of Megatron-LM (arXiv 2104.04473, equation 3) and Megatron-DeepSpeed.
    """
    if run.seconds is not None:
        return run.seconds
    cluster = load(run.cluster)
    work = planned(run.config, cluster, run.question).steps.workload
    flops = 3 * sum(part.flops for part in (work.first, *work.blocks, work.last)) * run.sequences
    return flops * (4 / 3 if run.recompute_counts else 1) / (run.tflops * 1e12 * cluster.num_devices)


def framework_seconds(run: FamousRun) -> float | None:
    """The predicted seconds of a step with the framework that ran it; None if its software is not known."""
    if not run.framework:
        return None
    software = FRAMEWORKS[run.framework]
    model = planned_model(run.config, run.sequence, load(run.cluster), software, run.plan.precision)
    return model.steps.step(run.plan, run.num_micro_batches).seconds

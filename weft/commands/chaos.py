"""The steps of `weft chaos`: a run without faults, the same run under faults, and a comparison of their checkpoints."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from weft.chaos.report import BaselineRun, ChaosReport, GoodputPrediction, by_kind, differences
from weft.chaos.storm import (
    KINDS,
    REPEATABLE,
    ROLE,
    Fault,
    Storm,
    StormForkServer,
    parse_kinds,
    schedule,
    survival_overrides,
)
from weft.checkpoint.folder import step_name
from weft.commands.console import ElapsedColumn, format_seconds, print_json, say
from weft.commands.run_planning import has_layout
from weft.errors import ConfigError
from weft.launch.environment import detect
from weft.planner.goodput import parse_duration
from weft.resilience.faults import VARIABLE
from weft.run_file import Run, load_run
from weft.train.batches import prepare_data
from weft.train.local_job import start_ranks

_MAX_NAMED = 10  # differing tensors that are named
_LAST_LINES = 5  # lines of the agent's log that are shown if the run did not end


class ChaosOptions(NamedTuple):
    """Options of the command."""

    mtbf: str
    kinds: str | None  # None: all that the run may have
    seed: int
    faults: int | None = None


def run_chaos(
    fork_server: StormForkServer,
    run_file: Path,
    overrides: list[str],
    options: ChaosOptions,
    console: Console,
    as_json: bool,
) -> None:
    """Train both runs and show the comparison; exit status 1 if they end differently."""
    if detect(os.environ) is not None:
        raise ConfigError("weft chaos starts ranks by itself; run it without torchrun, srun or mpirun")
    mtbf_seconds, kinds = parse_duration(options.mtbf, "--mtbf"), parse_kinds(options.kinds or ",".join(KINDS))
    run = load_run(run_file, overrides)
    if options.kinds is None and run.roles.num_ranks:
        kinds = (*kinds, ROLE)
    if not has_layout(run):
        raise ConfigError(f"{run_file} has no [plan]; write one with: weft plan {run_file} --write FILE")
    changes = survival_overrides(run, kinds)
    if REPEATABLE in changes:
        say(console, f"[bold]kernels[/]  of GPUs need not repeat their bits: both runs are trained with {REPEATABLE}")
    overrides = [*overrides, *changes]
    base = run.folder.with_name(run.folder.name + ".chaos")
    prepare_data(run)
    baseline = _undisturbed_run(fork_server, run_file, [*overrides, f"folder={base / 'undisturbed'}"], console)
    faults = schedule(kinds, mtbf_seconds, run.plan.num_ranks, options.seed)
    first = next(faults)
    _refuse_too_short(run, baseline, first, options)
    with tempfile.TemporaryDirectory(prefix="weft-chaos-") as requests:
        own = [*overrides, f"folder={_new_folder(base)}"]
        run = load_run(run_file, own)
        storm = Storm(run, chain([first], faults), kinds, Path(requests), max_faults=options.faults)
        status, log = _train(fork_server, storm, console, "under faults")
    last = Path("checkpoints") / step_name(run.train.steps)
    num_tensors, differ, control = 0, list[str](), None
    if (run.folder / last).is_dir():
        num_tensors, differ = differences(run.folder / last, Path(baseline.folder) / last)
    if differ:
        again = [*overrides, f"folder={base / 'undisturbed-again'}"]
        second = _undisturbed_run(fork_server, run_file, again, console)
        _, control = differences(Path(second.folder) / last, Path(baseline.folder) / last)
    predicted = GoodputPrediction.of(storm, baseline.step_seconds, mtbf_seconds)
    report = ChaosReport(
        baseline, storm, mtbf_seconds, options.seed, predicted, status, num_tensors, differ, log, control
    )
    if as_json:
        print_json(report.to_json())
    else:
        show(console, report)
    if not report.passed:
        raise SystemExit(1)


def _refuse_too_short(run: Run, baseline: BaselineRun, first: Fault, options: ChaosOptions) -> None:
    """Raise ConfigError if the run would be over before its first fault, so that nothing would be shown."""
    most = baseline.seconds - baseline.step_seconds  # no fault in the last step
    if first.after_seconds < most:
        return
    steps = math.ceil(run.train.steps * 2 * first.after_seconds / max(baseline.seconds, baseline.step_seconds))
    raise ConfigError(
        f"the first fault comes after {format_seconds(first.after_seconds)} (--mtbf {options.mtbf}, --seed "
        f"{options.seed}), and the run without faults took {format_seconds(baseline.seconds)}: none would come; give "
        f"e.g. train.steps={steps}, or a shorter --mtbf"
    )


def _undisturbed_run(
    fork_server: StormForkServer, run_file: Path, overrides: list[str], console: Console
) -> BaselineRun:
    """Train the run without faults, or read its times from an earlier call."""
    run = load_run(run_file, overrides)
    known = run.folder / "chaos.json"
    if known.is_file():
        recorded = json.loads(known.read_text())
        if recorded.pop("run") == run.to_toml():
            return BaselineRun(**recorded)
        raise ConfigError(f"{run.folder} is of another run file; remove it, or give another folder (folder = ...)")
    shutil.rmtree(run.folder, ignore_errors=True)  # left by a call that was stopped: its time would be too short
    storm = Storm(run, iter(()), (), Path())
    status, log = _train(fork_server, storm, console, "undisturbed")
    if status or not (run.folder / "checkpoints" / step_name(run.train.steps)).is_dir():
        raise ConfigError(f"the undisturbed run did not end as it should (status {status}); see {log}")
    if not storm.step_seconds:
        raise ConfigError("the undisturbed run was over before it was looked at; give it more steps (train.steps)")
    baseline = BaselineRun(str(run.folder), storm.seconds, statistics.median(storm.step_seconds))
    known.write_text(json.dumps({"run": run.to_toml(), **asdict(baseline)}))
    return baseline


def _train(fork_server: StormForkServer, storm: Storm, console: Console, title: str) -> tuple[int, Path]:
    """Train under the agent. Returns its exit status, and the file with its messages."""
    storm.run.folder.mkdir(parents=True, exist_ok=True)
    log = storm.run.folder / "agent.log"
    fork_server.storm = storm
    environ = {VARIABLE: str(storm.requests)} if storm.kinds else {}
    with (
        _bar(console, title, storm.run.train.steps) as storm.on_progress,
        open(log, "w") as file,
        redirect_stderr(file),
    ):
        status = start_ranks(fork_server, storm.run, lambda file: ["train", str(file), "--json"], environ)
        if status == 0:  # the last steps may end between two looks
            storm.on_progress(storm.run.train.steps, len(storm.records))
        return status, log


@contextmanager
def _bar(console: Console, title: str, num_steps: int) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} steps"))
    with Progress(*columns, TextColumn("{task.fields[faults]}"), ElapsedColumn(), console=console) as bar:
        task = bar.add_task(title, total=num_steps, faults="")

        def tell(step: int, num_faults: int) -> None:
            bar.update(task, completed=max(0, step), faults=f"{num_faults} faults" if num_faults else "")

        yield tell


def _new_folder(base: Path) -> Path:
    number = 1
    while (base / f"faults-{number}").exists():
        number += 1
    return base / f"faults-{number}"


def show(console: Console, report: ChaosReport) -> None:
    """Print a report as tables and sentences."""
    table = Table(title="faults and recoveries", title_justify="left", box=None, pad_edge=False)
    for name in ("kind", "faults", "cut short", "recovered", "median", "90 %", "longest"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    for kind, row in by_kind(report.storm.records).items():
        times = (row["median_seconds"], row["ninth_decile_seconds"], row["longest_seconds"])
        words = ["" if seconds is None else format_seconds(seconds) for seconds in times]
        counts = (str(row[name]) for name in ("faults", "cut_short", "recovered"))
        table.add_row(kind, *counts, *words, style="bold" if kind == "all" else "")
    console.print(table)
    lines = [
        f"[bold]goodput[/]  {report.goodput:.1%}: {format_seconds(report.baseline.seconds)} undisturbed, "
        f"{format_seconds(report.storm.seconds)} under faults, {report.storm.restarts} restarts; "
        f"{report.training_share:.1%} of the time was not spent on recoveries"
    ]
    if report.predicted is not None:
        one = report.predicted
        lines.append(
            f"[bold]predicted[/] {one.goodput:.1%} by Daly's formula: one stop in {format_seconds(one.mtbf_seconds)}, "
            f"{format_seconds(one.restart_seconds)} to train again, a copy every "
            f"{format_seconds(one.interval_seconds)} that counts {format_seconds(one.write_seconds)} later (measured)"
        )
    lines.append(_verdict(report))
    for line in lines:
        say(console, line)


def _verdict(report: ChaosReport) -> str:
    if report.differ_undisturbed:
        return (
            f"[bold red]NO ANSWER[/] {len(report.differ)} of {report.num_tensors} tensors differ, but "
            f"{len(report.differ_undisturbed)} differ between two runs without faults too: this run does not repeat "
            f"its own bits here, so nothing follows about faults"
        )
    if report.ended and not report.storm.records:
        return (
            f"[bold red]NO FAULT[/] came in {format_seconds(report.storm.seconds)}, so nothing was shown; give more "
            f"steps (train.steps), or a shorter --mtbf than {format_seconds(report.mtbf_seconds)}"
        )
    if report.passed:
        return f"[bold green]equal[/]    all {report.num_tensors} tensors have the bits of the undisturbed run"
    if report.differ:
        more = f" and {len(report.differ) - _MAX_NAMED} more" if len(report.differ) > _MAX_NAMED else ""
        names = ", ".join(report.differ[:_MAX_NAMED])
        return f"[bold red]DIFFERS[/]  {len(report.differ)} of {report.num_tensors} tensors: {names}{more}"
    words = "\n".join(report.log.read_text().splitlines()[-_LAST_LINES:])
    return f"[bold red]LOST[/]     the run did not end (status {report.status}); the agent's last words:\n{words}"

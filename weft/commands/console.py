"""Output on the terminal: tables of the machine, the plan and the proof, and a live line for each step. Needs rich."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.table import Table
from rich.text import Text

from weft.cluster.cpu_rates import is_cpu
from weft.cluster.hardware import Cluster, describe
from weft.errors import ConfigError
from weft.planner.predict import Prediction
from weft.profiling import Profile
from weft.proof.report import ProofReport
from weft.run_file import Run
from weft.schedule.draw import heading, to_text, write
from weft.train.metrics import StepMetrics

LOG_WIDTH = 100  # columns of a line of a log, at least
BAR_WIDTH, ELAPSED_WIDTH = 10, 15  # columns of a progress bar, and of the time beside it
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def make_console(to_stderr: bool = False) -> Console:
    """Returns a console on stdout, or on stderr if stdout is for JSON."""
    return Console(stderr=to_stderr)


def say(console: Console, text: str) -> None:
    """Print a sentence: broken between words on a terminal, whole in a log."""
    console.print(text, highlight=False, soft_wrap=not console.is_terminal)


def format_bytes(num_bytes: float) -> str:
    """Formats `1536` as `1.5 KiB`."""
    unit = 0
    while num_bytes >= 1024 and unit < len(UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.0f} {UNITS[unit]}" if unit == 0 else f"{num_bytes:.1f} {UNITS[unit]}"


def format_seconds(seconds: float) -> str:
    """Formats `90` as `1 min 30 s`, `0.002` as `2.0 ms`."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout."""
    print(json.dumps(value, indent=2))


def show_run(
    console: Console, run: Run, cluster: Cluster, profile: Profile, prediction: Prediction, brief: bool = False
) -> None:
    """Print the machine, the plan with its predicted memory, traffic and time, and the batch identity; if `brief`,
    memory and traffic on a line each.
    """
    console.print(f"[bold]machine[/]  {describe(cluster, run.plan.precision)}", highlight=False)
    model = run.model.architecture
    console.print(f"[bold]model[/]    {model}, {profile.numel:,} parameters in {len(profile.blocks)} blocks")
    memory = run.plan.memory
    console.print(
        f"[bold]plan[/]     {run.plan.describe_axes()}, {run.plan.precision}"
        f"{f' ({run.precision_reason})' if run.precision_reason else ''}, recompute {memory.recompute_words}"
        f"{replace(memory, recompute='none').words}"
    )
    console.print(f"[bold]batch[/]    {run.split.identity(run.plan)}", highlight=False)
    if prediction.branches:
        say(console, f"[bold]branches[/] {prediction.branches}")
    if brief:
        say(console, f"[bold]memory[/]   {_memory_text(prediction)}")
        if prediction.traffic:
            say(console, f"[bold]traffic[/]  {_traffic_text(prediction)}")
    else:
        console.print(_memory_table(prediction))
        if prediction.traffic:
            console.print(_traffic_table(prediction))
    for text in run.scaled:
        say(console, f"[yellow]scaled[/]   {text}")
    for text in prediction.assumptions:
        say(console, f"[yellow]assumed[/]  {text}")
    console.print(
        f"[bold]time[/]     {_time_text(prediction, is_cpu(cluster) and not cluster.node.device.peak_flops)}",
        highlight=False,
    )


def _memory_rows(prediction: Prediction) -> dict[str, int]:
    """Returns the predicted bytes of a device by what they hold, without those that are 0."""
    cost = prediction.cost
    rows = {**cost.state_bytes, "activations": cost.saved_bytes, "temporary": cost.transient_bytes}
    rows["margin for allocator, CUDA and NCCL"] = prediction.margin_bytes
    return {name: num_bytes for name, num_bytes in rows.items() if num_bytes}


def _memory_text(prediction: Prediction) -> str:
    largest = sorted(_memory_rows(prediction).items(), key=lambda row: -row[1])
    hosted = sum(prediction.cost.host_bytes.values())
    return (
        f"{format_bytes(prediction.memory_bytes)} of {format_bytes(prediction.memory_limit_bytes)} per device "
        f"(predicted): {', '.join(f'{name} {format_bytes(num_bytes)}' for name, num_bytes in largest)}"
        f"{f'; {format_bytes(hosted)} in host memory' if hosted else ''}"
    )


def _traffic_text(prediction: Prediction) -> str:
    by_axis: dict[str, int] = {}
    for (axis, _), value in prediction.traffic.items():
        by_axis[axis] = by_axis.get(axis, 0) + value.num_bytes
    total = sum(by_axis.values())
    main = ", ".join(f"{axis} {format_bytes(size)}" for axis, size in by_axis.items() if size > total / 1000)
    return f"{format_bytes(total)} per step and device (predicted): {main}; weft plan has the tables"


def _memory_table(prediction: Prediction) -> Table:
    table = Table(title="predicted memory per device", title_justify="left", box=None, pad_edge=False)
    table.add_column("what")
    table.add_column("bytes", justify="right")
    for name, num_bytes in _memory_rows(prediction).items():
        table.add_row(name, format_bytes(num_bytes))
    total, limit = prediction.memory_bytes, prediction.memory_limit_bytes
    style = "bold red" if total > limit else "bold"
    which = f" (pipe rank {prediction.pipe_rank}, the fullest)" if prediction.pipe_rank is not None else ""
    table.add_row(f"total{which}", f"{format_bytes(total)} of {format_bytes(limit)}", style=style)
    if prediction.cost.host_bytes:
        hosted, most = sum(prediction.cost.host_bytes.values()), prediction.host_limit_bytes
        style = "bold red" if hosted > most else "bold"
        table.add_row("in host memory", f"{format_bytes(hosted)} of {format_bytes(most)}", style=style)
    return table


def _traffic_table(prediction: Prediction) -> Table:
    title = "predicted traffic per step and device"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, min_width=len(title))
    for name in ("axis", "operation"):
        table.add_column(name)
    for name in ("calls", "bytes"):
        table.add_column(name, justify="right")
    for (axis, operation), value in prediction.traffic.items():
        table.add_row(axis, operation, str(value.calls), f"{value.num_bytes:,}")
    return table


def _time_text(prediction: Prediction, on_cpu: bool) -> str:
    communication_seconds = sum(prediction.communication_seconds.values())
    if on_cpu and not prediction.is_modelled:
        return "of a step with images is not predicted on CPUs: small operations take many times their peak's time"
    if prediction.step_seconds is None or prediction.compute_seconds is None:
        return f"unknown: this device's peak is not known; communication {format_seconds(communication_seconds)}"
    timeline = prediction.timeline
    bubble = f", bubble {timeline.bubble_share:.1%} of {timeline.schedule.name}" if timeline is not None else ""
    rough = " (rates of this CPU are assumed)" if on_cpu else "" if prediction.is_modelled else " (rough)"
    return (
        f"about {format_seconds(prediction.step_seconds)} a step{rough}: compute "
        f"{format_seconds(prediction.compute_seconds)}, communication {format_seconds(communication_seconds)}{bubble}"
    )


def show_timeline(console: Console, prediction: Prediction, path: Path | None) -> None:
    """Draw the predicted schedule of a pipeline, to a file or as text."""
    if prediction.timeline is None:
        raise ConfigError("a timeline needs times, and this device's peak is not known; use another cluster")
    if path is not None:
        write(path, {heading(prediction.timeline): prediction.timeline})
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    else:
        console.print(to_text(prediction.timeline, max(40, console.width - 24)), highlight=False, soft_wrap=True)


def show_report(console: Console, report: ProofReport, what: str) -> None:
    """Print a proof as a table."""
    precision = "bf16, within a tolerance," if report.plan.precision == "bf16" else "float64"
    table = Table(
        title=f"verified in {precision} against the sequential model: {what}",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for name in ("check", "expected", "found"):
        table.add_column(name)
    table.add_column("where", overflow="fold")
    table.add_column("", no_wrap=True)
    for check in report.checks:
        mark = "[green]equal[/]" if check.passed else "[bold red]DIFFERS[/]"
        table.add_row(check.what, check.expected, check.found, cut_at_dots(check.where, console.width - 58), mark)
    if report.checks:
        console.print(table)
    for one in report.not_proved:
        say(console, f"[bold]not proved[/]  {escape(one)}")


def cut_at_dots(words: str, width: int) -> str:
    """Returns a text whose names of parameters that are wider than a column have their lines end after dots."""
    lines = [""]
    for word in words.split(" "):
        pieces = re.findall(r"[^.]*\.|[^.]+", word) if len(word) > width else [word]
        lines[-1] += " " if lines[-1] else ""
        for piece in pieces:
            if len(word) > width and lines[-1] and len(lines[-1] + piece) > width:
                lines.append("")
            lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def show_table(console: Console, rows: Mapping[str, Any]) -> None:
    """Print names and values, one pair per line."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, escape(str(value)))
    console.print(table)


def show_findings(console: Console, findings: Mapping[str, Any]) -> None:
    """Print the findings of `weft doctor`."""
    rows = {
        key: value
        for key, value in findings.items()
        if key not in ("versions", "all_reduce", "warnings", "devices", "gpu_check")
    }
    for key in ("memory_free_bytes", "shared_memory_bytes"):
        rows[key] = "unknown" if rows[key] is None else format_bytes(rows[key])
    rates = findings["core_flops_per_second"]
    rows["core_flops_per_second"] = ", ".join(f"{name} {rate / 1e9:,.1f} G" for name, rate in rates.items())
    rows["backends"] = ", ".join(findings["backends"])
    rows |= {f"device {i}": ", ".join(f"{k} {v}" for k, v in d.items()) for i, d in enumerate(findings["devices"])}
    rows["versions"] = ", ".join(f"{name} {found or 'missing'}" for name, found in findings["versions"].items())
    for row in findings["all_reduce"]:
        rows[f"all-reduce of {format_bytes(row['bytes'])}"] = (
            f"{format_seconds(row['seconds'])} between {row['ranks']} local ranks, "
            f"{format_bytes(row['bus_bytes_per_second'])}/s"
        )
    checked = findings.get("gpu_check")
    if checked is not None:
        rows["GPU check"] = checked["backend"]
        for row in checked["rows"]:
            word = "right" if row["is_right"] else "WRONG"
            rows[f"  {row['what']}"] = f"{word}: {row['found']} ({format_seconds(row['seconds'])})"
    show_table(console, rows)
    for warning in findings["warnings"]:
        console.print(f"[yellow]warning[/] {warning}")


class _StepColumn(ProgressColumn):
    """Column of a progress bar with the line of the last step."""

    def render(self, task: Task) -> Text:
        return Text(task.fields.get("line", ""))


class ElapsedColumn(ProgressColumn):
    """Column of a progress bar with the time since it was shown."""

    def render(self, task: Task) -> Text:
        return Text(f"after {timedelta(seconds=int(task.elapsed or 0))}")


class LiveReporter:
    """Shows the progress of a run: a live bar on a terminal, about 20 lines in all, and in a log one more whenever
    `every_seconds` have passed without one.
    """

    def __init__(
        self,
        console: Console,
        num_steps: int,
        every_seconds: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._num_steps = console, num_steps
        self._every_seconds, self._clock, self._said_at = every_seconds, clock, clock()
        self._width = console.width if console.is_terminal else max(console.width, LOG_WIDTH)
        self._bar: Progress | None = None
        self._task: Any = None
        self._lines = 0

    def step(self, metrics: StepMetrics) -> None:
        """Show one step."""
        if self._console.is_terminal:
            if self._bar is None:
                self._bar = Progress(BarColumn(BAR_WIDTH), _StepColumn(), ElapsedColumn(), console=self._console)
                self._bar.start()
                self._task = self._bar.add_task("", total=self._num_steps)
            line = step_line(metrics, self._num_steps, self._console.width - BAR_WIDTH - ELAPSED_WIDTH)
            self._bar.update(self._task, completed=metrics.step, line=line)
        every = max(1, self._num_steps // 20)
        is_late = not self._console.is_terminal and self._clock() - self._said_at >= self._every_seconds
        if metrics.step == 1 or is_late or metrics.step // every > self._lines or metrics.step == self._num_steps:
            self._lines, self._said_at = metrics.step // every, self._clock()
            self.say(step_line(metrics, self._num_steps, self._width))

    def say(self, message: str) -> None:
        """Print a line, above the bar if there is one."""
        console = self._bar.console if self._bar is not None else self._console
        say(console, escape(message))  # it may name paths and errors of libraries, with brackets

    def close(self) -> None:
        """End the live display."""
        if self._bar is not None:
            self._bar.stop()


class QuietReporter:
    """Prints nothing; the metrics file has all steps."""

    def step(self, metrics: StepMetrics) -> None:
        """Does nothing."""

    def say(self, message: str) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def step_line(metrics: StepMetrics, num_steps: int, width: int | None = None) -> str:
    """Formats the metrics of one step as a line, without what does not fit into `width` columns."""
    words = {  # in the order of the line; a smaller number is left out later
        f"step {metrics.step}/{num_steps}": 0,
        f"loss {metrics.loss:.4f}": 1,
        f"grad norm {metrics.grad_norm:.3f}": 5,
        f"lr {metrics.learning_rate:.2e}": 3,
    }
    if metrics.start_seconds is not None:
        words[f"{format_seconds(metrics.start_seconds)} to start"] = 2
    else:
        words[f"{_rate(metrics.units_per_second)} {metrics.unit}/s"] = 4
        words[f"({_rate(metrics.units_per_second_per_device)}/device)"] = 8
        words[f"{metrics.tflops_per_second_per_device:.3f} TFLOP/s/device"] = 9
        if metrics.mfu is not None:
            words[f"MFU {metrics.mfu:.1%}"] = 6
        if metrics.step < num_steps:
            words[f"{format_seconds(metrics.seconds_left)} left"] = 2
    words[format_bytes(metrics.memory_bytes)] = 7
    while width is not None and len(words) > 1 and len("  ".join(words)) > width:
        del words[max(words, key=words.__getitem__)]
    return "  ".join(words)


def _rate(number: float) -> str:
    """Formats a rate; one below 100 gets a decimal digit."""
    return f"{number:,.0f}" if number >= 100 else f"{number:,.1f}"

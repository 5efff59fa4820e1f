"""The steps of `weft plan`: search for plans, or predict the given plan; show and write the results."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from weft.cluster.cpu_rates import is_cpu
from weft.cluster.hardware import Cluster, describe
from weft.commands.console import format_bytes, format_seconds, print_json, say, show_run, show_timeline
from weft.commands.job_files import pinned, refuse_kind, write_job
from weft.commands.out_of_memory import refuse_if_too_large
from weft.commands.output import warn, write_result
from weft.commands.run_planning import (
    ask_for,
    catalog_run,
    image_run,
    planning_cluster,
    with_plan,
    with_saves,
    with_traffic,
)
from weft.errors import ConfigError
from weft.planner.advice import best_levels, better_form, fitting_activations, fitting_offload, fitting_weights
from weft.planner.answer import Answer, with_more, with_scaling
from weft.planner.explain import GB
from weft.planner.famous_runs import compare, famous_run, famous_runs
from weft.planner.fewer_bytes import fewer_bytes
from weft.planner.goodput import Failures, cluster_mtbf, failures
from weft.planner.predict import Prediction, predict, run_cluster
from weft.planner.question import OBJECTIVES, parse_constraints, parse_count
from weft.planner.report.page import exposed_seconds, page
from weft.planner.report.style import number
from weft.run_file import Run
from weft.step.examples import micro_batch_profile
from weft.train.role_advice import RoleForecast, forecast_roles
from weft.train.timeline import refuse_timeline

USUAL_TOKENS = 4 << 20  # of a step, if the command line gives none


class JobFile(NamedTuple):
    """What `--write-job` asks for: the kind of job, and the run file that it starts with changes, if one is given."""

    kind: str
    run_file: Path | None
    changes: list[str]

    def write(self, run: Run, cluster: Cluster, seconds: float | None, planned: Path | None, console: Console) -> None:
        """Write the job of a planned run whose steps take `seconds`; of the file `planned` if the plan was written."""
        refuse_kind(self.kind)
        run_file = planned or self.run_file
        if run_file is None:
            raise ConfigError("--write-job starts a run file; give one, or --write FILE")
        changes = [] if planned else pinned(run, self.changes)
        path = write_job(self.kind, run, run_file, changes, cluster, seconds)
        start = {"slurm": f"sbatch {path}", "kubernetes": f"kubectl apply -f {path}, once it names your image"}
        console.print(f"wrote {path}; start it with: {start[self.kind]}", highlight=False, soft_wrap=True)


class PlanOptions(NamedTuple):
    """Options of a search."""

    where: list[str]
    best: str
    write: Path | None
    report: Path | None
    mtbf: str | None = None
    mtbf_cluster: str | None = None
    what_if: bool = False
    job: JobFile | None = None
    roles: bool = False

    @property
    def is_search(self) -> bool:
        """Do the options ask for a search?"""
        return bool(self.where or self.best != "time" or self.write or self.report or self.what_if)

    def device_mtbf(self, cluster: Cluster) -> float | None:
        """Returns the mean seconds between failures of a device; None if no option gives them."""
        mtbf_seconds = cluster_mtbf(self.mtbf, self.mtbf_cluster, cluster.num_devices)
        return None if mtbf_seconds is None else mtbf_seconds * cluster.num_devices


def named_run(
    model: str,
    cluster: str,
    tokens_per_step: str | None,
    sequence: int | None,
    images_per_step: str | None,
    size: int | None,
) -> Run:
    """Returns a run of a model of the catalog, from the options of the command line."""
    if images_per_step is not None and size is not None:
        return image_run(model, cluster, parse_count(images_per_step, "--images-per-step"), size)
    if tokens_per_step is not None:
        return catalog_run(model, cluster, parse_count(tokens_per_step, "--tokens-per-step"), sequence)
    run = catalog_run(model, cluster, USUAL_TOKENS, sequence)
    warn(f"{USUAL_TOKENS:,} tokens a step, as --tokens-per-step is not given")
    return run


def search_plans(run: Run, options: PlanOptions, console: Console, as_json: bool) -> None:
    """Search for plans, print the answer, and write the files that the options ask for."""
    if options.best not in OBJECTIVES:
        raise ConfigError(f"--best {options.best} is not one of {', '.join(OBJECTIVES)}")
    if options.roles:
        raise ConfigError("--roles says what a run file's own plan would gain; give a run file with a [plan]")
    constraints = parse_constraints(options.where)
    cluster = planning_cluster(run)
    mtbf_seconds = options.device_mtbf(cluster)
    for path in (options.write, options.report):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: its folder {path.parent} does not exist")
    with console.status("planning") as status:
        answer = ask_for(run, cluster, constraints, options.best, status.update, mtbf_seconds)  # type: ignore[arg-type]
        if options.what_if or as_json or options.report is not None:
            answer = with_more(answer, status.update)
        if answer.found.best and (as_json or options.report is not None):
            status.update("traffic of the first plan")
            answer = with_traffic(answer, run)
        if options.report is not None:
            answer = with_scaling(answer, status.update)
    table = answer.to_json()
    offload = answer.found.best[0].plan.memory.offload if answer.found.best else 0.0
    cost = _failures(mtbf_seconds, answer.model.numel, answer.question.precision, answer.model.cluster, offload)
    planned = _planned(run, answer, cost) if answer.found.best else None
    if options.report is not None:  # files first: a reader of the output may close it early
        write_result(options.report, page(table))
    if options.write is not None and planned is not None:
        write_result(options.write, planned.to_toml())
    if as_json:
        print_json(table if cost is None else {**table, "failures": cost.to_json()})
    else:
        show_answer(console, answer)
        _show_failures(console, cost)
    if options.report is not None:
        console.print(f"wrote {options.report}", highlight=False, soft_wrap=True)
    if planned is None:
        _planned(run, answer, cost)  # raises, with the reason why there is no plan
    if options.job is not None and planned is not None:
        options.job.write(planned, answer.model.cluster, answer.best.seconds, options.write, console)
    if options.write is not None:
        console.print(
            f"wrote {options.write}; run it with: weft train {options.write}", highlight=False, soft_wrap=True
        )


def _planned(run: Run, answer: Answer, cost: Failures | None) -> Run:
    """Returns the run with the best plan, and with intervals between saves that suit the failures."""
    planned = with_plan(run, answer)
    return planned if cost is None else with_saves(planned, cost, answer.best.seconds)


def _failures(
    mtbf_seconds: float | None, num_parameters: int, precision: str, cluster: Cluster, offload: float
) -> Failures | None:
    """Returns the cost of failures on a cluster; None if it is not known how often a device fails."""
    if mtbf_seconds is None:
        return None
    return failures(num_parameters, precision, cluster, mtbf_seconds / cluster.num_devices, offload)


def _show_failures(console: Console, cost: Failures | None) -> None:
    for line in [] if cost is None else cost.lines():
        say(console, f"[bold]failures[/] {line}")


def _roles(run: Run, cluster: Cluster, prediction: Prediction) -> RoleForecast:
    """Returns what roles would gain, with loading as measured here."""
    if prediction.step_seconds is None or (is_cpu(cluster) and run.cluster == "local"):
        raise ConfigError(
            "--roles compares loading with a step, whose time is not predicted on this machine; give cluster=FILE, "
            "which weft bench machine --write FILE measures, or train: a run says at its end which role would pay"
        )
    return forecast_roles(run, prediction.step_seconds)


def predict_plan(
    run: Run, options: PlanOptions, timeline: bool, path: Path | None, console: Console, as_json: bool
) -> None:
    """Print the predicted memory, traffic and time of the run's own plan."""
    if timeline:
        refuse_timeline(run.plan, path)
    cluster = run_cluster(run)
    profile = micro_batch_profile(run)
    offload, mtbf_seconds = max(run.plan.memory.offload, run.plan.memory.weights), options.device_mtbf(cluster)
    failing = _failures(mtbf_seconds, profile.numel, run.plan.precision, cluster, offload)
    prediction, form = predict(run, cluster), better_form(run, cluster)
    levels = best_levels(run, cluster) if cluster.num_nodes > 1 else None
    less, roles = fewer_bytes(run, cluster), _roles(run, cluster, prediction) if options.roles else None
    fitting = {
        "offload": fitting_offload(run, cluster),
        "activations": fitting_activations(run, cluster),
        "weights": fitting_weights(run, cluster),
    }
    if as_json:
        table = {"plan": run.plan.degrees, "batch": run.split.identity(run.plan), "cluster": cluster.name}
        better: dict[str, Any] = {} if form is None else {"better_form": asdict(form)}
        if levels is not None:
            better["two_levels"] = {**asdict(levels), "pays": levels.pays}
        if less is not None:
            better["fewer_bytes"] = {**asdict(less), "pays": less.pays}
        better |= {f"fitting_{name}": getattr(one, name) for name, one in fitting.items() if one is not None}
        if failing is not None:
            better["failures"] = failing.to_json()
        if roles is not None:
            better["roles"] = asdict(roles)
        print_json({**table, **prediction.to_json(), **better})
    else:
        show_run(console, run, cluster, profile, prediction)
        _show_failures(console, failing)
        if form is not None:
            say(console, f"Of the two forms of x, {form.describe()}.")
        if levels is not None:
            say(console, f"{levels.describe()}.")
        if less is not None:
            say(console, f"{less.describe()}.")
        for line in [] if roles is None else roles.lines(run, not is_cpu(cluster)):
            say(console, f"[bold]roles[/] {line}")
        for name, one in fitting.items():
            if one is None:
                continue
            hosted = format_bytes(sum(one.cost.host_bytes.values()))
            console.print(
                f"It does not fit; with plan.memory.{name} = {getattr(one, name):g} it would: "
                f"{format_bytes(one.cost.memory_bytes)} on the device, {hosted} in host memory.",
                highlight=False,
                soft_wrap=True,
            )
    if timeline and (path is not None or not as_json):
        show_timeline(console, prediction, path)
    refuse_if_too_large(run, cluster, prediction)
    if options.job is not None:
        options.job.write(run, cluster, prediction.step_seconds, None, console)


MAX_REFUSED = 2
NUMBERS_WIDTH = 62  # columns of the numbers of a plan
LEAST_SHOWN = 0.0005  # of a step; what saves less saves nothing


def show_answer(console: Console, answer: Answer) -> None:
    """Print the whole answer."""
    question, model = answer.question, answer.model
    console.print(f"[bold]machine[/]  {describe(model.cluster, question.precision)}", highlight=False)
    console.print(
        f"[bold]model[/]    {answer.name}, {model.numel / 1e9:,.4g} billion parameters in {model.num_blocks} blocks; "
        f"{question.describe()} a step in {question.precision}",
        highlight=False,
    )
    constraints = f"; {', '.join(one.text for one in question.constraints)}" if question.constraints else ""
    console.print(
        f"[bold]search[/]   {answer.found.num_considered:,} plans in "
        f"{format_seconds(answer.search_seconds)}{constraints}",
        highlight=False,
    )
    if answer.found.best:
        _show_plans(console, answer)
    say(console, f"[bold]why[/]      {answer.why}")
    for text in answer.assumptions:
        say(console, f"[yellow]assumed[/]  {text}")
    for one in answer.rejected:
        remedy = f"; {one.remedy}" if one.remedy else ""
        axes = f"{one.candidate.plan.describe_axes()}, micro-batch {one.candidate.plan.micro_batch}"
        faster = f" ({format_seconds(one.candidate.seconds)} a step)"
        say(console, f"[bold]rejected[/] {axes}{faster}: {one.reason}{remedy}")
    for what, reason in answer.found.refused[:MAX_REFUSED]:
        say(console, f"[bold]refused[/]  {what}: {reason}")
    if answer.sensitivities:
        console.print(_sensitivities(answer))


def _show_plans(console: Console, answer: Answer) -> None:
    """Print the plans with their numbers; on a narrow terminal the plans are listed below the table."""
    plans = [
        f"{one.plan.describe_axes()}, micro-batch {one.plan.micro_batch} × {one.num_micro_batches}"
        f"{one.plan.memory.words}"
        for one in answer.layouts()
    ]
    is_narrow = console.width < max(map(len, plans)) + NUMBERS_WIDTH
    console.print(_plans(answer, [str(number) for number in range(1, len(plans) + 1)] if is_narrow else plans))
    for index, plan in enumerate(plans if is_narrow else [], 1):
        say(console, f"plan {index}: {plan}")


def _plans(answer: Answer, names: list[str]) -> Table:
    table = Table(title="the best plan of each layout", title_justify="left", box=None, pad_edge=False)
    table.add_column("plan", no_wrap=True)
    unit = answer.question.unit
    for name in ("step", f"{unit}/s", "MFU", "memory", "exposed", "bubble"):
        table.add_column(name, justify="right", no_wrap=True)
    limit = answer.model.cluster.node.device.memory_bytes
    for index, (name, one) in enumerate(zip(names, answer.layouts(), strict=True)):
        rates, step = answer.rates(one), one.step
        assert step is not None
        table.add_row(
            name,
            format_seconds(one.seconds),
            number(rates[f"{unit}_per_second"]),
            "" if rates["mfu"] is None else f"{rates['mfu']:.1%}",
            f"{one.memory.total_bytes / GB:.1f}/{limit / GB:.4g} GB",
            f"{exposed_seconds(step.where) / one.seconds:.1%}",
            f"{step.wait_share:.1%}",
            style="bold" if index == 0 else "",
        )
    return table


def _sensitivities(answer: Answer) -> Table:
    table = Table(title="what more would change", title_justify="left", box=None, pad_edge=False)
    for name in ("change", "step", "saved", "best plan then"):
        table.add_column(name, overflow="fold")
    for one in answer.sensitivities:
        saved = one.saved_seconds / (one.seconds + one.saved_seconds)
        table.add_row(
            one.change, format_seconds(one.seconds), f"{saved:.1%}" if saved >= LEAST_SHOWN else "nothing", one.axes
        )
    return table


def plan_like(name: str, console: Console, as_json: bool) -> None:
    """Predict a famous run's plan, search for weft's best, and print both with the difference in words; or, for the
    name "list", print the names of the runs.
    """
    if name == "list":
        names = list(famous_runs())
        print_json(names) if as_json else console.print("\n".join(names), highlight=False)
        return
    run = famous_run(name)
    with console.status("planning") as status:
        comparison = compare(run, status.update)
    if as_json:
        print_json(comparison.to_json())
        return
    for title, sentence in comparison.lines:
        say(console, f"[bold]{title:8}[/] {sentence}")
    show_answer(console, comparison.answer)

"""The steps of `weft train` before, during and after training: plan, proof, data, ranks, and their output."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from torch import OutOfMemoryError

from weft.checkpoint import Checkpoint, steps
from weft.checkpoint.folder import step_name
from weft.commands import PROMPT
from weft.commands.console import (
    LiveReporter,
    QuietReporter,
    make_console,
    print_json,
    say,
    show_report,
    show_run,
)
from weft.commands.jobs import prove
from weft.commands.out_of_memory import out_of_memory, refuse_if_too_large
from weft.commands.output import byte_progress, print_text
from weft.commands.run_planning import ask_for, fit_to_ranks, has_layout, planning_cluster, with_plan
from weft.data.config import DataConfig
from weft.data.tokenizer import REPLACEMENT, encode_text
from weft.errors import UNFINISHED, ConfigError, DamagedError, LocalError
from weft.launch.environment import RankInfo, is_elastic, take_device
from weft.launch.folder_lock import locked, refuse_if_used
from weft.launch.fork_server import ForkServer
from weft.launch.role_ranks import TRAIN, JobRank, job_rank
from weft.models import LanguageConfig, VisionConfig
from weft.planner.predict import predict, refuse_run, run_cluster
from weft.run_file import Run, load_run
from weft.step.examples import micro_batch_profile
from weft.step.task import task_of
from weft.train.batches import TrainingData, prepare_data, refuse_missing_data, sample_prompt
from weft.train.early_stopping import stopped_early
from weft.train.local_job import start_ranks
from weft.train.loop import train
from weft.train.metrics import read_events
from weft.train.resume import changed_settings, refuse_other_training
from weft.train.setup import device_type
from weft.train.timeline import refuse_timeline

MAX_VERIFIED_RANKS = 8
MAX_PROMPT_CHARACTERS = 200  # of a command that is suggested
SAMPLE_TOKENS = 32  # of a text that a sample continues, at most
SAMPLE_SECONDS = 5.0  # at most, once the model is loaded


def train_under_launcher(run: Run, rank_info: RankInfo, fresh: bool, as_json: bool) -> None:
    """Train, or do the work of another role, as one rank that a launcher (torchrun, srun, mpirun) or weft itself
    started.
    """
    rank = job_rank(rank_info, run.roles.counts)
    if rank.role == TRAIN:
        shares = run.train.share_gpus, run.plan.ranks_per_device
        take_device(rank.training, device_type(run), *shares)  # first: predicting initialises CUDA
    if fresh:
        raise ConfigError("--fresh moves files that other ranks may use; move the run's folder before the launcher")
    if rank_info.launcher != "weft":  # weft's agent has checked it
        _refuse_before_plan(run)
    if not has_layout(run):
        run = _plan_first(run, rank, make_console(as_json))
    elif is_elastic(os.environ, rank_info):
        run = _fit(run, rank, as_json)
    if rank.role != TRAIN:
        train(run, rank_info, QuietReporter())
        return
    if run.train.timeline is not None:
        refuse_timeline(run.plan, Path(run.train.timeline))
    _train_rank(run, rank_info, as_json)


def _fit(run: Run, rank: JobRank, as_json: bool) -> Run:
    """Returns the run for the number of ranks that the launcher started, which may change at a restart."""
    fitted = fit_to_ranks(run, rank.training)
    if fitted is not run and rank.job.rank == 0:
        make_console(as_json).print(
            f"the plan needs {run.plan.num_ranks} ranks ({run.plan.describe_axes()}) and {rank.training.num_ranks} are "
            f"there: it goes on as {fitted.plan.describe_axes()}, {fitted.split.identity(fitted.plan)}",
            highlight=False,
            soft_wrap=True,
        )
    return fitted


def train_here(
    fork_server: ForkServer, run_file: Path, overrides: list[str], verify: bool, fresh: bool, as_json: bool
) -> None:
    """Plan, prove and train a run on this machine, with ranks from the fork server."""
    run = load_run(run_file, overrides)
    device_type(run)  # raises if the device is missing
    console = make_console(as_json)
    again = partial(_command, run_file, overrides)
    finished = None if fresh else _finished(run)
    if finished is None:
        refuse_if_used(run.folder)
    _refuse_before_plan(run, fresh)
    if finished is not None:
        refuse_other_training(finished, _prepare(run, console), run)
        _say_finished(finished, run, again, console)
    else:
        if not has_layout(run):
            run = _plan_first(run, None, console)
        if run.train.timeline is not None:
            refuse_timeline(run.plan, Path(run.train.timeline))
        if fresh:
            _move_aside(run, console)
        _show(run, console)
        _prepare(run, console)
        if verify:
            _verify(fork_server, run, console)
        _run_ranks(fork_server, run, as_json)
    last = max(steps(run.folder / "checkpoints"), default=0)
    is_finished = last >= run.train.steps or stopped_early(run, last) is not None  # else it was asked to stop
    if as_json:
        print_json({"run": run.name, "folder": str(run.folder), **_last_event(run)})
    elif is_finished:
        if isinstance(run.model, LanguageConfig):
            _show_sample(fork_server, run, again, _another_plan(run, run_file, overrides), console)
        else:
            _show_accuracy(run, again, console)
    if not is_finished:
        raise SystemExit(UNFINISHED)


def _refuse_before_plan(run: Run, fresh: bool = False) -> None:
    """Raises for what needs no plan, whose search and proof may take minutes: data that is not there, and a run folder
    of another training.
    """
    refuse_missing_data(run)
    newest = None if fresh else _newest(run)
    if newest is not None:
        refuse_other_training(newest, None, run)


Again = Callable[..., str]  # (a command, changes to the run) -> what to type, with the overrides that were given


def _command(run_file: Path, overrides: list[str], name: str, *changes: str) -> str:
    changed = {change.partition("=")[0] for change in changes}
    kept = [override for override in overrides if override.partition("=")[0] not in changed]
    return shlex.join(["weft", name, str(run_file), *kept, *changes])


def _finished(run: Run) -> Checkpoint | None:
    """Returns the last checkpoint of a run that has done all its steps, or has stopped early. None if it has not, or
    if that checkpoint is damaged: training then resumes from an older one, and says so.
    """
    newest = _newest(run)
    if newest is None or (newest.step < run.train.steps and stopped_early(run, newest.step) is None):
        return None
    return newest


def _newest(run: Run) -> Checkpoint | None:
    """Returns the newest checkpoint of a run; None if there is none, or if it is damaged."""
    done = steps(run.folder / "checkpoints")
    try:
        return Checkpoint(run.folder / "checkpoints" / step_name(done[-1])) if done else None
    except DamagedError:
        return None


def _say_finished(finished: Checkpoint, run: Run, again: Again, console: Console) -> None:
    tables = ("train", "plan") if has_layout(run) else ("train",)
    changed = "; ".join(changed_settings(finished, run, tables))
    then = f"It was trained with {changed}. " if changed else ""
    why = stopped_early(run, finished.step)
    if why is not None:
        then += f"It stopped early: {why}. To go on from there, give a higher train.patience. "
    console.print(
        f"\nThis run is finished: step {finished.step} of {run.train.steps} is in {run.folder}. "
        f"{then}"
        f"To start anew: {again('train', '--fresh')}. To go on: "
        f"{again('train', f'train.steps={finished.step + run.train.steps}')}",
        highlight=False,
        soft_wrap=True,
    )


def _plan_first(run: Run, rank: JobRank | None, console: Console) -> Run:
    """Returns the run with the best plan for the available devices."""
    prints = rank is None or rank.job.rank == 0
    with console.status("planning") if prints else nullcontext():
        answer = ask_for(run, planning_cluster(run, None if rank is None else rank.training))
        planned = with_plan(run, answer)
    if prints:
        say(console, f"[bold]planned[/]  no \\[plan] is given. {answer.why}")
    return planned


def _train_rank(run: Run, rank_info: RankInfo, as_json: bool) -> None:
    """Train as one rank under a launcher; rank 0 prints."""
    console = make_console(as_json)
    prints = rank_info.rank == 0 and not as_json
    step_seconds: float | None = None
    if rank_info.launcher not in ("none", "weft"):  # under those two, it was printed before
        cluster = run_cluster(run, rank_info.num_hosts)
        prediction = predict(run, cluster)
        step_seconds = prediction.step_seconds
        refuse_if_too_large(run, cluster, prediction)
        if prints:
            show_run(console, run, cluster, micro_batch_profile(run), prediction, brief=True)
            console.print("Prove this plan with: weft verify (not done under a launcher)")
    reporter = LiveReporter(console, run.train.steps, run.log.every_seconds) if prints else QuietReporter()
    try:
        outcome = train(run, rank_info, reporter, step_seconds)
    except OutOfMemoryError as error:
        raise out_of_memory(run, run_cluster(run, rank_info.num_hosts), error) from error
    finally:
        reporter.close()
    if rank_info.rank == 0 and not outcome.finished:
        make_console(True).print(
            f"stopped at step {outcome.step} and saved; run the same command to go on", highlight=False
        )
    if not outcome.finished and rank_info.launcher != "weft":  # weft's own agent takes any status but 0 for a failure
        raise SystemExit(UNFINISHED)


def _run_ranks(fork_server: ForkServer, run: Run, as_json: bool) -> None:
    # Not from the user's file, which may be edited while ranks train: a restart must use the same run.
    status = start_ranks(fork_server, run, lambda file: ["train", str(file), *(["--json"] if as_json else [])])
    if status:
        raise SystemExit(status)


def _show(run: Run, console: Console) -> None:
    cluster = run_cluster(run)
    prediction = predict(run, cluster)
    show_run(console, run, cluster, micro_batch_profile(run), prediction, brief=True)
    refuse_if_too_large(run, cluster, prediction)


def _verify(fork_server: ForkServer, run: Run, console: Console) -> None:
    if run.plan.num_ranks > MAX_VERIFIED_RANKS:
        console.print(
            f"not verified here: {run.plan.num_ranks} ranks are more than {MAX_VERIFIED_RANKS} local processes"
        )
        return
    start = time.perf_counter()
    with console.status("verifying the plan"):
        report = prove(fork_server, run)
    took = f"{run.plan.describe_axes()}, {time.perf_counter() - start:.0f} s"
    if report.passed and any(steps(run.folder / "checkpoints")):  # a run that resumes has shown its table
        console.print(f"[bold]proved[/]   {took}: {len(report.checks)} checks equal (weft verify shows them)")
    else:
        show_report(console, report, took)
    if report.checks:  # there are none if the plan fits the run, but no copy small enough to be proved
        report.require()


def _prepare(run: Run, console: Console) -> TrainingData:
    with byte_progress(console, task_of(run).unit) as progress:
        data = prepare_data(run, progress)
    held_out = 0 if data.held_out is None else len(data.held_out)
    console.print(
        f"[bold]data[/]     {data.description}: {len(data.train):,} {run.split.samples}, {held_out:,} held out",
        highlight=False,
    )
    return data


def _move_aside(run: Run, console: Console) -> None:
    if not run.folder.exists():
        return
    number = 1
    while (aside := run.folder.with_name(f"{run.folder.name}.old-{number}")).exists():
        number += 1
    with locked(run.folder):  # raises if a job uses it
        run.folder.rename(aside)
    console.print(f"moved the earlier run to {aside}")


def _last_event(run: Run) -> dict[str, Any]:
    last: dict[str, Any] = {}
    for event in read_events(run.folder / "metrics.jsonl"):
        last[event["kind"]] = {key: value for key, value in event.items() if key != "kind"}
    return {"step": last.get("step"), "evaluation": last.get("evaluation")}


def _another_plan(run: Run, run_file: Path, overrides: list[str]) -> tuple[str, ...] | None:
    """Returns overrides that make the run's ranks, or two processes on a CPU, another plan that its model allows."""
    num_ranks = max(run.plan.num_ranks, 2) if device_type(run) == "cpu" else run.plan.num_ranks
    for changes in (
        ("plan.tensor.x=2", "plan.data=1"),
        ("plan.pipe=2", "plan.data=1"),
        ("plan.shard=2", "plan.data=1"),
    ):
        try:
            other = load_run(run_file, [*overrides, *changes])
            refuse_run(other)
        except ConfigError:
            continue
        if other.plan != run.plan and other.plan.num_ranks <= num_ranks:
            return changes
    return None


def _show_sample(
    fork_server: ForkServer, run: Run, again: Again, other_plan: tuple[str, ...] | None, console: Console
) -> None:
    prompt, words, more_text = _sample_prompt(run)
    options = {"prompt": prompt, "num_tokens": 240, "seconds": SAMPLE_SECONDS}
    try:
        began = time.monotonic()
        with console.status("generating"):
            text = fork_server.call("sample", folder=str(run.folder), device=device_type(run), options=options)
        console.print(f"\n[bold]the model continues[/] {escape(repr(words))} (in {time.monotonic() - began:.0f} s):")
        print_text(words + text)
    except LocalError as error:  # the model may be too large for one GPU; the run is finished all the same
        say(console, f"\n[yellow]no sample[/]  {escape(str(error).splitlines()[0])}")
    more = f"train.steps={2 * run.train.steps}"
    with_other_plan = "" if other_plan is None else f"another plan:    {again('train', more, *other_plan)}\n"
    console.print(
        f"\n[bold]what to try next[/]\n"
        f"train on:        {again('train', more)}\n"
        f"{with_other_plan}"
        f"what it costs:   {again('plan', *_other_plan_to_price(run))}\n"
        f"more text:       {shlex.join(more_text)}\n"
        f"for others:      {shlex.join(['weft', 'export', str(run.folder), 'my-model'])}",
        highlight=False,
        soft_wrap=True,
    )


def _sample_prompt(run: Run) -> tuple[str | list[int], str, list[str]]:
    """Returns what a sample continues, for `generate`, and as a text; and a command that gives more text."""
    generate = ["weft", "generate", str(run.folder), "--prompt"]
    data = prepare_data(run)
    tokens = sample_prompt(run, data)
    if tokens is None:
        words = _first_words(run, data)
        return (PROMPT, PROMPT, [*generate, "import "]) if words is None else (words, words, [*generate, words])
    tokenizer = run.tokenizer
    texts = [tokenizer.decode(np.array(tokens), skip_special_tokens=skips) for skips in (True, False)]
    for text in texts:
        if len(text) <= MAX_PROMPT_CHARACTERS and encode_text(tokenizer, text) == tokens:
            return tokens, texts[1], [*generate, text]
    return tokens, texts[1], ["weft", "serve", str(run.folder)]  # chats, which its template writes


def _first_words(run: Run, data: TrainingData) -> str | None:
    """Returns the first words of held-out text; None for the text of Python's library, and for what cannot be typed."""
    assert isinstance(run.data, DataConfig)
    if run.data.source == "stdlib":
        return None
    samples = data.train if data.held_out is None else data.held_out
    tokens = samples.get(np.arange(1))[0][0][: min(SAMPLE_TOKENS, run.data.sequence // 2)].numpy()
    lines = run.tokenizer.decode(tokens).strip().splitlines()
    whole = lines[0].partition(REPLACEMENT)[0] if lines else ""
    words = whole.rpartition(" ")[0] or whole
    return words if words and words.isprintable() else None


def _other_plan_to_price(run: Run) -> tuple[str, ...]:
    """Returns a change of the plan that costs something else; none if the run's optimizer would be refused with it."""
    if run.train.kfac is not None:
        return ()
    has_stages = run.plan.shard.degree > 1 and run.plan.memory.accumulate == "whole"
    change = f"plan.shard.stage={3 if run.plan.shard.stage == 2 else 2}" if has_stages else ""
    other = "none" if run.plan.memory.recompute == "full" else "full"
    return (change or f"plan.memory.recompute={other}",)


def _show_accuracy(run: Run, again: Again, console: Console) -> None:
    assert isinstance(run.model, VisionConfig)
    evaluation = _last_event(run)["evaluation"]
    if evaluation is not None:
        console.print(
            f"\n[bold]held out[/]  {evaluation['accuracy']:.1%} right (chance is {1 / run.model.num_classes:.1%}), "
            f"loss {evaluation['loss']:.4f}",
            highlight=False,
        )
    console.print(
        f"\n[bold]what to try next[/]\n"
        f"train on:        {again('train', f'train.steps={2 * run.train.steps}')}\n"
        f"what it costs:   {again('plan', *_other_plan_to_price(run))}",
        highlight=False,
        soft_wrap=True,
    )

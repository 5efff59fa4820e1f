"""The commands. No logic here: each reads its arguments, calls the room that does the work, and shows the result."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
except ImportError:
    sys.exit("weft: the command line needs typer and rich; pip install 'weft[cli]'")

from torch import OutOfMemoryError

from weft import __version__
from weft.chaos import KINDS, StruckNursery
from weft.chaos_command import ChaosOptions, run_chaos
from weft.checkpoint import steps
from weft.config import Run, load_run
from weft.display import (
    LiveReporter,
    QuietReporter,
    byte_progress,
    print_json,
    show_findings,
    show_report,
    show_run,
)
from weft.doctor import examine
from weft.errors import ConfigError, WeftError
from weft.launch import Place, detect, is_elastic
from weft.lock import locked, refuse_if_used
from weft.models import LanguageConfig, VisionConfig
from weft.nursery import Nursery
from weft.plan_command import PlanOptions, named_run, predict_plan, search_plans, split_off_file
from weft.planning import ask_for, fit_to_ranks, has_layout, planning_cluster, with_plan
from weft.predict import micro_batch_profile, predict, run_cluster
from weft.schema import inline, to_table
from weft.train.batches import prepare_data
from weft.train.export import DTYPES, export
from weft.train.generate import generate, load_for_generation
from weft.train.loop import train
from weft.train.out_of_memory import out_of_memory
from weft.train.setup import device_type
from weft.train.task import task_of
from weft.train.timeline import refuse_timeline
from weft.train_command import import_for_ranks, start_ranks
from weft.verify import Report, verify_run

app = typer.Typer(
    name="weft",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Plans, proves and runs the training of networks too large for one device.",
)

RunFile = Annotated[Path, typer.Argument(help="the run file (TOML)", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(help="changes to it: section.key=value", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]

MAX_VERIFIED_RANKS = 8
PROMPT = "def "
UNFINISHED = 75  # the exit status for "try again later" (EX_TEMPFAIL)


@app.command("train", epilog="Example: weft train examples/quickstart.toml train.steps=50")
def train_command(
    run_file: RunFile,
    overrides: Overrides = None,
    verify: Annotated[bool, typer.Option(help="prove the plan on local processes first")] = True,
    fresh: Annotated[bool, typer.Option(help="move an earlier run of this name aside and start anew")] = False,
    as_json: Json = False,
) -> None:
    """Train a run: plan, proof, training, checkpoint, sample. Run it again to resume."""
    place = detect(os.environ)
    if place is not None:
        _train_under_launcher(load_run(run_file, overrides or []), place, fresh, as_json)
        return
    with Nursery(_run_as_rank, import_for_ranks) as nursery:  # first: before this process has threads or a GPU
        _train_here(nursery, run_file, overrides or [], verify, fresh, as_json)


@app.command(
    "plan",
    epilog="Example: weft plan --model llama3-70b --cluster h100:32x8 --tokens-per-step 4M --report plan.html; or: "
    "weft plan run.toml plan.data=2 plan.shard=4 cluster=h100:1x8 --json",
)
def plan_command(
    run_file: Annotated[Path | None, typer.Argument(help="the run file (TOML)", show_default=False)] = None,
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option(help="a model of the catalog, in place of a run file")] = None,
    cluster: Annotated[str | None, typer.Option(help="name, name:nodes or name:nodesxdevices")] = None,
    tokens_per_step: Annotated[str | None, typer.Option(help="with --model: 4M is 4 × 1024 × 1024")] = None,
    sequence: Annotated[int | None, typer.Option(help="with --model: tokens of a sequence", min=1)] = None,
    images_per_step: Annotated[str | None, typer.Option(help="with a --model of images, and --size")] = None,
    size: Annotated[int | None, typer.Option(help="with --images-per-step: rows and columns of an image")] = None,
    where: Annotated[
        list[str] | None, typer.Option(help="what must hold: 'pipe=4', 'tensor.x<=8', 'no recompute', 'exact only'")
    ] = None,
    best: Annotated[str, typer.Option(help="what is to be least: time, cost (device-hours) or devices")] = "time",
    search: Annotated[bool, typer.Option("--search", help="search, though the run file has a [plan]")] = False,
    write: Annotated[Path | None, typer.Option(help="write the run with the best plan, for weft train")] = None,
    report: Annotated[Path | None, typer.Option(help="write a page (HTML) about what was found")] = None,
    mtbf: Annotated[str | None, typer.Option(help="time between failures of a device, e.g. 5y: adds goodput")] = None,
    mtbf_cluster: Annotated[str | None, typer.Option(help="the same of the whole cluster, e.g. 3h")] = None,
    timeline: Annotated[
        bool,
        typer.Option("--timeline", help="draw the pipeline's schedule, here or to the FILE.svg (.png, .txt) given"),
    ] = False,
    as_json: Json = False,
) -> None:
    """Find the best plans for a model on a cluster, and why; or predict the plan that a run file gives."""
    asks = PlanOptions(where or [], best, write, report, mtbf, mtbf_cluster)
    if model is not None:
        if run_file is not None:
            raise ConfigError(f"--model {model} and the run file {run_file} both say what the model is; give one")
        run = named_run(model, cluster, tokens_per_step, sequence, images_per_step, size)
        search_plans(run, asks, _console(as_json), as_json)
        return
    if run_file is None:
        raise ConfigError("give a run file, or --model with --cluster and --tokens-per-step; see weft plan --help")
    if any(given is not None for given in (tokens_per_step, sequence, images_per_step, size)):
        raise ConfigError(
            "--tokens-per-step, --sequence, --images-per-step and --size go with --model; a run file has [train] and "
            "[data]"
        )
    changes, path = split_off_file(overrides or []) if timeline else (overrides or [], None)
    if cluster is not None:
        changes = [*changes, f"cluster={cluster}"]
    run = load_run(run_file, changes)
    if asks.is_search or search or not has_layout(run):
        search_plans(run, asks, _console(as_json), as_json)
    else:
        predict_plan(run, asks, timeline, path, _console(as_json), as_json)


@app.command("verify", epilog="Example: weft verify run.toml plan.data=2 plan.shard.stage=2")
def verify_command(run_file: RunFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Prove that the plan equals the unsplit model, in float64 on local processes, on a shrunk copy of the model."""
    run = load_run(run_file, overrides or [])
    console = _console(as_json)
    with console.status(f"verifying {run.plan.describe_axes()} on {run.plan.num_ranks} local processes"):
        report = verify_run(run)
    if as_json:
        print_json({"passed": report.passed, "checks": [asdict(check) for check in report.checks]})
    else:
        show_report(console, report, run.plan.describe_axes())
    report.require()


@app.command("chaos", epilog="Example: weft chaos examples/quickstart.toml --mtbf 20s --kinds kill,hang,nan --seed 1")
def chaos_command(
    run_file: RunFile,
    overrides: Overrides = None,
    mtbf: Annotated[str, typer.Option(help="mean time between faults, e.g. 20s")] = "20s",
    kinds: Annotated[str, typer.Option(help="the kinds of faults, of which each is as likely")] = ",".join(KINDS),
    seed: Annotated[int, typer.Option(help="of the times, kinds and victims")] = 0,
    faults: Annotated[int | None, typer.Option(help="no more faults than this", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Train a run in peace and under random faults, and prove that both end with the same bits (else status 1)."""
    with StruckNursery(_run_as_rank, import_for_ranks) as nursery:  # first, as for train
        asks = ChaosOptions(mtbf, kinds, seed, faults)
        run_chaos(nursery, run_file, overrides or [], asks, _console(as_json), as_json)


@app.command("export", epilog="Example: weft export runs/quickstart my-model --dtype bf16")
def export_command(
    source: Annotated[Path, typer.Argument(help="a run folder or a checkpoint")],
    target: Annotated[Path, typer.Argument(help="the Hugging Face folder to write; must not exist")],
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; as trained if not given")] = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder that transformers loads."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    with byte_progress(_console(as_json), "exporting") as progress:
        export(source, target, dtype, progress)
    if as_json:
        print_json({"folder": str(target)})
    else:
        _console().print(f"wrote {target}; load it with AutoModelForCausalLM.from_pretrained('{target}')")


@app.command("generate", epilog='Example: weft generate runs/quickstart --prompt "def main():" --tokens 100')
def generate_command(
    source: Annotated[Path, typer.Argument(help="a run folder, a checkpoint or a Hugging Face folder")],
    prompt: Annotated[str, typer.Option(help="the text to continue")] = PROMPT,
    tokens: Annotated[int, typer.Option(help="how many tokens at most", min=1, max=100_000)] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token", min=0.0, max=10.0)] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="choose among the k likeliest", min=1)] = 50,
    seed: Annotated[int, typer.Option(help="of the sampling")] = 0,
    tokenizer: Annotated[str | None, typer.Option(help="bytes or a tokenizer.json, for HF folders without one")] = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt with a trained model, on one process."""
    console = _console(as_json)
    with console.status("generating"):
        model, tokens_of, context = load_for_generation(source, tokenizer)
        text = generate(
            model,
            tokens_of,
            prompt,
            num_tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            context=context,
        )
    if as_json:
        print_json({"prompt": prompt, "text": text})
    else:
        print(prompt + text)


@app.command("doctor", epilog="Example: weft doctor --json")
def doctor_command(
    ranks: Annotated[int, typer.Option(help="local ranks to measure the all-reduce with", min=2, max=64)] = 2,
    as_json: Json = False,
) -> None:
    """Report versions, devices, back-ends, memory, the launcher found and the measured all-reduce speed."""
    console = _console(as_json)
    with console.status("examining the machine"):
        findings = examine(os.environ, ranks)
    if as_json:
        print_json(findings)
    else:
        show_findings(console, findings)


def main() -> None:
    """The entry point: errors that weft raises on purpose are one line, status 2 for what the user can change."""
    try:
        app()
    except ConfigError as error:
        _fail(error, 2)
    except WeftError as error:
        _fail(error, 1)


# --- steps of `weft train`


def _run_as_rank(arguments: list[str]) -> None:
    """`weft ARGUMENTS` in a rank that was forked; its errors are the agent's to show."""
    app(arguments, standalone_mode=False)


def _train_under_launcher(run: Run, place: Place, fresh: bool, as_json: bool) -> None:
    device_type(run)  # refuses one that is not there
    if fresh:
        raise ConfigError("--fresh moves files that other ranks may use; move the run's folder before the launcher")
    if not has_layout(run):
        run, _ = _plan_first(run, place, _console(as_json), [])
    elif is_elastic(os.environ, place):
        run = _fit(run, place, as_json)
    if run.train.timeline is not None:
        refuse_timeline(run.plan, Path(run.train.timeline))
    _train_rank(run, place, as_json)


def _fit(run: Run, place: Place, as_json: bool) -> Run:
    """The run for the ranks that a launcher found, which may be others after a restart."""
    fitted = fit_to_ranks(run, place)
    if fitted is not run and place.rank == 0:
        _console(as_json).print(
            f"the plan needs {run.plan.num_ranks} ranks ({run.plan.describe_axes()}) and {place.num_ranks} are there: "
            f"it goes on as {fitted.plan.describe_axes()}, {fitted.split.identity(fitted.plan)}",
            highlight=False,
            soft_wrap=True,
        )
    return fitted


def _train_here(
    nursery: Nursery, run_file: Path, overrides: list[str], verify: bool, fresh: bool, as_json: bool
) -> None:
    """The whole of it on this machine, with ranks from the nursery."""
    run = load_run(run_file, overrides)
    device_type(run)  # refuses one that is not there
    console = _console(as_json)
    if not has_layout(run):
        run, overrides = _plan_first(run, None, console, overrides)
    if run.train.timeline is not None:
        refuse_timeline(run.plan, Path(run.train.timeline))
    if fresh:
        _move_aside(run, console)
    _show(run, console)
    done = steps(run.folder / "checkpoints")
    if done and done[-1] >= run.train.steps:
        console.print(
            f"\nThis run is finished: step {done[-1]} of {run.train.steps} is in {run.folder}. "
            f"To start anew: weft train {run_file} --fresh. To go on: weft train {run_file} "
            f"train.steps={done[-1] + run.train.steps}",
            highlight=False,
            soft_wrap=True,
        )
    else:
        refuse_if_used(run.folder)  # told now, not after the proof
        _prepare(run, console)
        if verify:
            _verify(run, console)
        _run_ranks(nursery, run, run_file, overrides, as_json)
    if as_json:
        print_json({"run": run.name, "folder": str(run.folder), **_last_event(run)})
    elif max(steps(run.folder / "checkpoints"), default=0) >= run.train.steps:  # else it was asked to stop
        (_show_sample if isinstance(run.model, LanguageConfig) else _show_accuracy)(run, run_file, console)


def _plan_first(run: Run, place: Place | None, console: Console, overrides: list[str]) -> tuple[Run, list[str]]:
    """The run under the best plan for the devices that are there, and the overrides that say so to local ranks."""
    speaks = place is None or place.rank == 0
    with console.status("planning") if speaks else nullcontext():
        answer = ask_for(run, planning_cluster(run, place))
        planned = with_plan(run, answer)
    if speaks:
        console.print(f"[bold]planned[/]  no \\[plan] is given. {answer.why}", highlight=False, soft_wrap=True)
    return planned, [*overrides, f"plan={inline(to_table(planned.plan))}"]


def _train_rank(run: Run, place: Place, as_json: bool) -> None:
    """One rank under a launcher; rank 0 speaks."""
    console = _console(as_json)
    speaks = place.rank == 0 and not as_json
    step_seconds: float | None = None
    if place.launcher not in ("none", "weft"):  # under those two, all this was said before
        cluster = run_cluster(run, place.num_hosts)
        prediction = predict(run, cluster)
        step_seconds = prediction.step_seconds
        if speaks:
            show_run(console, run, cluster, micro_batch_profile(run), prediction)
            console.print("Prove this plan with: weft verify (not done under a launcher)")
    reporter = LiveReporter(console, run.train.steps) if speaks else QuietReporter()
    try:
        outcome = train(run, place, reporter, step_seconds)
    except OutOfMemoryError as error:
        raise out_of_memory(run, run_cluster(run, place.num_hosts), error) from error
    finally:
        reporter.close()
    if place.rank == 0 and not outcome.finished:
        _console(True).print(
            f"stopped at step {outcome.step} and saved; run the same command to go on", highlight=False
        )
    if not outcome.finished and is_elastic(os.environ, place):
        raise SystemExit(UNFINISHED)  # torchrun stops ranks when hosts come: they must not look as if all were done


def _run_ranks(nursery: Nursery, run: Run, run_file: Path, overrides: list[str], as_json: bool) -> None:
    if run.plan.num_ranks == 1:
        _train_rank(run, Place(), as_json)
        return

    arguments = ["train", str(run_file), *overrides, *(["--json"] if as_json else [])]
    status = start_ranks(nursery, run, arguments)
    if status:
        raise SystemExit(status)


def _show(run: Run, console: Console) -> None:
    cluster = run_cluster(run)
    show_run(console, run, cluster, micro_batch_profile(run), predict(run, cluster))


def _verify(run: Run, console: Console) -> None:
    if run.plan.num_ranks > MAX_VERIFIED_RANKS:
        console.print(
            f"not verified here: {run.plan.num_ranks} ranks are more than {MAX_VERIFIED_RANKS} local processes"
        )
        return
    start = time.perf_counter()
    with console.status("verifying the plan"):
        report: Report = verify_run(run)
    show_report(console, report, f"{run.plan.describe_axes()}, {time.perf_counter() - start:.0f} s")
    report.require()


def _prepare(run: Run, console: Console) -> None:
    with byte_progress(console, task_of(run).unit) as progress:
        data = prepare_data(run, progress)
    held_out = 0 if data.held_out is None else len(data.held_out)
    console.print(
        f"[bold]data[/]     {data.description}: {len(data.train):,} {run.split.samples}, {held_out:,} held out",
        highlight=False,
    )


def _move_aside(run: Run, console: Console) -> None:
    if not run.folder.exists():
        return
    number = 1
    while (aside := run.folder.with_name(f"{run.folder.name}.old-{number}")).exists():
        number += 1
    with locked(run.folder):  # not under a job that runs
        run.folder.rename(aside)
    console.print(f"moved the earlier run to {aside}")


def _last_event(run: Run) -> dict[str, Any]:
    path = run.folder / "metrics.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    last: dict[str, Any] = {}
    for event in events:
        last[event["kind"]] = {key: value for key, value in event.items() if key != "kind"}
    return {"step": last.get("step"), "evaluation": last.get("evaluation")}


def _show_sample(run: Run, run_file: Path, console: Console) -> None:
    with console.status("generating"):
        model, tokenizer, context = load_for_generation(run.folder)
        text = generate(model, tokenizer, PROMPT, num_tokens=240, context=context)
    console.print(f"\n[bold]the model continues[/] {PROMPT!r}:")
    print(PROMPT + text)
    console.print(
        f"\n[bold]what to try next[/]\n"
        f"  weft train {run_file} train.steps={2 * run.train.steps}                 # train on, from the checkpoint\n"
        f"  weft train {run_file} train.steps={2 * run.train.steps} plan.tensor.x=2 plan.data=1  # under another plan\n"
        f"  weft plan {run_file} plan.shard.stage=2           # what another plan would cost\n"
        f'  weft generate {run.folder} --prompt "import "     # more text\n'
        f"  weft export {run.folder} my-model                 # a folder that transformers loads",
        highlight=False,
        soft_wrap=True,
    )


def _show_accuracy(run: Run, run_file: Path, console: Console) -> None:
    assert isinstance(run.model, VisionConfig)
    found = _last_event(run)["evaluation"]
    if found is not None:
        console.print(
            f"\n[bold]held out[/]  {found['accuracy']:.1%} right (chance is {1 / run.model.num_classes:.1%}), loss "
            f"{found['loss']:.4f}",
            highlight=False,
        )
    console.print(
        f"\n[bold]what to try next[/]\n"
        f"  weft train {run_file} train.steps={2 * run.train.steps}              # train on, from the checkpoint\n"
        f"  weft plan {run_file} plan.memory.recompute=full  # what another plan would cost",
        highlight=False,
        soft_wrap=True,
    )


def _console(to_stderr: bool = False) -> Console:
    return Console(stderr=to_stderr)


def _fail(error: WeftError, status: int) -> None:
    print(f"weft: {error}", file=sys.stderr)
    raise SystemExit(status)


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="print the version and leave", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of no command."""

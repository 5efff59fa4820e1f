"""The commands of `weft`. Each reads its arguments, calls the code that does the work, and shows the result.

Commands import that code themselves, after they have checked the run file: help, the version and most mistakes are
answered without torch, whose import takes seconds.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

try:
    import rich  # noqa: F401 (other files of this folder need it)
    import typer
except ImportError:
    sys.exit("weft: the command line needs typer and rich; pip install 'weft[cli]'")


from weft.commands.arguments import Json, Overrides, RunFile, Source
from weft.commands.bench import bench_app
from weft.commands.bench_serve import bench_serve_command
from weft.commands.calibrate import calibrate_command, index_command
from weft.commands.generate import generate_command
from weft.commands.plan_command import plan_command
from weft.commands.serve import serve_command
from weft.errors import ConfigError
from weft.version import VERSION

app = typer.Typer(
    name="weft",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich would double the time that it takes
    help="Plans, proves, runs and serves networks too large for one device.",
    epilog="Example: weft init run.toml; weft plan run.toml; weft train run.toml",
)

tune_app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Choose a setting of a run by short measurements.",
    epilog="Example: weft tune ranks-per-device run.toml --most 3",
)
app.add_typer(bench_app, name="bench")
app.add_typer(tune_app, name="tune")


@app.command("init", epilog="Example: weft init run.toml --data my-texts --cluster h100:1x8")
def init_command(
    run_file: Annotated[Path, typer.Argument(help="the run file to write; must not exist")],
    model: Annotated[str | None, typer.Option(help="a model of the catalog; a small Llama if not given")] = None,
    data: Annotated[str, typer.Option(help="a file or folder of text, or stdlib")] = "stdlib",
    cluster: Annotated[str, typer.Option(help="local, name:nodes or name:nodesxdevices")] = "local",
    interactive: Annotated[bool, typer.Option("--interactive", help="ask for what is not given")] = False,
) -> None:
    """Write a commented run file to begin with."""
    from weft.commands.init import init

    if interactive:
        model = typer.prompt("model of the catalog, or small", default=model or "small")
        data, cluster = typer.prompt("text", default=data), typer.prompt("machine", default=cluster)
    init(run_file, None if model == "small" else model, data, cluster)
    print(f"wrote {run_file}; what it costs: weft plan {run_file}; run it: weft train {run_file}")


@app.command("train", epilog="Example: weft train examples/quickstart.toml train.steps=50")
def train_command(
    run_file: RunFile,
    overrides: Overrides = None,
    verify: Annotated[bool, typer.Option(help="prove the plan on local processes first")] = True,
    fresh: Annotated[bool, typer.Option(help="move an earlier run of this name aside and start anew")] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print every value and where it came from; train nothing")
    ] = False,
    profile: Annotated[
        str | None, typer.Option(help="record the communication of steps, e.g. 10:20, for weft profile")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a run: plan, proof, training, checkpoint, sample. Run it again to resume."""
    from weft.run_file import check_run_file, load_run

    if profile is not None:
        overrides = [*(overrides or []), f"train.profile={profile}"]
    check_run_file(run_file, overrides or [])
    if print_config:
        from weft.commands.run_reference import configuration

        print(configuration(load_run(run_file, overrides or [])), end="")
        return
    from weft.commands.jobs import command_fork_server
    from weft.commands.train import train_here, train_under_launcher
    from weft.launch.environment import detect
    from weft.train.local_job import run_of_job

    rank_info = detect(os.environ)
    if rank_info is not None:
        with run_of_job(run_file, overrides or [], os.environ, rank_info) as run:
            train_under_launcher(run, rank_info, fresh, as_json)
        return
    with command_fork_server(_run_as_rank) as fork_server:
        train_here(fork_server, run_file, overrides or [], verify, fresh, as_json)


app.command(
    "plan",
    epilog="Example: weft plan --model llama3-70b --cluster h100:32x8 --tokens-per-step 4M --report plan.html; or: "
    "weft plan run.toml plan.data=2 plan.shard=4 cluster=h100:1x8 --json",
)(plan_command)


@app.command("verify", epilog="Example: weft verify run.toml plan.data=2 plan.shard.stage=2 --device cuda")
def verify_command(
    run_file: RunFile,
    overrides: Overrides = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda: ranks share the GPUs of this machine")] = "cpu",
    precision: Annotated[str, typer.Option(help="fp64, or bf16: within a tolerance of float64")] = "fp64",
    compiles: Annotated[bool, typer.Option("--compile", help="with cuda: what the run compiles and records")] = False,
    as_json: Json = False,
) -> None:
    """Prove that the plan equals the unsplit model. In float64 on local processes, on a small copy of the model."""
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device} is not one of cpu, cuda")
    if precision not in ("fp64", "bf16"):
        raise ConfigError(f"--precision {precision} is not one of fp64, bf16")
    if compiles and device == "cpu":
        raise ConfigError("--compile is for --device cuda, where a run compiles its blocks; leave it out on a CPU")
    from weft.run_file import check_run_file, load_run

    check_run_file(run_file, overrides or [])
    from weft.cluster.local_gpus import gpus
    from weft.commands.console import make_console, print_json, show_report
    from weft.commands.jobs import command_fork_server, prove

    console = make_console(as_json)
    with command_fork_server(_run_as_rank) as fork_server:
        if device == "cuda" and not gpus():
            raise ConfigError("--device cuda, but torch sees no GPU; use --device cpu")
        name = gpus()[0].name if device == "cuda" else "CPUs"
        run = load_run(run_file, overrides or [])
        with console.status(f"verifying {run.plan.describe_axes()} on {run.plan.num_ranks} local processes"):
            report = prove(fork_server, run, device, precision, compiles)  # type: ignore[arg-type]
    if as_json:
        checks = [asdict(check) for check in report.checks]
        report_table = {"passed": report.passed, "device": device, "precision": precision, "checks": checks}
        print_json({**report_table, "not_proved": list(report.not_proved)})
    else:
        show_report(console, report, f"{run.plan.describe_axes()} on {name}")
    report.require()


@app.command("chaos", epilog="Example: weft chaos examples/quickstart.toml --mtbf 20s --kinds kill,hang,nan --seed 1")
def chaos_command(
    run_file: RunFile,
    overrides: Overrides = None,
    mtbf: Annotated[str, typer.Option(help="mean time between faults, e.g. 20s")] = "20s",
    kinds: Annotated[
        str | None, typer.Option(help="the kinds of faults, of which each is as likely; all if not given")
    ] = None,
    seed: Annotated[int, typer.Option(help="of the times, kinds and victims")] = 0,
    faults: Annotated[int | None, typer.Option(help="no more faults than this", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Train a run with and without faults, and compare the bits. Exit status 1 if they differ, or if no fault came."""
    from weft.run_file import check_run_file

    check_run_file(run_file, overrides or [])
    from weft.chaos.storm import StormForkServer
    from weft.commands.chaos import ChaosOptions, run_chaos
    from weft.commands.console import make_console
    from weft.commands.jobs import command_fork_server

    with command_fork_server(_run_as_rank, StormForkServer) as fork_server:
        options = ChaosOptions(mtbf, kinds, seed, faults)
        run_chaos(fork_server, run_file, overrides or [], options, make_console(as_json), as_json)


@app.command("evaluate", epilog="Example: weft evaluate runs/chat --data questions.jsonl")
def evaluate_command(
    source: Source,
    data: Annotated[
        Path | None,
        typer.Option(help="what to measure it on, read as the run read its own; what it held out if not given"),
    ] = None,
    kind: Annotated[str | None, typer.Option(help="text or chat, if not as the run")] = None,
    sequence: Annotated[int | None, typer.Option(help="tokens of a sequence, if not as the run", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Measure a model on data: loss, accuracy, perplexity of text."""
    from weft.commands.console import make_console, print_json
    from weft.commands.evaluate import evaluate_folder, in_words

    with make_console(to_stderr=True).status("measuring"):
        measures = evaluate_folder(source, data, kind, sequence)
    print_json(measures) if as_json else make_console().print(in_words(measures))


@app.command("export", epilog="Example: weft export runs/quickstart my-model --dtype bf16")
def export_command(
    source: Annotated[Path, typer.Argument(help="a run folder or a checkpoint")],
    target: Annotated[
        Path, typer.Argument(help="the Hugging Face folder to write (of images: model.safetensors); must not exist")
    ],
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; as trained if not given")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="write LoRA's updates alone, for PEFT")] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint as a folder that transformers loads.

    A model of images is written as `model.safetensors`.
    """
    from weft.commands.console import make_console, print_json
    from weft.commands.export import DTYPES, export
    from weft.commands.output import byte_progress, warn

    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    with byte_progress(make_console(as_json), "exporting") as progress:
        load = export(source, target, dtype, progress, adapter, warn)
    if as_json:
        print_json({"folder": str(target)})
        return
    make_console().print(f"wrote {target}; load it with {load}", soft_wrap=True)


@app.command("profile", epilog="Example: weft profile runs/run, after weft train run.toml --profile 10:20")
def profile_command(
    run_folder: Annotated[Path, typer.Argument(help="the folder of a run that was trained with --profile")],
    live: Annotated[bool, typer.Option("--live", help="serve the page on loopback while the run records")] = False,
    port: Annotated[int, typer.Option(help="of --live; 0 takes a free one", min=0, max=65535)] = 0,
    as_json: Json = False,
) -> None:
    """Show where the communication time of recorded steps goes. A table, a page (HTML) and a Chrome trace."""
    from weft.commands.console import make_console
    from weft.commands.recorded import serve_live, show_profile

    if live:
        serve_live(run_folder, port, make_console(as_json))
        return
    show_profile(run_folder, make_console(as_json), as_json)


@app.command("report", epilog="Example: weft report runs/quickstart")
def report_command(
    run_folder: Annotated[Path, typer.Argument(help="the folder of a run, which may still train")],
    out: Annotated[Path | None, typer.Option(help="the file to write; report.html in the folder if not given")] = None,
    as_json: Json = False,
) -> None:
    """Draw a run's losses and speed against steps. One page (HTML) that loads nothing from elsewhere."""
    from weft.commands.recorded import write_report

    write_report(run_folder, out, as_json)


app.command("generate", epilog='Example: weft generate runs/quickstart --prompt "def main():" --tokens 100')(
    generate_command
)
app.command(
    "serve", epilog="Example: weft serve runs/quickstart --port 8000, then: curl http://127.0.0.1:8000/v1/models"
)(serve_command)
app.command("calibrate", epilog="Example: weft calibrate runs/quickstart --data text.txt --out loki.safetensors")(
    calibrate_command
)
app.command("index", epilog="Example: weft index runs/quickstart --data text.txt --out graph.safetensors")(
    index_command
)
bench_app.command(
    "serve",
    epilog="Example: weft bench serve runs/quickstart --rate 2 --requests 40; or: weft bench serve http://127.0.0.1:8000",
)(bench_serve_command)


@app.command("doctor", epilog="Example: weft doctor --json")
def doctor_command(
    ranks: Annotated[int, typer.Option(help="local ranks to measure the all-reduce with", min=2, max=64)] = 2,
    check: Annotated[bool, typer.Option(help="where there are GPUs: prove a few plans on them, in a minute")] = True,
    as_json: Json = False,
) -> None:
    """Report what this machine has, and whether GPUs compute right. Versions, devices, back-ends, memory, the launcher
    found, and the measured all-reduce speed.
    """
    from weft.cluster.local_gpus import gpus
    from weft.commands.console import make_console, print_json, show_findings
    from weft.commands.doctor import examine
    from weft.commands.jobs import command_fork_server

    console = make_console(as_json)
    with (
        command_fork_server(_run_as_rank, warms=False) as fork_server,
        console.status("examining the machine") as status,
    ):
        findings = examine(os.environ, ranks)
        if check and gpus():
            status.update("training a tiny model on the GPU under several plans: about a minute")
            findings["gpu_check"] = fork_server.call("check_gpu")
    if as_json:
        print_json(findings)
    else:
        show_findings(console, findings)
    if not all(row["is_right"] for row in findings.get("gpu_check", {}).get("rows", ())):
        raise SystemExit(1)


@tune_app.command(
    "ranks-per-device",
    epilog="Example: weft tune ranks-per-device examples/quickstart.toml plan.shard=1 --most 3 --steps 20",
)
def ranks_per_device_command(
    run_file: RunFile,
    overrides: Overrides = None,
    most: Annotated[int, typer.Option(help="the largest number of ranks per device to measure", min=1, max=16)] = 4,
    steps: Annotated[int, typer.Option(help="steps to measure, after the warm-up", min=5)] = 50,
    warm_up: Annotated[int, typer.Option(help="steps before them", min=1)] = 20,
    rounds: Annotated[int, typer.Option(help="measure the fastest numbers so many times more", min=0)] = 2,
    as_json: Json = False,
) -> None:
    """Measure how many ranks per device to use. From 1 to --most, at the run's global batch (plan.ranks_per_device)."""
    from weft.run_file import check_run_file, load_run

    check_run_file(run_file, overrides or [])
    from weft.commands.console import make_console, print_json
    from weft.commands.jobs import command_fork_server
    from weft.commands.tune import show, tune

    console = make_console(as_json)
    with command_fork_server(_run_as_rank) as fork_server:
        run = load_run(run_file, overrides or [])
        tuning = tune(fork_server, run, most, steps, warm_up, rounds, console)
    print_json(asdict(tuning)) if as_json else show(tuning, run, console)


def _run_as_rank(arguments: list[str]) -> None:
    """Run `weft ARGUMENTS` in a forked rank. Errors are raised, so that the agent shows them."""
    app(arguments, standalone_mode=False)


def _print_version(asked: bool) -> None:
    if asked:
        print(VERSION)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="print the version and leave", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of `weft` itself."""

"""The command `weft plan`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.commands.arguments import Json, Overrides
from weft.commands.serving_options import Given, takes_options
from weft.errors import ConfigError
from weft.serve.spec import options_of

if TYPE_CHECKING:  # these import torch
    from weft.planner.serving_load import ServiceQuestion

ALWAYS = ("run_file", "overrides", "model", "cluster", "serve", "report", "as_json")  # of both kinds of planning
OF_SERVICE = ("rate", "trace", "first_token", "next_token", "price", "shared_prompt", "formats")
AT_ONCE = ("requests", "accepted", "speculate")  # what questions about a service do not take
TO_SERVE = (*(one.name for one in options_of("plan")), *AT_ONCE[:2], "prompt", "output", *OF_SERVICE)
WhereOption = Annotated[
    list[str] | None, typer.Option(help="what must hold: 'pipe=4', 'tensor.x<=8', 'no recompute', 'exact only'")
]
WriteJobOption = Annotated[
    str | None, typer.Option(help="slurm or kubernetes: write the file that starts the run, beside the run file")
]
WhatIfOption = Annotated[bool, typer.Option("--what-if", help="say what more bandwidth, memory or nodes would change")]
RolesOption = Annotated[bool, typer.Option("--roles", help="say which ranks that do not train would pay")]
TimelineOption = Annotated[
    bool,
    typer.Option("--timeline", help="draw the pipeline's schedule, here or to the FILE.svg (.png, .txt) given"),
]


@takes_options("plan")
def plan_command(
    context: typer.Context,
    run_file: Annotated[Path | None, typer.Argument(help="the run file (TOML)", show_default=False)] = None,
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option(help="of the catalog; with --serve, or a folder; no run file")] = None,
    like: Annotated[
        str | None, typer.Option(help="a famous run, beside weft's best: llama3-405b-meta; list names them")
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="name, name:nodes or name:nodesxdevices")] = None,
    tokens_per_step: Annotated[str | None, typer.Option(help="with --model: 4M (if not given) is 4 × 1024²")] = None,
    sequence: Annotated[int | None, typer.Option(help="with --model: tokens of a sequence", min=1)] = None,
    images_per_step: Annotated[str | None, typer.Option(help="with a --model of images, and --size")] = None,
    size: Annotated[int | None, typer.Option(help="with --images-per-step: rows and columns of an image")] = None,
    where: WhereOption = None,
    best: Annotated[str, typer.Option(help="what is to be least: time, cost (device-hours) or devices")] = "time",
    search: Annotated[bool, typer.Option("--search", help="search, though the run file has a [plan]")] = False,
    write: Annotated[Path | None, typer.Option(help="write the run with the best plan, for weft train")] = None,
    report: Annotated[Path | None, typer.Option(help="write a page (HTML) about what was found")] = None,
    write_job: WriteJobOption = None,
    what_if: WhatIfOption = False,
    mtbf: Annotated[str | None, typer.Option(help="time between failures of a device, e.g. 5y: adds goodput")] = None,
    mtbf_cluster: Annotated[str | None, typer.Option(help="the same of the whole cluster, e.g. 3h")] = None,
    timeline: TimelineOption = False,
    roles: RolesOption = False,
    serve: Annotated[bool, typer.Option("--serve", help="plan to serve the model, not to train it")] = False,
    requests: Annotated[int, typer.Option(help="with --serve: how many arrive at once", min=1, max=4096)] = 256,
    prompt: Annotated[
        str, typer.Option(help="with --serve: tokens of a prompt: 512, 100-1024, or ~220 (the mean of log-normal ones)")
    ] = "512",
    output: Annotated[str, typer.Option(help="with --serve: tokens of an answer, in the same way")] = "256",
    rate: Annotated[float | None, typer.Option(help="with --serve: requests a second that arrive at random")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="with --serve: requests as CSV or JSON lines with seconds, prompt and output")
    ] = None,
    first_token: Annotated[
        float | None, typer.Option(help="with --serve: seconds in which 99 % of requests get their first token")
    ] = None,
    next_token: Annotated[
        float | None, typer.Option(help="with --serve: seconds for each following token, in 99 % of requests")
    ] = None,
    price: Annotated[float | None, typer.Option(help="with --serve: dollars of a device for an hour")] = None,
    shared_prompt: Annotated[
        int, typer.Option(help="with --serve: tokens with which all prompts begin, which the cache keeps", min=0)
    ] = 0,
    formats: Annotated[
        bool, typer.Option("--formats", help="with --serve --rate: try fp8, int8 and int4 weights too")
    ] = False,
    *,
    given: Given,
    accepted: Annotated[float, typer.Option(help="with --speculate: the share of drafts that are accepted")] = 0.7,
    as_json: Json = False,
) -> None:
    """Find the best plans, and why; or predict a run file's plan."""
    _refuse_ignored(context, serve)
    if serve:
        from weft.planner.serving_load import Lengths, Limits, ServiceQuestion

        lengths = Lengths.of(prompt, "prompt"), Lengths.of(output, "output")
        limits = Limits(first_token, next_token)
        service = ServiceQuestion(*lengths, rate, trace, limits, price, shared_prompt, formats, report)
        is_service = _is_service(context)
        _plan_serving(
            model, run_file, overrides or [], cluster, requests, service, is_service, given, accepted, as_json
        )
        return
    if like is None:
        _refuse_options(model, run_file, cluster, tokens_per_step, sequence, images_per_step, size)
    elif any((model, run_file, cluster, tokens_per_step, sequence, where, write, report)):
        raise ConfigError(
            f"--like {like} says what is planned, on which machine; leave out the run file and the other options but "
            f"--json, or plan its model with --model"
        )
    changes, path = _changes(overrides or [], cluster, timeline, run_file)
    from weft.commands.console import make_console
    from weft.commands.jobs import command_fork_server
    from weft.commands.plan import JobFile, PlanOptions, named_run, plan_like, predict_plan, search_plans
    from weft.commands.run_planning import has_layout
    from weft.run_file import load_run

    job = None if write_job is None else JobFile(write_job, run_file, changes)
    options = PlanOptions(where or [], best, write, report, mtbf, mtbf_cluster, what_if, job, roles)
    console = make_console(as_json)
    with command_fork_server(_no_rank, warms=False):
        if like is not None:
            plan_like(like, console, as_json)
            return
        if run_file is not None:
            run = load_run(run_file, changes)
        else:
            assert model is not None, "it is refused above"
            assert cluster is not None, "it is refused above"
            run = named_run(model, cluster, tokens_per_step, sequence, images_per_step, size)
        if model is not None or search or options.is_search or not has_layout(run):
            search_plans(run, options, console, as_json)
        else:
            predict_plan(run, options, timeline, path, console, as_json)


def _refuse_ignored(context: typer.Context, serve: bool) -> None:
    """Raise ConfigError for options that were given and that planning of this kind, to serve or to train, ignores."""
    for name in context.params:
        source, option = context.get_parameter_source(name), f"--{name.replace('_', '-')}"
        is_used = name in ALWAYS or (name in TO_SERVE) == serve
        if is_used or source is None or source.name != "COMMANDLINE":
            continue
        if serve:
            raise ConfigError(
                f"{option} is about training, and --serve plans to serve the model; leave out one of them"
            )
        raise ConfigError(f"{option} is about serving the model; give --serve too, or leave it out")


def _is_service(context: typer.Context) -> bool:
    """Is a question about a service asked? Raises ConfigError for options that go with requests at once alone."""
    names = [
        name for name in context.params if (one := context.get_parameter_source(name)) and one.name == "COMMANDLINE"
    ]
    asked = [f"--{name.replace('_', '-')}" for name in names if name in (*OF_SERVICE, "report")]
    others = [f"--{name.replace('_', '-')}" for name in names if name in AT_ONCE]
    if asked and others:
        raise ConfigError(
            f"{others[0]} is for requests that arrive at once, and {asked[0]} asks about a service; leave out one of "
            f"them"
        )
    return bool(asked)


def _changes(
    overrides: list[str], cluster: str | None, timeline: bool, run_file: Path | None
) -> tuple[list[str], Path | None]:
    """Returns the changes to the run file, and the file that --timeline is written to, if one is named behind them.
    Checks the run file, if there is one, with its changes.
    """
    from weft.run_file import check_run_file

    changes, path = split_off_file(overrides) if timeline else (overrides, None)
    changes = [*changes, *([] if cluster is None else [f"cluster={cluster}"])]
    if run_file is not None:
        check_run_file(run_file, changes)
    return changes, path


def _plan_serving(
    model: str | None,
    run_file: Path | None,
    overrides: list[str],
    cluster: str | None,
    num_requests: int,
    service: ServiceQuestion,
    is_service: bool,
    given: Given,
    accepted: float,
    as_json: bool,
) -> None:
    """Plan to serve a model of the catalog, of a folder, or that of a run file."""
    _refuse_two_models(model, run_file, ())
    import torch

    from weft.cluster.cpu_rates import is_cpu
    from weft.cluster.hardware import load
    from weft.commands.console import make_console
    from weft.commands.plan_serve import plan_serving
    from weft.commands.plan_serve_cpu import ModelToServe
    from weft.models.catalog import load_model
    from weft.run_file import load_run
    from weft.serve.loading import computes_in, model_config
    from weft.serve.weights.folder_codes import folder_format

    run = None if run_file is None else load_run(run_file, overrides)
    cluster = cluster or (run.cluster if run else "local")
    spec = given("cpu" if is_cpu(load(cluster)) else "cuda")
    if run is not None:
        saved = "bf16" if run.plan.precision == "bf16" and not run.plan.memory.master else "fp32"
        planned = ModelToServe(run.name, run.model, saved)
    else:
        assert model is not None
        folder = Path(model)
        if folder.is_dir():
            own = folder_format(folder) if spec.weights is None else None
            saved = "bf16" if computes_in(folder) == torch.bfloat16 else "fp32"
            planned = ModelToServe(model, model_config(folder), saved, own is not None)
            spec = replace(spec, weights=spec.weights or own)
        else:
            planned = ModelToServe(model, load_model(model))
    question = service if is_service else service.at_once(num_requests, planned.config)
    plan_serving(planned, cluster, question, spec, accepted, make_console(as_json), as_json)


def _refuse_two_models(model: str | None, run_file: Path | None, sizes: tuple[object, ...]) -> None:
    """Raise ConfigError unless one of `--model`, with its sizes, and a run file says what is to be planned."""
    if model is not None and run_file is not None and "=" in run_file.name:
        raise ConfigError(f"'{run_file}' changes a run file, and --model {model} has none; leave it out, or give one")
    if model is not None and run_file is not None:
        raise ConfigError(f"--model {model} and the run file {run_file} both say what the model is; give one")
    if model is None and run_file is None:
        raise ConfigError("give a run file, or --model with --cluster; see weft plan --help")
    if model is None and any(given is not None for given in sizes):
        raise ConfigError(
            "--tokens-per-step, --sequence, --images-per-step and --size go with --model; a run file has [train] and "
            "[data]"
        )


def split_off_file(arguments: list[str]) -> tuple[list[str], Path | None]:
    """Splits arguments into overrides (`a.b=c`), and the file to draw to, if there is one among them."""
    files = [text for text in arguments if "=" not in text]
    if len(files) > 1:
        raise ConfigError(f"--timeline draws to one file; given {' and '.join(files)}")
    return [text for text in arguments if "=" in text], Path(files[0]) if files else None


def _refuse_options(
    model: str | None,
    run_file: Path | None,
    cluster: str | None,
    tokens: str | None,
    sequence: int | None,
    images: str | None,
    size: int | None,
) -> None:
    """Raise ConfigError unless one model is given, and `--model` with the options that it needs."""
    _refuse_two_models(model, run_file, (tokens, sequence, images, size))
    is_of_two = tokens is not None and images is not None
    if model is not None and (cluster is None or is_of_two or (images is None) != (size is None)):
        raise ConfigError(
            "--model needs --cluster, e.g. --cluster h100:32x8, and may have --tokens-per-step; a model of images "
            "needs --cluster, --images-per-step and --size"
        )


def _no_rank(arguments: list[str]) -> None:
    raise AssertionError("weft plan starts no ranks")

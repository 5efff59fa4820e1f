"""`weft serve`: a model behind OpenAI's HTTP API."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.commands.device_option import DeviceOption, chosen_device
from weft.commands.progress_bar import progress_on_stderr
from weft.errors import ConfigError
from weft.launch.one_speaker import is_first_to_say
from weft.schema import build_dataclass, parse_override
from weft.serve.http.addresses import is_loopback

if TYPE_CHECKING:  # these import torch, or take a while
    from weft.plan import Plan
    from weft.serve.http.run_server import Ready, ServeOptions

EXAMPLE = "Example: weft serve runs/quickstart --port 8000, then: curl http://127.0.0.1:8000/v1/models"


RankOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="serve on several ranks: plan.tensor.x=2 plan.pipe=2 plan.data=2; plan.context=2 splits each request's "
        "cache",
        show_default=False,
    ),
]
HostOption = Annotated[
    str, typer.Option(help="address to listen on; one that other machines can reach needs --api-key")
]
KeysOption = Annotated[
    list[str] | None,
    typer.Option(
        help="key that clients must send; repeat for several keys, each with its own prefix cache",
        envvar="WEFT_API_KEY",
    ),
]
AdaptersOption = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=FOLDER of a PEFT adapter; a request selects it by giving NAME as its model", show_default=False
    ),
]
RunningOption = Annotated[
    int | None, typer.Option(help="requests computed at once; if not given, 256 on a GPU, 64 on CPUs", min=1)
]
BudgetOption = Annotated[
    int | None,
    typer.Option(help="tokens of a step, decodes and prompts; if not given, 2048 on a GPU, 512 on CPUs", min=1),
]
CacheOption = Annotated[
    int | None,
    typer.Option(
        help="blocks of the key-value cache on each rank, of 16 tokens (--cache int4: 64, int4-32: 32, int4-128: 128); "
        "default: what running requests can use and memory holds",
        min=1,
    ),
]
SwapOption = Annotated[
    int,
    typer.Option(
        help="blocks in host memory for requests that go back to the queue; 0: their keys and values are recomputed",
        min=0,
    ),
]
SpeculateOption = Annotated[
    str | None,
    typer.Option(
        help="draft tokens: ngram (by lookup in the request), layers=K (by the model's first K layers), or the FOLDER "
        "of a smaller model; answers stay the same, but for bf16's last bits and --weights of integers on a CPU",
        show_default=False,
    ),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        help="weights of linears in fewer bits: fp8, int8, int4, int4-128, on a CPU fp16 and int8-row too; changes "
        "answers, which on a CPU also depend on requests beside them (but for fp8 and fp16)",
        show_default=False,
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        help="fp32 or bf16, in which a CPU computes; default: as a run is saved, fp32 for Hugging Face folders",
        show_default=False,
    ),
]
KeysValuesOption = Annotated[
    str | None,
    typer.Option(
        help="fewer bytes of keys and values: int4, int4-32, int4-128 or loki=FILE; changes answers",
        show_default=False,
    ),
]
HeadOption = Annotated[
    str | None,
    typer.Option(
        help="on a CPU: fp16, int8-row, int8, int4 or int4-128 for the head's weight, or graph=FILE or "
        "approximate-graph=FILE of weft index to search the likeliest tokens; changes answers",
        show_default=False,
    ),
]
SumsOption = Annotated[
    str,
    typer.Option(
        help="how ranks sum partial results: library, one-shot, two-shot, symmetric-one-shot, symmetric-two-shot "
        "(GPUs that read each other's memory), or measured (time all at start, use the fastest)"
    ),
]
StreamOption = Annotated[
    int,
    typer.Option(
        help="keep block weights in host memory and copy them this many blocks ahead; 0: keep them on the device",
        min=0,
    ),
]
ResidentOption = Annotated[
    int,
    typer.Option(help="with --stream-weights: this many blocks of each rank stay on the device", min=0),
]
ContextOption = Annotated[
    int | None,
    typer.Option(help="maximum tokens of prompt and answer together; default: the model's context", min=1),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(help="text file to calibrate the rounding of --weights int4, int4-128 or int8"),
]
SecondsOption = Annotated[float, typer.Option(help="seconds for a whole answer; later ones get 504", min=0.1)]
DrainOption = Annotated[float, typer.Option(help="seconds to finish requests after SIGTERM or Ctrl-C", min=0.0)]
ShareOption = Annotated[
    bool, typer.Option("--share-gpus", help="ranks share GPUs if there are more ranks; for tests only, as it is slow")
]
LogOption = Annotated[
    str, typer.Option(help="on stderr: rates (every 10 s, while there is work), requests (a line each, too), or none")
]
WarmUpOption = Annotated[
    bool, typer.Option(help="compile, capture and tune before the first request, and not while it waits")
]


def serve_command(
    source: Annotated[Path, typer.Argument(help="a run folder, a checkpoint or a (quantised) Hugging Face folder")],
    overrides: RankOverrides = None,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one", min=0, max=65535)] = 8000,
    api_key: KeysOption = None,
    name: Annotated[str | None, typer.Option(help="model name for clients; default: the folder's name")] = None,
    device: DeviceOption = "auto",
    follow: Annotated[bool, typer.Option("--follow", help="take newer checkpoints of a run that trains")] = False,
    tokenizer: Annotated[str | None, typer.Option(help="bytes or a tokenizer.json, for HF folders without one")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="a Jinja file; the model's own if not given")] = None,
    adapter: AdaptersOption = None,
    merge_adapter: Annotated[Path | None, typer.Option(help="a folder of PEFT, added to the weights")] = None,
    context: ContextOption = None,
    max_running: RunningOption = None,
    max_waiting: Annotated[int, typer.Option(help="requests in the queue; beyond, clients get 429", min=0)] = 256,
    token_budget: BudgetOption = None,
    cache_blocks: CacheOption = None,
    swap_blocks: SwapOption = 0,
    speculate: SpeculateOption = None,
    precision: PrecisionOption = None,
    weights: WeightsOption = None,
    cache: KeysValuesOption = None,
    head: HeadOption = None,
    stream_weights: StreamOption = 0,
    resident_blocks: ResidentOption = 0,
    sums: SumsOption = "library",
    calibration: CalibrationOption = None,
    share_gpus: ShareOption = False,
    warm_up: WarmUpOption = True,
    log: LogOption = "rates",
    body_bytes: Annotated[int, typer.Option(help="maximum bytes of a request; larger ones get 413", min=1)] = 4 << 20,
    request_seconds: SecondsOption = 600.0,
    drain_seconds: DrainOption = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Serve a model over HTTP, by OpenAI's API. With a page to chat at /. Ends on Ctrl-C or SIGTERM."""
    _refuse_address(host, api_key or [])
    _give_sign_of_life(source)
    kind = chosen_device(device)
    with _needs_extra():
        from weft.serve.http.guard import ServerLimits
        from weft.serve.http.run_server import ServeOptions
    where: dict[str, Any] = {"host": host, "port": port, "api_keys": api_key or [], "device": kind}
    served: dict[str, Any] = {"name": name, "tokenizer": tokenizer, "template": _text(chat_template), "follows": follow}
    served |= {"adapters": named_adapters(adapter or []), "merged_adapter": _text(merge_adapter)}
    sizes: dict[str, Any] = {"context_length": context, "max_waiting": max_waiting, "num_blocks": cache_blocks}
    sizes |= {"max_running": max_running or (256 if kind == "cuda" else 64)}
    sizes |= {"token_budget": token_budget or (2048 if kind == "cuda" else 512)}
    ways: dict[str, Any] = {"precision": precision, "weights": weights, "calibration": _text(calibration)}
    ways |= {"cache": cache, "swap_blocks": swap_blocks, "head": head, "speculate": speculate, "sums": sums}
    ways |= {"stream_weights": stream_weights, "resident_blocks": resident_blocks, "share_gpus": share_gpus}
    ways |= {"warms_up": warm_up, "log": log}
    limits = ServerLimits(body_bytes=body_bytes, request_seconds=request_seconds, drain_seconds=drain_seconds)
    options = ServeOptions(**where, **served, **sizes, **ways, limits=limits)
    _serve(source, options, serving_plan(overrides or []), partial(_announce, as_json=as_json))


def _text(path: Path | None) -> str | None:
    """A path as text, which ranks are given as JSON."""
    return None if path is None else str(path)


@contextmanager
def _needs_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"weft serve needs {error.name}; run: pip install 'weft[serve]'") from None


def _serve(source: Path, options: ServeOptions, plan: Plan, ready: Ready) -> None:
    """Serve as a rank of a launcher, as the only rank, or with ranks that are started here."""
    from weft.launch.environment import detect
    from weft.serve.http.run_server import run_rank, run_server

    rank_info = detect(os.environ)
    if rank_info is not None:
        run_rank(source, options, plan, rank_info, None, ready, say, progress_on_stderr)
    elif plan.num_ranks == 1:
        run_server(source, options, ready, say, progress_on_stderr)
    else:
        _serve_on_ranks(source, options, plan, ready)


def named_adapters(pairs: list[str]) -> dict[str, str]:
    """Returns the folders of adapters by name, from texts such as name=folder. Raises ConfigError."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, _, folder = pair.partition("=")
        if not name or not folder or name in found:
            raise ConfigError(f"--adapter '{pair}' must be name=FOLDER, each name once")
        found[name] = folder
    return found


def serving_plan(overrides: list[str]) -> Plan:
    """Returns the plan of overrides such as plan.tensor.x=2. Raises ConfigError or PlanError."""
    tables: dict[str, Any] = {}
    for text in overrides:
        keys, value = parse_override(text)
        if keys[0] != "plan" or len(keys) < 2:
            raise ConfigError(
                f"'{text}' is not of the plan; give plan.data, plan.pipe, plan.expert, plan.context, plan.tensor.x or "
                f"plan.tensor.y"
            )
        table = tables
        for key in keys[1:-1]:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise ConfigError(f"'{text}' sets a part of '{key}', which another argument sets as a whole; give one")
        table[keys[-1]] = value
    from weft.plan import Plan

    return build_dataclass(Plan, tables, "plan")


def _serve_on_ranks(source: Path, options: ServeOptions, plan: Plan, ready: Ready) -> None:
    """Start the ranks of a plan on this machine, and serve until told to stop."""
    from weft.launch.fork_server import ForkServer
    from weft.serve.generate import model_config
    from weft.serve.http.addresses import listen
    from weft.serve.http.local_ranks_server import serve_as_rank, start_server
    from weft.serve.http.run_server import refuse_options
    from weft.serve.parallel.rank_part import refuse_plan

    refuse_options(source, options, plan)
    refuse_plan(model_config(source), plan)
    sock = listen(options.host, options.port)  # before the fork server, so that ranks inherit it
    with ForkServer(partial(serve_as_rank, ready=ready, say=say, bar=progress_on_stderr)) as fork_server:
        status = start_server(fork_server, sock, source, options, plan)
    if status:
        raise SystemExit(status)


def _refuse_address(host: str, keys: list[str]) -> None:
    """Raise ConfigError for keys that cannot be sent, and for an address of other machines without a key."""
    if any(not key.isascii() or not key.isprintable() or " " in key or not key for key in keys):
        raise ConfigError("--api-key must be printable ASCII without spaces, as it is sent in a header")
    if not is_loopback(host):
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"--host {host} is no address and no name that is known here ({error}); give 127.0.0.1, or an address "
                f"of this machine"
            ) from None
    if not is_loopback(host) and not keys:
        raise ConfigError(f"--host {host} is reached from other machines; give --api-key, or serve on 127.0.0.1")


def _give_sign_of_life(source: Path) -> None:
    """Say what is loaded before torch is, which takes seconds. Of a launcher's ranks one says it."""
    message = f"loading {source}"
    if source.exists() and is_first_to_say(message, os.environ):
        say(message)


def _announce(about: dict[str, Any], as_json: bool) -> None:
    seconds = about["warm_up_seconds"]
    warm = "not warmed up" if seconds is None else f"warmed up in {seconds:.1f} s"
    words = f"serving {about['model']} ({about['weights']}) on {about['url']}, {warm}; stop with Ctrl-C"
    print(json.dumps(about) if as_json else words, flush=True)


def say(message: str) -> None:
    """Tell the operator something, on stderr."""
    print(f"weft: {message}", file=sys.stderr, flush=True)

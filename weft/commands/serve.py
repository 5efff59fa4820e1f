"""`weft serve`: a model behind OpenAI's HTTP API."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.commands.arguments import Json
from weft.commands.output import progress_on_stderr, warn
from weft.commands.serving_options import Given, takes_options
from weft.errors import ConfigError
from weft.launch.one_speaker import is_first_to_say
from weft.schema import build_dataclass, parse_override
from weft.serve.http.addresses import is_loopback

if TYPE_CHECKING:  # these import torch, or take a while
    from weft.plan import Plan
    from weft.serve.http.run_server import Serving


RankOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="serve on several ranks: plan.tensor.x=2 plan.pipe=2 plan.data=2; plan.context=2 splits each request's "
        "cache",
        show_default=False,
    ),
]


@takes_options("serve")
def serve_command(
    source: Annotated[Path, typer.Argument(help="a run folder, a checkpoint or a (quantised) Hugging Face folder")],
    given: Given,
    overrides: RankOverrides = None,
    as_json: Json = False,
) -> None:
    """Serve a model over HTTP, by OpenAI's API. With a page to chat at /. Ends on Ctrl-C or SIGTERM."""
    _refuse_address(given.value("host"), given.value("api_keys"))
    _give_sign_of_life(source)
    spec = given()
    try:
        from weft.serve.http.run_server import Serving, run_rank, run_server
    except ModuleNotFoundError as error:
        raise ConfigError(f"weft serve needs {error.name}; run: pip install 'weft[serve]'") from None
    from weft.launch.environment import detect

    plan, ready = serving_plan(overrides or []), partial(_announce, as_json=as_json)
    serving = Serving(source, spec, plan, ready, warn, progress_on_stderr)
    rank_info = detect(os.environ)
    if rank_info is not None:
        run_rank(serving, rank_info)
    elif plan.num_ranks == 1:
        run_server(serving)
    else:
        _serve_on_ranks(serving)


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


def _serve_on_ranks(serving: Serving) -> None:
    """Start the ranks of a plan on this machine, and serve until told to stop."""
    from weft.serve.http.addresses import listen
    from weft.serve.http.local_ranks_server import start_server
    from weft.serve.http.run_server import refuse_options
    from weft.serve.loading import model_config
    from weft.serve.parallel.rank_part import refuse_plan

    refuse_options(serving.source, serving.spec, serving.plan)
    refuse_plan(model_config(serving.source), serving.plan)
    status = start_server(serving, listen(serving.spec.host, serving.spec.port))
    if status:
        raise SystemExit(status)


def _refuse_address(host: str, keys: Sequence[str]) -> None:
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
        warn(message)


def _announce(about: dict[str, Any], as_json: bool) -> None:
    seconds = about["warm_up_seconds"]
    warm = "not warmed up" if seconds is None else f"warmed up in {seconds:.1f} s"
    words = f"serving {about['model']} ({about['weights']}) on {about['url']}, {warm}; stop with Ctrl-C"
    print(json.dumps(about) if as_json else words, flush=True)

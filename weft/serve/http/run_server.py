"""Loads a model, and serves it until the process is told to stop: on one rank, or as one of several."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn

from weft.checkpoint import latest
from weft.errors import ConfigError, EngineError, WeftError
from weft.health.rank_status import Status
from weft.health.watchdog import Deadline
from weft.launch.environment import (
    RankInfo,
    check_world,
    init_process_group,
    is_elastic,
    shutdown,
    starts_again,
    world_store,
)
from weft.mesh import Mesh
from weft.plan import Plan
from weft.resilience.peer_watch import Lookout
from weft.saved_run import first_usable
from weft.serve.attention.formats import block_size_of, cache_format, why_slow
from weft.serve.calibration.bars import Bar, no_bar
from weft.serve.engine import Engine
from weft.serve.follow_steps import follow_steps
from weft.serve.head.graph_head import graph_head
from weft.serve.http.addresses import listen, url_name
from weft.serve.http.end_points import Api, answer_once, build_app
from weft.serve.http.metrics import RequestLog, say_rates
from weft.serve.http.server import HttpServer
from weft.serve.loading import LoadedModel, load_draft, load_model, model_config
from weft.serve.measurement.cpu_threads import fastest_threads
from weft.serve.model.model_part import ModelPart
from weft.serve.model.ranks import ServingRanks, Sums
from weft.serve.parallel.rank_part import refuse_plan
from weft.serve.refusals import ServingCase, kind_of, refuse
from weft.serve.replicas import ReplicaFront, serve_replica
from weft.serve.spec import EngineOptions, ServingSpec, named_adapters
from weft.serve.text import stated_defaults
from weft.serve.warm_up import warm_up
from weft.serve.weights.packed_linear import what_cpus_do
from weft.serve.weights.streamed_weights import refuse_resident
from weft.serve.weights.usable_weights import ServedRecord, paths_to_try
from weft.serve.worker import EngineWorker

RANK_TIMEOUT = timedelta(minutes=10)  # of a rank that waits for another; a rank that died is found at once
HANG_SECONDS = 60.0  # without a sign of life, and as long as ten steps, before ranks of a launcher count as hung
END_SECONDS = 10.0

Ready = Callable[[dict[str, Any]], None]
Say = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Serving:
    """What is served, and who is told: `ready` what is served and where, `say` what happens; `bar` shows progress."""

    source: Path
    spec: ServingSpec
    plan: Plan
    ready: Ready
    say: Say
    bar: Bar = no_bar


def engine_options(
    spec: ServingSpec, loaded: LoadedModel, device: torch.device | str, max_waiting: int | None = None
) -> EngineOptions:
    """Return what an engine is told: the sizes of a spec, and the objects that its options name."""
    sizes = replace(
        spec.sizes(),
        context_length=spec.context_length or loaded.context_length,
        max_waiting=spec.max_waiting if max_waiting is None else max_waiting,
    )
    cache = cache_format(spec.cache)
    return EngineOptions(
        **vars(sizes),
        cache=cache,
        head=graph_head(spec.head),
        device=device,
        block_size=block_size_of(cache),
        vocab_size=loaded.tokenizer.vocab_size,
        adapters=named_adapters(spec.adapters),
        grammars=loaded.grammars,
        speculate=load_draft(spec, loaded.tokenizer, device),
    )


def refuse_options(source: Path, spec: ServingSpec, plan: Plan, on_ranks: bool = False) -> None:
    """Raise ConfigError or PlanError for options that do not go together, with each other, the model or the plan."""
    if spec.follow:
        require_run(source)
    config = model_config(source)
    cache = cache_format(spec.cache)
    refuse(ServingCase.of(spec, plan=plan, on_ranks=on_ranks, model=kind_of(config), device=spec.device, cache=cache))
    if spec.resident_blocks:
        refuse_resident(spec.resident_blocks, config.num_layers // plan.pipe.degree)


def run_server(serving: Serving) -> None:
    """Serve a model on one rank until SIGTERM or Ctrl-C."""
    source, spec, say = serving.source, serving.spec, serving.say
    refuse_options(source, spec, serving.plan)
    sock = listen(spec.host, spec.port)  # before the model is loaded: a port in use is known at once
    loaded = load_model(source, spec, spec.device, say)
    on_cpu = next(loaded.model.parameters()).device.type == "cpu"
    if on_cpu and not spec.stream_weights and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(fastest_threads(torch.get_num_threads()))
    _say_what_is_slow(serving, loaded.model, say)
    options = engine_options(spec, loaded, spec.device)
    engine = Engine(loaded.model, options)

    def load(checkpoint: Path) -> nn.Module:
        return load_model(checkpoint, spec, "cpu", say).model  # a GPU may have no room for two

    def warm() -> float | None:
        return warm_up(engine, options, serving.bar) if spec.warm_up else None

    _serve_engine(serving, engine, loaded, sock, load, warm, ServedRecord())


def run_rank(
    serving: Serving, rank_info: RankInfo, sock: socket.socket | None = None, record: ServedRecord | None = None
) -> None:
    """Serve a model as one of the plan's ranks. Rank 0 listens, on `sock` if it is given. `record` has the weights that
    were served before the ranks started again; ranks of a launcher find it themselves.
    """
    source, spec, plan = serving.source, serving.spec, serving.plan
    check_world(rank_info, plan.num_ranks, plan.degrees)
    refuse_options(source, spec, plan, on_ranks=True)
    refuse_plan(model_config(source), plan)
    if rank_info.rank == 0 and sock is None:
        sock = listen(spec.host, spec.port)
    mesh = _join(rank_info, spec, plan)
    record = record or _record_of_launcher(rank_info, serving.say if mesh.is_first else lambda message: None)
    with _lookout(rank_info, mesh):
        _serve_rank(serving, mesh, sock, record)
    record.remove()
    shutdown()


def _serve_rank(serving: Serving, mesh: Mesh, sock: socket.socket | None, record: ServedRecord) -> None:
    """Read this rank's part of the model and serve it, as one of the ranks of a mesh."""
    spec, plan, say_once = serving.spec, mesh.plan, serving.say if mesh.is_first else lambda message: None
    ranks = ServingRanks(mesh, cast(Sums, spec.sums.replace("-", "_")), spec.stream_weights > 0, say_once)
    replicas = mesh.with_own_group("data", "requests") if plan.data > 1 else mesh["data"]
    paths = _agreed_paths(ranks, serving.source, record, say_once)

    def read(path: Path) -> LoadedModel:
        return load_model(path, spec, mesh.device, say_once, ranks)

    loaded = first_usable(paths, read, serving.say, ranks.who_fails)
    _say_what_is_slow(serving, loaded.model, say_once)

    def load(checkpoint: Path) -> nn.Module:
        return load_model(checkpoint, spec, "cpu", say_once, ranks).model

    max_requests = spec.max_running + spec.max_waiting
    spec_of_rank = spec if ranks.is_lead else replace(spec, speculate=None)  # the scheduling rank drafts
    options = engine_options(spec_of_rank, loaded, mesh.device, max_requests if plan.data > 1 else None)
    if not ranks.is_lead:
        part = ModelPart(loaded.model, options, ranks, load)
        with _as_engine_errors():
            follow_steps(part)
        return
    engine = Engine(loaded.model, options, ranks, load)

    def warm() -> float | None:
        return warm_up(engine, options, serving.bar if mesh.is_first else no_bar) if spec.warm_up else None

    if replicas.index > 0:
        warm()
        ranks.is_watched = True
        with _as_engine_errors():
            serve_replica(engine, replicas)
        return
    assert sock is not None
    front = ReplicaFront(engine, replicas, max_requests) if plan.data > 1 else engine

    def ready(about: dict[str, Any]) -> None:
        ranks.is_watched = True
        serving.ready(about)

    _serve_engine(replace(serving, ready=ready), front, loaded, sock, Path, warm, record)


def _lookout(rank_info: RankInfo, mesh: Mesh) -> AbstractContextManager[object]:
    """Returns a context in which ranks that a launcher started watch each other for hangs, as weft's agent watches its
    own.
    """
    if rank_info.num_ranks == 1 or rank_info.launcher in ("none", "weft"):
        return nullcontext()
    assert mesh.ledger.status is not None
    stacks = Path(tempfile.gettempdir()) / "weft-serve"
    return Lookout(mesh.ledger.status, rank_info, world_store(), Deadline(HANG_SECONDS), stacks)


def _record_of_launcher(rank_info: RankInfo, say: Say) -> ServedRecord:
    """Returns the record of the weights that were served last, in a file that torchrun's ranks find when it starts them
    again.
    """
    if not is_elastic(os.environ, rank_info):
        say(
            "the launcher starts no rank again (torchrun does with --max-restarts): if one fails or hangs, the server "
            "ends, and its next start takes the newest weights"
        )
        return ServedRecord()
    if rank_info.rank > 0:
        return ServedRecord()
    record = ServedRecord(Path(tempfile.gettempdir()) / f"weft-served-{os.getuid()}-{os.getppid()}")
    if not starts_again(os.environ):
        record.remove()  # of an earlier process with this number
    return record


def _join(rank_info: RankInfo, spec: ServingSpec, plan: Plan) -> Mesh:
    """Join the other ranks, with a status page by which hangs are found."""
    if rank_info.rank > 0:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # rank 0 tells when to end
            signal.signal(number, signal.SIG_IGN)
    kind = cast(Literal["cpu", "cuda"], spec.device)
    device = init_process_group(rank_info, kind, RANK_TIMEOUT, spec.share_gpus)
    mesh = Mesh(plan, device, rank_info.num_local_ranks)
    mesh.ledger.status = Status(os.environ, rank_info.rank)
    return mesh


def _agreed_paths(ranks: ServingRanks, source: Path, record: ServedRecord, say: Say) -> list[Path]:
    """Returns the folders of weights that all ranks try, in this order."""
    paths = [str(path) for path in paths_to_try(source, record.read(), say)] if ranks.mesh.is_first else []
    return [Path(one) for one in json.loads(ranks.agree_on_text(json.dumps(paths)))]


@contextmanager
def _as_engine_errors() -> Iterator[None]:
    """Make weft's errors EngineErrors: the weights can be used, so what fails in a step may succeed after a restart."""
    try:
        yield
    except WeftError as error:
        raise EngineError(f"the engine failed: {type(error).__name__}: {error}") from error


def _say_what_is_slow(serving: Serving, model: nn.Module, say: Say) -> None:
    """Say which weights a CPU dequantises for each product or rounds inputs for, and what a GPU has no kernels for."""
    device, cache = serving.spec.device, cache_format(serving.spec.cache)
    dtype = next(model.parameters()).dtype
    of_cache = why_slow(cache, device, dtype, serving.plan.context.degree > 1)
    for reason in what_cpus_do(model) if device == "cpu" else of_cache:
        say(reason)


def _serve_engine(
    serving: Serving,
    engine: Engine | ReplicaFront,
    loaded: LoadedModel,
    sock: socket.socket,
    load: Callable[[Path], nn.Module | Path],
    warm: Callable[[], float | None],
    record: ServedRecord,
) -> None:
    """Serve an engine on a socket until the process is told to stop. `warm` returns the seconds of its warm-up."""
    spec, say = serving.spec, serving.say
    name = spec.name or serving.source.resolve().name
    longest = min(engine.context_length, engine.num_slots)
    if longest < engine.context_length:
        say(
            f"memory holds the keys and values of {longest} tokens: prompts and answers have at most so many, not the "
            f"{engine.context_length} of the model's context"
        )
    folders = (serving.source, loaded.tokenizer_folder) if spec.generation_config else ()
    defaults = next(filter(None, map(stated_defaults, folders)), {})
    if defaults:
        say(f"requests have these defaults: {', '.join(f'{key} = {value:g}' for key, value in defaults.items())}")
    adapters = named_adapters(spec.adapters)
    served = loaded.served(name, spec.chat_template, longest, engine.vocab_size, adapters, defaults)
    worker = EngineWorker(engine, serving.plan.data * (spec.max_running + spec.max_waiting))
    seconds = {"warm_up_seconds": warm()}
    engine.idle()  # other replicas answer when they are warm
    if spec.warm_up:
        answer_once(served, engine, spec, spec.host)
        engine.reset()
    api = Api(served, worker, spec, loaded.weights, **seconds)

    async def take(weights: nn.Module | Path, name: str) -> None:
        await worker.replace_weights(weights)
        api.fingerprint = name
        record.write(name)

    beside = [follow(serving.source, loaded.weights, load, take, say)] if spec.follow else []
    if spec.log != "none":
        beside.append(say_rates(worker, api.metrics, say))
    url = f"http://{url_name(spec.host)}:{sock.getsockname()[1]}"
    about = {"url": url, "model": name, "weights": loaded.weights, "device": spec.device, **seconds}
    app = build_app(api, spec.api_keys, spec.host, spec.allowed_origins)
    app = RequestLog(app, say) if spec.log == "requests" else app
    record.write(loaded.weights)
    HttpServer(app, worker, spec, lambda: serving.ready(about), beside).run([sock])
    has_ended = worker.join(END_SECONDS)
    if worker.has_failed:
        raise EngineError(worker.failure)
    if has_ended:
        with suppress(RuntimeError):  # a rank that was lost meanwhile is not told
            engine.close()
    else:
        os._exit(1)  # a step does not end; the launcher ends the other ranks


async def follow(
    run: Path,
    weights: str,
    load: Callable[[Path], T],
    replace: Callable[[T, str], Awaitable[None]],
    say: Say,
    seconds: float = 2.0,
) -> None:
    """Watch a run that still trains, and take its newest checkpoint between two steps of the engine. `weights` names
    those in use; `replace` is given what `load` returns for newer ones, and their name. Runs until it is cancelled.

    A checkpoint that cannot be used is tried once and passed over: it is damaged, was removed meanwhile, is of another
    model, or its training diverged.
    """
    folder, tried, said = run / "checkpoints", weights, ""
    while True:
        try:
            newest, trouble = await asyncio.to_thread(latest, folder), ""
        except OSError as error:  # as of a network file system, which may come back
            newest, trouble = None, f"{folder} cannot be read ({error}); the weights in use stay"
        if trouble and trouble != said:
            say(trouble)
        said = trouble
        if newest is not None and newest.name > tried:
            tried = newest.name
            try:
                await replace(await asyncio.to_thread(load, newest), newest.name)  # no name here holds what is loaded
            except Exception as error:  # whatever it is, requests go on
                say(f"{newest} is not served ({type(error).__name__}: {error}); the weights in use stay")
            else:
                say(f"serving {newest.name}")
        await asyncio.sleep(seconds)


def require_run(source: Path) -> None:
    """Raise ConfigError unless a folder is a run that may get newer checkpoints."""
    if latest(source / "checkpoints") is None:
        raise ConfigError(f"--follow needs a run folder with a checkpoint; '{source}' has none in its checkpoints/")

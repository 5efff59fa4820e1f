"""Loads a model, and serves it until the process is told to stop: on one rank, or as one of several."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from weft.errors import ConfigError, EngineError, WeftError
from weft.health.rank_status import Status
from weft.launch.environment import RankInfo, check_world, init_process_group, shutdown
from weft.mesh import Mesh
from weft.models import RecurrentConfig
from weft.plan import Plan
from weft.saved_run import first_usable
from weft.serve.attention.split_formats import split_format
from weft.serve.cache_formats import block_size_of, cache_format, refuse_shared_axes, why_slow
from weft.serve.calibration.bars import Bar, no_bar
from weft.serve.engine import Engine, EngineOptions
from weft.serve.follow import follow, require_run
from weft.serve.follow_steps import follow_steps
from weft.serve.generate import model_config, refuse_for_recurrent
from weft.serve.head.graph_head import graph_head
from weft.serve.http.addresses import listen, url_name
from weft.serve.http.end_points import Api, build_app
from weft.serve.http.first_answer import answer_once
from weft.serve.http.guard import ServerLimits
from weft.serve.http.request_log import RequestLog, log_of, say_rates
from weft.serve.http.server import HttpServer
from weft.serve.loading import LoadedModel, Packing, load_draft, load_model
from weft.serve.measurement.cpu_threads import fastest_threads
from weft.serve.model.adapters import merge_adapter
from weft.serve.model.model_part import ModelPart, refuse_shared_reading
from weft.serve.model.ranks import ServingRanks, sums_of
from weft.serve.model.streamed_model import Streaming
from weft.serve.parallel.rank_part import refuse_plan
from weft.serve.replicas import ReplicaFront, serve_replica
from weft.serve.warm_up import warm_up
from weft.serve.weights.packed_linear import what_cpus_do
from weft.serve.weights.streamed_weights import refuse_resident
from weft.serve.weights.usable_weights import ServedRecord, paths_to_try
from weft.serve.weights.weight_formats import HEAD_FORMATS
from weft.serve.worker import EngineWorker

RANK_TIMEOUT = timedelta(minutes=10)  # of a rank that waits for another; a rank that died is found at once
END_SECONDS = 10.0

Ready = Callable[[dict[str, Any]], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class ServeOptions:
    """What `weft serve` is asked for. None of an optional value means: as the model says."""

    host: str
    port: int
    api_keys: Sequence[str]
    name: str | None
    device: str
    follows: bool
    tokenizer: str | None
    template: str | None
    context_length: int | None
    max_running: int
    max_waiting: int
    token_budget: int
    num_blocks: int | None
    limits: ServerLimits
    swap_blocks: int = 0
    adapters: Mapping[str, str] = field(default_factory=dict)  # folders by the names that requests choose
    merged_adapter: str | None = None  # the folder of one that is part of the weights
    speculate: str | None = None  # "ngram", "layers=K", or the folder of a draft model
    precision: str | None = None  # in which a CPU computes: fp32 or bf16
    weights: str | None = None  # a format of fewer bits
    calibration: str | None = None  # the path of a text by which rounding to it is corrected
    cache: str | None = None  # a format of keys and values
    head: str | None = None  # "graph=FILE": how the likeliest tokens are found; or a format of the head's weight
    sums: str = "library"  # how several ranks add up partial results
    stream_weights: int = 0  # blocks whose weights are copied ahead from host memory; 0: none
    resident_blocks: int = 0  # of each rank's blocks, that stay on the device while others are streamed
    share_gpus: bool = False  # ranks share GPUs if there are more ranks
    log: str = "rates"  # what is said of requests (`serve/http/request_log.py`)
    warms_up: bool = True  # compile, capture and tune before the first request

    @property
    def packing(self) -> Packing:
        """How weights are kept. Raises ConfigError for options that do not go together."""
        if self.weights is None and self.calibration is not None:
            raise ConfigError("--calibration corrects rounded weights; give --weights int4 or int8 too")
        is_rounded = self.weights is not None or self.head in HEAD_FORMATS
        if is_rounded and self.merged_adapter is not None:
            raise ConfigError(
                "--merge-adapter changes weights that --weights and --head round; export a merged model first"
            )
        return Packing(self.weights, self.calibration, self.head, self.precision)

    def engine(self, loaded: LoadedModel, max_waiting: int, device: torch.device | str) -> EngineOptions:
        cache = cache_format(self.cache)
        return EngineOptions(
            cache=cache,
            head=graph_head(self.head),
            device=device,
            stream_weights=self.stream_weights,
            resident_blocks=self.resident_blocks,
            block_size=block_size_of(cache),
            num_blocks=self.num_blocks,
            max_running=self.max_running,
            max_waiting=max_waiting,
            token_budget=self.token_budget,
            context_length=self.context_length or loaded.context_length,
            vocab_size=loaded.tokenizer.vocab_size,
            swap_blocks=self.swap_blocks,
            adapters={name: Path(folder) for name, folder in self.adapters.items()},
            grammars=loaded.grammars,
            speculate=load_draft(self.speculate, self.tokenizer, loaded.tokenizer, device, self.packing.dtype(device)),
        )


def refuse_options(source: Path, options: ServeOptions, plan: Plan) -> None:
    """Raise ConfigError or PlanError for options that do not go together, with each other or with the plan."""
    sums_of(options.sums)
    log_of(options.log)
    options.packing.dtype(options.device)
    if options.share_gpus and options.device == "cpu":
        raise ConfigError("--share-gpus is for --device cuda, and the device is the CPU; leave it out")
    if options.follows:
        require_run(source)
    if options.follows and options.calibration is not None and plan.num_ranks > 1:
        raise ConfigError(
            "--follow with --calibration would correct the rounding of newer weights while requests wait, as ranks "
            "read them between two steps; leave out one of them, or serve on one rank, which does both meanwhile"
        )
    _refuse_for_recurrent(source, options, plan)
    if options.follows and options.stream_weights:
        raise ConfigError("--follow replaces weights, which --stream-weights does not allow; leave out one of them")
    if options.follows and options.head not in (None, *HEAD_FORMATS):
        raise ConfigError("--follow replaces weights, which the graph of --head is made of; leave out one of them")
    cache = cache_format(options.cache)
    if options.follows and cache.answers_choose:
        raise ConfigError(
            "--follow replaces weights, of which the axes of --cache loki are made; leave out one of them"
        )
    if Streaming.of(options.stream_weights, options.resident_blocks, None) is not None:
        refuse_shared_reading(plan)
        refuse_shared_axes(cache, plan)
    if options.resident_blocks:
        refuse_resident(options.resident_blocks, model_config(source).num_layers // plan.pipe.degree)


def _refuse_for_recurrent(source: Path, options: ServeOptions, plan: Plan) -> None:
    """Raise ConfigError for options that a recurrent model does not have, if the model is one."""
    given = {
        "the plan": plan.num_ranks > 1,
        "--weights": options.weights,
        "--calibration": options.calibration,
        "--merge-adapter": options.merged_adapter,
        "--stream-weights": options.stream_weights,
        "--resident-blocks": options.resident_blocks,
        "--follow": options.follows,
    }
    found = {name: one or None for name, one in given.items()}
    if any(found.values()) and isinstance(model_config(source), RecurrentConfig):
        refuse_for_recurrent(found)


def run_server(source: Path, options: ServeOptions, ready: Ready, say: Say, bar: Bar = no_bar) -> None:
    """Serve a model until SIGTERM or Ctrl-C. `ready` is told what is served and where, `say` what happens; `bar` shows
    progress.
    """
    refuse_options(source, options, Plan())
    sock = listen(options.host, options.port)  # before the model is loaded: a port in use is known at once
    streaming = Streaming.of(options.stream_weights, options.resident_blocks, None)
    is_merged = options.merged_adapter is not None
    given = (source, options.tokenizer, options.device, say, None, options.packing)
    loaded = load_model(*given, streaming, is_merged)
    if options.merged_adapter is not None:
        merge_adapter(loaded.model, Path(options.merged_adapter))
    on_cpu = next(loaded.model.parameters()).device.type == "cpu"
    if on_cpu and streaming is None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(fastest_threads(torch.get_num_threads()))
    _say_what_is_slow(loaded.model, options, Plan(), say)
    of_engine = options.engine(loaded, options.max_waiting, options.device)
    engine = Engine(loaded.model, of_engine)

    def load(checkpoint: Path) -> nn.Module:
        # On the host: a GPU may have no room for two.
        model = load_model(checkpoint, options.tokenizer, "cpu", say, packing=options.packing).model
        if options.merged_adapter is not None:
            merge_adapter(model, Path(options.merged_adapter))
        return model

    warm = partial(_warm_up, engine, of_engine, options, bar)
    _serve_engine(engine, loaded, sock, source, options, 1, load, warm, ready, say, ServedRecord())


def run_rank(
    source: Path,
    options: ServeOptions,
    plan: Plan,
    rank_info: RankInfo,
    sock: socket.socket | None,
    ready: Ready,
    say: Say,
    bar: Bar = no_bar,
    record: ServedRecord = ServedRecord(),  # noqa: B008 (it records nothing)
) -> None:
    """Serve a model as one of the plan's ranks. Rank 0 listens, on `sock` if it is given. `record` has the weights that
    were served before the ranks started again.
    """
    check_world(rank_info, plan.num_ranks, plan.degrees)
    refuse_options(source, options, plan)
    refuse_plan(model_config(source), plan)
    if options.adapters or options.merged_adapter is not None:
        raise ConfigError("--adapter and --merge-adapter need one rank; serve without a plan, or export a merged model")
    if rank_info.rank == 0 and sock is None:
        sock = listen(options.host, options.port)
    mesh = _join(rank_info, options, plan)
    say_once = say if rank_info.rank == 0 else lambda message: None
    ranks = ServingRanks(mesh, sums_of(options.sums), options.stream_weights > 0, say_once)
    replicas = mesh.with_own_group("data", "requests") if plan.data > 1 else mesh["data"]
    paths = _agreed_paths(ranks, source, record, say_once)
    streaming = Streaming.of(options.stream_weights, options.resident_blocks, ranks)
    given = (options.tokenizer, mesh.device, say_once, ranks.place, options.packing, streaming)
    loaded = first_usable(paths, lambda path: load_model(path, *given), say, ranks.who_fails)
    _say_what_is_slow(loaded.model, options, plan, say_once)

    def load(checkpoint: Path) -> nn.Module:
        return load_model(checkpoint, options.tokenizer, "cpu", say_once, ranks.place, options.packing).model

    max_held = options.max_running + options.max_waiting
    if not ranks.is_lead:
        options = replace(options, speculate=None)  # the scheduling rank drafts
    of_engine = options.engine(loaded, max_held if plan.data > 1 else options.max_waiting, mesh.device)
    if not ranks.is_lead:
        part = ModelPart(loaded.model, of_engine, ranks, load)
        with _as_engine_errors():
            follow_steps(part)
    else:
        engine = Engine(loaded.model, of_engine, ranks, load)
        warm = partial(_warm_up, engine, of_engine, options, bar if rank_info.rank == 0 else no_bar)
        if replicas.index > 0:
            warm()
            ranks.is_watched = True
            with _as_engine_errors():
                serve_replica(engine, replicas)
        else:
            assert sock is not None
            front = ReplicaFront(engine, replicas, max_held) if plan.data > 1 else engine

            def say_ready(about: dict[str, Any]) -> None:
                ranks.is_watched = True
                ready(about)

            _serve_engine(front, loaded, sock, source, options, plan.data, Path, warm, say_ready, say, record)
    shutdown()


def _join(rank_info: RankInfo, options: ServeOptions, plan: Plan) -> Mesh:
    """Join the other ranks, with a status page by which hangs are found."""
    if rank_info.rank > 0:
        for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 tells when to end
            signal.signal(number, signal.SIG_IGN)
    kind = cast(Literal["cpu", "cuda"], options.device)
    device = init_process_group(rank_info, kind, RANK_TIMEOUT, options.share_gpus)
    mesh = Mesh(plan, device, rank_info.num_local_ranks)
    mesh.ledger.status = Status(os.environ, rank_info.rank)
    return mesh


def _agreed_paths(ranks: ServingRanks, source: Path, record: ServedRecord, say: Say) -> list[Path]:
    """The folders of weights that all ranks try, in this order."""
    found = [str(path) for path in paths_to_try(source, record.read(), say)] if ranks.mesh.is_first else []
    return [Path(one) for one in json.loads(ranks.agree_on_text(json.dumps(found)))]


@contextmanager
def _as_engine_errors() -> Iterator[None]:
    """Make weft's errors EngineErrors: the weights can be used, so what fails in a step may succeed after a restart."""
    try:
        yield
    except WeftError as error:
        raise EngineError(f"the engine failed: {type(error).__name__}: {error}") from error


def _say_what_is_slow(model: nn.Module, options: ServeOptions, plan: Plan, say: Say) -> None:
    """Say which weights a CPU decodes for each product or rounds inputs for, and what a GPU has no kernels for."""
    form = cache_format(options.cache)
    form = (split_format(form) or form) if plan.context.degree > 1 else form
    dtype = next(model.parameters()).dtype
    reasons = what_cpus_do(model) if options.device == "cpu" else why_slow(form, options.device, dtype)
    for reason in reasons:
        say(reason)


def _warm_up(engine: Engine, of_engine: EngineOptions, options: ServeOptions, bar: Bar) -> float | None:
    """Warm an engine up, and return the seconds that it took; None if it is not to be."""
    return warm_up(engine, of_engine, bar) if options.warms_up else None


def _serve_engine(
    engine: Engine | ReplicaFront,
    loaded: LoadedModel,
    sock: socket.socket,
    source: Path,
    options: ServeOptions,
    num_replicas: int,
    load: Callable[[Path], nn.Module | Path],
    warm: Callable[[], float | None],
    ready: Ready,
    say: Say,
    record: ServedRecord,
) -> None:
    """Serve an engine on a socket until the process is told to stop. `warm` returns the seconds of its warm-up."""
    name = options.name or source.resolve().name
    longest = min(engine.context_length, engine.num_slots)
    if longest < engine.context_length:
        say(
            f"memory holds the keys and values of {longest} tokens: prompts and answers have at most so many, not the "
            f"{engine.context_length} of the model's context"
        )
    served = loaded.served(name, options.template, longest, engine.vocab_size, options.adapters)
    worker = EngineWorker(engine, num_replicas * (options.max_running + options.max_waiting))
    seconds = {"warm_up_seconds": warm()}
    engine.idle()  # other replicas answer when they are warm
    if options.warms_up:
        answer_once(served, engine, options.limits, options.host)
        engine.reset()
    api = Api(served, worker, options.limits, loaded.weights, **seconds)

    async def take(weights: nn.Module | Path, name: str) -> None:
        await worker.replace_weights(weights)
        api.fingerprint = name
        record.write(name)

    beside = [follow(source, loaded.weights, load, take, say)] if options.follows else []
    if options.log != "none":
        beside.append(say_rates(worker, api.metrics, say))
    url = f"http://{url_name(options.host)}:{sock.getsockname()[1]}"
    about = {"url": url, "model": name, "weights": loaded.weights, "device": options.device, **seconds}
    app = build_app(api, options.api_keys, options.host)
    app = RequestLog(app, say) if options.log == "requests" else app
    record.write(loaded.weights)
    HttpServer(app, worker, options.limits, lambda: ready(about), beside).run([sock])
    has_ended = worker.join(END_SECONDS)
    if worker.has_failed:
        raise EngineError(worker.failure)
    if has_ended:
        with suppress(RuntimeError):  # a rank that was lost meanwhile is not told
            engine.close()
    else:
        os._exit(1)  # a step does not end; the launcher ends the other ranks

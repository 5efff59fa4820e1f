"""Builds a run before its first step: process group and mesh, model and optimizer, watchdog and saver."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]  # as documented

from weft.checkpoint import Saver
from weft.cluster.local_gpus import gpus
from weft.comm import Axis, Ledger, broadcast
from weft.compile.attention_kernel import attention_shape, fastest_attention
from weft.compile.blocks import Say, compile_blocks, wants_compile
from weft.errors import CheckpointError, ConfigError
from weft.health.call_order import NUM_KEPT, CallOrder
from weft.health.rank_status import FOLDER_VARIABLE, SAVING, Status
from weft.health.watchdog import Deadline
from weft.inspection.model_tensors import saved_buffers
from weft.launch.environment import (
    RankInfo,
    check_world,
    init_process_group,
    shutdown,
    starts_again,
    world_store,
)
from weft.mesh import Mesh
from weft.models import initial_value
from weft.models.adapter import adapter_reader
from weft.models.tuning import initial_adapter, is_adapter
from weft.optim.saved_state import make_optimizer
from weft.parallel.apply import parallelize
from weft.parallel.model_state import all_units
from weft.pipeline.rank_model import rank_model
from weft.planner.predict import peak_flops, predict, run_cluster
from weft.resilience.memory_copies import MemoryCopies
from weft.resilience.peer_watch import Lookout
from weft.resilience.shared_memory import claim, folder_of
from weft.run_file import Run
from weft.saved_run import open_source, weights_fingerprint
from weft.sharding.host_memory import check_memory_fits
from weft.sharding.layout import COMPUTE_DTYPE, MASTER_DTYPE
from weft.step.documents import document_end, has_separate_documents, separate_documents
from weft.step.examples import example_inputs, example_loss, micro_batch_profile, model_flops
from weft.step.layer_drop import drop_layers
from weft.strategy import Values
from weft.train.agreement import agree, run_settings, texts_of_ranks
from weft.train.batches import TrainingData
from weft.train.metrics import Clock
from weft.train.reference import with_reference
from weft.train.state import TrainState
from weft.train.timeline import refuse_timeline

_FINISH_SECONDS = 120.0  # to finish a save in flight when a rank fails


@contextmanager
def world(run: Run, rank_info: RankInfo, store: Store | None = None) -> Iterator[Mesh]:
    """A context with this rank's mesh, inside its process group: `rank_info` is its place among the training ranks.

    `store` is that of the job, if it has ranks of other roles.
    """
    kind = device_type(run)
    if rank_info.num_ranks == 1:
        yield Mesh(run.plan, torch.device(kind, 0) if kind == "cuda" else torch.device("cpu"))
        return
    timeout = timedelta(seconds=run.train.timeout_seconds)
    device = init_process_group(rank_info, kind, timeout, run.train.share_gpus, store, run.plan.ranks_per_device)
    try:
        # Before groups are made: ranks with different plans would make different groups and wait for each other.
        agree(run_settings(run), Axis("world", rank_info.num_ranks, rank_info.rank, None, Ledger()))
        chooses = run.plan.communication.between == "fastest"
        cluster = run_cluster(run, rank_info.num_hosts) if chooses else None
        yield Mesh(run.plan, device, rank_info.num_local_ranks, cluster)
    finally:
        shutdown()


def refuse_start(run: Run, rank_info: RankInfo) -> None:
    """Raises if the run cannot start: wrong number of ranks, a timeline that cannot be drawn, too little memory."""
    check_world(rank_info, run.num_ranks, {**run.plan.degrees, **run.roles.counts})
    if run.train.timeline is not None:
        refuse_timeline(run.plan, Path(run.train.timeline))
    if run.plan.memory.activations or run.plan.memory.weights:  # other host memory needs no prediction
        hosted = predict(run, run_cluster(run, rank_info.num_hosts)).cost.host_bytes
        check_memory_fits(sum(hosted.values()), 0, torch.device("cpu"), rank_info.num_local_ranks)


def build_state(
    run: Run, run_id: str, data: TrainingData, mesh: Mesh, status: Status, say: Say, kernel: str | None
) -> TrainState:
    """Builds the model under its plan (compiled if the run wants it), its optimizer and its data.

    `kernel` is the name of the attention kernel, for messages.
    """
    set_determinism(run)
    model = first_model(run, mesh, partial(example_inputs, run), example_loss(run))
    rank_model(model).check_evaluation()
    keep_documents_apart(run, model, mesh)
    if wants_compile(run, mesh.device):
        say("the first step compiles the model's blocks" + (f"; attention by {kernel}" if kernel else ""))
        compile_blocks(model, say)
    optimizer = make_optimizer(model, run.train, mesh)
    source = weights_fingerprint(run.source, run.tuning.adapter, run.folder)
    data = with_reference(run, data.on_tile(mesh), model, mesh)
    state = TrainState(run, run_id, data, mesh, model, optimizer, status, say, source)
    if run.train.layer_drop is not None:
        state.gates = drop_layers(model, run.train.layer_drop, run.train.seed, run.plan, optimizer)
    return state


def keep_documents_apart(run: Run, model: nn.Module, mesh: Mesh) -> None:
    """Makes attention ignore other documents of a sequence, if the run's data asks for it."""
    if has_separate_documents(run):
        separate_documents(model, document_end(run), mesh["context"])


@contextmanager
def watched(state: TrainState, rank_info: RankInfo, saver: Saver, step_seconds: float | None) -> Iterator[None]:
    """A context in which ranks that weft's own agent did not start watch each other for hangs and failures.

    A rank that fails finishes the save in flight before it exits, for at most 120 s. The other ranks wait for it in the
    meantime and write their parts: the agent would end them all as soon as this rank exits.
    """
    run, status = state.run, state.status
    watch: AbstractContextManager[object] = nullcontext()
    if rank_info.num_ranks > 1 and rank_info.launcher not in ("none", "weft"):
        watch = Lookout(status, rank_info, world_store(), Deadline(run.restart.hang_seconds, step_seconds), run.folder)
    with watch:
        try:
            yield
        except BaseException:
            if saver.is_in_flight:
                status.phase(SAVING)
                waiting = threading.Thread(target=_wait_quietly, args=(saver,), daemon=True)
                waiting.start()
                waiting.join(_FINISH_SECONDS)
            raise


def _wait_quietly(saver: Saver) -> None:
    with suppress(Exception):  # the rank's own error is reported
        saver.wait(published=True)


def show_status(status: Status, model: nn.Module, mesh: Mesh, rank_info: RankInfo) -> None:
    """From here on the rank publishes its progress in `status`, whether or not another process reads it."""
    where = [f"host {socket.gethostname()}"] if rank_info.num_hosts > 1 else []
    where.append(rank_model(model).description)
    status.place = ", ".join(filter(None, where))
    mesh.ledger.status = status
    if FOLDER_VARIABLE in os.environ and mesh.ledger.order is None:
        mesh.ledger.order = CallOrder(Path(os.environ[FOLDER_VARIABLE]), mesh.rank, NUM_KEPT)
    for units in all_units(model):
        units.status = status


def attention(run: Run, mesh: Mesh) -> AbstractContextManager[str | None]:
    """A context in which the fastest attention kernel is used. Yields its name, or None."""
    return fastest_attention(attention_shape(run), COMPUTE_DTYPE[run.plan.precision], mesh.device)


def device_type(run: Run) -> Literal["cpu", "cuda"]:
    """The run's device type: as `train.device` says, or GPUs if there are any."""
    available = run.train.device != "cpu" and bool(gpus())
    if run.train.device == "cuda" and not available:
        raise ConfigError("train.device = 'cuda' but torch sees no GPU; use 'auto' or 'cpu'")
    return "cuda" if available else "cpu"


def set_determinism(run: Run) -> None:
    """Seeds torch, and makes it deterministic if the run asks for it."""
    torch.manual_seed(run.train.seed)
    if run.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def build_model(run: Run) -> nn.Module:
    """Builds the model on the meta device: no rank ever needs memory for all of it.

    Running statistics have the dtype of master weights.
    """
    model = run.tuning.build_on_meta(run.model)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(MASTER_DTYPE[run.plan.precision])
    return model


def first_model(
    run: Run,
    mesh: Mesh,
    example: Callable[[], tuple[Any, ...]] | None = None,
    finish: Callable[[Any], Any] | None = None,
) -> nn.Module:
    """Builds the model under its plan, with the parameters and buffers that the run starts from.

    `example` and `finish` are those of `parallelize`.
    """
    model, values = build_model(run), first_values(run)
    if run.source is not None:
        with torch.no_grad():
            for name, buffer in saved_buffers(model):
                buffer.copy_(values(name))
    return parallelize(model, run.plan, mesh, values, example, finish)


def first_values(run: Run) -> Values:
    """Returns a function from a parameter's name to its initial value: from the weights to start from, or random
    by (seed, name). With weights to start from, it reads buffers too.
    """
    shapes = {name: parameter.shape for name, parameter in build_model(run).named_parameters()}
    read = None if run.source is None else open_source(run.source).read
    adapter = None if run.tuning.adapter is None else adapter_reader(Path(run.tuning.adapter), shapes)

    def value(name: str) -> Tensor:
        if is_adapter(name):
            return initial_adapter(name, shapes[name], run.train.seed) if adapter is None else adapter(name)
        return initial_value(run.model, name, shapes[name], run.train.seed) if read is None else read(name)

    return value


def make_saver(run: Run, mesh: Mesh) -> Saver:
    """Returns the saver. All ranks share a random token, which keeps files apart from those of a crashed attempt.

    A folder that cannot be written is refused at the first start. Ranks that start again go on: copies in memory would
    be lost with the job, and a full disk may have space again at the next save.
    """
    token = torch.randint(0, 2**62, (1,), generator=torch.Generator().manual_seed(int.from_bytes(os.urandom(7))))
    broadcast(token, mesh["world"]).wait()
    return Saver(
        run.folder / "checkpoints",
        mesh.rank,
        run.plan.num_ranks,
        f"{int(token):016x}",
        keep_last=run.checkpoint.keep_last,
        keep_every=run.checkpoint.keep_every,
        tries_folder=not starts_again(os.environ),
    )


def memory_copies(
    run: Run, run_id: str, mesh: Mesh, rank_info: RankInfo, say: Callable[[str], None]
) -> MemoryCopies | None:
    """Returns the copies in memory, if the run asks for them and a launcher would restart its ranks; else None.

    If one rank cannot use the folder, no rank keeps copies.
    """
    if run.checkpoint.memory_every is None or rank_info.num_ranks == 1:
        return None
    folder = folder_of(os.environ, run.folder, run_id)
    if folder is None:
        return None
    problem, held = "", None
    try:
        held = claim(folder)
    except (CheckpointError, OSError) as error:
        problem = str(error)
    problems = texts_of_ranks(problem, mesh["world"])
    if any(problems):
        if held is not None:
            held.close()
        say(f"no copies are kept in memory: {next(filter(None, problems))}")
        return None
    assert held is not None
    with held:
        return MemoryCopies(folder, mesh, rank_info, say)


def make_clock(run: Run, mesh: Mesh, step: int) -> Clock:
    """Returns the clock that computes the run's rates."""
    split = run.split
    shared_by = run.plan.num_ranks // run.plan.num_batch_ranks  # ranks that compute parts of the same samples
    flops = model_flops(micro_batch_profile(run)) * split.accumulation / shared_by
    per_device = run.plan.ranks_per_device
    num_devices, peak = run.plan.num_ranks // per_device, peak_flops(run, mesh.device)
    return Clock(step, split.tokens, num_devices, flops * per_device, peak, mesh.device)

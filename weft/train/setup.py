"""What a run is made of before its first step: the world of its ranks, its model, and what watches and saves it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Literal

import torch
from torch import nn

from weft.checkpoint import Saver
from weft.cluster.local_gpus import gpus
from weft.comm import Axis, Ledger, broadcast
from weft.compile.attention_kernel import attention_shape, fastest_attention
from weft.errors import CheckpointError, ConfigError
from weft.health.rank_status import Status
from weft.health.watchdog import Deadline
from weft.launch.environment import Place, init_process_group, shutdown, world_store
from weft.mesh import Mesh
from weft.models import LanguageConfig, build, initial_value, weight_reader
from weft.models.hf import parameter_shapes
from weft.parallel.model_state import all_units
from weft.pipeline.runtime import Pipeline
from weft.planner.predict import peak_flops
from weft.resilience.memory_copies import MemoryCopies
from weft.resilience.peer_watch import Lookout
from weft.resilience.shared_memory import claim, folder_of
from weft.run_file import Run
from weft.sharding.layout import COMPUTE_DTYPE, MASTER_DTYPE
from weft.step.examples import micro_batch_profile, model_flops
from weft.strategy import Values
from weft.train.agreement import agree, all_say, run_beliefs
from weft.train.metrics import Clock


@contextmanager
def world(run: Run, place: Place) -> Iterator[Mesh]:
    """This rank's mesh, inside its process group."""
    kind = device_type(run)
    if place.num_ranks == 1:
        yield Mesh(run.plan, torch.device(kind, 0) if kind == "cuda" else torch.device("cpu"))
        return
    timeout = timedelta(seconds=run.train.timeout_seconds)
    device = init_process_group(place, kind, timeout, run.train.share_gpus)
    try:
        # Before groups are made: ranks with different plans would make different ones, and wait for each other.
        agree(run_beliefs(run), Axis("world", place.num_ranks, place.rank, None, Ledger()))
        yield Mesh(run.plan, device, place.num_local_ranks)
    finally:
        shutdown()


def check_evaluation(model: nn.Module) -> None:
    """Raises a PlanError if the first evaluation would fail."""
    if isinstance(model, Pipeline):
        model.check_evaluation()


def show_status(status: Status, model: nn.Module, mesh: Mesh, place: Place) -> None:
    """From here on the rank says what it does: to itself where nobody watches."""
    where = [f"host {socket.gethostname()}"] if place.num_hosts > 1 else []
    if isinstance(model, Pipeline):
        stages = sorted({stage.index for stage in model.parts.values()})
        where.append(f"pipe stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))}")
    status.place = ", ".join(where)
    mesh.ledger.status = status
    for units in all_units(model):
        units.status = status


def lookout(
    run: Run, place: Place, status: Status, step_seconds: float | None
) -> AbstractContextManager[Lookout | None]:
    """Ranks that weft's own agent did not start watch over each other."""
    if place.num_ranks == 1 or place.launcher in ("none", "weft"):
        return nullcontext()
    return Lookout(status, place, world_store(), Deadline(run.restart.hang_seconds, step_seconds), run.folder)


def attention(run: Run, mesh: Mesh) -> AbstractContextManager[str | None]:
    return fastest_attention(attention_shape(run), COMPUTE_DTYPE[run.plan.precision], mesh.device)


def device_type(run: Run) -> Literal["cpu", "cuda"]:
    """Where the run computes: as it says, or on GPUs where there are any."""
    available = run.train.device != "cpu" and bool(gpus())
    if run.train.device == "cuda" and not available:
        raise ConfigError("train.device = 'cuda' but torch sees no GPU; use 'auto' or 'cpu'")
    return "cuda" if available else "cpu"


def set_determinism(run: Run) -> None:
    torch.manual_seed(run.train.seed)
    if run.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def build_model(run: Run) -> nn.Module:
    """The model without values: no rank ever needs room for all of it. Running statistics are as exact as its state."""
    with torch.device("meta"):
        model = build(run.model)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(MASTER_DTYPE[run.plan.precision])
    return model


def first_values(run: Run) -> Values:
    """A parameter's first value by name: from a Hugging Face folder, or drawn from (seed, name)."""
    if run.model_folder is not None:
        assert isinstance(run.model, LanguageConfig), "the run file was checked"
        return weight_reader(run.model_folder, run.model)
    shapes = parameter_shapes(run.model)
    return lambda name: initial_value(run.model, name, torch.Size(shapes[name]), run.train.seed)


def make_saver(run: Run, mesh: Mesh) -> Saver:
    """All ranks agree on a random token, which keeps a crashed attempt's files apart."""
    token = torch.randint(0, 2**62, (1,), generator=torch.Generator().manual_seed(int.from_bytes(os.urandom(7))))
    broadcast(token, mesh["world"]).wait()
    return Saver(
        run.folder / "checkpoints",
        mesh.rank,
        run.plan.num_ranks,
        f"{int(token):016x}",
        keep_last=run.checkpoint.keep_last,
        keep_every=run.checkpoint.keep_every,
    )


def memory_copies(run: Run, run_id: str, mesh: Mesh, place: Place, say: Callable[[str], None]) -> MemoryCopies | None:
    """Copies in memory, where they are asked for and somebody would start the ranks again. A folder that one rank may
    not use is done without by all.
    """
    if run.checkpoint.memory_every is None or place.num_ranks == 1:
        return None
    folder = folder_of(os.environ, run.folder, run_id)
    if folder is None:
        return None
    problem, held = "", None
    try:
        held = claim(folder)
    except (CheckpointError, OSError) as error:
        problem = str(error)
    problems = all_say(problem, mesh["world"])
    if any(problems):
        if held is not None:
            held.close()
        say(f"no copies are kept in memory: {next(filter(None, problems))}")
        return None
    assert held is not None
    with held:
        return MemoryCopies(folder, mesh, place, say)


def make_clock(run: Run, mesh: Mesh, step: int) -> Clock:
    split = run.split
    shared_by = run.plan.num_ranks // run.plan.num_batch_ranks  # ranks that compute parts of the same samples
    flops = model_flops(micro_batch_profile(run)) * split.accumulation / shared_by
    return Clock(step, split.tokens, run.plan.num_ranks, flops, peak_flops(run, mesh.device), mesh.device)

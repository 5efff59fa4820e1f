"""Starts the ranks of `weft train` on this machine: where they keep copies, and which checkpoint they resume from."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from weft.cluster.local_gpus import gpus
from weft.errors import CheckpointError
from weft.launch.agent import Restarts, ResumePoint, start_local
from weft.launch.environment import LOCAL_RUN_ID_PREFIX, RankInfo, is_elastic
from weft.launch.fork_server import ForkServer
from weft.launch.mps import shared_gpu_service
from weft.launch.one_speaker import parent_identity
from weft.launch.stop_signal import say
from weft.planner.predict import predict, run_cluster
from weft.resilience.shared_memory import claim, complete_steps, copies_folder, job_folder
from weft.run_file import FROZEN_SUFFIX, Run, load_run
from weft.train.resume import found_checkpoints
from weft.train.run_identity import make_run_id

Arguments = Sequence[str] | Callable[[Path], Sequence[str]]


def start_ranks(
    fork_server: ForkServer, run: Run, arguments: Arguments, environ: Mapping[str, str] | None = None
) -> int:
    """Trains a run on local ranks of the fork server's program, with restarts. Returns the exit status.

    If `arguments` is a function, it gets the path of a frozen copy of this run, which `load_run` reads. Restarted ranks
    then continue with the run that was checked, even if the user has changed the run file.
    """
    job = LOCAL_RUN_ID_PREFIX + uuid.uuid4().hex
    copies, held = None, None
    if run.checkpoint.memory_every is not None and run.plan.num_ranks > 1:
        copies = copies_folder(job, run.folder, make_run_id(run.folder))
        with suppress(CheckpointError, OSError):  # the ranks report this and continue without copies
            held = claim(copies)  # held here too, so that copies remain while no rank runs
    step_seconds = predict(run, run_cluster(run)).step_seconds
    restarts = Restarts(run.restart.limit, run.restart.window_seconds, run.restart.hang_seconds, step_seconds)
    environ = {**(environ or {}), "TORCHELASTIC_RUN_ID": job}
    shadowed = run.plan.pipe.shadow
    with (
        tempfile.TemporaryDirectory(prefix="weft-run-", ignore_cleanup_errors=True) as folder,
        _gpu_service(run) as service,
    ):
        environ = {**environ, **service}
        frozen = Path(folder) / f"run{FROZEN_SUFFIX}"
        given = arguments(frozen) if callable(arguments) else arguments

        def newest() -> ResumePoint:
            """Called before each start. Writes the frozen run again if its file was removed."""
            _freeze(run, frozen)
            return newest_source(run, copies)

        try:
            return start_local(
                fork_server, run.num_ranks, given, environ, restarts, newest, run.folder, shadowed, run.roles.num_ranks
            )
        finally:
            if held is not None and copies is not None:
                shutil.rmtree(copies, ignore_errors=True)
                held.close()


def _gpu_service(run: Run) -> AbstractContextManager[dict[str, str]]:
    """A context in which MPS runs, if ranks share a GPU by the plan."""
    if run.plan.ranks_per_device == 1 or run.train.device == "cpu" or not gpus():
        return nullcontext({})
    return shared_gpu_service(os.environ, lambda message: say(f"weft: {message}"))


def _freeze(run: Run, path: Path) -> None:
    """Writes the run to a file from which `load_run` reads the same run."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not path.exists():
        path.write_text(run.to_json(), encoding="utf-8")
        assert load_run(path) == run, "a frozen run is the run"


@contextmanager
def run_of_job(
    run_file: Path, overrides: Sequence[str], environ: Mapping[str, str], rank_info: RankInfo
) -> Iterator[Run]:
    """A context with the run that a rank of a launcher trains.

    If torchrun may restart ranks, it is the run that the first ranks of this host's agent have read, even if the user
    has changed the run file since.
    """
    with ExitStack() as held:
        frozen = None
        if is_elastic(environ, rank_info):
            with suppress(CheckpointError, OSError):  # without space in shared memory, each start reads the run file
                frozen = _freeze_for_job(run_file, overrides, environ, held)
        yield load_run(run_file, overrides) if frozen is None else load_run(frozen)
        if frozen is not None and rank_info.local_rank == 0:  # the run has ended without an error
            shutil.rmtree(frozen.parent, ignore_errors=True)


def _freeze_for_job(run_file: Path, overrides: Sequence[str], environ: Mapping[str, str], held: ExitStack) -> Path:
    """Returns the frozen run of the agent that has started this rank. The first rank writes it."""
    folder = job_folder(f"run {parent_identity()} {environ.get('TORCHELASTIC_RUN_ID')}")
    held.enter_context(claim(folder))
    frozen = folder / f"run{FROZEN_SUFFIX}"
    if not frozen.exists():
        temporary = frozen.with_suffix(f".{os.getpid()}")
        temporary.write_text(load_run(run_file, overrides).to_json(), encoding="utf-8")
        with suppress(FileExistsError):  # another rank was first
            os.link(temporary, frozen)
        temporary.unlink()
    return frozen


def newest_source(run: Run, copies: Path | None) -> ResumePoint:
    """The checkpoint from which ranks that start now would resume."""
    found = found_checkpoints(run.folder / "checkpoints", complete_steps(copies) if copies is not None else [])
    if not found:
        return ResumePoint()
    saved_step = max((one.step for one in found if one.path is not None), default=0)
    return ResumePoint(found[0].step, str(found[0].path or "memory"), saved_step=saved_step)

"""Starting the ranks of `weft train` on this machine: where they keep copies, and from where they go on."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from weft.agent import Restarts, Source, start_local
from weft.config import Run
from weft.launch import LOCAL_RUN_ID_PREFIX
from weft.nursery import Nursery
from weft.predict import predict, run_cluster
from weft.train.resume import found_checkpoints
from weft.train.shared_memory import complete_steps, job_folder


def start_ranks(nursery: Nursery, run: Run, arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Train a run on local ranks of the nursery's program, again and again if need be; the exit status."""
    run_id = LOCAL_RUN_ID_PREFIX + uuid.uuid4().hex
    copies = job_folder(run_id) if run.checkpoint.memory_every is not None else None
    step_seconds = predict(run, run_cluster(run)).step_seconds
    restarts = Restarts(run.restart.limit, run.restart.window_seconds, run.restart.hang_seconds, step_seconds)
    environ = {**(environ or {}), "TORCHELASTIC_RUN_ID": run_id}

    def newest() -> Source:
        return newest_source(run, copies)

    try:
        shadowed = run.plan.pipe.shadow
        return start_local(nursery, run.plan.num_ranks, arguments, environ, restarts, newest, run.folder, shadowed)
    finally:
        if copies is not None:
            shutil.rmtree(copies, ignore_errors=True)


def newest_source(run: Run, copies: Path | None) -> Source:
    """From where ranks that start now would go on."""
    found = found_checkpoints(run.folder / "checkpoints", complete_steps(copies) if copies is not None else [])
    return Source(found[0].step, str(found[0].path or "memory")) if found else Source()

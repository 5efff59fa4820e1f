"""Jobs that commands run in a child process of the fork server: those that use a GPU, run a backward or fork ranks.

    with command_fork_server(run_as_rank) as fork_server:    first of all in a command
        prove(fork_server, run)

Arguments and results are JSON values; a run is passed as the text of `Run.to_json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from weft.cluster.local_gpus import Gpu, ask_library, hide_gpus, query_gpus
from weft.comm.backends import DeviceType
from weft.commands.doctor import check_gpu
from weft.launch.fork_server import ForkServer, Job, Main
from weft.planner.predict import refuse_run
from weft.proof.prove import prove_run
from weft.proof.report import ProofReport, report_from_json, report_to_json
from weft.run_file import Run, run_from_json


def import_for_ranks() -> None:
    """Import a slow module that optimizers and profiles need, so that each forked rank need not import it (seconds)."""
    import torch._dynamo  # noqa: F401


@contextmanager
def command_fork_server(main: Main, kind: type[ForkServer] = ForkServer, warms: bool = True) -> Iterator[Any]:
    """Start a fork server of class `kind` for a command, and yield it.

    A child lists the GPUs; inside the context, this process uses that list and does not touch a GPU. With `warms`, the
    fork server imports what ranks need before it starts any.
    """
    ask_library()
    with kind(main, import_for_ranks if warms else lambda: None, JOBS) as fork_server:
        has_cuda = torch.version.cuda is not None or torch.version.hip is not None
        seen = fork_server.call("gpus") if has_cuda else []
        with hide_gpus([Gpu(**{**one, "capability": tuple(one["capability"])}) for one in seen]):
            yield fork_server


def prove(
    fork_server: ForkServer,
    run: Run,
    device: DeviceType = "cpu",
    precision: Literal["fp64", "bf16"] = "fp64",
    compiles: bool = False,
) -> ProofReport:
    """Like `verify_run`: checks the run in this process, and proves it in a child of the fork server.

    The child can fork ranks, also if this process has run a backward.
    """
    refuse_run(run)
    table = fork_server.call("verify", run=run.to_json(), device=device, precision=precision, compiles=compiles)
    return report_from_json(table)


def _gpus() -> list[dict[str, Any]]:
    return [asdict(one) for one in query_gpus(with_free_bytes=True)]


def _verify(run: str, device: DeviceType, precision: Literal["fp64", "bf16"], compiles: bool) -> dict[str, Any]:
    return report_to_json(prove_run(run_from_json(run), device, precision, compiles))


def _sample(folder: str, device: DeviceType, options: Mapping[str, Any]) -> str:
    from weft.serve.generate import generate  # for this job alone: commands that plan start faster
    from weft.serve.loading import load_model

    loaded = load_model(Path(folder), device=device)
    ends = loaded.end_tokens
    return generate(loaded.model, loaded.tokenizer, context=loaded.context_length, stop_tokens=ends, **options)


JOBS: dict[str, Job] = {"gpus": _gpus, "verify": _verify, "sample": _sample, "check_gpu": check_gpu}

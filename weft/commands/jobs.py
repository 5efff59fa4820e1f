"""What commands let a child of the fork server do: whatever touches a GPU, runs a backward or forks ranks of its own.

    with command_fork_server(run_as_rank) as fork_server:    first of all in a command
        prove(fork_server, run)

Arguments and results are JSON's: a run travels as `Run.to_json` writes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from weft.cluster.local_gpus import Gpu, hide_gpus, query_gpus
from weft.comm.backends import DeviceType
from weft.commands.gpu_check import check_gpu, describe
from weft.launch.fork_server import ForkServer, Job, Main
from weft.planner.predict import refuse_run
from weft.proof.prove import prove_run
from weft.proof.report import Report, report_from_json, report_to_json
from weft.run_file import Run, run_from_json
from weft.serve.generate import generate, load_for_generation

# With it torch asks NVIDIA's management library whether there is a GPU, which leaves a process as it was; by itself it
# asks CUDA, and no child of that process can use a GPU any more.
_ASKS_LIBRARY = "PYTORCH_NVML_BASED_CUDA_CHECK"


def import_for_ranks() -> None:
    """What ranks would otherwise each import: optimizers and profiles need it, for seconds."""
    import torch._dynamo  # noqa: F401


@contextmanager
def command_fork_server(main: Main, kind: type[ForkServer] = ForkServer, warms: bool = True) -> Iterator[Any]:
    """The fork server (of that kind) of a command; while it lasts, this process sees no GPU and knows what a child saw
    of them. One that will start ranks `warms` up: it imports what they need.
    """
    os.environ.setdefault(_ASKS_LIBRARY, "1")
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
) -> Report:
    """`verify_run`: the run itself is checked here, and proved in a child, which can fork ranks whatever this process
    has done.
    """
    refuse_run(run)
    found = fork_server.call("verify", run=run.to_json(), device=device, precision=precision, compiles=compiles)
    return report_from_json(found)


def _gpus() -> list[dict[str, Any]]:
    return [asdict(one) for one in query_gpus(with_free_bytes=True)]


def _verify(run: str, device: DeviceType, precision: Literal["fp64", "bf16"], compiles: bool) -> dict[str, Any]:
    return report_to_json(prove_run(run_from_json(run), device, precision, compiles))


def _sample(folder: str, device: DeviceType, options: Mapping[str, Any]) -> str:
    model, tokenizer, context = load_for_generation(Path(folder), device=device)
    return generate(model, tokenizer, context=context, **options)


def _check_gpu() -> dict[str, Any]:
    rows = check_gpu()  # first: it forks
    return {"backend": describe(), "rows": rows}


JOBS: dict[str, Job] = {"gpus": _gpus, "verify": _verify, "sample": _sample, "check_gpu": _check_gpu}

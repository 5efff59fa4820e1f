"""What commands let a child of the nursery do: whatever touches a GPU, runs a backward or forks ranks of its own.

    with command_nursery(run_as_rank) as nursery:    first of all in a command
        prove(nursery, run)

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

from weft.cluster.local_gpus import Gpu, described, look
from weft.comm.backends import DeviceType
from weft.commands.gpu_check import check_gpu, describe
from weft.launch.fork_server import Job, Main, Nursery
from weft.planner.predict import refuse_run
from weft.proof.prove import prove_run
from weft.proof.report import ProofReport, report_from_json, report_to_json
from weft.run_file import Run, run_from_json
from weft.serve.generate import generate, load_for_generation

# With it torch asks NVIDIA's management library whether there is a GPU, which leaves a process as it was; by itself it
# asks CUDA, and no child of that process can use a GPU any more.
_ASKS_LIBRARY = "PYTORCH_NVML_BASED_CUDA_CHECK"


def import_for_ranks() -> None:
    """What ranks would otherwise each import: optimizers and profiles need it, for seconds."""
    import torch._dynamo  # noqa: F401


@contextmanager
def command_nursery(main: Main, kind: type[Nursery] = Nursery, warms: bool = True) -> Iterator[Any]:
    """The nursery (of that kind) of a command; while it lasts, this process sees no GPU and knows what a child saw of
    them. One that will start ranks `warms` up: it imports what they need.
    """
    os.environ.setdefault(_ASKS_LIBRARY, "1")
    with kind(main, import_for_ranks if warms else lambda: None, JOBS) as nursery:
        has_cuda = torch.version.cuda is not None or torch.version.hip is not None
        seen = nursery.call("gpus") if has_cuda else []
        with described([Gpu(**{**one, "capability": tuple(one["capability"])}) for one in seen]):
            yield nursery


def prove(
    nursery: Nursery,
    run: Run,
    device: DeviceType = "cpu",
    precision: Literal["fp64", "bf16"] = "fp64",
    compiles: bool = False,
) -> ProofReport:
    """`verify_run`: the run itself is checked here, and proved in a child, which can fork ranks whatever this process
    has done.
    """
    refuse_run(run)
    found = nursery.call("verify", run=run.to_json(), device=device, precision=precision, compiles=compiles)
    return report_from_json(found)


def _gpus() -> list[dict[str, Any]]:
    return [asdict(one) for one in look(with_free_bytes=True)]


def _verify(run: str, device: DeviceType, precision: Literal["fp64", "bf16"], compiles: bool) -> dict[str, Any]:
    return report_to_json(prove_run(run_from_json(run), device, precision, compiles))


def _sample(folder: str, device: DeviceType, options: Mapping[str, Any]) -> str:
    model, tokenizer, context = load_for_generation(Path(folder), device=device)
    return generate(model, tokenizer, context=context, **options)


def _check_gpu() -> dict[str, Any]:
    rows = check_gpu()  # first: it forks
    return {"backend": describe(), "rows": rows}


JOBS: dict[str, Job] = {"gpus": _gpus, "verify": _verify, "sample": _sample, "check_gpu": _check_gpu}

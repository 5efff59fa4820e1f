"""Tests for a machine with a GPU, through the commands and the public API: `make test-gpu`.

Elsewhere all of them are skipped, with the reason. The process of the tests never initialises CUDA; its children do.
Several NCCL ranks share the GPU where NCCL is 2.30 or later (set LD_PRELOAD to such a library); Gloo carries them
otherwise. `--results FILE` keeps what was found.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking whether there is a GPU does not initialise CUDA

# Of many channels each rank holds gigabytes, and some 40 ranks share the GPU at a time.
os.environ.setdefault("NCCL_MAX_NCHANNELS", "2")

import pytest
import torch
from gpu_for_tests import JOBS, ran

from weft.commands.jobs import import_for_ranks
from weft.launch.fork_server import ForkServer

HERE = Path(__file__).parent
BEGAN = time.time()
LONGEST = 2500  # characters of a failure that is told at once


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="write what the GPU tests found to this file (JSON)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU here; make test-gpu is for a machine with one"))


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Children that may use the GPU, whatever this process has done."""
    with ForkServer(lambda arguments: None, import_for_ranks, JOBS) as made:
        yield made


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once what failed and how long tests took: a run that is cut off is not lost."""
    if "PYTEST_XDIST_WORKER" not in os.environ and (report.failed or report.when == "call"):
        print(f"\n{report.outcome} {report.nodeid} {report.duration:.1f} s", flush=True)
        if report.failed:
            print(str(report.longrepr)[-LONGEST:], flush=True)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    path: Path | None = config.getoption("--results", None)
    if path is None or hasattr(config, "workerinput") or not torch.cuda.is_available():
        return
    stats = terminalreporter.stats
    rows = [
        {
            "test": one.nodeid,
            "outcome": kind,
            "seconds": round(getattr(one, "duration", 0.0), 1),
            **dict(getattr(one, "user_properties", ())),
        }
        for kind in ("passed", "failed", "error", "skipped")
        for one in stats.get(kind, [])
    ]
    whole = {
        "benchmark": "test_gpu",
        **ran("gpus"),
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seconds": round(time.time() - BEGAN, 1),
        "counts": {
            kind: sum(row["outcome"] == kind for row in rows) for kind in ("passed", "failed", "error", "skipped")
        },
        "tests": sorted(rows, key=lambda row: row["test"]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n")

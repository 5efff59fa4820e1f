"""What benchmarks share: their options, the head of a result file, times of calls, and runs in processes of their own.

A result file begins with what `facts` returns: which benchmark, on which day, by which command, on which hardware and
with which versions. `measured.py` makes a page of docs/measured from it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from weft.cluster.topology import cpu_model

RESULTS = Path(__file__).parent / "results"


def options(
    text: str | None, out: str | None = None, tiny: str | None = None, device: bool = False
) -> argparse.ArgumentParser:
    """Return a parser whose help is a benchmark's docstring.

    `out` is the name of its file in benchmarks/results, which `--out` changes; `tiny` is the help of `--tiny`; with
    `device` there is `--device`, a GPU where there is one.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if out is not None:
        parser.add_argument("--out", type=Path, default=RESULTS / out, help=f"the file to write, usually {out}")
    if tiny is not None:
        parser.add_argument("--tiny", action="store_true", help=tiny)
    if device:
        parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


NOT_WRITTEN = "tiny sizes, to try the benchmark itself; results are printed, not written"


def facts(packages: Sequence[str] = ("torch",), device: torch.device | str | None = None) -> dict[str, Any]:
    """Return the head of a result: benchmark, day, command, hardware and versions.

    The device is a GPU where there is one, unless it is given.
    """
    on_gpu = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    script, words = Path(sys.argv[0]).stem, sys.argv[1:]
    if "--out" in words:  # where the file lies says nothing of what was measured
        place = words.index("--out")
        words = words[:place] + words[place + 2 :]
    found = {name: importlib.metadata.version(name) for name in packages if importlib.util.find_spec(name)}
    return {
        "benchmark": script,
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", f"benchmarks/{script}.py", *words]),
        "device": torch.cuda.get_device_name() if on_gpu else cpu_model(),
        "cpu_cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), **found},
    }


def write(
    path: Path, result: dict[str, Any], packages: Sequence[str] = ("torch",), device: torch.device | str | None = None
) -> None:
    """Write a result with its head."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts(packages, device), **result}, indent=1, default=str) + "\n")


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def call_seconds(
    call: Callable[[], object],
    device: torch.device,
    calls: int = 1,
    repeats: int = 11,
    left_out: int = 0,
    of: Callable[[Iterable[float]], float] = statistics.median,
) -> float:
    """Return the seconds of a call by the host's clock: the median, or `of`, of repeats with so many calls each.

    The first repeats are left out, if so many are given. The caller has made the first call, which compiles.
    """
    found = []
    for _ in range(repeats):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        found.append((time.perf_counter() - begin) / calls)
    return of(found[left_out:])


def gpu_seconds(call: Callable[[], object], calls: int, warm: int) -> float:
    """Return the mean seconds of a call on the GPU, by its own clock, after some calls that are not counted."""
    for _ in range(warm):
        call()
    if not torch.cuda.is_available():
        return float("nan")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls / 1e3


def run_apart(arguments: Sequence[str], timeout_seconds: float, file: str) -> dict[str, Any]:
    """Return what a benchmark says in its last line, in JSON, when it runs in another process with these arguments."""
    command = [sys.executable, str(Path(file).resolve()), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {timeout_seconds:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer
    reason = done.stderr.strip().splitlines()
    return {"error": reason[-1] if reason else f"ended with {done.returncode}"}

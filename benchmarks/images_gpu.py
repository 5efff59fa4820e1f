"""Large images on one GPU: weft's step against plain PyTorch, and the largest square image that trains.

    python benchmarks/images_gpu.py [--tiny]

ResNet-50 and AmoebaNet-D at 2048², 4096² and 8192², one image a step, bf16, channels last. Plain PyTorch is autocast
over fp32 weights with a fused AdamW, as one would write it, and the same with torch.compile over the whole model; weft
is its own trainer's step with bf16 weights over fp32 masters: blocks compiled, forward and backward as a CUDA graph.
Each case has a process of its own; one that does not fit, or is not compiled in time, says so. Plain PyTorch and weft
compile at once, then have their steps measured in turn: their memory must fit together. The ratio is to the faster
plain one. Where no side fits, weft's step with full recompute is measured. The largest image is found in steps of 1,024
pixels, plain and with weft's full recompute. Writes benchmarks/results/images-h200.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, Queue
from tempfile import TemporaryFile
from threading import Thread

import harness
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.compile.blocks import compile_blocks
from weft.mesh import Mesh
from weft.models import build
from weft.models.catalog import load_model
from weft.optim import AdamW
from weft.parallel.apply import parallelize
from weft.plan import Memory, Plan
from weft.step.cuda_graph import Graph
from weft.step.objective import CLASSIFICATION
from weft.step.train_step import train_step

MODELS = ("resnet50", "amoebanet-d-18-208")
SIZES = (2048, 4096, 8192)
STRIDE, LARGEST = 1024, 32768
WARM_STEPS, STEPS = 6, 12
COMPILE_SECONDS, RUN_SECONDS = 200, 60


def images_of(size: int, device: str) -> tuple[Tensor, Tensor]:
    image = torch.randn(1, 3, size, size, device=device).to(memory_format=torch.channels_last)
    return image, torch.zeros(1, dtype=torch.long, device=device)


def plain_step(name: str, size: int, device: str, is_compiled: bool = False) -> Callable[[], object]:
    """A step as one would write it."""
    model: nn.Module = build(load_model(name)).to(device)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    image, label = images_of(size, device)
    forward = torch.compile(model) if is_compiled else model

    def step() -> object:
        with torch.autocast(device, torch.bfloat16):
            logits = forward(image)
        loss = F.cross_entropy(logits.float(), label)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def weft_step(
    name: str, size: int, device: str, recompute: str = "none", is_compiled: bool = True
) -> Callable[[], object]:
    """Weft's step, as its trainer does it."""
    plan = Plan(precision="bf16", memory=Memory(recompute))  # type: ignore[arg-type]
    mesh = Mesh(plan, device)
    model = parallelize(build(load_model(name)).to(device), plan, mesh)
    optimizer = AdamW(model)
    image, label = images_of(size, device)
    batch = (image.to(torch.bfloat16), label)
    graph = None
    if device == "cuda" and is_compiled:
        compile_blocks(model, SAID.append)
    if device == "cuda" and recompute == "none":
        graph = Graph(model, SAID.append)

    def step() -> object:
        return float(train_step(model, optimizer, [batch], mesh, CLASSIFICATION, graph=graph).loss)

    return step


SAID: list[str] = []  # by weft, of what it could not do


SIDES: dict[str, Callable[[str, int, str], Callable[[], object]]] = {
    "plain": plain_step,
    "plain, compiled": partial(plain_step, is_compiled=True),
    "weft": weft_step,
    "weft, not compiled": partial(weft_step, is_compiled=False),
    "weft, recomputed": partial(weft_step, recompute="full", is_compiled=False),
}


def measure(name: str, side: str, size: int, device: str) -> dict[str, object]:
    """Seconds of steps; one ends with the loss on the host."""
    seconds = []
    if device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    step = SIDES[side](name, size, device)
    warm, steps = (WARM_STEPS, STEPS) if device == "cuda" else (0, 1)
    for number in range(warm + steps):
        if number == warm:
            print("ready", flush=True)
            sys.stdin.readline()  # until it is its turn
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    found = {"seconds": statistics.median(seconds[warm:]), "first_seconds": seconds[0], "peak_bytes": peak}
    return {**found, **({"said": SAID} if SAID else {})}


def compare(name: str, size: int, tiny: list[str], compile_seconds: int = COMPILE_SECONDS) -> dict[str, object]:
    """All sides, those that compile at once, and how much faster weft is than the faster plain one."""
    found: dict[str, object] = {}
    times = {}
    for sides in (("plain, compiled", "weft"), ("plain",), ("weft, not compiled",), ("weft, recomputed",)):
        if sides == ("weft, recomputed",) and times:
            continue  # only for what does not fit otherwise
        begin = time.monotonic()
        cases = {side: Case("--measure", name, side, str(size), *tiny) for side in sides}
        for side, case in cases.items():
            if case.is_ready(begin + compile_seconds):
                print("ready", name, side, size, f"{time.monotonic() - begin:.0f} s", flush=True)
        for side, case in cases.items():
            found[side] = row = case.result(RUN_SECONDS)
            if "seconds" in row:
                times[side] = float(str(row["seconds"]))
    plain = [seconds for side, seconds in times.items() if side.startswith("plain")]
    if plain and "weft" in times:
        found["throughput_ratio"] = min(plain) / times["weft"]
    return found


def trains(name: str, side: str, size: int, device: str) -> dict[str, object]:
    """Whether two steps of one image of this size can be made."""
    step = (
        plain_step(name, size, device) if side == "plain" else weft_step(name, size, device, "full", is_compiled=False)
    )
    step(), step()
    return {"size": size, "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0}


class Case:
    """A case in a process of its own. One that is measured is ready when it has compiled, and waits for its turn."""

    def __init__(self, *arguments: str) -> None:
        self.errors = TemporaryFile("w+")  # noqa: SIM115 (it is read when the process has ended)
        # A group of its own: compilers that it has started would keep its output open.
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,
        )
        self.lines: Queue[str] = Queue()  # '' at its end
        self.begin, self.late = time.monotonic(), ""
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def _line(self, start: str, end: float) -> str:
        """The next line that starts so, '' if there is none before `end`."""
        with suppress(Empty):
            while line := self.lines.get(timeout=max(0.0, end - time.monotonic())):
                if line.startswith(start):
                    return line
            self.lines.put("")
            self.process.wait()
        return ""

    def is_ready(self, end: float) -> bool:
        """Whether it is before `end`; one that is not is stopped."""
        if self._line("ready", end):
            return True
        if self.process.poll() is None:
            self.late = f"not ready after {end - self.begin:.0f} s"
        return False

    def result(self, seconds: int) -> dict[str, object]:
        """What it found, within `seconds`, or why it did not."""
        out = "" if self.late else self._answer(time.monotonic() + seconds)
        is_over = out or self.process.poll() is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if out:
            found: dict[str, object] = json.loads(out)
            return found
        self.errors.seek(0)
        said = self.errors.read().strip().splitlines()
        return {"error": said[-1][:200] if is_over and said else self.late or f"more than {seconds} s"}

    def _answer(self, end: float) -> str:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        return self._line("{", end)


def largest(name: str, side: str, start: int, tiny: list[str]) -> dict[str, object]:
    """The largest square image, by halving the steps between one that fits and one that does not."""
    low, high = start // STRIDE, LARGEST // STRIDE
    best: dict[str, object] = {}
    while high - low > 1:
        middle = (low + high) // 2
        found = Case("--trains", name, side, str(middle * STRIDE), *tiny).result(RUN_SECONDS)
        low, high, best = (low, middle, best) if "error" in found else (middle, high, found)
    return {"size": low * STRIDE, **best}


def main() -> None:
    parser = harness.options(__doc__, "images-h200.json")
    parser.add_argument("--tiny", action="store_true", help="small images on the CPU; writes nothing")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--no-largest", action="store_true", help="leave out the search for the largest image")
    parser.add_argument("--compile-seconds", type=int, default=COMPILE_SECONDS, help="for each case")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--trains", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device, tiny = ("cpu", ["--tiny"]) if options.tiny else ("cuda", [])
    if options.measure:
        name, side, size = options.measure
        print(json.dumps(measure(name, side, int(size), device)))
        return
    if options.trains:
        name, side, size = options.trains
        print(json.dumps(trains(name, side, int(size), device)))
        return
    found: dict[str, object] = {}
    if options.tiny:
        print(json.dumps(compare(MODELS[0], 64, tiny)))
        return
    for name in options.models:
        for size in options.sizes:
            found[f"{name} {size}"] = row = compare(name, size, tiny, options.compile_seconds)
            print(name, size, json.dumps(row), flush=True)
        for side in () if options.no_largest else ("plain", "weft"):
            found[f"{name} largest {side}"] = row = largest(name, side, SIZES[0], tiny)
            print(name, "largest", side, json.dumps(row), flush=True)
        harness.write(options.out, found, device=device)


if __name__ == "__main__":
    main()

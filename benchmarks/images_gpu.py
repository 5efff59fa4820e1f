"""Large images on one GPU: weft's step against plain PyTorch, and the largest square image that trains.

    python benchmarks/images_gpu.py [--tiny]

ResNet-50 and AmoebaNet-D at 2048², 4096² and 8192², one image a step, bf16, channels last. Plain PyTorch is autocast
over fp32 weights with a fused AdamW, as one would write it, and the same with torch.compile over the whole model; weft
is its own trainer's step with bf16 weights over fp32 masters: blocks compiled, forward and backward as a CUDA graph.
Each case has a process of its own; one that does not fit, or is not compiled in time, says so. What is compiled is
compiled before anything is measured, several cases at once. The ratio is to the faster plain one. The largest image is
found in steps of 1,024 pixels, plain and with weft's full recompute. Writes benchmarks/results/images-h200.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.mesh import Mesh
from weft.models import build
from weft.models.catalog import load_model
from weft.optim import AdamW
from weft.parallel import parallelize
from weft.plan import Memory, Plan
from weft.train.compiling import compile_blocks
from weft.train.graph import Graph
from weft.train.step import CLASSIFICATION, train_step

RESULT = Path(__file__).parent / "results" / "images-h200.json"
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
}


def measure(name: str, side: str, size: int, device: str) -> dict[str, object]:
    """Seconds of steps; one ends with the loss on the host."""
    seconds = []
    if device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    step = SIDES[side](name, size, device)
    warm, steps = (WARM_STEPS, STEPS) if device == "cuda" else (0, 1)
    for _ in range(warm + steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    found = {"seconds": statistics.median(seconds[warm:]), "first_seconds": seconds[0], "peak_bytes": peak}
    return {**found, **({"said": SAID} if SAID else {})}


def prepare(name: str, sizes: Sequence[int], seconds: int) -> None:
    """Compile what is not yet, several cases at once."""
    cases = [("--measure", name, side, str(size)) for size in sizes for side in ("plain, compiled", "weft")]
    with ThreadPoolExecutor(len(cases)) as pool:
        for case, found in zip(cases, pool.map(lambda case: call(*case, seconds=seconds), cases), strict=True):
            print("prepared", *case[1:], json.dumps(found), flush=True)


def compare(name: str, size: int, seconds: int, tiny: list[str]) -> dict[str, object]:
    """All sides one after the other, and how much faster weft is than the faster plain one."""
    found: dict[str, object] = {}
    times = {}
    for side in SIDES:
        found[side] = row = call("--measure", name, side, str(size), *tiny, seconds=seconds)
        if "seconds" in row:
            times[side] = float(str(row["seconds"]))
    plain = [time for side, time in times.items() if side.startswith("plain")]
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


def call(*arguments: str, seconds: int) -> dict[str, object]:
    """A case in a process of its own."""
    # A group of its own: compilers that it has started would keep its output open.
    left = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = left.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(left.pid, signal.SIGKILL)
        left.communicate()
        return {"error": f"more than {seconds} s"}
    if left.returncode:
        return {"error": errors.strip().splitlines()[-1][:200]}
    found: dict[str, object] = json.loads(out.splitlines()[-1])
    return found


def largest(name: str, side: str, start: int, tiny: list[str]) -> dict[str, object]:
    """The largest square image, by halving the steps between one that fits and one that does not."""
    low, high = start // STRIDE, LARGEST // STRIDE
    best: dict[str, object] = {}
    while high - low > 1:
        middle = (low + high) // 2
        found = call("--trains", name, side, str(middle * STRIDE), *tiny, seconds=60)
        low, high, best = (low, middle, best) if "error" in found else (middle, high, found)
    return {"size": low * STRIDE, **best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small images on the CPU; writes nothing")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--no-largest", action="store_true", help="leave out the search for the largest image")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--trains", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULT)
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
    found: dict[str, object] = {"benchmark": "images_gpu", "torch": torch.__version__}
    if device == "cuda":
        found["hardware"] = {"device": torch.cuda.get_device_name(), "cpu": platform.machine()}
    if options.tiny:
        print(json.dumps(compare(MODELS[0], 64, RUN_SECONDS, tiny)))
        return
    for name in options.models:
        small = [size for size in options.sizes if size < SIZES[-1]]
        for sizes in (small, [size for size in options.sizes if size not in small]):  # what fits at once
            if sizes:
                prepare(name, sizes, COMPILE_SECONDS)
        for size in options.sizes:
            found[f"{name} {size}"] = row = compare(name, size, RUN_SECONDS, tiny)
            print(name, size, json.dumps(row), flush=True)
        for side in () if options.no_largest else ("plain", "weft"):
            found[f"{name} largest {side}"] = row = largest(name, side, SIZES[0], tiny)
            print(name, "largest", side, json.dumps(row), flush=True)
        options.out.parent.mkdir(exist_ok=True, parents=True)
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Large images on one GPU: weft's step against plain PyTorch, and the largest square image that trains.

    python benchmarks/images_gpu.py [--tiny]

ResNet-50 and AmoebaNet-D at 2048², 4096² and 8192², one image a step, bf16, channels last. Plain PyTorch is autocast
over fp32 weights with a fused AdamW, as one would write it; weft is its own trainer's step with bf16 weights over fp32
masters. Each case runs both, in turns, in a process of its own; a case that does not fit says so. The largest image is
found in steps of 1,024 pixels, plain and with weft's full recompute. Writes benchmarks/results/images-h200.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.mesh import Mesh
from weft.models import build
from weft.models.catalog import load_model
from weft.parallel import parallelize
from weft.plan import Memory, Plan
from weft.train.step import CLASSIFICATION, train_step

RESULT = Path(__file__).parent / "results" / "images-h200.json"
MODELS = ("resnet50", "amoebanet-d-18-208")
SIZES = (2048, 4096, 8192)
STRIDE, LARGEST = 1024, 32768
WARM_STEPS, STEPS = 3, 6


def images_of(size: int, device: str) -> tuple[Tensor, Tensor]:
    image = torch.randn(1, 3, size, size, device=device).to(memory_format=torch.channels_last)
    return image, torch.zeros(1, dtype=torch.long, device=device)


def plain_step(name: str, size: int, device: str) -> Callable[[], object]:
    """A step as one would write it."""
    model: nn.Module = build(load_model(name)).to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    image, label = images_of(size, device)

    def step() -> object:
        with torch.autocast(device, torch.bfloat16):
            logits = model(image)
        loss = F.cross_entropy(logits.float(), label)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def weft_step(name: str, size: int, device: str, recompute: str = "none") -> Callable[[], object]:
    """Weft's step."""
    plan = Plan(precision="bf16", memory=Memory(recompute))  # type: ignore[arg-type]
    mesh = Mesh(plan, device)
    model = parallelize(build(load_model(name)).to(device), plan, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    image, label = images_of(size, device)
    batch = (image.to(torch.bfloat16), label)

    def step() -> object:
        return float(train_step(model, optimizer, [batch], mesh, CLASSIFICATION).loss)

    return step


def measure(step: Callable[[], object]) -> list[float]:
    """Seconds of steps; one ends with the loss on the host."""
    seconds = []
    for _ in range(WARM_STEPS + STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_STEPS:]


def compare(name: str, size: int, device: str) -> dict[str, object]:
    """Images per second of both, one after the other, twice."""
    times: dict[str, list[float]] = {"plain": [], "weft": []}
    peaks = {}
    for _ in range(2):
        for side, make in (("plain", plain_step), ("weft", weft_step)):
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            times[side] += measure(make(name, size, device))
            peaks[side] = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    medians = {side: statistics.median(found) for side, found in times.items()}
    return {"seconds": medians, "peak_bytes": peaks, "throughput_ratio": medians["plain"] / medians["weft"]}


def trains(name: str, side: str, size: int, device: str) -> dict[str, object]:
    """Whether two steps of one image of this size can be made."""
    step = plain_step(name, size, device) if side == "plain" else weft_step(name, size, device, "full")
    step(), step()
    return {"size": size, "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0}


def call(*arguments: str, seconds: int) -> dict[str, object]:
    """A case in a process of its own."""
    try:
        left = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"more than {seconds} s"}
    if left.returncode:
        return {"error": left.stderr.strip().splitlines()[-1][:200]}
    found: dict[str, object] = json.loads(left.stdout.splitlines()[-1])
    return found


def largest(name: str, side: str, start: int, tiny: list[str]) -> dict[str, object]:
    """The largest square image, by halving the steps between one that fits and one that does not."""
    low, high, best = start // STRIDE, LARGEST // STRIDE, {}
    while high - low > 1:
        middle = (low + high) // 2
        found = call("--trains", name, side, str(middle * STRIDE), *tiny, seconds=60)
        low, high, best = (low, middle, best) if "error" in found else (middle, high, found)
    return {"size": low * STRIDE, **best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small images on the CPU; writes nothing")
    parser.add_argument("--compare", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--trains", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    device, tiny = ("cpu", ["--tiny"]) if options.tiny else ("cuda", [])
    if options.compare:
        print(json.dumps(compare(options.compare[0], int(options.compare[1]), device)))
        return
    if options.trains:
        name, side, size = options.trains
        print(json.dumps(trains(name, side, int(size), device)))
        return
    found: dict[str, object] = {"benchmark": "images_gpu", "torch": torch.__version__}
    if device == "cuda":
        found["hardware"] = {"device": torch.cuda.get_device_name(), "cpu": platform.machine()}
    for name in MODELS[:1] if options.tiny else MODELS:
        for size in (64,) if options.tiny else SIZES:
            found[f"{name} {size}"] = row = call("--compare", name, str(size), *tiny, seconds=120)
            print(name, size, json.dumps(row), flush=True)
        if not options.tiny:
            for side in ("plain", "weft"):
                found[f"{name} largest {side}"] = row = largest(name, side, SIZES[0], tiny)
                print(name, "largest", side, json.dumps(row), flush=True)
            options.out.parent.mkdir(exist_ok=True, parents=True)
            options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Shows where the time of serving steps goes on one GPU: kernels, waits of the device and of the host, kinds of steps.

    python benchmarks/serve_profile.py                 an 8B Llama in bf16 with random weights; about 2 minutes
    python benchmarks/serve_profile.py --tiny --device cpu

"batch 1" and "decodes" are steps of decodes alone; in "mixed" steps, prompts come in while others decode. The last
table is a run of 1,000 requests with lengths like ShareGPT's (see `serve_gpu.py`), by kinds of steps.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from typing import Any

import harness
import numpy as np
import torch
from harness import synchronize
from serve_gpu import LLAMA_8B, TINY, many_lengths, random_model
from torch import nn
from torch.profiler import ProfilerActivity, profile

from weft.serve.engine import Engine, EngineOptions, LaunchedStep
from weft.serve.scheduling.request import Request, Sampling

GREEDY = Sampling(temperature=0)


class Waits:
    """Sums up how long the host waits for the tokens of steps."""

    def __init__(self) -> None:
        self.seconds = 0.0
        wait = LaunchedStep.wait

        def timed(step: LaunchedStep) -> Any:
            begin = time.perf_counter()
            found = wait(step)
            self.seconds += time.perf_counter() - begin
            return found

        LaunchedStep.wait = timed  # type: ignore[method-assign]


def new_engine(model: nn.Module, options: dict[str, Any]) -> Engine:
    """An engine that has the memory of those before it, which may refer to themselves."""
    gc.collect()
    return Engine(model, EngineOptions(**options))


def add(engine: Engine, name: str, num_in: int, num_out: int) -> None:
    rng = np.random.default_rng(len(name))
    engine.add(Request(name, tuple(rng.integers(0, engine.vocab_size, num_in).tolist()), num_out, GREEDY))


def print_kernels(title: str, engine: Engine, num_steps: int, waits: Waits, device: torch.device) -> None:
    """Profile some steps of an engine, and print what they cost each."""
    synchronize(device)
    waits.seconds, begin = 0.0, time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    synchronize(device)
    whole, waited = time.perf_counter() - begin, waits.seconds
    activities = [ProfilerActivity.CUDA] if device.type == "cuda" else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiled:
        for _ in range(num_steps):
            engine.step()
        synchronize(device)
    totals: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA or device.type != "cuda":
            totals[event.name].append(event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end))
    busy, end = 0.0, 0.0
    for low, high in sorted(spans):
        busy += max(0.0, high - max(low, end))
        end = max(end, high)
    print(
        f"\n{title}: {1e3 * whole / num_steps:.3f} ms a step without the profiler, of which the host waits "
        f"{1e3 * waited / num_steps:.3f}; the device is busy for {busy / 1e3 / num_steps:.3f} with it"
    )
    ordered = sorted(totals.items(), key=lambda item: -sum(item[1]))
    for name, times in ordered[:18]:
        print(f"  {sum(times) / num_steps:9.1f} us {len(times) / num_steps:7.1f} x {name[:90]}")


def profile_steps(model: nn.Module, options: dict[str, Any], waits: Waits, device: torch.device, scale: int) -> None:
    engine = new_engine(model, {**options, "max_running": 1, "num_blocks": 64})
    add(engine, "one", 128 // scale, 400 // scale)
    for _ in range(8):
        engine.step()
    print_kernels("batch 1", engine, 8, waits, device)
    del engine
    number = options["max_running"] // scale
    engine = new_engine(model, {**options, "max_running": number})
    for index in range(number - number // 16):
        add(engine, f"long {index}", 250 // scale, 400 // scale)
    while engine.state().num_waiting:
        engine.step()
    for _ in range(6):
        engine.step()
    print_kernels(f"{number - number // 16} decodes", engine, 4, waits, device)
    for index in range(number // 16 - 1):
        add(engine, f"short {index}", 220 // scale, 400 // scale)
        if index % 2:
            engine.step()
    for index in range(64):  # a prompt or two each step, as in a steady state
        add(engine, f"new {index}", 220 // scale, 1)
    engine._scheduler.token_budget = number + 300 // scale
    for _ in range(4):
        engine.step()
    print_kernels("mixed: all decode, and 300 tokens of prompts", engine, 4, waits, device)


def steps_by_kind(model: nn.Module, options: dict[str, Any], waits: Waits, is_tiny: bool) -> None:
    """A whole run: how long steps took, by how many decodes they had and whether prompts came with them."""
    engine = new_engine(model, options)
    for capture in engine.captures():
        capture()
    for index, (num_in, num_out) in enumerate(many_lengths(is_tiny)["sharegpt"]):
        add(engine, str(index), num_in, num_out)
    kinds: dict[tuple[bool, int], list[tuple[float, float, int, int]]] = defaultdict(list)
    schedule, scheduled = engine._scheduler.schedule, list[Any]()

    def recorded() -> list[Any]:
        scheduled[:] = schedule()
        return list(scheduled)

    engine._scheduler.schedule = recorded  # type: ignore[method-assign]
    whole, number = time.perf_counter(), 0
    while engine.has_work():
        waits.seconds, begin = 0.0, time.perf_counter()
        number += len(engine.step())
        seconds = time.perf_counter() - begin
        decodes = sum(chunk.num_tokens == 1 for chunk in scheduled)
        prompts = sum(chunk.num_tokens for chunk in scheduled) - decodes
        kinds[prompts > 0, 0 if not decodes else 2 ** (decodes - 1).bit_length()].append(
            (seconds, waits.seconds, decodes, prompts)
        )
    whole = time.perf_counter() - whole
    print(f"\n{options}: {number} tokens in {whole:.2f} s, {number / whole:.0f} a second")
    print("  prompts  decodes up to  steps  seconds  ms a step  host waits ms  decodes a step  prompt tokens a step")
    for (has_prompts, most), rows in sorted(kinds.items()):
        seconds, waited, decodes, prompts = (sum(column) for column in zip(*rows, strict=True))
        count = len(rows)
        print(
            f"  {'yes' if has_prompts else 'no':7s} {most:14d} {count:6d} {seconds:8.2f} {1e3 * seconds / count:10.2f} "
            f"{1e3 * waited / count:14.2f} {decodes / count:15.1f} {prompts / count:21.1f}"
        )


def main() -> None:
    parser = harness.options(__doc__, tiny="a tiny model, to try the script itself", device=True)
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--max-running", type=int, nargs="+", default=[256])
    parser.add_argument("--only", choices=("kernels", "kinds"))
    given = parser.parse_args()
    device = torch.device(given.device)
    model = random_model(TINY if given.tiny else LLAMA_8B, device)
    waits, options = Waits(), {"token_budget": given.token_budget, "prefix_cache": False}
    with torch.inference_mode():
        if given.only != "kinds":
            first = {**options, "max_running": given.max_running[0]}
            profile_steps(model, first, waits, device, 8 if given.tiny else 1)
        if given.only != "kernels":
            for number in given.max_running:
                steps_by_kind(model, {**options, "max_running": number}, waits, given.tiny)


if __name__ == "__main__":
    main()

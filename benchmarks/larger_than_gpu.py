"""Measures decodes of a model that is larger than the GPU: some blocks stay on it, the others are streamed.

    python benchmarks/larger_than_gpu.py           a Llama of 92 blocks as wide as those of 70B, 162 GB in bf16, with 46
                                                   and with 72 blocks on the GPU; three minutes on an H200 of 150 GB
    python benchmarks/larger_than_gpu.py --tiny    tiny sizes, to try the benchmark itself, also on a CPU

Weights are random, made on the GPU, and go straight to where they stay. First a small model is decoded with all weights
on the device and with some streamed, and must give the same log-probabilities. The floor of a step is the time to copy
its streamed blocks at the rate that the same memory is copied with nothing else to do. The prediction is that of
`weft plan --serve`. Writes benchmarks/results/larger-than-gpu.json.
"""

from __future__ import annotations

import gc
import json
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import torch
from harness import synchronize
from serve_gpu import LLAMA_8B, TINY
from torch import Tensor

from weft.cluster.hardware import load
from weft.models import DecoderConfig
from weft.plan import Plan
from weft.planner.serving import ServingModel
from weft.serve.engine import Engine, EngineOptions
from weft.serve.model.streamed_model import StreamedModel, stream_model
from weft.serve.parallel.rank_part import PartValues, build_whole, read_part
from weft.serve.scheduling.request import Request, Sampling
from weft.serve.spec import EngineSizes, ServingSpec
from weft.serve.weights.streamed_weights import StreamedWeights

LARGE = replace(LLAMA_8B, hidden_size=8192, intermediate_size=28672, num_hidden_layers=92, num_attention_heads=64)
SMALL = replace(LLAMA_8B, hidden_size=1024, intermediate_size=2048, num_hidden_layers=7, num_attention_heads=8)
PROMPT, OUTPUT, AHEAD = 16, 12, 2


def parts(config: DecoderConfig, device: torch.device) -> tuple[Any, PartValues]:
    """A model on the meta device, and its random values, which are made on the device."""
    model, cuts = build_whole(config)
    model.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    shapes = {name: (tuple(one.shape), one.dtype) for name, one in model.named_parameters()}

    def read(name: str) -> Tensor:
        shape, dtype = shapes[name]
        values = torch.empty(shape, dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        return values.fill_(1.0) if "norm" in name else values.normal_(0.0, 0.02, generator=generator)

    return model, PartValues(model, cuts, read, device)


def streamed_model(config: DecoderConfig, device: torch.device, num_resident: int) -> StreamedModel:
    model, values = parts(config, device)
    return stream_model(model, device, EngineSizes(stream_weights=AHEAD, resident_blocks=num_resident), values=values)


def options(device: torch.device, num_requests: int) -> EngineOptions:
    num_blocks = 8 + num_requests * (-(-(PROMPT + OUTPUT) // 16) + 1)
    return EngineOptions(
        max_running=num_requests, num_blocks=num_blocks, prefix_cache=False, device=device, graphs=False
    )


def serve(engine: Engine, number: int) -> tuple[list[float], list[tuple[str, int, float | None]]]:
    """The times at which steps end, and what is generated."""
    for index in range(number):
        sampling = Sampling(temperature=0, num_logprobs=1)
        engine.add(Request(str(index), tuple(range(index, index + PROMPT)), OUTPUT, sampling))
    times, found = [], []
    while engine.has_work():
        for one in engine.step():
            found.append((one.request, one.token, None if one.logprobs is None else one.logprobs.token))
        times.append(time.perf_counter())
    return times, found


def check_bits(config: DecoderConfig, device: torch.device) -> None:
    """The small model must give the same with weights on the device, streamed, and partly streamed."""
    found = []
    for num_resident in (None, 0, 3):
        if num_resident is None:
            model, values = parts(config, device)
            read_part(model, values.cuts, values.read, device)
        else:
            model = streamed_model(config, device, num_resident)
        found.append(serve(Engine(model, options(device, 4)), 4)[1])
    assert found[0] == found[1] == found[2], "streamed weights changed answers"
    assert len({token for _, token, _ in found[0]}) > 4


def link_rate(weights: StreamedWeights, device: torch.device) -> float:
    """Bytes a second at which streamed blocks are copied to the device, one after the other."""
    room, best = torch.empty(max(len(one) for one in weights.home), dtype=torch.uint8, device=device), 0.0
    for _ in range(3):
        synchronize(device)
        begin = time.perf_counter()
        for home in weights.home[:8]:
            room[: len(home)].copy_(home, non_blocking=True)
        synchronize(device)
        best = max(best, sum(len(home) for home in weights.home[:8]) / (time.perf_counter() - begin))
    return best


def highest_host_bytes() -> int:
    """The most memory that this process has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measure(config: DecoderConfig, device: torch.device, num_resident: int, numbers: tuple[int, ...]) -> dict[str, Any]:
    begin = time.perf_counter()
    streamed = streamed_model(config, device, num_resident)
    synchronize(device)
    weights = streamed.weights
    rate, copied = link_rate(weights, device), sum(len(home) for home in weights.home)
    found: dict[str, Any] = {
        "resident_blocks": num_resident,
        "blocks": config.num_hidden_layers,
        "model_bytes": sum(weights.block_bytes) + 4 * config.vocab_size * config.hidden_size,
        "seconds_to_load": time.perf_counter() - begin,
        "link_bytes_per_second": rate,
        "bytes_copied_per_step": copied,
        "host_bytes_at_most": highest_host_bytes(),
        "device_bytes_at_most": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
    }
    print(json.dumps(found), flush=True)
    engine = Engine(streamed, options(device, max(numbers)))
    planned = ServingModel(
        config, load("h200:1x1"), Plan(), "bf16", spec=ServingSpec(stream_weights=AHEAD, resident_blocks=num_resident)
    )
    for number in numbers:
        times, _ = serve(engine, number)
        seconds = (times[-2] - times[2]) / (len(times) - 4)  # without prompts
        predicted = planned.simulate([(PROMPT, OUTPUT)] * number, 1 << 16).tokens_per_second
        found[f"{number} requests"] = {
            "seconds_per_step": seconds,
            "tokens_per_second": number / seconds,
            "floor_tokens_per_second": number * rate / copied,
            "share_of_floor": copied / rate / seconds,
            "predicted_tokens_per_second": predicted,
            "prediction_error": predicted * seconds / number - 1,
        }
        print(number, json.dumps(found[f"{number} requests"]), flush=True)
    return found


def main() -> None:
    parser = harness.options(__doc__, "larger-than-gpu.json", harness.NOT_WRITTEN, device=True)
    parser.add_argument("--layers", type=int, help="blocks of the model")
    parser.add_argument("--resident", type=int, nargs="+", default=[46, 72], help="blocks that stay on the device")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    given = parser.parse_args()
    device = torch.device(given.device)
    large, small = (replace(TINY, num_hidden_layers=7),) * 2 if given.tiny else (LARGE, SMALL)
    large = replace(large, num_hidden_layers=given.layers or large.num_hidden_layers)
    check_bits(small, device)
    print("a small model gives the same bits", flush=True)
    results: dict[str, Any] = {"runs": []}
    if device.type == "cuda":
        results["device_bytes"] = torch.cuda.mem_get_info()[1]
    for num_resident in (2, 5) if given.tiny else given.resident:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        results["runs"].append(measure(large, device, num_resident, tuple(given.requests)))
        if not given.tiny:
            harness.write(given.out, results, device=device)


if __name__ == "__main__":
    main()

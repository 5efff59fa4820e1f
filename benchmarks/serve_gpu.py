"""Measures the serving engine on one GPU: decode at batch 1, throughput of many requests, prefill of a long prompt.

    python benchmarks/serve_gpu.py                 an 8B Llama in bf16 with random weights; about 3 minutes on an H200
    python benchmarks/serve_gpu.py --tiny          a tiny model, to try the benchmark itself, also on a CPU

The memory floor is the time to read every weight but the embedding once, at the measured rate of a copy. Prompts are
random tokens and tokens are the likeliest, unless a row says otherwise. Lengths "like ShareGPT": log-normal with
sigma 1 and means of 220 (prompt) and 200 (output), cut to 4..1024; they are measured with as many requests at once as
`--max-running` says, and with 1024 in steps of up to 8192 tokens. "large" is a model of 40B parameters. Writes
benchmarks/results/serve-gpu.json.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import torch

from weft.models import Decoder, DecoderConfig, build
from weft.serve.engine import Engine, EngineOptions
from weft.serve.scheduling.request import Request, Sampling

PEAK = 989e12  # dense bf16 FLOP/s of an H100 or H200
LLAMA_8B = DecoderConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_theta=500000.0,
)
LLAMA_40B = DecoderConfig(
    vocab_size=65024,
    hidden_size=8192,
    intermediate_size=22016,
    num_hidden_layers=56,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=2048,
)
MANY = {"max_running": 1024, "token_budget": 8192}
TINY = DecoderConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)


def random_model(config: DecoderConfig, device: torch.device) -> Decoder:
    with torch.device("meta"):
        model = build(config)
    model = model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, 0.02)
    return model


def copy_rate(device: torch.device) -> float:
    """Bytes read and written a second by a copy."""
    size = 2**31 if device.type == "cuda" else 2**26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        harness.synchronize(device)
        begin = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        harness.synchronize(device)
        best = max(best, 8 * size / (time.perf_counter() - begin))
    return best


def serve(engine: Engine, lengths: list[tuple[int, int]], sampling: Sampling) -> dict[str, float]:
    """Run requests of (prompt, output) tokens that all arrive at once; seconds, tokens and times to the first token."""
    rng = np.random.default_rng(0)
    before = engine.state()
    begin = time.perf_counter()
    for index, (num_in, num_out) in enumerate(lengths):
        prompt = tuple(rng.integers(0, engine.vocab_size, num_in).tolist())
        engine.add(Request(str(index), prompt, num_out, sampling))
    added = time.perf_counter() - begin
    first, last, num_steps, num_tokens = dict[str, float](), begin, 0, 0
    begin = time.perf_counter()
    while engine.has_work():
        generated = engine.step()
        num_steps += 1
        num_tokens += len(generated)
        last = time.perf_counter()
        for one in generated:
            first.setdefault(one.request, last - begin)
    assert num_tokens == sum(num_out for _, num_out in lengths)
    seconds = last - begin
    print(f"{len(lengths)} requests: {num_tokens / seconds:.1f} tokens/s in {num_steps} steps", flush=True)
    waits = sorted(first.values())
    return {
        "seconds": seconds,
        "adding_seconds": added,
        "steps": num_steps,
        "prompt_tokens": sum(num_in for num_in, _ in lengths),
        "output_tokens": num_tokens,
        "output_tokens_per_second": num_tokens / seconds,
        "seconds_per_step": seconds / num_steps,
        "first_token_seconds_median": waits[len(waits) // 2],
        "first_token_seconds_p99": waits[int(0.99 * (len(waits) - 1))],
        "preempted": engine.state().num_preempted - before.num_preempted,
    }


def measure_batch_1(
    model: Decoder, options: dict[str, Any], rate: float, num_in: int, num_out: int
) -> dict[str, float]:
    engine = Engine(model, EngineOptions(**{**options, "max_running": 1, "num_blocks": 64}))
    serve(engine, [(num_in, 8)], Sampling(temperature=0))
    engine.add(Request("one", tuple(range(num_in)), num_out, Sampling(temperature=0)))
    times = []
    while engine.has_work():
        times += [time.perf_counter()] * len(engine.step())
    per_token = (times[-1] - times[0]) / (len(times) - 1)
    read = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "embed_tokens" not in name)
    return {
        "tokens_per_second": 1 / per_token,
        "bytes_read_per_token": read,
        "floor_tokens_per_second": rate / read,
        "share_of_floor": read / rate / per_token,
    }


def measure_transformers(config: DecoderConfig, device: torch.device, num_in: int, num_out: int) -> dict[str, float]:
    """transformers' `generate` on the same shape: a static cache, whose steps it compiles, one request."""
    from transformers import LlamaConfig, LlamaForCausalLM

    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "max_position_embeddings")
    with torch.device(device):
        peer = LlamaForCausalLM(LlamaConfig(**{name: getattr(config, name) for name in names + more}))
    peer = peer.to(torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
    prompt = torch.arange(num_in, device=device)[None]

    def seconds(number: int) -> float:
        harness.synchronize(device)
        begin = time.perf_counter()
        exact = {"min_new_tokens": number, "max_new_tokens": number, "do_sample": False, "pad_token_id": 0}
        peer.generate(prompt, attention_mask=torch.ones_like(prompt), cache_implementation="static", **exact)
        harness.synchronize(device)
        return time.perf_counter() - begin

    for _ in range(2):
        seconds(num_out)  # compiles, then records graphs
    return {"tokens_per_second": num_out / min(seconds(num_out) for _ in range(3))}


def measure_prefill(model: Decoder, options: dict[str, Any], is_tiny: bool) -> dict[str, float]:
    config, length = model.config, 256 if is_tiny else 8192
    engine = Engine(model, EngineOptions(**{**options, "max_running": 4, "token_budget": length, "num_blocks": 2048}))
    seconds = min(serve(engine, [(length, 1)], Sampling(temperature=0))["seconds"] for _ in range(3))
    body = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name and "head" not in name)
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * length**2
    flops = 2 * body * length + attention
    return {"tokens": length, "seconds": seconds, "flops": flops, "mfu": flops / seconds / PEAK}


def many_lengths(is_tiny: bool) -> dict[str, list[tuple[int, int]]]:
    rng = np.random.default_rng(1)
    scale = 16 if is_tiny else 1
    number, outputs = (16, 16) if is_tiny else (256, 256)
    uniform = [(int(n) // scale + 1, outputs) for n in rng.integers(100, 1025, number)]
    sharegpt = [
        tuple(int(np.clip(rng.lognormal(np.log(mean) - 0.5), 4, 1024)) // scale + 1 for mean in (220, 200))
        for _ in range(32 if is_tiny else 1000)
    ]
    return {"uniform": uniform, "sharegpt": sharegpt}  # type: ignore[dict-item]


def warm_engine(model: Decoder, options: dict[str, Any]) -> Engine:
    engine = Engine(model, EngineOptions(**options))
    for capture in engine.captures():
        capture()
    for sampling in (Sampling(temperature=0), Sampling(temperature=1.0, seed=1)):  # kernels are compiled now
        serve(engine, [(64, 8)] * 4, sampling)
    return engine


def measure_throughput(model: Decoder, options: dict[str, Any], is_tiny: bool) -> dict[str, dict[str, float]]:
    engine, lengths = warm_engine(model, options), many_lengths(is_tiny)
    greedy, drawn = Sampling(temperature=0), Sampling(temperature=1.0, seed=1)
    return {
        "256 requests, 100-1024 in, 256 out": serve(engine, lengths["uniform"], greedy),
        "256 requests, 100-1024 in, 256 out, temperature 1": serve(engine, lengths["uniform"], drawn),
        "1000 requests with lengths like ShareGPT's": serve(engine, lengths["sharegpt"], greedy),
    }


def measure_many(model: Decoder, options: dict[str, Any], is_tiny: bool) -> dict[str, Any]:
    engine = warm_engine(model, {**options, **MANY})
    return {**MANY, **serve(engine, many_lengths(is_tiny)["sharegpt"], Sampling(temperature=0))}


def measure_large(options: dict[str, Any], device: torch.device, rate: float, is_tiny: bool) -> dict[str, float]:
    model = random_model(TINY if is_tiny else LLAMA_40B, device)
    number = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": number, **measure_batch_1(model, options, rate, 16 if is_tiny else 128, 128)}


def main() -> None:
    parser = harness.options(__doc__, "serve-gpu.json", harness.NOT_WRITTEN, device=True)
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--max-running", type=int, default=256)
    choices = ("batch_1", "transformers", "prefill", "many", "large", "throughput")
    parser.add_argument("--only", nargs="+", choices=choices)
    given = parser.parse_args()
    device = torch.device(given.device)
    model = random_model(TINY if given.tiny else LLAMA_8B, device)
    options = {"token_budget": given.token_budget, "max_running": given.max_running, "prefix_cache": False}
    rate = copy_rate(device)
    results: dict[str, Any] = {"copy_bytes_per_second": rate, **options}
    lengths = (16, 32) if given.tiny else (128, 512)
    measures: dict[str, Callable[[], Any]] = {
        "batch_1": lambda: measure_batch_1(model, options, rate, *lengths),
        "transformers": lambda: measure_transformers(model.config, device, *lengths),
        "prefill": lambda: measure_prefill(model, options, given.tiny),
        "many": lambda: measure_many(model, options, given.tiny),
        "throughput": lambda: measure_throughput(model, options, given.tiny),
        "large": lambda: measure_large(options, device, rate, given.tiny),
    }
    for key, measure in measures.items():
        if given.only is None or key in given.only:
            gc.collect()  # engines of before, and their memory
            begin = time.perf_counter()
            results[key] = measure()
            print(f"{key} ({time.perf_counter() - begin:.0f} s): {json.dumps(results[key], indent=1)}", flush=True)
            if not given.tiny:
                harness.write(given.out, results, ("torch", "transformers"), device)


if __name__ == "__main__":
    main()

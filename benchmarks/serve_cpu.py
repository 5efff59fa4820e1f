"""Measures decodes of one request on a CPU: the engine in several formats beside transformers, compiled.

    python benchmarks/serve_cpu.py                       Llamas of 200M and 300M with random weights; minutes
    python benchmarks/serve_cpu.py --model 200M          one of them; nothing is written
    python benchmarks/serve_cpu.py --threads 1 --cpu-time  for a machine that other processes use too
    python benchmarks/serve_cpu.py --tiny                a tiny model, to try the benchmark itself; nothing is written

The memory floor is the bytes of all weights but the embedding, at the best rate of torch's matrix-vector product and
sum over 256 MB of float32, before and after a way is measured, as others may use memory too. A time is the least of all
steps of a decode after the first ones. transformers has a static cache of the same length, and its forward is compiled.
With --cpu-time, seconds are those that the process had a core. Writes benchmarks/results/serve-cpu.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import torch
from serve_gpu import TINY, random_model
from torch import nn

from weft.models import DecoderConfig
from weft.serve.engine import Engine, EngineOptions
from weft.serve.scheduling.request import Request, Sampling
from weft.serve.weights.packed_linear import pack_head, pack_model
from weft.serve.weights.weight_formats import FORMATS

LLAMA_200M = DecoderConfig(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=4,
    max_position_embeddings=256,
)
LLAMA_300M = DecoderConfig(  # fewer and wider layers
    vocab_size=32000,
    hidden_size=1536,
    intermediate_size=4096,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=4,
    max_position_embeddings=256,
)
MODELS = {"200M": LLAMA_200M, "300M": LLAMA_300M}
# dtype, --weights, --head
WAYS = (
    ("float32", None, None),
    ("bfloat16", None, None),
    ("float32", "fp16", "fp16"),
    ("float32", "int8-row", "int8-row"),
    ("float32", "int8", None),
    ("float32", "int8", "int8"),
    ("float32", "int4", None),
    ("float32", "int4", "int8"),
    ("float32", "int4", "int4"),
)
Clock = Callable[[], float]


def read_rate(clock: Clock, num_rows: int) -> float:
    """Bytes a second that are read from memory."""
    weight, row = torch.randn(num_rows, 8192), torch.randn(8192)
    best = float("inf")
    for compute in (lambda: torch.mv(weight, row), lambda: weight.sum()):
        for _ in range(8):
            begin = clock()
            compute()
            best = min(best, clock() - begin)
    return weight.numel() * weight.itemsize / best


def least_step(step: Callable[[], Any], clock: Clock, number: int) -> float:
    times = []
    for _ in range(number):
        begin = clock()
        step()
        times.append(clock() - begin)
    return min(times[3:])


def engine_seconds(model: nn.Module, clock: Clock, number: int) -> float:
    engine = Engine(model, EngineOptions(max_running=1, num_blocks=16, prefix_cache=False))
    engine.add(Request("one", tuple(range(16)), number + 2, Sampling(temperature=0)))
    engine.step()
    return least_step(engine.step, clock, number)


@torch.inference_mode()
def transformers_seconds(config: DecoderConfig, dtype: torch.dtype, clock: Clock, number: int) -> float:
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {name: getattr(config, name) for name in (*names, "num_key_value_heads", "max_position_embeddings")}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).to(dtype).eval()
    cache = StaticCache(config=model.config, max_cache_len=config.max_position_embeddings)
    model(torch.arange(16)[None], past_key_values=cache, cache_position=torch.arange(16))
    forward = torch.compile(model.forward, dynamic=False)
    place, token = torch.tensor([16]), torch.tensor([[3]])

    def step() -> None:
        logits = forward(token, past_key_values=cache, cache_position=place).logits
        token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        place.add_(1)

    return least_step(step, clock, number)


def bytes_read(model: nn.Module) -> int:
    named = (*model.named_parameters(), *model.named_buffers())
    return sum(one.numel() * one.element_size() for name, one in named if "embed_tokens" not in name)


def way_result(
    config: DecoderConfig, way: tuple[str, str | None, str | None], read: Callable[[], float], clock: Clock, number: int
) -> dict[str, float]:
    """The time of a decode by the engine, and its floor by the better rate of memory just before and after."""
    dtype, weights, head = way
    model = random_model(config, torch.device("cpu")).to(getattr(torch, dtype))
    if weights is not None:
        pack_model(model, FORMATS[weights])
    pack_head(model, head, "cpu")
    before, seconds, after = read(), engine_seconds(model, clock, number), read()
    share = bytes_read(model) / max(before, after) / seconds
    return {
        "milliseconds_per_token": 1e3 * seconds,
        "share_of_floor": share,
        "bytes_read_per_second": max(before, after),
    }


def model_results(config: DecoderConfig, given: argparse.Namespace, clock: Clock, number: int) -> dict[str, Any]:
    """The times of a decode of one model by all ways."""
    read = partial(read_rate, clock, 128 if given.tiny else 8192)
    others = () if given.no_transformers else ("float32", "bfloat16")
    results: dict[str, Any] = {}
    for dtype in others:
        seconds = transformers_seconds(config, getattr(torch, dtype), clock, number)
        results[f"transformers {dtype}"] = {"milliseconds_per_token": 1e3 * seconds}
        print(f"transformers {dtype}", results[f"transformers {dtype}"], flush=True)
    for dtype, weights, head in WAYS:
        name = f"weft {weights or dtype}" + (f", head {head}" if head else "")
        results[name] = way_result(config, (dtype, weights, head), read, clock, number)
        for other in others:
            times = results[f"transformers {other}"]["milliseconds_per_token"] / results[name]["milliseconds_per_token"]
            results[name][f"times_as_fast_as_transformers_in_{other}"] = times
        print(name, results[name], flush=True)
    return results


def main() -> None:
    parser = harness.options(__doc__, "serve-cpu.json", harness.NOT_WRITTEN)
    parser.add_argument("--model", choices=MODELS, help="one model alone; results are printed, not written")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--cpu-time", action="store_true", help="seconds that the process had a core; needs --threads 1"
    )
    parser.add_argument("--no-transformers", action="store_true")
    given = parser.parse_args()
    if given.cpu_time and given.threads != 1:
        parser.error("--cpu-time adds up the seconds of all threads; give --threads 1 too")
    torch.set_num_threads(given.threads)
    clock: Clock = time.process_time if given.cpu_time else time.perf_counter
    models = {"tiny": TINY} if given.tiny else MODELS if given.model is None else {given.model: MODELS[given.model]}
    results: dict[str, Any] = {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": given.threads,
        "seconds": "of a core" if given.cpu_time else "of the clock",
    }
    number = 8 if given.tiny else 96
    results["models"] = {name: model_results(config, given, clock, number) for name, config in models.items()}
    if not given.tiny and given.model is None:
        harness.write(given.out, results, ("torch", "transformers"), "cpu")


if __name__ == "__main__":
    main()

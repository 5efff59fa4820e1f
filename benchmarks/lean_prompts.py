"""Measures prompts over caches of 4 bits on one GPU, beside the plain cache and the plain functions, in the same run.

    python benchmarks/lean_prompts.py              one layer, and prompts of an 8B Llama with random weights
    python benchmarks/lean_prompts.py --sweep      the kernel with other numbers of rows, warps and stages
    python benchmarks/lean_prompts.py --tiny       tiny sizes, to try the benchmark itself, also on a CPU

A layer has the heads of an 8B Llama. It adds a chunk of a prompt, or the five tokens of a step that checks drafts, to
the end of a request and attends to all of it. Prompts of the engine come in steps of 2,048 tokens; the first one, which
compiles kernels, is not counted. Writes benchmarks/results/lean-prompts.json.
"""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import patch

import harness
import torch
from harness import synchronize
from serve_gpu import LLAMA_8B, TINY, random_model
from torch import nn

from weft.serve.attention import four_bit_prompt_kernel
from weft.serve.attention.batch import CacheSizes, PagedBatch
from weft.serve.attention.formats import DEFAULT_BLOCK_SIZE, CacheFormat
from weft.serve.attention.four_bits import FourBitPages, FourBitStorage
from weft.serve.engine import Engine, EngineOptions
from weft.serve.scheduling.request import Request, Sampling

HEADS = (32, 8, 128)
FORMS: tuple[CacheFormat, ...] = (
    CacheFormat(),
    CacheFormat(FourBitStorage()),
    CacheFormat(FourBitStorage(32)),
    CacheFormat(FourBitStorage(128)),
)
PLAIN_FUNCTIONS = "int4, plain functions"


@torch.inference_mode()
def layer_seconds(form: CacheFormat, chunk: int, length: int, device: torch.device, by_plain: bool = False) -> float:
    """Of a layer that adds the last `chunk` of a request's tokens: the median of some calls."""
    size = form.block_size or DEFAULT_BLOCK_SIZE
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    num_blocks, (num_heads, num_key_heads, head_dim) = -(-length // size), HEADS
    layer = form.layer(0, CacheSizes(num_blocks + 1, size, 1, num_key_heads, head_dim, dtype, device))
    for page in layer.pages:
        page.random_(0, 256) if page.dtype == torch.uint8 else page.uniform_(-1, 1)
    tables = torch.randperm(num_blocks, device=device).to(torch.int32)[None]
    places = torch.arange(length - chunk, length, device=device)
    slots = tables[0].long()[places // size] * size + places % size
    ends, rows = (torch.full((1,), number, dtype=torch.int32, device=device) for number in (length, 0))
    batch = PagedBatch(places, places, slots, tables, ends, rows, size, 0, (chunk,), (length,))
    query = torch.randn(chunk, num_heads, head_dim, dtype=dtype, device=device)
    keys, values = (torch.randn(chunk, num_key_heads, head_dim, dtype=dtype, device=device) for _ in range(2))
    if by_plain:
        assert isinstance(layer.storage, FourBitPages)
        layer.storage._prompts_by_kernel = layer.storage._prompts  # type: ignore[method-assign]

    if form.kind == "plain":
        _, keys, values = layer.room(batch)  # a step writes them there

    def step() -> None:
        layer.attend(query, keys, values, batch, None)

    step()
    found = []
    for _ in range(7):
        synchronize(device)
        begin = time.perf_counter()
        step()
        synchronize(device)
        found.append(time.perf_counter() - begin)
    return median(found)


def measure_layers(sizes: tuple[tuple[int, int], ...], device: torch.device) -> list[dict[str, Any]]:
    rows = []
    for chunk, length in sizes:
        seconds = {form.name: layer_seconds(form, chunk, length, device) for form in FORMS}
        seconds[PLAIN_FUNCTIONS] = layer_seconds(FORMS[1], chunk, length, device, by_plain=True)
        flops = 4 * HEADS[0] * HEADS[2] * chunk * (length - chunk / 2)
        rows.append({"chunk": chunk, "length": length, "flops": flops, "seconds": seconds})
        print(rows[-1], flush=True)
    return rows


def prompt_seconds(model: nn.Module, form: CacheFormat, length: int, budget: int, by_plain: bool = False) -> float:
    """Seconds until the first token of a prompt."""
    size = form.block_size or DEFAULT_BLOCK_SIZE
    options = EngineOptions(
        block_size=size,
        num_blocks=length // size + 8,
        max_running=1,
        token_budget=budget,
        prefix_cache=False,
        cache=form,
    )
    engine, found = Engine(model, options), []
    by_kernel = FourBitPages._prompts_by_kernel
    with patch.object(FourBitPages, "_prompts_by_kernel", FourBitPages._prompts if by_plain else by_kernel):
        for index in range(3):
            engine.add(Request(str(index), tuple(range(length)), 1, Sampling(temperature=0)))
            begin = time.perf_counter()
            while engine.has_work():
                engine.step()
            found.append(time.perf_counter() - begin)
    return min(found[1:])


def measure_engine(config: Any, lengths: tuple[int, ...], budget: int, device: torch.device) -> list[dict[str, Any]]:
    model = random_model(replace(config, max_position_embeddings=2 * max(lengths)), device)
    rows = []
    for length in lengths:
        seconds = {form.name: prompt_seconds(model, form, length, budget) for form in FORMS[:2]}
        if length == lengths[0]:
            seconds[PLAIN_FUNCTIONS] = prompt_seconds(model, FORMS[1], length, budget, by_plain=True)
        rows.append({"tokens": length, "seconds": seconds})
        print(rows[-1], flush=True)
    return rows


def sweep(sizes: tuple[tuple[int, int], ...], device: torch.device) -> None:
    """Print the times of the kernel as it could be launched."""
    for rows in (64, 128):
        for warps in (4, 8):
            for stages in (1, 2, 3, 4):
                given = (rows, warps, stages)
                four_bit_prompt_kernel._ROWS, four_bit_prompt_kernel._WARPS, four_bit_prompt_kernel._STAGES = given
                try:
                    found = [f"{1e3 * layer_seconds(FORMS[1], *size, device):.3f}" for size in sizes]
                except Exception as error:  # a launch that does not fit is one of the answers
                    found = [f"{type(error).__name__}: {str(error)[:80]}"]
                print(f"{rows} rows, {warps} warps, {stages} stages: {' '.join(found)} ms", flush=True)


def main() -> None:
    parser = harness.options(__doc__, "lean-prompts.json", harness.NOT_WRITTEN, device=True)
    parser.add_argument("--sweep", action="store_true", help="time ways to launch the kernel")
    given = parser.parse_args()
    device = torch.device(given.device)
    sizes = ((2048, 2048), (2048, 8192), (2048, 32768), (5, 32768), (2048, 131072))
    if given.tiny:
        sizes = ((130, 200), (5, 200))
    if given.sweep:
        sweep(sizes[:3], device)
        return
    results: dict[str, Any] = {"heads": HEADS}
    results["layers"] = measure_layers(sizes, device)
    lengths, budget = ((200,), 64) if given.tiny else ((8192, 32768), 2048)
    results["engine"] = measure_engine(TINY if given.tiny else LLAMA_8B, lengths, budget, device)
    if not given.tiny:
        harness.write(given.out, results, device=device)


if __name__ == "__main__":
    main()

"""Compares what `weft plan --serve` predicts for lean inference with what was measured on an H200.

    python benchmarks/lean_planned.py              writes benchmarks/results/lean-planned.json; needs no GPU

Measurements are those of benchmarks/results: serve-gpu.json, lean-gpu.json, lean-prompts.json, larger-than-gpu.json.
Predictions know the model, the device and the workload, and for drafts the share that was accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import torch
from lean_gpu import EXPERT_SHAPES
from serve_gpu import LLAMA_8B, LLAMA_40B, many_lengths

from weft.cluster.hardware import load
from weft.models.catalog import load_model
from weft.plan import Plan
from weft.planner.kernels import LAUNCH_SECONDS
from weft.planner.lean_kernels import cache_seconds
from weft.planner.serving import ServingModel
from weft.planner.serving_speculation import price_speculation
from weft.serve.attention.formats import CacheFormat, Loki
from weft.serve.attention.four_bits import FourBitStorage
from weft.serve.attention.reads import cache_reads
from weft.serve.costs import MORE_KERNELS
from weft.serve.spec import ServingSpec

RESULTS = Path(__file__).parent / "results"
SHAREGPT = "1000 requests with lengths like ShareGPT's"
Row = tuple[str, float, float]  # what, predicted, measured


def decodes(lean: dict[str, Any]) -> Iterator[Row]:
    """Tokens a second of one request, by weights."""
    for kind, measured in lean["weights"].items():
        model = ServingModel(
            LLAMA_8B, load("h200:1x1"), Plan(), "bf16", ServingSpec(weights=None if kind == "bf16" else kind)
        )
        found = model.simulate([(16, 256)], model.cache_tokens).tokens_per_second
        yield f"one request, 8B, {kind}: tokens/s", found, measured["tokens_per_second"]
    large = ServingModel(load_model("llama3-70b"), load("h200:1x1"), Plan(), "bf16", ServingSpec(weights="int4"))  # type: ignore[arg-type]
    found = large.simulate([(16, 128)], large.cache_tokens).tokens_per_second
    yield "one request, 70B, int4: tokens/s", found, lean["llama_70b_int4"]["tokens_per_second"]


def in_16_bits(_: dict[str, Any]) -> Iterator[Row]:
    """What serve_gpu.py measured: one request, a prompt, many requests, a larger model."""
    measured = json.loads((RESULTS / "serve-gpu.json").read_text())
    model, large = (ServingModel(config, load("h200:1x1"), Plan(), "bf16") for config in (LLAMA_8B, LLAMA_40B))
    alone = model.simulate([(128, 128)], model.cache_tokens).tokens_per_second
    yield "in 16 bits, one request: tokens/s", alone, measured["batch_1"]["tokens_per_second"]
    prompt = model.simulate([(measured["prefill"]["tokens"], 1)], model.cache_tokens).seconds
    yield "a prompt of 8,192 tokens: s", prompt, measured["prefill"]["seconds"]
    loads = zip(many_lengths(False).values(), ("256 requests, 100-1024 in, 256 out", SHAREGPT), strict=True)
    for lengths, name in loads:
        found = model.simulate(lengths, model.cache_tokens).tokens_per_second
        yield f"{name}: tokens/s", found, measured["throughput"][name]["output_tokens_per_second"]
    found = large.simulate([(128, 128)], large.cache_tokens).tokens_per_second
    yield "one request, 40B: tokens/s", found, measured["large"]["tokens_per_second"]


def attention(lean: dict[str, Any]) -> Iterator[Row]:
    """Milliseconds of one layer's attention, by format of the cache."""
    kernels = ServingModel(LLAMA_8B, load("h200:1x1"), Plan(), "bf16").kernels
    number, each = lean["four_bits"]["requests"], lean["four_bits"]["tokens_each"]
    formats: tuple[tuple[CacheFormat, float], ...] = (
        (CacheFormat(), lean["four_bits"]["plain_seconds"]),
        (CacheFormat(FourBitStorage()), lean["four_bits"]["seconds"]),
        (CacheFormat(loki=Loki(torch.zeros(1))), lean["loki"]["seconds"]),
    )
    for form, measured in formats:
        seconds = cache_seconds(kernels, cache_reads(form, number, number * each, (32, 8, 128), 2))
        seconds += MORE_KERNELS[form.name] * LAUNCH_SECONDS
        yield f"attention of {number} × {each:,} tokens, {form.name}: ms", 1e3 * seconds, 1e3 * measured


def streaming(lean: dict[str, Any]) -> Iterator[Row]:
    """Tokens a second with the weights of blocks in host memory."""
    model = ServingModel(LLAMA_8B, load("h200:1x1"), Plan(), "bf16", spec=ServingSpec(stream_weights=2))
    for number in (1, 32):
        found = model.simulate([(16, 10)] * number, model.cache_tokens).tokens_per_second
        measured = lean["streaming"][f"{number} requests"]["tokens_per_second"]
        yield f"weights in host memory, {number} at once: tokens/s", found, measured


def larger_than_gpu(_: dict[str, Any]) -> Iterator[Row]:
    """Tokens a second of a model that is larger than the GPU, with some blocks on it."""
    for run in json.loads((RESULTS / "larger-than-gpu.json").read_text())["runs"]:
        config = replace(load_model("llama3-70b"), num_hidden_layers=run["blocks"])
        model = ServingModel(
            config,
            load("h200:1x1"),
            Plan(),
            "bf16",
            spec=ServingSpec(stream_weights=2, resident_blocks=run["resident_blocks"]),
        )  # type: ignore[arg-type]
        for number in (1, 64):
            found = model.simulate([(16, 12)] * number, 1 << 16).tokens_per_second
            name = f"{run['blocks']} blocks of 70B, {run['resident_blocks']} on the GPU, {number} at once: tokens/s"
            yield name, found, run[f"{number} requests"]["tokens_per_second"]


def drafts(lean: dict[str, Any]) -> Iterator[Row]:
    """Tokens a second of one request with drafts, by the share of them that was accepted."""
    model = ServingModel(LLAMA_8B, load("h200:1x1"), Plan(), "bf16")
    for kind, measured in lean["speculation"].items():
        if isinstance(measured, dict) and "accepted" in measured:
            found = price_speculation(model, kind, measured["accepted"], 64 + 128)
            yield f"drafts by {kind}: tokens/s", found.tokens_per_second, measured["tokens_per_second"]


def experts(lean: dict[str, Any]) -> Iterator[Row]:
    """Tokens a second of models with experts, by weights and requests at once."""
    for shape, config in EXPERT_SHAPES.items():
        for kind, measured in lean["experts"][shape].items():
            if kind == "experts_used":
                continue
            model = ServingModel(
                config, load("h200:1x1"), Plan(), "bf16", ServingSpec(weights=None if kind == "bf16" else kind)
            )
            for number in (1, 16):
                found = model.simulate([(16, 256)] * number, model.cache_tokens).tokens_per_second
                one = measured[f"{number} requests"]["tokens_per_second"]
                yield f"{shape}, {kind}, {number} at once: tokens/s", found, one


def prompts(_: dict[str, Any]) -> Iterator[Row]:
    """Seconds of prompts in steps of 2,048 tokens, by format of the cache."""
    config = replace(LLAMA_8B, max_position_embeddings=1 << 16)
    for cache in ("plain", "int4"):
        model = ServingModel(
            config, load("h200:1x1"), Plan(), "bf16", spec=ServingSpec(cache=None if cache == "plain" else cache)
        )
        for row in json.loads((RESULTS / "lean-prompts.json").read_text())["engine"]:
            found = model.simulate([(row["tokens"], 1)], model.cache_tokens).seconds
            yield f"a prompt of {row['tokens']:,} tokens, {cache} cache: s", found, row["seconds"][cache]


def rows() -> list[Row]:
    lean = json.loads((RESULTS / "lean-gpu.json").read_text())
    parts = (in_16_bits, decodes, attention, prompts, streaming, larger_than_gpu, drafts, experts)
    return [row for part in parts for row in part(lean)]


def main() -> None:
    given = harness.options(__doc__, "lean-planned.json").parse_args()
    found = [
        {"what": what, "predicted": predicted, "measured": value, "error": predicted / value - 1}
        for what, predicted, value in rows()
    ]
    print(
        "\n".join(
            f"{row['what']:75} {row['predicted']:9,.4g} {row['measured']:9,.4g} {row['error']:+.0%}" for row in found
        )
    )
    harness.write(given.out, {"cluster": "h200:1x1", "rows": found}, device="cpu")


if __name__ == "__main__":
    main()

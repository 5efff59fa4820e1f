"""`weft plan --serve`: predictions against an H200, memory, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from weft.cluster.hardware import load
from weft.commands.plan_serve import explain
from weft.errors import ConfigError, PlanError
from weft.models import DecoderConfig, write_config
from weft.models.catalog import load_model
from weft.plan import Context, Pipe, Plan, Tensor
from weft.planner.kernels import LAUNCH_SECONDS
from weft.planner.lean_kernels import cache_seconds, product_seconds
from weft.planner.serving import ServingModel, ServingWorkload
from weft.planner.serving_search import predict_serving, search_serving, serving_plans
from weft.planner.serving_speculation import price_speculation
from weft.serve.attention.formats import CacheFormat, Loki, save_loki
from weft.serve.attention.four_bits import FourBitStorage
from weft.serve.attention.reads import cache_reads, prompt_part
from weft.serve.costs import MORE_KERNELS, linear_product
from weft.serve.scheduling.speculation import MAX_DRAFTS
from weft.serve.spec import ServingSpec
from weft.serve.weights.fast_path import Place
from weft.serve.weights.weight_formats import weight_format

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MEASURED, LEAN, LARGER, PROMPTS = (
    json.loads((RESULTS / f"{name}.json").read_text())
    for name in ("serve-gpu", "lean-gpu", "larger-than-gpu", "lean-prompts")
)
LLAMA_8B = DecoderConfig(  # of benchmarks/serve_gpu.py
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_theta=500000.0,
)


def test_one_request_and_a_long_prompt_are_predicted_as_measured_on_an_h200() -> None:
    model = ServingModel(LLAMA_8B, load("h200:1x1"), Plan(), "bf16")
    alone = model.simulate([(128, 64)], model.cache_tokens)
    assert alone.tokens_per_second == pytest.approx(MEASURED["batch_1"]["tokens_per_second"], rel=0.1)
    assert alone.tokens_per_second < alone.floor_tokens_per_second
    prompt = model.simulate([(8192, 1)], model.cache_tokens)
    assert prompt.seconds == pytest.approx(MEASURED["prefill"]["seconds"], rel=0.15)
    assert sum(prompt.shares.values()) == pytest.approx(1)


def test_decodes_with_weights_in_fewer_bits_are_predicted_as_measured_on_an_h200() -> None:
    cluster = load("h200:1x1")
    for kind in ("int4", "fp8", "int8"):
        model = ServingModel(LLAMA_8B, cluster, Plan(), "bf16", ServingSpec(weights=kind))
        found = model.simulate([(16, 256)], model.cache_tokens).tokens_per_second
        assert found == pytest.approx(LEAN["weights"][kind]["tokens_per_second"], rel=0.1), kind
    large = ServingModel(load_model("llama3-70b"), cluster, Plan(), "bf16", ServingSpec(weights="int4"))  # type: ignore[arg-type]
    found = large.simulate([(16, 128)], large.cache_tokens).tokens_per_second
    assert found == pytest.approx(LEAN["llama_70b_int4"]["tokens_per_second"], rel=0.1)


def test_attention_over_lean_caches_is_predicted_as_measured_on_an_h200() -> None:
    kernels = ServingModel(LLAMA_8B, load("h200:1x1"), Plan(), "bf16").kernels
    formats = {
        "plain": CacheFormat(),
        "int4": CacheFormat(FourBitStorage()),
        "loki": CacheFormat(loki=Loki(torch.zeros(1))),
    }
    four_bits, loki = LEAN["four_bits"], LEAN["loki"]
    measured = {"plain": four_bits["plain_seconds"], "int4": four_bits["seconds"], "loki": loki["seconds"]}
    found = {}
    for name, form in formats.items():
        num_cached = four_bits["requests"] * four_bits["tokens_each"]
        reads = cache_reads(form, four_bits["requests"], num_cached, (32, 8, 128), 2)
        seconds, read = cache_seconds(kernels, reads), reads.page_bytes
        found[name] = seconds + MORE_KERNELS[name] * LAUNCH_SECONDS
        assert found[name] == pytest.approx(measured[name], rel=0.1), name
        assert read == num_cached * 8 * {"plain": 512, "int4": 144, "loki": 192}[name]  # the page's table
    assert found["int4"] < found["loki"] < found["plain"]
    for form, of_token, measured_ms in (
        (CacheFormat(FourBitStorage(32)), 152, 0.223),
        (CacheFormat(FourBitStorage(128)), 136, 0.190),
    ):
        reads = cache_reads(form, four_bits["requests"], num_cached, (32, 8, 128), 2)
        seconds, read = cache_seconds(kernels, reads), reads.page_bytes
        assert read == num_cached * 8 * of_token
        seconds += MORE_KERNELS["int4"] * LAUNCH_SECONDS
        assert 1e3 * seconds == pytest.approx(measured_ms, rel=0.1)  # docs/measured/serving_gpu.md
    short = [cache_seconds(kernels, cache_reads(form, 1, 500, (32, 8, 128), 2)) for form in formats.values()]
    assert short[2] > short[0]  # all of a short request's tokens are chosen, after they are scored


def test_drafts_over_chosen_tokens_are_decodes_without_a_graph(tmp_path: Path) -> None:
    path = tmp_path / "axes"
    save_loki(path, Loki(torch.eye(128).expand(32, 8, 128, 128), identity="any"))
    plain, loki = (
        ServingModel(LLAMA_8B, load("h200:1x1"), Plan(), "bf16", spec=ServingSpec(cache=one))
        for one in (None, f"loki={path}")
    )
    assert loki.draft_check_seconds(4, 8000) > loki.decode_seconds(8000)
    assert loki.costs.cache_bytes(0) == 32 * 8 * 576
    assert loki.costs.bytes_beside_pages(0) == 32 * 8 * 128 * 128 * 4
    assert plain.costs.bytes_beside_pages(0) == 0
    assert plain.cache_tokens > loki.cache_tokens


def test_drafts_are_priced_by_their_chance() -> None:
    model = ServingModel(LLAMA_8B, load("h200:1x1"), Plan(), "bf16")
    sure, likely, unlikely, never = (price_speculation(model, "ngram", chance, 200) for chance in (1, 0.7, 0.1, 0))
    assert sure.num_drafts == MAX_DRAFTS
    assert sure.tokens_per_step == MAX_DRAFTS + 1
    assert sure.times_as_fast > likely.times_as_fast > 1 > unlikely.times_as_fast >= never.times_as_fast
    assert never.num_drafts == 0
    for kind in ("ngram", "layers=2"):  # all drafts were accepted
        found = price_speculation(model, kind, LEAN["speculation"][kind]["accepted"], 64 + 128)
        assert found.tokens_per_second == pytest.approx(LEAN["speculation"][kind]["tokens_per_second"], rel=0.1)
    few, many = (price_speculation(model, f"layers={number}", 0.9, 200) for number in (2, 16))
    assert sure.tokens_per_second > few.tokens_per_second > many.tokens_per_second
    assert model.decode_seconds(200, 16) < model.decode_seconds(200) < 2 * model.decode_seconds(200, 16)
    for kind, chance, match in (
        ("layers=32", 0.5, "fewer than the model's 32"),
        ("runs/small", 0.5, "runs/small is no folder; give ngram, layers=K, or the folder of a smaller model"),
        ("ngram", 1.5, "--accepted 1.5 must be"),
    ):
        with pytest.raises(ConfigError, match=match):
            price_speculation(model, kind, chance, 200)
    with pytest.raises(ConfigError, match="priced on one device"):
        price_speculation(ServingModel(LLAMA_8B, load("h200:1x2"), Plan(tensor=Tensor(2)), "bf16"), "ngram", 0.5, 200)


def test_a_draft_model_costs_its_own_decodes(tmp_path: Path) -> None:
    model = ServingModel(LLAMA_8B, load("h200:1x1"), Plan(), "bf16")
    shapes = {"two": LLAMA_8B, "wide": replace(LLAMA_8B, intermediate_size=8 * 14336), "same": LLAMA_8B}
    for name, shape in shapes.items():
        write_config(tmp_path / name, replace(shape, num_hidden_layers=32 if name == "same" else 2))
    two, wide, same = (price_speculation(model, str(tmp_path / name), 1, 64 + 128) for name in shapes)
    of_layers = price_speculation(model, "layers=2", 1, 64 + 128)  # the same products, in the model itself
    assert two.tokens_per_second == pytest.approx(of_layers.tokens_per_second, rel=0.1)
    assert two.times_as_fast > 2 > wide.times_as_fast > 1 > same.times_as_fast
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config))
    packed = price_speculation(model, str(tmp_path / "wide"), 1, 64 + 128)
    assert two.tokens_per_second >= packed.tokens_per_second > 1.2 * wide.tokens_per_second  # it reads fewer bytes
    write_config(tmp_path / "large", replace(LLAMA_8B, num_hidden_layers=2, intermediate_size=5_000_000))
    with pytest.raises(ConfigError, match=r"both models and a text of 192 tokens take .* GB, and a device has 141"):
        price_speculation(model, str(tmp_path / "large"), 1, 192)


def test_more_ranks_hold_less_each_and_a_pipeline_overlaps_its_requests() -> None:
    cluster, workload = load("h200:1x8"), ServingWorkload.of(8, 64, 8)
    one, x, pipe = (
        predict_serving(LLAMA_8B, cluster, plan, workload)
        for plan in (Plan(), Plan(tensor=Tensor(4)), Plan(pipe=Pipe(4)))
    )
    assert x.weight_bytes < one.weight_bytes / 3
    assert pipe.cache_bytes_per_token == one.cache_bytes_per_token // 4
    assert x.alone.floor_tokens_per_second > 3 * one.alone.floor_tokens_per_second
    assert x.alone.shares["waiting for the host"] > 0.1  # steps of several ranks are no CUDA graphs
    assert pipe.alone.tokens_per_second < 1.05 * one.alone.tokens_per_second  # a token passes all stages
    assert "communication" in x.loaded.shares


def test_ranks_of_context_hold_a_share_of_each_request() -> None:
    cluster, workload = load("h200:1x2"), ServingWorkload.of(2, 4000, 8)
    one, two = (predict_serving(LLAMA_8B, cluster, Plan(context=Context(n)), workload) for n in (1, 2))
    assert two.weight_bytes == one.weight_bytes
    assert two.cache_bytes_per_token == one.cache_bytes_per_token / 2
    assert two.cache_tokens == pytest.approx(2 * one.cache_tokens, abs=2)
    assert (one.merged_bytes, two.merged_bytes) == (0, 2 * 32 * 129 * 4)
    assert two.loaded.shares["communication"] > 0 == one.loaded.shares["communication"]
    words = (
        "Context: each of 2 devices holds 1/2 of a request's keys and values, and the same weights; in each layer 33.0"
    )
    assert [any(line.startswith(words) for line in explain([given], cluster)) for given in (one, two)] == [False, True]
    plans = (Plan(), Plan(context=Context(2)))
    steps = [ServingModel(LLAMA_8B, cluster, plan, "bf16").step(0, 1, 10**6, (), 1) for plan in plans]
    whole, half = (step.by_cause["attention and its cache"] for step in steps)
    assert half == pytest.approx(whole / 2)


def test_context_is_tried_where_a_request_is_long_beside_the_weights() -> None:
    """One key head is on every rank of x, and ranks of context share its tokens."""
    cluster = load("h200:1x2")
    config = replace(LLAMA_8B, num_key_value_heads=1, num_hidden_layers=2, intermediate_size=256, vocab_size=1000)
    long, _ = search_serving(config, cluster, ServingWorkload.of(1, 16384, 8))
    held = {(one.plan.context.degree, one.plan.tensor.x): one.cache_tokens for one in long}
    assert held[2, 1] > 1.9 * held[1, 2]
    short, _ = search_serving(config, cluster, ServingWorkload.of(1, 500, 8))
    assert {one.plan.context.degree for one in short} == {1}
    layouts = list(serving_plans(LLAMA_8B, 8, with_context=True))
    assert len(layouts) == len(set(layouts)) == 20
    assert {plan.num_ranks for plan in layouts} == {8}


def test_weights_in_fewer_bits_hold_what_does_not_fit_in_sixteen() -> None:
    model, cluster, workload = load_model("llama3-70b"), load("h100:1x1"), ServingWorkload.of(1, 256, 64)
    found = predict_serving(model, cluster, Plan(), workload, spec=ServingSpec(weights="int4"))  # type: ignore[arg-type]
    linears = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    rest = 2 * 128256 * 8192 + 161 * 8192  # embeddings, head and norms
    assert found.weight_bytes == linears * 9 // 16 + 2 * rest
    with pytest.raises(ConfigError, match="--weights int3 is unknown"):
        predict_serving(model, cluster, Plan(), workload, spec=ServingSpec(weights="int3"))  # type: ignore[arg-type]


def test_weights_in_fewer_bits_are_decoded_for_each_step_without_bf16() -> None:
    """The kernels take inputs of 16 bits, and a V100 serves in 32."""
    config = replace(LLAMA_8B, num_hidden_layers=2)
    plain, lean, rows = (
        ServingModel(config, load("v100-32:1x1"), Plan(), "fp32", ServingSpec(weights=one))
        for one in (None, "int4", "fp8")
    )
    kernels, shape = plain.kernels, (4096, 14336)
    for count in (1, 16, 65):
        times = [product_seconds(kernels, one.costs.linear(count, *shape)) for one in (plain, lean, rows)]
        assert times[1] - times[0] == pytest.approx((24 + 9 / 16) * 4096 * 14336 / kernels.bytes_per_second)
        assert times[2] - times[0] == pytest.approx(5 * 4096 * 14336 / kernels.bytes_per_second, rel=1e-3)
    assert lean.decode_seconds(100) > plain.decode_seconds(100)


def test_other_caches_are_not_priced_without_bf16() -> None:
    """Their kernels take 16 bits: in 32, plain functions decode and attend, which takes many times as long."""
    config, workload = replace(LLAMA_8B, num_hidden_layers=2), ServingWorkload.of(1, 16, 4)
    for cache in ("int4", "int4-128"):
        predict_serving(config, load("a100-80:1x1"), Plan(), workload, "bf16", spec=ServingSpec(cache=cache))
        with pytest.raises(
            ConfigError, match=f"--cache {cache} is not priced in fp32, in which a V100 SXM 32GB serves"
        ):
            search_serving(config, load("v100-32:1x1"), workload, "fp32", spec=ServingSpec(cache=cache))


def test_experts_in_fewer_bits_are_priced_by_the_bytes_of_the_chosen_ones() -> None:
    config, cluster, workload = load_model("mixtral-8x7b"), load("h200:1x1"), ServingWorkload.of(1, 256, 64)
    found = predict_serving(config, cluster, Plan(), workload, spec=ServingSpec(weights="int4"))  # type: ignore[arg-type]
    packed = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 3 * 4096 * 14336)
    rest = 2 * 32000 * 4096 + 65 * 4096 + 32 * 8 * 4096  # embeddings, head, norms and routers
    assert found.weight_bytes == packed * 9 // 16 + 2 * rest
    plain = ServingModel(config, cluster, Plan(), "bf16")  # type: ignore[arg-type]
    lean = ServingModel(config, cluster, Plan(), "bf16", ServingSpec(weights="int4"))  # type: ignore[arg-type]
    read = 32 * 2 * 3 * 4096 * 14336  # by one token, of two experts a layer
    saved = [model.step(0, 1, 0, (), 1).floor_seconds for model in (plain, lean)]
    bandwidth = cluster.node.device.memory_bandwidth_bytes_per_second
    assert bandwidth is not None
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert saved[0] - saved[1] == pytest.approx((read + attention) * (2 - 9 / 16) / bandwidth)
    halves = predict_serving(config, load("h200:1x2"), Plan(expert=2), workload, spec=ServingSpec(weights="int4"))  # type: ignore[arg-type]
    assert halves.weight_bytes == found.weight_bytes - 32 * 4 * 3 * 4096 * 14336 * 9 // 16


def test_a_cache_of_four_bits_holds_more_tokens() -> None:
    workload, cluster = ServingWorkload.of(4, 512, 32), load("h200:1x1")
    plain, lean = (
        predict_serving(LLAMA_8B, cluster, Plan(), workload, spec=ServingSpec(cache=cache)) for cache in (None, "int4")
    )
    assert plain.cache_bytes_per_token == 32 * 8 * 512
    assert lean.cache_bytes_per_token == 32 * 8 * 144
    assert 3.3 < lean.cache_tokens / plain.cache_tokens < 512 / 144  # tails take some
    assert lean.memory_bytes <= cluster.node.device.memory_bytes


def test_what_does_not_fit_is_refused_and_layouts_use_all_devices() -> None:
    with pytest.raises(PlanError, match="leave no room for a request of 320 tokens; split the model over more devices"):
        predict_serving(load_model("llama3-70b"), load("h100:1x1"), Plan(), ServingWorkload.of(1, 256, 64))  # type: ignore[arg-type]
    assert {plan.num_ranks for plan in serving_plans(LLAMA_8B, 8)} == {8}
    assert all(plan.expert == 1 for plan in serving_plans(LLAMA_8B, 8))


def test_weights_in_host_memory_are_priced_by_the_link() -> None:
    cluster, workload = load("h200:1x1"), ServingWorkload.of(32, 64, 16)
    plain, streamed = (
        predict_serving(LLAMA_8B, cluster, Plan(), workload, spec=ServingSpec(stream_weights=ahead)) for ahead in (0, 2)
    )
    assert plain.streaming is None
    price = streamed.streaming
    assert price is not None
    assert price.copied_bytes == LEAN["streaming"]["bytes_copied_per_step"]
    assert plain.weight_bytes - streamed.weight_bytes == price.copied_bytes * 29 // 32  # three of 32 blocks have room
    assert streamed.cache_tokens > plain.cache_tokens
    steps = 1 / streamed.alone.tokens_per_second
    assert steps == pytest.approx(price.copy_seconds, rel=0.1)
    assert streamed.alone.tokens_per_second == pytest.approx(
        LEAN["streaming"]["1 requests"]["tokens_per_second"], rel=0.1
    )
    many = ServingModel(LLAMA_8B, cluster, Plan(), "bf16", spec=ServingSpec(stream_weights=2)).simulate(
        [(16, 10)] * 32, streamed.cache_tokens
    )
    assert many.tokens_per_second == pytest.approx(LEAN["streaming"]["32 requests"]["tokens_per_second"], rel=0.1)
    few = ServingModel(
        LLAMA_8B, cluster, Plan(), "bf16", ServingSpec(weights="int4", stream_weights=2)
    ).streaming_price()
    assert few is not None
    assert few.break_even_tokens < 0.3 * price.break_even_tokens  # fewer bytes are copied


def test_weights_in_host_memory_on_several_devices() -> None:
    workload = ServingWorkload.of(32, 64, 16)
    one = predict_serving(LLAMA_8B, load("h200:1x1"), Plan(), workload, spec=ServingSpec(stream_weights=2))
    sliced, shared, staged = (
        predict_serving(LLAMA_8B, load("h200:1x2"), plan, workload, spec=ServingSpec(stream_weights=2))
        for plan in (Plan(tensor=Tensor(2)), Plan(data=2), Plan(pipe=Pipe(2)))
    )
    prices = [found.streaming for found in (one, sliced, shared, staged)]
    assert prices[0] is not None
    assert prices[2] is not None
    copied = [price.copied_bytes / prices[0].copied_bytes for price in prices if price is not None]
    assert copied == pytest.approx([1, 0.5, 0.5, 0.5], rel=1e-3)  # norms of a layer are whole on ranks of x
    assert [price.gathered_bytes for price in prices if price is not None] == [0, 0, prices[0].copied_bytes, 0]
    assert shared.weight_bytes == one.weight_bytes  # replicas have room for whole blocks
    assert sliced.weight_bytes < one.weight_bytes
    assert shared.alone.tokens_per_second == pytest.approx(2 * one.alone.tokens_per_second, rel=0.05)
    slow = replace(load("h200:1x2").node.intra, bandwidth_bytes_per_second=1e9)  # gathers take longer than copies
    cluster = replace(load("h200:1x2"), node=replace(load("h200:1x2").node, intra=slow))
    late = predict_serving(LLAMA_8B, cluster, Plan(data=2), workload, spec=ServingSpec(stream_weights=2)).streaming
    assert late is not None
    assert late.copy_seconds > 3 * prices[2].copy_seconds
    whole = predict_serving(LLAMA_8B, load("h200:1x2"), Plan(data=2), workload, spec=ServingSpec(stream_weights=99))
    assert whole.streaming is not None
    assert whole.streaming.copied_bytes == 0
    with pytest.raises(PlanError, match="are in different steps; use one of the two, or leave out --stream-weights"):
        predict_serving(
            LLAMA_8B, load("h200:1x4"), Plan(data=2, pipe=Pipe(2)), workload, spec=ServingSpec(stream_weights=2)
        )


def test_resident_blocks_are_on_the_device_and_not_copied() -> None:
    cluster, workload = load("h200:1x1"), ServingWorkload.of(32, 64, 16)
    every, some = (
        predict_serving(LLAMA_8B, cluster, Plan(), workload, spec=ServingSpec(stream_weights=2, resident_blocks=n))
        for n in (0, 20)
    )
    prices = every.streaming, some.streaming
    assert prices[0] is not None
    assert prices[1] is not None
    block = prices[0].copied_bytes // 32
    assert [one.copied_bytes for one in prices if one] == [32 * block, 12 * block]
    assert [one.host_bytes for one in prices if one] == [32 * block, 12 * block]
    assert some.weight_bytes - every.weight_bytes == 20 * block
    assert prices[1].copy_seconds == pytest.approx(prices[0].copy_seconds * 12 / 32)
    assert some.alone.tokens_per_second > 2.5 * every.alone.tokens_per_second
    assert prices[0].fitting_blocks == prices[1].fitting_blocks == 32  # an 8B model fits
    with pytest.raises(PlanError, match="of a rank's 32 blocks cannot stay on the device"):
        predict_serving(LLAMA_8B, cluster, Plan(), workload, spec=ServingSpec(stream_weights=2, resident_blocks=32))
    with pytest.raises(PlanError, match="of a rank's 16 blocks cannot stay on the device"):
        predict_serving(
            LLAMA_8B,
            load("h200:1x2"),
            Plan(pipe=Pipe(2)),
            workload,
            spec=ServingSpec(stream_weights=2, resident_blocks=20),
        )


def test_as_many_blocks_as_fit_beside_the_cache_are_named() -> None:
    whole, memory = load("h200:1x1"), 15_000_000_000  # less than the model has
    small = replace(whole, node=replace(whole.node, device=replace(whole.node.device, memory_bytes=memory)))
    given = (LLAMA_8B, small, Plan(), ServingWorkload.of(8, 500, 12))
    price = predict_serving(*given, spec=ServingSpec(stream_weights=2)).streaming
    assert price is not None
    assert 10 < price.fitting_blocks < 30
    best = predict_serving(*given, spec=ServingSpec(stream_weights=2, resident_blocks=price.fitting_blocks))
    assert best.cache_tokens >= 8 * 512
    assert best.memory_bytes <= memory
    assert best.streaming is not None
    assert best.streaming.fitting_blocks == price.fitting_blocks  # however many stay there already
    more = ServingModel(
        LLAMA_8B, small, Plan(), "bf16", ServingSpec(stream_weights=2, resident_blocks=price.fitting_blocks + 1)
    )
    assert more.cache_tokens < 8 * 512
    with pytest.raises(PlanError, match="lower --resident-blocks, or split the model over more devices"):
        predict_serving(*given, spec=ServingSpec(stream_weights=2, resident_blocks=31))


def test_a_host_without_memory_for_streamed_blocks_is_refused() -> None:
    workload, whole = ServingWorkload.of(4, 16, 8), load("h200:1x2")
    small = replace(whole, node=replace(whole.node, host_memory_bytes=17_000_000_000))
    predict_serving(
        LLAMA_8B, small, Plan(data=2), workload, spec=ServingSpec(stream_weights=2)
    )  # replicas have a half each
    predict_serving(LLAMA_8B, small, Plan(tensor=Tensor(2)), workload, spec=ServingSpec(stream_weights=2))
    smaller = replace(whole, node=replace(whole.node, host_memory_bytes=16_000_000_000))
    with pytest.raises(PlanError, match=r"7\.0 GB of streamed weights for each of 2 devices of a node do not fit"):
        predict_serving(LLAMA_8B, smaller, Plan(data=2), workload, spec=ServingSpec(stream_weights=2))
    predict_serving(LLAMA_8B, smaller, Plan(data=2), workload, spec=ServingSpec(stream_weights=2, resident_blocks=8))


def test_a_model_larger_than_the_gpu_decodes_as_measured() -> None:
    for run in LARGER["runs"]:
        config = replace(load_model("llama3-70b"), num_hidden_layers=run["blocks"])  # type: ignore[type-var]
        spec = ServingSpec(stream_weights=2, resident_blocks=run["resident_blocks"])
        model = ServingModel(config, load("h200:1x1"), Plan(), "bf16", spec)  # type: ignore[arg-type]
        price = model.streaming_price()
        assert price is not None
        assert price.copied_bytes == price.host_bytes == run["bytes_copied_per_step"]
        assert price.host_bytes < run["host_bytes_at_most"]
        made = run["device_bytes_at_most"] - model.weight_bytes  # one weight at a time is made on the device
        assert 0 < made < 1.02 * 2 * config.vocab_size * config.hidden_size  # type: ignore[union-attr]
        for number in (1, 16, 64):
            found = model.simulate([(16, 12)] * number, 1 << 16).tokens_per_second
            assert found == pytest.approx(run[f"{number} requests"]["tokens_per_second"], rel=0.1)


def test_prompts_are_predicted_as_measured_on_an_h200_also_over_a_cache_of_four_bits() -> None:
    config = replace(LLAMA_8B, max_position_embeddings=1 << 16)
    for cache in (None, "int4"):
        model = ServingModel(config, load("h200:1x1"), Plan(), "bf16", spec=ServingSpec(cache=cache))
        for row in PROMPTS["engine"]:
            predicted = model.simulate([(row["tokens"], 1)], model.cache_tokens).seconds
            assert predicted == pytest.approx(row["seconds"][cache or "plain"], rel=0.1), (cache, row["tokens"])


def test_tokens_outside_of_a_sliding_window_are_not_priced() -> None:
    whole = replace(LLAMA_8B, architecture="mistral", max_position_embeddings=1 << 16)
    models = [
        ServingModel(replace(whole, sliding_window=window), load("h200:1x1"), Plan(), "bf16") for window in (None, 1024)
    ]
    full, near = models
    assert near.decode_seconds(30_000) == near.decode_seconds(1024) == full.decode_seconds(1024)
    assert near.draft_check_seconds(4, 30_000) < full.draft_check_seconds(4, 30_000)
    loaded = [one.simulate([(8192, 8)], one.cache_tokens) for one in models]
    assert loaded[1].seconds < loaded[0].seconds
    assert loaded[1].floor_seconds < loaded[0].floor_seconds
    scores = [prompt_part(CacheFormat(), 5, 12, window, (1, 1, 2)).num_scores for window in (None, 9, 3, 12)]
    assert scores == [7 * 5 + 12.5, 7 * 2 + 2 + 9 * 3, 15, 7 * 5 + 12.5]


def linear_seconds(kind: str, rows: int, inner: int, cluster: str = "h200:1x1") -> float:
    """Of a linear with 4,096 outputs."""
    kernels = ServingModel(LLAMA_8B, load(cluster), Plan(), "bf16").kernels
    place = Place("cuda", torch.bfloat16, (9, 0) if kernels.device.is_newer else (8, 0))
    return product_seconds(kernels, linear_product(weight_format(kind), place, rows, inner, 4096))


def test_groups_without_a_kernel_are_priced_as_decoded() -> None:
    assert linear_seconds("int4", 1, 688) > 3 * linear_seconds("int4", 1, 704)  # groups of 16 inputs
    assert linear_seconds("fp8", 1, 344) > linear_seconds("fp8", 1, 352)


def test_products_of_float8_are_priced_on_gpus_that_have_them() -> None:
    """Others widen the weights of prompts, and multiply in bf16 (`fast_path`)."""
    for cluster, has_products in (("h200:1x1", True), ("a100-80:1x1", False)):
        plain = ServingModel(LLAMA_8B, load(cluster), Plan(), "bf16").kernels.product(2048, 4096, 4096)
        assert (linear_seconds("fp8", 2048, 4096, cluster) < plain) is has_products, cluster


def test_experts_that_are_not_priced_are_refused_and_those_of_several_ranks_have_plain_routers() -> None:
    mixtral = replace(LLAMA_8B, architecture="mixtral", num_experts=8, num_experts_per_tok=2)
    for more, what in (
        ({"residual_experts": True}, "residual_experts = true is served, and not priced"),
        ({"num_experts": 0, "num_experts_per_layer": (4, 8) * 16}, r"layers of \[4, 8\] experts is served"),
    ):
        with pytest.raises(ConfigError, match=what):
            ServingModel(replace(mixtral, **more), load("h200:1x1"), Plan(), "bf16")  # type: ignore[arg-type]
    one, two = (
        ServingModel(mixtral, load("h200:1x2"), Plan(expert=number), "bf16", ServingSpec(weights="int4"))
        .step(0, 1, 16, (), 1)
        .by_cause
        for number in (1, 2)
    )
    assert two["other kernels"] > one["other kernels"]


def test_drafts_over_a_cache_of_four_bits_attend_as_decodes() -> None:
    model = ServingModel(LLAMA_8B, load("h200:1x1"), Plan(), "bf16", spec=ServingSpec(cache="int4"))
    five = model.step(0, 5, 5 * 8000, (), 5, may_be_graph=False).seconds
    assert model.draft_check_seconds(4, 8000) == five > model.decode_seconds(8000)


def test_decodes_in_float32_are_no_graphs() -> None:
    causes = [
        ServingModel(LLAMA_8B, load("h200:1x1"), Plan(), precision).step(0, 1, 16, (), 1).by_cause
        for precision in ("bf16", "fp32")
    ]
    assert ["waiting for the host" in one for one in causes] == [False, True]


# gpt-fast (pytorch-labs/gpt-fast, README at 32971d31): tokens a second of one request on A100-80GB at 330 W, by
# (hidden, MLP, layers, key heads, vocabulary) and ranks of x.
SHAPES = {
    "Llama-2-7B": (4096, 11008, 32, 32, 32000),
    "Llama-3.1-8B": (4096, 14336, 32, 8, 128256),
    "Llama-2-70B": (8192, 28672, 80, 8, 32000),
}
GPT_FAST = {
    "Llama-2-7B": {1: 104.9, 2: 168.84, 4: 254.02, 8: 328.43},
    "Llama-3.1-8B": {1: 93.89, 2: 149.1, 4: 217.21, 8: 276.01},
    "Llama-2-70B": {2: 21.32, 4: 38.01, 8: 62.5},
}


@pytest.mark.parametrize("name", SHAPES)
def test_decodes_over_ranks_of_x_are_near_published_ones(name: str) -> None:
    """Gpt-fast's steps are CUDA graphs, and weft's over ranks are not, so waiting for the host is left out."""
    hidden, inner, layers, key_heads, vocab = SHAPES[name]
    config = DecoderConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=hidden // 128, num_key_value_heads=key_heads, max_position_embeddings=4096,
    )  # fmt: skip
    for x, measured in GPT_FAST[name].items():
        model = ServingModel(config, load(f"a100-80:1x{x}"), Plan(tensor=Tensor(x)), "bf16")
        causes = model.step(0, 1, 100, (), 1).by_cause
        seconds = sum(value for cause, value in causes.items() if cause != "waiting for the host")
        assert 1 / seconds == pytest.approx(measured, rel=0.2), x


def test_few_bytes_are_sent_by_a_low_latency_protocol_and_many_are_not() -> None:
    model = ServingModel(LLAMA_8B, load("a100-80:1x8"), Plan(tensor=Tensor(8)), "bf16")
    few, many = (model._call_seconds("x", "all_reduce", size) for size in (8192, 1 << 25))
    assert few == pytest.approx(15e-6, rel=0.1)
    link = load("a100-80:1x8").node.intra
    ring = 2 * (7 * link.latency_seconds + (1 << 25) * 7 / 8 / (0.78 * link.bandwidth_bytes_per_second))
    assert many == pytest.approx(ring + link.start_seconds)
    sizes = [1 << power for power in range(10, 28)]
    times = [model._call_seconds("x", "all_reduce", size) for size in sizes]
    assert times == sorted(times)


def test_a_search_runs_each_stretch_of_steps_once() -> None:
    """All answers are those of every step run alone, at a twentieth of the steps."""
    config, lengths = replace(LLAMA_8B, num_hidden_layers=4), [(100 + 37 * number % 900, 64) for number in range(80)]
    for plan, cluster in ((Plan(), "h200:1x1"), (Plan(pipe=Pipe(4)), "h200:1x4"), (Plan(tensor=Tensor(2)), "h200:1x2")):
        model = ServingModel(config, load(cluster), plan, "bf16", ServingSpec(device="cuda", max_running=48))
        for cache_tokens in (1 << 20, 6000):
            fast, slow = (model.simulate(lengths, cache_tokens, given) for given in (True, False))
            assert fast.seconds == pytest.approx(slow.seconds, rel=1e-9)
            assert fast.floor_seconds == pytest.approx(slow.floor_seconds, rel=1e-9)
            assert fast.first_token_seconds == pytest.approx(slow.first_token_seconds, rel=1e-9)
            assert fast.shares == pytest.approx(slow.shares, rel=1e-9)


def test_more_requests_may_run_at_once_than_a_server_takes_by_itself() -> None:
    """As measured with --max-running 1024 and --token-budget 8192 on an H200."""
    usual, many = (
        ServingModel(LLAMA_8B, load("h200:1x1"), Plan(), "bf16", spec)
        for spec in (ServingSpec(), ServingSpec(device="cuda", max_running=1024, token_budget=8192))
    )
    assert (usual.costs.max_running, many.costs.max_running) == (256, 1024)
    assert many.cache_tokens < usual.cache_tokens  # logits of more requests
    lengths = [(300, 100)] * 1000
    found = [one.simulate(lengths, one.cache_tokens).tokens_per_second for one in (usual, many)]
    assert found[1] > found[0]

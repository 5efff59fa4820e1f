"""Measures lean inference on one GPU: each way against the engine's own 16-bit path, in the same run.

    python benchmarks/lean_gpu.py                  an 8B Llama with random weights; some minutes on an H200
    python benchmarks/lean_gpu.py --only loki      some parts alone
    python benchmarks/lean_gpu.py --check          every kernel against its plain function; nothing is timed
    python benchmarks/lean_gpu.py --sweep          4-bit attention with other numbers of warps, stages and programs
    python benchmarks/lean_gpu.py --tiny           tiny sizes, to try the benchmark itself, also on a CPU

Attention is one layer of the cache, of 16 requests with 32,768 tokens each, recorded as a CUDA graph, with what a
decode adds to the cache. Decodes are those of the engine, of one request. Floors are the bytes that a token reads, at
the measured rate of a copy. Speculation has a model whose likeliest next token follows from the last one, in cycles
of 32 tokens, with blocks as large as the others'. A model of 70B has weights in int4 from the start. Streaming has all
weights of the blocks of the 8B model in host memory and two blocks copied ahead; its floor is the time to copy them at
the measured rate of a copy from pinned memory. Models with experts have fewer layers; their floor is that of the chosen
experts' bytes. Writes benchmarks/results/lean-gpu.json after every part.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import harness
import torch
from harness import call_seconds, synchronize
from lean_gpu_checks import TINY_EXPERTS, check_kernels
from serve_gpu import LLAMA_8B, TINY, copy_rate, random_model
from torch import Tensor, nn

from weft.models import Decoder, DecoderConfig, build
from weft.models.router import Router
from weft.serve.attention import four_bit_attention_kernel
from weft.serve.attention.batch import CacheSizes, PagedBatch
from weft.serve.attention.choice import LokiChoice
from weft.serve.attention.formats import DEFAULT_BLOCK_SIZE, CacheFormat, Loki
from weft.serve.attention.four_bits import FourBitStorage
from weft.serve.engine import Engine, EngineOptions
from weft.serve.model.step_graphs import GraphRecorder
from weft.serve.scheduling.request import Request, Sampling
from weft.serve.scheduling.speculation import EarlyLayers
from weft.serve.weights.group_codes import joined_ranges
from weft.serve.weights.packed_linear import PackedLinear, make_room, pack_model
from weft.serve.weights.weight_formats import FORMATS

GREEDY = Sampling(temperature=0)
EARLY = 16  # one of so many layers drafts
PARTS = ("four_bits", "loki", "weights", "experts", "speculation", "llama_70b_int4", "streaming")
LLAMA_70B = replace(LLAMA_8B, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)
# Shapes of Mixtral 8x7B, and of models with 16B weights of which 3B are used, with fewer layers.
EXPERT_SHAPES = {
    "8 experts of 14336, 2 used, 8 layers": replace(
        LLAMA_8B, architecture="mixtral", vocab_size=32000, num_hidden_layers=8, num_experts=8, num_experts_per_tok=2
    ),
    "64 experts of 1408, 6 used, 16 layers": DecoderConfig(
        "qwen3_moe", vocab_size=32000, hidden_size=2048, num_hidden_layers=16, head_dim=128, num_attention_heads=16,
        num_key_value_heads=4, num_experts=64, num_experts_per_tok=6, moe_intermediate_size=1408,
        max_position_embeddings=8192,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    num_requests: int
    num_tokens: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    outputs: int  # tokens of a decode


LARGE, SMALL = Sizes(16, 32768, 32, 8, 128, 256), Sizes(2, 256, 4, 2, 16, 40)


def seconds_of(compute: Callable[[], Tensor], device: torch.device, number: int = 20) -> float:
    """Seconds of a function, recorded as a CUDA graph: the least of three times `number` calls."""
    compute()
    replay: Callable[[], Any] = GraphRecorder()(compute)[1] if device.type == "cuda" else compute
    return call_seconds(replay, device, number, repeats=3, of=min)


@torch.inference_mode()
def attention_seconds(form: CacheFormat, sizes: Sizes, device: torch.device, number: int = 20) -> float:
    """Of one layer's attention of decodes, over pages of random numbers."""
    block_size = form.block_size or DEFAULT_BLOCK_SIZE
    blocks_each = sizes.num_tokens // block_size
    num_blocks = sizes.num_requests * blocks_each
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (num_blocks + 1, block_size, sizes.num_requests, sizes.num_key_heads, sizes.head_dim)
    layer = form.layer(0, CacheSizes(*shape, dtype, device))
    for page in layer.pages:
        if page.dtype == torch.uint8:
            page.random_(0, 256)
        else:
            page.uniform_(-1, 1)
    tables = torch.randperm(num_blocks, device=device).view(sizes.num_requests, blocks_each).to(torch.int32)
    lengths = torch.full((sizes.num_requests,), sizes.num_tokens - 5, dtype=torch.int32, device=device)
    places = lengths - 1
    slots = tables[:, -1].long() * block_size + places % block_size
    rows = torch.arange(sizes.num_requests, dtype=torch.int32, device=device)
    batch = PagedBatch(places, places, slots, tables, lengths, rows, block_size, sizes.num_requests)
    query = torch.randn(sizes.num_requests, sizes.num_heads, sizes.head_dim, dtype=dtype, device=device)
    _, keys, values = layer.room(batch)
    if len(keys) == sizes.num_requests:  # otherwise keys go to the cache itself
        keys.normal_()
        values.normal_()
    return seconds_of(lambda: layer.attend(query, keys, values, batch, None), device, number)


def attention_result(form: CacheFormat, sizes: Sizes, device: torch.device) -> dict[str, float]:
    """The attention of a format beside that of the plain one."""
    plain = attention_seconds(CacheFormat(), sizes, device)
    own = attention_seconds(form, sizes, device)
    kept = [one.bytes_per_token(sizes.num_key_heads, sizes.head_dim, 2) for one in (CacheFormat(), form)]
    return {
        "requests": sizes.num_requests,
        "tokens_each": sizes.num_tokens,
        "plain_seconds": plain,
        "seconds": own,
        "times_as_fast": plain / own,
        "plain_bytes_per_second": kept[0] * sizes.num_requests * sizes.num_tokens / plain,
        "cache_bytes_ratio": kept[0] / kept[1],
    }


def measure_four_bits(sizes: Sizes, device: torch.device) -> dict[str, float]:
    form, found = CacheFormat(FourBitStorage()), attention_result(CacheFormat(FourBitStorage()), sizes, device)
    heads = (sizes.num_key_heads, sizes.head_dim, 2)
    memory = CacheFormat().bytes_per_token(*heads) * sizes.num_requests * sizes.num_tokens
    held = (memory - (sizes.num_requests + 1) * form.bytes_per_row(*heads)) / form.bytes_per_token(*heads)
    found["times_the_tokens_held"] = held / (sizes.num_requests * sizes.num_tokens)
    found["bytes_per_second"] = form.bytes_per_token(*heads) * sizes.num_requests * sizes.num_tokens / found["seconds"]
    return found


def sweep_four_bits(sizes: Sizes, device: torch.device) -> None:
    """Print the times of the kernel as it could be launched."""
    print(f"plain: {1e6 * attention_seconds(CacheFormat(), sizes, device):.0f} us", flush=True)
    for warps, stages, programs in (
        *((1, 3, number) for number in (512, 1024, 2048)),
        *((1, number, 1024) for number in (2, 4)),
        *((2, number, 512) for number in (3, 4, 5)),
        (4, 3, 512),
    ):
        four_bit_attention_kernel._WARPS, four_bit_attention_kernel._STAGES = warps, stages
        four_bit_attention_kernel._PROGRAMS = programs
        seconds = attention_seconds(CacheFormat(FourBitStorage()), sizes, device)
        print(f"{warps} warps, {stages} stages, {programs} programs: {1e6 * seconds:.0f} us", flush=True)


def measure_loki(sizes: Sizes, device: torch.device) -> dict[str, float]:
    axes = torch.linalg.qr(torch.randn(1, sizes.num_key_heads, sizes.head_dim, sizes.head_dim))[0]
    choice = LokiChoice() if sizes.num_tokens > 4096 else LokiChoice(newest=4, dense_below=32)
    return attention_result(CacheFormat(loki=Loki(axes, choice)), sizes, device)


def decode_rate(model: nn.Module, num_out: int, prompt: tuple[int, ...], **options: Any) -> dict[str, float]:
    """Tokens a second of one request, after its first tokens. The same request comes before, and compiles kernels."""
    sizes = {"max_running": 1, "num_blocks": 64, "prefix_cache": False, **options}
    engine = Engine(model, EngineOptions(**sizes))
    engine.add(Request("warm", prompt, num_out, GREEDY))
    while engine.has_work():
        engine.step()
    engine.add(Request("one", prompt, num_out, GREEDY))
    times: list[float] = []
    num_steps = 0
    while engine.has_work():
        times += [time.perf_counter()] * len(engine.step())
        num_steps += 1
    first = times.count(times[0])
    found = {"tokens_per_second": (len(times) - first) / (times[-1] - times[0]), "steps": num_steps}
    if engine.state().num_drafted:  # of both requests
        found["accepted"] = engine.state().num_accepted / engine.state().num_drafted
    return found


def bytes_read(model: nn.Module) -> int:
    """Bytes of weights that a token reads: all but the embedding."""
    named = (*model.named_parameters(), *model.named_buffers())
    return sum(one.numel() * one.element_size() for name, one in named if "embed_tokens" not in name)


def measure_weights(config: Any, sizes: Sizes, device: torch.device, rate: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in (None, "int4", "fp8", "int8"):
        model = random_model(config, device)
        if name is not None:
            pack_model(model, FORMATS[name])
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*cannot be captured")
            one = decode_rate(model, sizes.outputs, tuple(range(16)))
        read = bytes_read(model)
        one |= {"bytes_read_per_token": read, "share_of_floor": one["tokens_per_second"] * read / rate}
        found[name or "bf16"] = one
        one["times_as_fast"] = one["tokens_per_second"] / found["bf16"]["tokens_per_second"]
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def measure_experts(shapes: dict[str, Any], sizes: Sizes, device: torch.device, rate: float) -> dict[str, Any]:
    """Decodes of 1 and of 16 requests, of models with experts, whose experts are chosen evenly."""
    found: dict[str, Any] = {}
    for shape, config in shapes.items():
        of_shape = found[shape] = dict[str, Any]()
        for name in (None, "int4", "fp8", "int8"):
            model = even_model(config, device)
            if name is None:
                of_shape["experts_used"] = {f"{number} requests": experts_used(model, number) for number in (1, 16)}
            else:
                pack_model(model, FORMATS[name])
            of_shape[name or "bf16"] = {}
            for number in (1, 16):
                one = of_shape[name or "bf16"][f"{number} requests"] = batch_rate(model, number, sizes.outputs)
                read = bytes_of_chosen(model, number)
                per_second = one["steps_per_second"] * read
                one |= {"bytes_read_per_step": read, "share_of_floor": per_second / rate}
                plain = of_shape["bf16"][f"{number} requests"]["tokens_per_second"]
                one["times_as_fast"] = one["tokens_per_second"] / plain
            del model
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return found


def even_model(config: Any, device: torch.device) -> Decoder:
    """A model of random weights in which layers add little, so that routers see the embeddings of tokens, which are
    independent. Where layers add more, tokens are alike, and choose the same experts.
    """
    model = random_model(config, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(0.01)
    return model


def experts_used(model: nn.Module, number: int) -> float:
    """Experts of a layer that decodes of so many requests choose together, in the mean."""
    counts = list[int]()

    def count(router: nn.Module, given: Any, chosen: tuple[Tensor, Tensor]) -> None:
        if len(chosen[1]) == number:
            counts.append(len(chosen[1].unique()))

    hooks = [one.register_forward_hook(count) for one in model.modules() if isinstance(one, Router)]
    sizes = {"max_running": number, "num_blocks": 64 * number, "prefix_cache": False, "graphs": False}
    engine = Engine(model, EngineOptions(**sizes))  # type: ignore[arg-type]
    for index in range(number):
        engine.add(Request(str(index), tuple(range(index, index + 16)), 16, GREEDY))
    while engine.has_work():
        engine.step()
    for hook in hooks:
        hook.remove()
    return fmean(counts)


def batch_rate(model: nn.Module, number: int, num_out: int) -> dict[str, float]:
    """Steps and tokens a second of so many requests that decode together. The same ones come before, and compile."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be captured")
        engine = Engine(model, EngineOptions(max_running=number, num_blocks=64 * number, prefix_cache=False))
        for _ in range(2):
            for index in range(number):
                engine.add(Request(str(index), tuple(range(index, index + 16)), num_out, GREEDY))
            times: list[float] = []
            while engine.has_work():
                if len(engine.step()) == number:
                    times.append(time.perf_counter())
    steps = (len(times) - 1) / (times[-1] - times[0])
    return {"steps_per_second": steps, "tokens_per_second": number * steps}


def bytes_of_chosen(model: nn.Module, num_tokens: int) -> int:
    """Bytes of weights that a step reads: all but the embedding, and of experts those that a token chose, in the
    mean if all choices are equally likely.
    """
    config, total = model.config, 0.0
    share = 1 - (1 - config.num_experts_per_tok / config.num_experts) ** num_tokens  # type: ignore[union-attr, operator]
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        if "embed_tokens" not in name:
            total += one.numel() * one.element_size() * (share if ".experts." in name else 1.0)
    return round(total)


def random_packed_model(config: Any, device: torch.device) -> Decoder:
    """A model of random weights in int4, which are never held in 16 bits."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device("meta"):
        model = build(config).to(dtype)
    make_room(model, FORMATS["int4"])
    model = model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, 0.02)
        for module in model.modules():
            if isinstance(module, PackedLinear):
                codes, ranges = module.parts
                codes.random_(0, 256)
                scale = torch.full(ranges.shape, 0.004, dtype=torch.float16, device=device)
                ranges.copy_(joined_ranges(scale, -7.5 * scale))
    return model


def measure_large(config: Any, sizes: Sizes, device: torch.device, rate: float) -> dict[str, Any]:
    """A model that would not fit into the GPU in 16 bits."""
    model = random_packed_model(config, device)
    found = decode_rate(model, sizes.outputs // 2, tuple(range(16)))
    read = bytes_read(model)
    found |= {"bytes_read_per_token": read, "share_of_floor": found["tokens_per_second"] * read / rate}
    return found | {"floor_tokens_per_second": rate / read}


def host_link_rate(device: torch.device) -> float:
    """Bytes a second of copies from pinned host memory to the device."""
    source = torch.empty(2**29, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    return len(source) / min(_seconds_of_copy(target, source, device) for _ in range(4))


def _seconds_of_copy(target: Tensor, source: Tensor, device: torch.device) -> float:
    synchronize(device)
    begin = time.perf_counter()
    target.copy_(source, non_blocking=True)
    synchronize(device)
    return time.perf_counter() - begin


def measure_streaming(config: Any, device: torch.device) -> dict[str, Any]:
    """Decodes of 1 and of 32 requests with the blocks' weights in host memory."""
    rate = host_link_rate(device)
    model = random_model(config, device).cpu()
    sizes = {"max_running": 32, "num_blocks": 128, "prefix_cache": False, "device": str(device)}
    engine = Engine(model, EngineOptions(**sizes, stream_weights=2))  # type: ignore[arg-type]
    assert engine._part.streamed is not None
    copied = sum(len(home) for home in engine._part.streamed.home)
    found: dict[str, Any] = {"link_bytes_per_second": rate, "bytes_copied_per_step": copied}
    found["device_bytes_of_blocks"] = engine._part.streamed.places.numel()
    for number in (1, 32):
        for index in range(number):
            engine.add(Request(str(index), tuple(range(16)), 10, GREEDY))
        times = []
        while engine.has_work():
            engine.step()
            times.append(time.perf_counter())
        seconds = (times[-2] - times[2]) / (len(times) - 4)  # without prompts
        found[f"{number} requests"] = {"tokens_per_second": number / seconds, "share_of_floor": copied / rate / seconds}
    return found


def cyclic_model(config: Any, device: torch.device) -> Decoder:
    """A model whose likeliest next token is the next one in a cycle of 32, whatever its blocks compute."""
    model = random_model(config, device)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
        embedding = model.model.embed_tokens.weight
        ids = torch.arange(len(embedding), device=device)
        model.lm_head.weight.copy_(embedding[ids // 32 * 32 + (ids - 1) % 32])
    return model


def measure_speculation(config: Any, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    prompt = tuple(range(32)) * 2
    model = cyclic_model(config, device)
    plain = decode_rate(model, sizes.outputs, prompt)
    found: dict[str, Any] = {"without": plain}
    early = EarlyLayers(max(1, config.num_hidden_layers // EARLY))
    for name, drafter in (("ngram", "ngram"), (f"layers={early.number}", early)):
        found[name] = one = decode_rate(model, sizes.outputs, prompt, speculate=drafter)
        one["times_as_fast"] = one["tokens_per_second"] / plain["tokens_per_second"]
    return found


def main() -> None:
    parser = harness.options(__doc__, "lean-gpu.json", harness.NOT_WRITTEN, device=True)
    parser.add_argument("--check", action="store_true", help="compare kernels with plain functions")
    parser.add_argument("--sweep", action="store_true", help="time ways to launch the kernel of 4-bit attention")
    parser.add_argument("--only", nargs="+", choices=PARTS)
    given = parser.parse_args()
    device = torch.device(given.device)
    sizes, config = (SMALL, TINY) if given.tiny else (LARGE, LLAMA_8B)
    if given.check or given.sweep:
        check_kernels(device) if given.check else sweep_four_bits(sizes, device)
        return
    rate = copy_rate(device)
    results: dict[str, Any] = {"copy_bytes_per_second": rate}
    if given.out.exists() and not given.tiny:
        before, head = json.loads(given.out.read_text()), harness.facts(device=device)
        if before["device"] == head["device"]:
            results = {**{key: value for key, value in before.items() if key not in (*head, "torch")}, **results}
    measures: dict[str, Callable[[], Any]] = {
        "four_bits": lambda: measure_four_bits(sizes, device),
        "loki": lambda: measure_loki(sizes, device),
        "weights": lambda: measure_weights(config, sizes, device, rate),
        "experts": lambda: measure_experts(
            {"tiny": TINY_EXPERTS} if given.tiny else EXPERT_SHAPES, sizes, device, rate
        ),
        "speculation": lambda: measure_speculation(config, sizes, device),
        "llama_70b_int4": lambda: measure_large(TINY if given.tiny else LLAMA_70B, sizes, device, rate),
        "streaming": lambda: measure_streaming(config, device),
    }
    for key, measure in measures.items():
        if given.only is None or key in given.only:
            begin = time.perf_counter()
            results[key] = measure()
            print(f"{key} ({time.perf_counter() - begin:.0f} s): {json.dumps(results[key], indent=1)}", flush=True)
            if not given.tiny:
                harness.write(given.out, results, device=device)


if __name__ == "__main__":
    main()

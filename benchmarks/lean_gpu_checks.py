"""Compares the kernels of lean inference with their plain functions, on the GPU, for `lean_gpu.py --check`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from serve_gpu import TINY
from torch import Tensor

from weft.models.attention import RMSNorm
from weft.models.expert_rows import sort_by_expert
from weft.models.experts import StackedExperts
from weft.models.router import Router
from weft.serve.attention.batch import CacheSizes, PagedBatch, slots_of
from weft.serve.attention.choice import LokiChoice, LokiPages
from weft.serve.attention.decode_attention_kernel import decode_attention_by_kernel
from weft.serve.attention.formats import CacheFormat, Loki
from weft.serve.attention.four_bits import FourBitPages, FourBitStorage
from weft.serve.attention.plain import PlainPages, decode_attention
from weft.serve.attention.whole_attention_kernel import whole_attention_by_kernel
from weft.serve.engine import Engine, EngineOptions
from weft.serve.model.fused_kernel import rotate_and_store_by_kernel
from weft.serve.model.step_graphs import GraphRecorder
from weft.serve.scheduling.request import Request, Sampling
from weft.serve.weights.expert_kernel import order_by_kernel, route_by_kernel
from weft.serve.weights.fast_path import place_of
from weft.serve.weights.packed_experts import PackedExperts
from weft.serve.weights.packed_linear import PackedLinear, pack_model
from weft.serve.weights.weight_formats import CPU_FORMATS, FORMATS

TINY_EXPERTS = replace(
    TINY, architecture="mixtral", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=TINY.intermediate_size
)
GPU_FORMATS = {name: form for name, form in FORMATS.items() if name not in CPU_FORMATS}
Found = Iterator[tuple[str, float, float]]  # what is compared, the largest difference of the largest number, the most


def difference(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-30))


def pages_of(lengths: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Block tables of requests of these lengths, and the slots of their last tokens."""
    width = -(-int(lengths.max()) // block_size)
    tables = torch.randperm(len(lengths) * width, device=lengths.device).view(len(lengths), width).to(torch.int32)
    places = (lengths - 1).long()
    return tables, tables.gather(1, places[:, None] // block_size)[:, 0].long() * block_size + places % block_size


def attention(device: torch.device) -> Found:
    for dtype, heads, window in ((torch.bfloat16, (32, 8, 128), None), (torch.float16, (8, 2, 64), 300)):
        lengths = torch.tensor([1, 64, 700, 1024, 2000], dtype=torch.int32, device=device)
        tables, _ = pages_of(lengths, 16)
        query = torch.randn(5, heads[0], heads[2], dtype=dtype, device=device)
        keys, values = (torch.randn(tables.numel() * 16, *heads[1:], dtype=dtype, device=device) for _ in range(2))
        given = (query, keys, values, tables, lengths, 16, window)
        yield (
            f"attention {dtype} {heads} {window}",
            difference(decode_attention_by_kernel(*given), decode_attention(*given)),
            0.02,
        )


def whole_attention(device: torch.device) -> Found:
    """Rotation, new entries of the cache and attention by one kernel, twice, as it sets its counts back."""
    for dtype, sizes, window in ((torch.bfloat16, (32, 8, 128), None), (torch.float16, (8, 2, 64), 300)):
        for some in ([1, 64, 700, 1025, 6000], [1], [2000], [20000]):
            lengths = torch.tensor(some, dtype=torch.int32, device=device)
            tables, slots = pages_of(lengths, 16)
            pages = [torch.randn(tables.numel() * 16, *sizes[1:], dtype=dtype, device=device) for _ in range(2)]
            plain = [page.clone() for page in pages]
            projected = torch.randn(len(some), (sizes[0] + 2 * sizes[1]) * sizes[2], dtype=dtype, device=device)
            angles = torch.randn(max(some), sizes[2] // 2, device=device).repeat(1, 2)
            given = (projected, sizes, None, (angles.cos().to(dtype), angles.sin().to(dtype)), lengths - 1, slots)
            counts = torch.zeros(len(some) * sizes[1], dtype=torch.int32, device=device)
            after = (tables, lengths, 16, window)
            first, again = (whole_attention_by_kernel(*given, *pages, *after, counts) for _ in range(2))
            expected = decode_attention(rotate_and_store_by_kernel(*given, *plain), *plain, *after)
            name = f"whole attention {dtype} {sizes} {window} {some}"
            yield name, difference(first, expected), 0.02
            yield f"{name}: pages", max(map(difference, pages, plain)), 0.01
            yield f"{name}: again", difference(again, first) + float(counts.abs().max()), 0.0


def four_bits(device: torch.device) -> Found:
    """A decode by kernels and one by plain functions, from the same pages: what they give and what they keep."""
    for dtype, heads, window, page in (
        (torch.bfloat16, (32, 8, 128), None, 64),
        (torch.float16, (32, 8, 128), 300, 64),
        (torch.bfloat16, (8, 2, 64), None, 64),
        (torch.bfloat16, (4, 4, 96), None, 64),
        (torch.bfloat16, (32, 8, 128), 300, 32),
        (torch.bfloat16, (32, 8, 128), None, 128),
        (torch.float16, (8, 2, 64), 300, 128),
    ):
        lengths = torch.tensor([1, page, 700, 1024, 2000], dtype=torch.int32, device=device)
        tables, slots = pages_of(lengths, page)
        sizes = CacheSizes(tables.numel() + 1, page, 5, *heads[1:], dtype, device)
        layers = [FourBitPages(sizes) for _ in range(2)]
        for mine, other in zip((*layers[0].pages, layers[0]._tails), (*layers[1].pages, layers[1]._tails), strict=True):
            mine.random_(0, 256) if mine.dtype == torch.uint8 else mine.uniform_(-0.5, 1)
            other.copy_(mine)
        rows = torch.tensor([3, 0, 4, 1, 2], dtype=torch.int32, device=device)
        batch = PagedBatch(lengths - 1, lengths - 1, slots, tables, lengths, rows, page, 5)
        query = torch.randn(5, heads[0], heads[2], dtype=dtype, device=device)
        key, value = (torch.randn(5, *heads[1:], dtype=dtype, device=device) for _ in range(2))
        recorded, replay = GraphRecorder()(
            lambda query=query, key=key, value=value, batch=batch, window=window, layer=layers[0]: layer.attend(
                query, key, value, batch, window
            )
        )
        replay()
        expected = layers[1]._decode(query, key, value, batch, window)
        kept = zip(layers[0].pages, layers[1].pages, strict=True)
        wrong = sum(int((one[:-1] != two[:-1]).sum()) for one, two in kept)
        wrong += int((layers[0]._tails != layers[1]._tails).sum())
        name = f"four bits {dtype} {heads} {window} {page}"
        yield name, difference(recorded, expected), 0.02
        yield name + ", kept bits that differ", float(wrong), 0.0


def four_bit_prompts(device: torch.device) -> Found:
    """Chunks of prompts by kernels and by plain functions: what they give and what they keep."""
    long, short = ((100, 100), (700, 1500), (1, 65), (512, 2048)), ((5, 1000), (1, 64), (16, 2000))
    for dtype, heads, window, page, chunks in (
        (torch.bfloat16, (32, 8, 128), None, 64, long),
        (torch.float16, (32, 8, 128), 300, 64, long),
        (torch.bfloat16, (8, 8, 64), None, 64, long),
        (torch.bfloat16, (8, 1, 96), 300, 32, long),
        (torch.bfloat16, (32, 8, 128), None, 32, long),
        (torch.bfloat16, (32, 8, 128), None, 128, long),
        (torch.float16, (8, 4, 64), 300, 128, long),
        (torch.bfloat16, (32, 8, 128), None, 64, short),
        (torch.float16, (8, 2, 64), 300, 128, short),
    ):
        queries, ends = zip(*chunks, strict=True)
        lengths, number = torch.tensor(ends, dtype=torch.int32, device=device), len(chunks)
        tables, _ = pages_of(lengths, page)
        sizes = CacheSizes(tables.numel() + 1, page, number, *heads[1:], dtype, device)
        layers = [FourBitPages(sizes) for _ in range(2)]
        both = list(zip(*((*layer.pages, layer._tails) for layer in layers), strict=True))
        for mine, other in both:
            mine.random_(0, 256) if mine.dtype == torch.uint8 else mine.uniform_(-0.5, 1)
            other.copy_(mine)
        places = [torch.arange(end - count, end, device=device) for count, end in chunks]
        of_tables = zip(slots_of(tables, int(lengths.max()), page), places, strict=True)
        slots = torch.cat([every[own] for every, own in of_tables])
        rows = torch.randperm(number, device=device).to(torch.int32)
        batch = PagedBatch(slots, torch.cat(places), slots, tables, lengths, rows, page, 0, queries, ends)
        query = torch.randn(sum(queries), heads[0], heads[2], dtype=dtype, device=device)
        keys, values = (torch.randn(sum(queries), *heads[1:], dtype=dtype, device=device) for _ in range(2))
        given = (query, keys, values, batch, window)
        found, expected = layers[0]._prompts_by_kernel(*given), layers[1]._prompts(*given)
        name = f"four bits, {'drafts' if chunks is short else 'prompts'} {dtype} {heads} {window} {page}"
        yield name, difference(found, expected), 0.02
        wrong = sum(int((mine[:-1] != other[:-1]).sum()) for mine, other in both)
        yield name + ", kept bits that differ", float(wrong), 0.0


def chosen(device: torch.device) -> Found:
    for dtype, heads, window in ((torch.bfloat16, (32, 8, 128), None), (torch.float16, (8, 8, 64), 700)):
        lengths = torch.tensor([1, 64, 700, 1024, 6000], dtype=torch.int32, device=device)
        tables, _ = pages_of(lengths, 16)
        query = torch.randn(5, heads[0], heads[2], dtype=dtype, device=device)
        keys, values = (torch.randn(tables.numel() * 16, *heads[1:], dtype=dtype, device=device) for _ in range(2))
        keys *= torch.linspace(2, 0, heads[2], dtype=dtype, device=device)  # the first dims say most
        choice = LokiChoice(newest=16, dense_below=256)
        plain = PlainPages(*(one.unflatten(0, (-1, 16)) for one in (keys, values)))
        sizes = CacheSizes(len(plain.pages[0]), 16, 5, *heads[1:], dtype, device)
        loki = LokiPages(torch.eye(heads[2]).expand(heads[1], -1, -1), choice, plain, sizes)
        loki.pages[2].copy_(plain.pages[0][..., : choice.num_dims(heads[2])].transpose(1, 2))
        batch = PagedBatch(*[lengths] * 3, tables, lengths, lengths, 16, 5)
        expected = loki._decode(query, batch, window)
        name = f"chosen tokens {dtype} {heads} {window}"
        # Scores that are nearly equal may be chosen either way.
        yield name, difference(loki._decode_by_kernel(query, batch, window), expected), 0.03
        all_tokens = difference(decode_attention_by_kernel(query, keys, values, tables, lengths, 16, window), expected)
        yield name + ", 1 over the difference to all tokens", 1 / max(all_tokens, 1e-9), 25


def products(device: torch.device) -> Found:
    for kind, form in GPU_FORMATS.items():
        weight = torch.randn(1536, 4096, device=device) * 0.02
        parts = form.quantise(weight)
        decoded, linear = form.dequantise(parts, torch.float64), PackedLinear(form, parts, 4096, None)
        linear.choose(place_of(device, torch.bfloat16))
        for num_rows in (1, 2, 5, 16, 33, 256):
            hidden = torch.randn(num_rows, 4096, dtype=torch.bfloat16, device=device)
            yield (
                f"{kind} {num_rows} rows",
                difference(linear(hidden), hidden.double() @ decoded.T),
                0.08 if kind == "fp8" and num_rows > 64 else 0.04,  # inputs are rounded to float8 too
            )


def packed_experts(device: torch.device, kind: str, sizes: tuple[int, int, int]) -> PackedExperts:
    """So many experts, with so many features and inner features, of random weights."""
    num_experts, hidden, inner = sizes
    config = replace(TINY_EXPERTS, hidden_size=hidden, intermediate_size=inner, moe_intermediate_size=inner)
    with torch.device("meta"):
        stacked = StackedExperts(config, num_experts)
    packed = PackedExperts(FORMATS[kind], stacked, device)
    for name, stack in packed.stacks.items():
        stack.take(name, torch.randn(stack.shape, device=device) * 0.02, torch.bfloat16)
    packed.choose(place_of(device, torch.bfloat16))
    return packed


def experts(device: torch.device) -> Found:
    """Tokens through chosen experts: one and many, in a graph that is replayed for other choices."""
    for kind in GPU_FORMATS:
        for sizes, k in (((16, 1024, 1408), 4), ((8, 4096, 1536), 2)):
            packed = packed_experts(device, kind, sizes)
            for num_tokens in (1, 3, 16, 300):
                tokens = torch.randn(num_tokens, sizes[1], dtype=torch.bfloat16, device=device)
                weights = torch.rand(num_tokens, k, device=device)
                chosen = torch.rand(num_tokens, sizes[0], device=device).topk(k).indices
                given = (tokens, weights, chosen)
                recorded, replay = GraphRecorder()(lambda given=given, packed=packed: packed.of_tokens(*given))
                chosen.copy_((chosen + 1) % sizes[0])
                replay()
                packed.has_kernel = False
                expected = packed.of_tokens(tokens.double(), weights.double(), chosen)
                packed.has_kernel = True
                name = f"experts {kind} {sizes}, {k} of them, {num_tokens} tokens"
                yield name, difference(recorded, expected), 0.04
            others = packed.of_tokens(tokens, weights, (chosen + 1) % sizes[0])
            yield f"{name}: 1 over the difference to other experts", 1 / max(difference(others, expected), 1e-9), 25


def routers(device: torch.device) -> Found:
    """Norm, router and order of rows by kernels."""
    for num_experts, size, k in ((8, 4096, 2), (64, 2048, 6), (128, 2048, 8)):
        config = replace(TINY_EXPERTS, hidden_size=size, num_experts=num_experts, num_experts_per_tok=k)
        router, norm = Router(config, num_experts).eval().to(device, torch.bfloat16), RMSNorm(size, 1e-6).to(device)
        norm.bfloat16().weight.data.uniform_(0.5, 1.5)
        router.weight.data.normal_(0, 0.05)
        for num_tokens in (1, 16):
            hidden = torch.randn(num_tokens, size, dtype=torch.bfloat16, device=device)
            normed, weights, chosen = route_by_kernel(hidden, norm, router)
            expected, most_likely = router(normed[None])
            name = f"router {num_experts} {size}, {num_tokens} tokens"
            yield f"{name}: norm", difference(normed, norm(hidden)), 0.01
            yield f"{name}: weights", difference(weights, expected), 0.01
            yield f"{name}: choices that differ", float((chosen != most_likely).sum()), 0.02 * chosen.numel()
            order, sorted_order = order_by_kernel(chosen, num_experts), sort_by_expert(chosen, num_experts)
            wrong = (order.places != sorted_order.places).sum() + (order.ends != sorted_order.ends).sum()
            yield f"{name}: order", float(wrong + (order.sources != sorted_order.sources).sum()), 0.0


def engines(device: torch.device) -> Found:
    """Tokens of engines with CUDA graphs against those without; whether graphs were recorded."""
    from serve_gpu import random_model

    axes = torch.linalg.qr(torch.randn(2, 2, 16, 16))[0]
    for name, options in (
        ("int4", {"cache": CacheFormat(FourBitStorage()), "block_size": 64}),
        ("loki", {"cache": CacheFormat(loki=Loki(axes, LokiChoice(newest=4, dense_below=16)))}),
        *((kind, {}) for kind in GPU_FORMATS),
        *((f"experts {kind}", {}) for kind in GPU_FORMATS),
    ):
        tokens = []
        for graphs in (False, True):
            model = random_model(TINY_EXPERTS if name.startswith("experts") else TINY, device)
            if name.removeprefix("experts ") in FORMATS and not options:
                pack_model(model, FORMATS[name.removeprefix("experts ")])
            engine = Engine(model, EngineOptions(num_blocks=40, graphs=graphs, **options))  # type: ignore[arg-type]
            for index in range(4):  # a batch that graphs do not pad
                engine.add(Request(str(index), tuple(range(3, 60 + index)), 20, Sampling(temperature=0)))
            found: dict[str, list[int]] = {}
            while engine.has_work():
                for one in engine.step():
                    found.setdefault(one.request, []).append(one.token)
            tokens.append(found)
            if graphs:
                missing = engine._graphs is None or engine._graphs._steps._has_failed
                yield f"engine with {name}: no graphs", float(missing), 0.0
        differ = sum(a != b for key in tokens[0] for a, b in zip(tokens[0][key], tokens[1][key], strict=True))
        yield f"engine with {name}: tokens that differ with graphs", float(differ), 0.0


@torch.inference_mode()
def check_kernels(device: torch.device) -> None:
    """Print each comparison; SystemExit if one is off."""
    torch.manual_seed(0)
    begin, num_bad = time.perf_counter(), 0
    for compare in (
        attention,
        whole_attention,
        four_bits,
        four_bit_prompts,
        chosen,
        products,
        routers,
        experts,
        engines,
    ):
        try:
            for name, found, most in compare(device):
                num_bad += not found <= most
                print(f"{'ok ' if found <= most else 'BAD'} {found:9.2e} (at most {most:g})  {name}", flush=True)
        except Exception as error:
            num_bad += 1
            print(f"BAD {compare.__name__}: {type(error).__name__}: {str(error)[:2000]}", flush=True)
    print(f"{num_bad} comparisons are off; {time.perf_counter() - begin:.0f} s")
    raise SystemExit(num_bad > 0)

"""The cache of 4 bits: how tokens are added changes nothing, attention is that over the decoded cache, bytes are as
stated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from serving_for_tests import GREEDY, draft_always, serve_all, tokens_of
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.models import DecoderConfig, build, initialise
from weft.serve.attention import four_bits
from weft.serve.attention.batch import CacheSizes, PagedBatch
from weft.serve.attention.formats import CacheFormat, cache_format
from weft.serve.attention.four_bits import GROUP, FourBitPages, FourBitStorage
from weft.serve.engine import Engine, EngineOptions
from weft.serve.scheduling.request import Request

HEADS, KEY_HEADS, DIM, NUM_BLOCKS = 4, 2, 6, 12
TABLE = torch.tensor([[5, 2, 7, 0, 9, 3, 8, 1, 10, 4]], dtype=torch.int32)  # the pages of the request, in any order


def sizes_of(size: int = GROUP, dtype: torch.dtype = torch.float64) -> CacheSizes:
    return CacheSizes(NUM_BLOCKS, size, 3, KEY_HEADS, DIM, dtype, torch.device("cpu"))


def new_layer(size: int = GROUP) -> FourBitPages:
    return FourBitPages(sizes_of(size))


def batch_of(start: int, end: int, size: int = GROUP) -> PagedBatch:
    """The tokens `start` to `end` of a request in row 1, as a decode if it is one token."""
    places = torch.arange(start, end)
    slots = TABLE[0].long()[places // size] * size + places % size
    lengths, rows = torch.tensor([end], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    if end - start == 1:
        return PagedBatch(places, places, slots, TABLE, lengths, rows, size, 1)
    return PagedBatch(places, places, slots, TABLE, lengths, rows, size, 0, [end - start], [end])


def attended(
    layer: FourBitPages, tokens: tuple[Tensor, Tensor, Tensor], sizes: Sequence[int], window: int | None = None
) -> Tensor:
    """The results of a request whose tokens come in chunks of these sizes."""
    parts, start = [], 0
    for size in sizes:
        batch = batch_of(start, start + size, layer._size)
        slots, keys, values = layer.room(batch)
        keys[slots], values[slots] = (one[start : start + size] for one in tokens[1:])
        parts.append(layer.attend(tokens[0][start : start + size], keys, values, batch, window))
        start += size
    return torch.cat(parts)


def random_tokens(number: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(number, HEADS, DIM, generator=generator, dtype=torch.float64)
    keys, values = torch.randn(2, number, KEY_HEADS, DIM, generator=generator, dtype=torch.float64)
    return query, keys * torch.tensor([1, 9, 1, 0.1, 1, 1]), values  # one channel of keys is large


def oracle(layer: FourBitPages, tokens: tuple[Tensor, Tensor, Tensor], window: int | None = None) -> Tensor:
    """Attention of every token, one by one, over the layer's decoded pages and its own page's keys as they are."""
    query, own, _ = tokens
    keys, values = (one.flatten(0, 1) for one in layer.dequantised(TABLE[0].long(), torch.float64))
    out = []
    for place in range(len(query)):
        first = place // layer._size * layer._size
        mixed = torch.cat([keys[:first], own[first : place + 1]])
        begin = 0 if window is None else max(0, place + 1 - window)
        heads = []
        for head in range(HEADS):
            scores = mixed[begin : place + 1, head // 2] @ query[place, head] / DIM**0.5
            heads.append(scores.softmax(0) @ values[begin : place + 1, head // 2])
        out.append(torch.stack(heads))
    return torch.stack(out)


@pytest.mark.parametrize(
    ("size", "number"),
    [(64, 1), (64, 2), (64, 63), (64, 64), (64, 65), (64, 128), (64, 193), (32, 97), (128, 257)],
)
@pytest.mark.full(3)
def test_tokens_one_by_one_in_chunks_and_at_once_give_the_same_bits(size: int, number: int) -> None:
    tokens, rng = random_tokens(number), random.Random(number)
    at_once, one_by_one, chunked = new_layer(size), new_layer(size), new_layer(size)
    cuts = sorted({0, number, *(rng.randrange(number + 1) for _ in range(5))})
    results = [
        attended(at_once, tokens, [number]),
        attended(one_by_one, tokens, [1] * number),
        attended(chunked, tokens, [end - begin for begin, end in pairwise(cuts)]),
    ]
    full = TABLE[0, : number // size].long()
    for other in (one_by_one, chunked):
        for index, (mine, theirs) in enumerate(zip(at_once.pages, other.pages, strict=True)):
            if index < 2:  # keys: pages that are full
                assert torch.equal(mine[full], theirs[full])
            else:
                assert torch.equal(mine[TABLE[0].long()], theirs[TABLE[0].long()])
        rest = number % size
        half = number // size % 2
        assert torch.equal(at_once._tails[1, half, :rest], other._tails[1, half, :rest])
    for one in results[1:]:
        torch.testing.assert_close(one, results[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("window", "size"), [(None, 64), (70, 64), (None, 32), (70, 128)])
def test_attention_is_that_over_the_decoded_cache(window: int | None, size: int) -> None:
    number = 2 * size + 9
    tokens = random_tokens(number)
    layer = new_layer(size)
    found = attended(layer, tokens, [size + 3, 1, 1, number - size - 5], window)
    torch.testing.assert_close(found, oracle(layer, tokens, window), rtol=0, atol=1e-12)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(one.repeat_interleave(HEADS // one.shape[1], 1).transpose(0, 1) for one in tokens), is_causal=True
    ).transpose(0, 1)
    if window is None:
        assert 1e-6 < float((found - exact).abs().mean()) < 0.2  # close to attention over what was not rounded
        assert float((found - exact).abs().mean()) < 0.5 * float((found - exact.roll(1, 0)).abs().mean())


@pytest.mark.parametrize(("first", "last"), tuple(combinations(range(10), 2)))
def test_a_chunk_over_several_pages_leaves_the_keys_of_its_last_page(first: int, last: int) -> None:
    """A request keeps the keys of two pages as they are, one even and one odd."""
    tokens = random_tokens(last * 32 + 9)
    layer = new_layer(32)
    found = attended(layer, tokens, [first * 32 + 5, (last - first) * 32 + 3, 1])
    torch.testing.assert_close(found[-1], oracle(layer, tokens)[-1], rtol=0, atol=1e-12)


def test_pages_hold_the_rounded_numbers() -> None:
    tokens, layer = random_tokens(GROUP), new_layer()
    attended(layer, tokens, [GROUP])
    keys, values = layer.dequantised(TABLE[0, 0].long(), torch.float64)
    scale = layer._key_ranges[TABLE[0, 0].long(), ..., 0].double()  # [key heads, channels]
    assert bool(((keys - tokens[1]).abs() <= scale / 2 * (1 + 1e-6)).all())
    assert float(scale[:, 1].min()) > 5 * float(scale[:, 0].max())  # the large channel alone has a large scale
    of_tokens = layer._value_ranges[TABLE[0, 0].long(), :, 0, :, 0].double().T[..., None]  # [tokens, key heads, 1]
    assert bool(((values - tokens[2]).abs() <= of_tokens / 2 * (1 + 1e-6)).all())


def swap_halves(layer: FourBitPages) -> None:
    layer._key_codes.copy_((layer._key_codes >> 4) | (layer._key_codes << 4))


def forget_tails(layer: FourBitPages) -> None:
    layer._tails.zero_()


def take_the_next_scale(layer: FourBitPages) -> None:
    layer._key_ranges[..., 0].copy_(layer._key_ranges[..., 0].roll(1, 2))


@pytest.mark.parametrize("damage", [swap_halves, forget_tails, take_the_next_scale])
def test_damage_is_noticed(damage: Callable[[FourBitPages], None]) -> None:
    tokens, layer = random_tokens(GROUP + 9), new_layer()
    attended(layer, tokens, [GROUP + 8])
    expected = oracle(layer, tokens)[-1]
    damage(layer)
    batch = batch_of(GROUP + 8, GROUP + 9)
    slots, keys, values = layer.room(batch)
    keys[slots], values[slots] = (one[-1:] for one in tokens[1:])
    found = layer.attend(tokens[0][-1:], keys, values, batch, None)[0]
    assert float((found - expected).abs().max()) > 1e-3


def test_rejected_drafts_of_the_next_page_leave_no_trace() -> None:
    number = GROUP + 5
    tokens, others = random_tokens(number), random_tokens(number, seed=1)
    layer, expected = new_layer(), new_layer()
    before = GROUP - 2
    attended(layer, tokens, [before])
    batch = batch_of(before, before + 6)  # six drafts, of which four are in the next page
    slots, keys, values = layer.room(batch)
    keys[slots], values[slots] = (one[before : before + 6] for one in others[1:])
    layer.attend(others[0][before : before + 6], keys, values, batch, None)
    results = []
    for start in range(before, number):  # all of them were wrong
        batch = batch_of(start, start + 1)
        slots, keys, values = layer.room(batch)
        keys[slots], values[slots] = (one[start : start + 1] for one in tokens[1:])
        results.append(layer.attend(tokens[0][start : start + 1], keys, values, batch, None))
    torch.testing.assert_close(torch.cat(results), attended(expected, tokens, [number])[before:], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("heads", "dim"), [(2, 6), (8, 128), (4, 64), (3, 96)])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_bytes_of_pages_and_tails_are_as_stated(heads: int, dim: int, size: int) -> None:
    sizes = CacheSizes(5, size, 7, heads, dim, torch.bfloat16, torch.device("cpu"))
    form = cache_format({32: "int4-32", 64: "int4", 128: "int4-128"}[size])
    assert form.block_size == size
    layer = form.layer(0, sizes).storage
    assert isinstance(layer, FourBitPages)
    held = sum(page.numel() * page.itemsize for page in layer.pages)
    assert held == 5 * size * form.bytes_per_token(heads, dim, 2)
    assert layer._tails.numel() * 2 == 8 * form.bytes_per_row(heads, dim, 2)
    if dim == 128:  # of 512 bytes in 16 bits
        assert form.bytes_per_token(heads, dim, 2) == heads * {32: 152, 64: 144, 128: 136}[size]


def longer_model(seed: int = 0) -> nn.Module:
    config = DecoderConfig("mistral", vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4 * GROUP,
                           sliding_window=100)  # fmt: skip
    model = build(config)
    initialise(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.double().eval()


def engine_of(**options: object) -> Engine:
    sizes = {"block_size": GROUP, "num_blocks": 30, "cache": CacheFormat(FourBitStorage()), **options}
    return Engine(longer_model(), EngineOptions(**sizes))  # type: ignore[arg-type]


@cache
def requests_and_tokens() -> tuple[list[Request], dict[str, list[int]]]:
    """Requests, and the tokens of each when it is alone."""
    rng = random.Random(0)
    shared = tuple(rng.randrange(61) for _ in range(GROUP + 2))
    prompts = [tuple(rng.randrange(61) for _ in range(length)) for length in (60, 61, 62, 3, GROUP, 2 * GROUP + 5)]
    prompts += [(*shared, 1), (1, 2, 1, 2, 1, 2)]
    requests = [Request(str(i), prompt, 8, GREEDY) for i, prompt in enumerate(prompts)]
    requests += [Request("long", (5, 6), GROUP + 10, GREEDY)]
    requests += [Request(f"shared {i}", (*shared, i), 2, GREEDY) for i in range(3)]
    expected = {}
    for one in requests:
        expected |= tokens_of(serve_all(engine_of(), [one]))
    plain = tokens_of(serve_all(Engine(longer_model(), EngineOptions(num_blocks=120)), requests))
    assert plain != expected  # it is not exact
    return requests, expected


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 5, "token_budget": 80, "max_running": 4, "swap_blocks": 3},
        {"token_budget": 50},
        {"speculate": "ngram"},
        {"speculate": "itself"},
    ],
    ids=str,
)
@pytest.mark.full(2)
def test_tokens_do_not_depend_on_chunks_memory_prefixes_swapping_or_drafts(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, expected = requests_and_tokens()
    draft_always(monkeypatch)
    monkeypatch.setattr(four_bits, "DEQUANTISED_TOKENS", 2 * GROUP)  # several requests are decoded in turns
    drafter = {"speculate": longer_model()} if options.get("speculate") == "itself" else {}
    engine = engine_of(**{**options, **drafter})
    assert tokens_of(serve_all(engine, requests, every=1)) == expected
    state = engine.state()
    assert state.num_preempted > 0 or "num_blocks" not in options
    assert state.num_swapped > 0 or "swap_blocks" not in options
    assert state.num_drafted > 0 or "speculate" not in options
    assert state.num_prefix_tokens > 0


def test_a_text_in_chunks_is_embedded_as_at_once() -> None:
    """Its last page, which is not full, is kept beside those of requests."""
    text, found = [one % 50 + 1 for one in range(2 * GROUP + 9)], []
    for budget in (512, 50):
        engine, request = engine_of(token_budget=budget), Request("one", tuple(text[:20]), 12, GREEDY)
        engine.add(request)
        tokens = [one.token for one in engine.step()]
        found.append(engine.embed(text, "last"))
        while engine.has_work():
            tokens += [one.token for one in engine.step()]
        assert tokens == tokens_of(serve_all(engine_of(token_budget=budget), [request]))["one"]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_sizes_that_it_cannot_keep_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs blocks of 64 tokens, not 16; give block_size = 64"):
        engine_of(block_size=16)
    with pytest.raises(ConfigError, match="needs heads of an even size"):
        FourBitPages(CacheSizes(2, GROUP, 1, 1, 5, torch.float32, torch.device("cpu")))
    with pytest.raises(ConfigError, match="blocks of 32, 64 or 128 tokens, not heads of 6 and blocks of 48"):
        FourBitPages(sizes_of(48))

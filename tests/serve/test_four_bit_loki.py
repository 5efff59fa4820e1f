"""Loki over a cache of 4 bits: attention over the decoded cache with the same choice, all tokens chosen is the cache of
4 bits, how tokens are added changes no bit, and answers depend on the request alone, on one rank and on several.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_serving_for_tests import LIMIT_SECONDS, part_of, requests, tokens_on_ranks, whole_model
from serving_for_tests import CONFIGS, GREEDY, draft_always, make_engine, serve_all, tiny_model, tokens_of
from test_four_bit_cache import (
    DIM,
    HEADS,
    KEY_HEADS,
    NUM_BLOCKS,
    TABLE,
    attended,
    longer_model,
    new_layer,
    random_tokens,
    requests_and_tokens,
    sizes_of,
)
from test_loki import along, axes_of
from test_loki_ranks import calibrated
from torch import Tensor

from weft.cluster.hardware import load as load_cluster
from weft.errors import ConfigError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.plan import Pipe, Plan
from weft.plan import Tensor as TensorDegrees
from weft.planner.serving import MAX_RUNNING, ServingModel
from weft.serve.cache import four_bit_cache
from weft.serve.cache.four_bit_cache import GROUP, FourBitFormat, FourBitLayer
from weft.serve.cache.four_bit_loki_cache import FourBitLokiFormat, FourBitLokiLayer
from weft.serve.cache.layer_cache import CacheSizes, PlainFormat
from weft.serve.cache.loki_choice import LokiChoice, attention_to_chosen, chosen_tokens
from weft.serve.cache_formats import block_size_of, cache_format, why_slow
from weft.serve.calibration.loki_calibration import calibrate, save
from weft.serve.engine import Engine, EngineOptions
from weft.serve.model.model_part import ModelPart
from weft.serve.model.ranks import ServingRanks
from weft.serve.parallel.rank_part import refuse_plan
from weft.serve.scheduling.request import Request
from weft.serve.scheduling.speculation import EarlyLayers

ALL = LokiChoice(dims=0.25, tokens=1.0, newest=1, dense_below=1)
SOME = LokiChoice(dims=0.5, tokens=0.2, newest=3, dense_below=5)
MORE_DIMS = LokiChoice(dims=0.8, tokens=0.2, newest=3, dense_below=5)  # than half a head, which one half of bytes has


def loki_layer(choice: LokiChoice, size: int = GROUP, seed: int = 0) -> FourBitLokiLayer:
    return FourBitLokiLayer(axes_of(seed, DIM), choice, sizes_of(size))


def composed(
    layer: FourBitLayer, tokens: tuple[Tensor, Tensor, Tensor], choice: LokiChoice, window: int | None
) -> Tensor:
    """The last token's attention over the decoded cache, its own page's keys as they are, with Loki's choice."""
    query, own, _ = tokens
    number = len(query)
    keys, values = (one.flatten(0, 1)[:number] for one in layer.decoded(TABLE[0].long(), torch.float64))
    first = (number - 1) // layer._size * layer._size
    keys = torch.cat([keys[:first], along(own[first:], axes_of(0, DIM))])
    turned, lengths = along(query[-1:], axes_of(0, DIM)), torch.tensor([number])
    order, counts = chosen_tokens(turned, keys[None, ..., : choice.num_dims(DIM)], lengths, window, choice)
    heads = torch.arange(KEY_HEADS)[None, :, None]
    return attention_to_chosen(turned, keys[order, heads], values[order, heads], counts)[0]


@pytest.mark.parametrize("choice", [SOME, MORE_DIMS], ids=["half", "more"])
@pytest.mark.parametrize(("window", "size"), [(None, 64), (70, 64), (None, 32)])
def test_attention_is_that_over_the_decoded_cache_with_the_same_choice(
    choice: LokiChoice, window: int | None, size: int
) -> None:
    tokens, layer = random_tokens(2 * size + 9), loki_layer(choice, size)
    found = attended(layer, tokens, [size + 3, 1, size + 4, 1], window)[-1]
    expected = composed(layer, tokens, choice, window)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    dense = composed(layer, tokens, ALL, window)
    assert float((found - dense).abs().max()) > 1e-3  # it is a choice
    for damage in (swap_halves, take_the_next_scale, forget_tails):  # the controls
        changed = loki_layer(choice, size)
        attended(changed, tuple(one[:-1] for one in tokens), [len(tokens[0]) - 1], window)  # type: ignore[arg-type]
        damage(changed)
        assert float((last_of(changed, tokens, window) - expected).abs().max()) > 1e-4, damage.__name__


def last_of(layer: FourBitLayer, tokens: tuple[Tensor, Tensor, Tensor], window: int | None) -> Tensor:
    """The result of the last token as a decode, after the others are in the cache."""
    from test_four_bit_cache import batch_of

    number = len(tokens[0])
    batch = batch_of(number - 1, number, layer._size)
    slots, keys, values = layer.room(batch)
    keys[slots], values[slots] = (one[-1:] for one in tokens[1:])
    return layer.attend(tokens[0][-1:], keys, values, batch, window)[0]


def swap_halves(layer: FourBitLayer) -> None:
    layer._key_codes.copy_((layer._key_codes >> 4) | (layer._key_codes << 4))


def forget_tails(layer: FourBitLayer) -> None:
    layer._tails.zero_()


def take_the_next_scale(layer: FourBitLayer) -> None:
    layer._value_ranges[..., 0].copy_(layer._value_ranges[..., 0].roll(1, 3))


@pytest.mark.parametrize("window", [None, 70])
def test_all_tokens_chosen_is_the_cache_of_4_bits(window: int | None) -> None:
    """That of keys and queries along the same axes; all tokens are decodes, and all are in a prompt."""
    number = GROUP + 9
    query, keys, values = random_tokens(number)
    plain = new_layer()
    axes = axes_of(0, DIM)
    expected = attended(plain, (along(query, axes), along(keys, axes), values), [number], window)
    for chunks in ([1] * number, [number]):
        found = attended(loki_layer(ALL), (query, keys, values), chunks, window)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    other = attended(loki_layer(ALL, seed=1), (query, keys, values), [number], window)
    assert float((other - expected).abs().max()) > 1e-4  # the control: other axes are rounded otherwise


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [6, 64])
def test_tokens_one_by_one_in_chunks_and_at_once_give_the_same_bits(dtype: torch.dtype, dim: int) -> None:
    number, generator = 2 * GROUP + 3, torch.Generator().manual_seed(0)
    query = torch.randn(number, HEADS, dim, generator=generator).to(dtype)
    keys, values = torch.randn(2, number, KEY_HEADS, dim, generator=generator).to(dtype)
    cuts = [0, 3, 4, 5, 70, 71, 100, number]
    layers = []
    for chunks in ([number], [1] * number, [end - begin for begin, end in pairwise(cuts)]):
        sizes = CacheSizes(NUM_BLOCKS, GROUP, 3, KEY_HEADS, dim, dtype, torch.device("cpu"))
        layers.append(FourBitLokiLayer(axes_of(0, dim), ALL, sizes))
        attended(layers[-1], (query, keys, values), chunks)
    blocks = TABLE[0].long()
    for other in layers[1:]:
        for index, (mine, theirs) in enumerate(zip(layers[0].pages, other.pages, strict=True)):
            of_pages = blocks[:2] if index < 2 else blocks[:3]  # keys: pages that are full
            assert torch.equal(mine[of_pages], theirs[of_pages])
        assert torch.equal(layers[0]._tails[1, 0, :3], other._tails[1, 0, :3])


@cache
def longer_format(choice: LokiChoice = SOME) -> FourBitLokiFormat:
    texts = [torch.randint(0, 61, (3, 100), generator=torch.Generator().manual_seed(0))]
    return FourBitLokiFormat(calibrate(longer_model(), texts, choice)[0])


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 5, "token_budget": 80, "max_running": 4, "swap_blocks": 3},
        {"token_budget": 50, "speculate": "ngram"},
        {"speculate": EarlyLayers(1)},
    ],
    ids=str,
)
@pytest.mark.full(2)
def test_answers_depend_on_the_request_alone(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given, of_four_bits = requests_and_tokens()
    draft_always(monkeypatch)
    monkeypatch.setattr(four_bit_cache, "DECODED_TOKENS", 2 * GROUP)
    alone = answers_alone()
    sizes = {"block_size": GROUP, "num_blocks": 30, "cache": longer_format(), **options}
    engine = Engine(longer_model(), EngineOptions(**sizes))
    assert tokens_of(serve_all(engine, given, every=1)) == alone
    assert alone != of_four_bits
    state = engine.state()
    assert state.num_preempted > 0 or "num_blocks" not in options
    assert state.num_swapped > 0 or "swap_blocks" not in options
    assert state.num_drafted > 0 or "speculate" not in options
    assert state.num_prefix_tokens > 0


@pytest.mark.parametrize("has_loki", [False, True])
def test_a_text_in_chunks_is_embedded_as_at_once(has_loki: bool) -> None:
    """Its last page, which is not full, is kept beside those of requests."""
    text, form = [one % 50 + 1 for one in range(2 * GROUP + 9)], longer_format() if has_loki else FourBitFormat()
    found = []
    for budget in (512, 50):
        sizes = {"block_size": GROUP, "num_blocks": 30, "cache": form, "token_budget": budget}
        engine = Engine(longer_model(), EngineOptions(**sizes))
        request = Request("one", tuple(text[:20]), 12, GREEDY)
        engine.add(request)
        tokens = [one.token for one in engine.step()]
        found.append(engine.embed(text, "last"))
        while engine.has_work():
            tokens += [one.token for one in engine.step()]
        assert tokens == tokens_of(serve_all(Engine(longer_model(), EngineOptions(**sizes)), [request]))["one"]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_drafts_wait_for_a_prompt_whose_last_chunk_is_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of answers are computed before those of prompts, so drafts would not see the prompt's last token."""
    draft_always(monkeypatch)
    prompt = tuple(one % 50 + 1 for one in range(GROUP + 1))
    given = [
        Request("short", (5,), 12, GREEDY),
        Request("long", prompt, 12, GREEDY),
        Request("again", prompt, 12, GREEDY),
    ]
    found = []
    for speculate in (None, longer_model()):
        sizes = {"block_size": GROUP, "num_blocks": 30, "cache": longer_format(), "speculate": speculate}
        engine = Engine(longer_model(), EngineOptions(**sizes))
        found.append([tokens_of(serve_all(engine, [one])) for one in given])
        assert engine.state().num_prefix_tokens == GROUP
    assert found[0] == found[1]


@pytest.mark.parametrize("after", [6, 85])
def test_answers_that_are_computed_again_stay_the_same(after: int) -> None:
    """Of a prompt and an answer in one page, and of an answer over several pages; with nothing left in the cache."""
    small = FourBitLokiFormat(longer_format().loki, 32)
    found = []
    for forgets in (False, True):
        engine = Engine(longer_model(), EngineOptions(block_size=32, num_blocks=12, cache=small))
        engine.add(Request("one", tuple(range(1, 21)), after + 9, GREEDY))
        tokens: list[int] = []
        while engine.has_work():
            if forgets and len(tokens) == after:
                forgets = False
                engine._forget_cache()
                for layer in engine._part.cache:
                    for page in (*layer.pages, layer._tails):  # type: ignore[attr-defined]
                        page.zero_()
            tokens += [one.token for one in engine.step()]
        found.append(tokens)
    assert found[0] == found[1]
    assert len(found[0]) == after + 9


@cache
def answers_alone() -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for one in requests_and_tokens()[0]:
        options = EngineOptions(block_size=GROUP, num_blocks=30, cache=longer_format())
        found |= tokens_of(serve_all(Engine(longer_model(), options), [one]))
    return found


def test_a_file_is_read_with_any_group_and_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "axes"
    save(path, calibrated("llama"))
    for name, size, num_bytes in (("int4", 64, 144), ("int4-32", 32, 152), ("int4-128", 128, 136)):
        form = cache_format(f"{name},loki={path}")
        assert isinstance(form, FourBitLokiFormat)
        assert form.name == f"{name},loki"
        assert block_size_of(form) == size
        assert form.bytes_per_token(1, 128, 2) == num_bytes == cache_format(name).bytes_per_token(1, 128, 2)
        make_engine(tiny_model("llama"), cache=form, block_size=size)
        assert "has no kernels for decodes on GPUs: plain functions" in why_slow(form, "cuda", torch.bfloat16)[0]
        assert why_slow(form, "cpu", torch.float32) == why_slow(cache_format(name), "cuda", torch.float16) == []
        assert why_slow(PlainFormat(), "cuda", torch.float32) == []
        assert f"--cache {name} has kernels for 16 bits alone" in why_slow(cache_format(name), "cuda", torch.float32)[0]
        with pytest.raises(ConfigError, match=f"the file of --cache {name},loki is of another model"):
            make_engine(tiny_model("llama", seed=1), cache=form, block_size=size)
    for wrong in ("int4,", "int4,loki", "int4,axes=x", "int4-48", f"loki={path},int4"):
        with pytest.raises(ConfigError, match=r"give int4, int4-32 or int4-128, loki=FILE|cannot be read"):
            cache_format(wrong)


@pytest.mark.processes
def test_two_ranks_give_the_tokens_of_one_and_hold_what_is_planned(tmp_path: Path) -> None:
    cases = [("llama", Plan(tensor=TensorDegrees(2))), ("gpt2", Plan(pipe=Pipe(2)))]
    forms = {name: FourBitLokiFormat(calibrated(name), 32) for name, _ in cases}
    sizes = {"block_size": 32, "num_blocks": 3, "token_budget": 5, "max_running": 3}
    expected = {}
    for name, plan in cases:
        refuse_plan(CONFIGS[name], plan)
        save(tmp_path / name, calibrated(name))
        engine = make_engine(whole_model(name), cache=forms[name], block_size=32)
        expected[name] = tokens_of(serve_all(engine, requests()))

    def rank(_: int) -> list[Any]:
        torch.set_num_threads(1)
        found = []
        for name, plan in cases:
            options = EngineOptions(**sizes, cache=forms[name])  # type: ignore[arg-type]
            tokens = tokens_on_ranks(name, Mesh(plan), requests(), options)
            ranks = ServingRanks(Mesh(plan))
            part = ModelPart(part_of(name, ranks.place).float(), options, ranks)
            held = sum(page.numel() * page.itemsize for layer in part.cache for page in layer.pages)
            tails = sum(layer._tails.numel() * 4 for layer in part.cache)  # type: ignore[attr-defined]
            axes = sum(layer._axes.numel() * 4 for layer in part.cache)  # type: ignore[attr-defined]
            found.append((None if tokens is None else tokens["tokens"], held, tails, axes))
        return found

    for place, results in enumerate(run_local(rank, 2, LIMIT_SECONDS)):
        for (name, plan), (tokens, held, tails, axes) in zip(cases, results, strict=True):
            assert tokens == (expected[name] if place == 0 else None)
            cache_name = f"int4-32,loki={tmp_path / name}"
            model = ServingModel(CONFIGS[name], load_cluster("h200:1x2"), plan, "fp32", cache=cache_name)
            assert held == 4 * 32 * model.cache_bytes(0)
            assert tails / 4 * (MAX_RUNNING + 1) + axes == model.bytes_beside_pages(0)
    other = make_engine(whole_model("llama"), cache=FourBitFormat(32), block_size=32)
    assert tokens_of(serve_all(other, requests())) != expected["llama"]

"""Drafts by the model's own first layers: they are what those layers give, and cost no memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from serving_for_tests import (
    GREEDY,
    draft_always,
    likeliest,
    make_engine,
    merged_model,
    save_adapter,
    serve_all,
    tiny_model,
    tokens_of,
)
from torch import nn

from weft.errors import ConfigError
from weft.models import GPT2, Decoder
from weft.serve.attention.formats import CacheFormat
from weft.serve.attention.four_bits import FourBitStorage
from weft.serve.drafts.model_drafts import EarlyLayersDrafter
from weft.serve.scheduling.request import Request
from weft.serve.scheduling.scheduler import ActiveRequest
from weft.serve.scheduling.speculation import EarlyLayers, early_layers


def first_layer_of(name: str) -> nn.Module:
    return first_layer(tiny_model(name))


def first_layer(model: nn.Module) -> nn.Module:
    """The model of the first layer alone, with the last norm and the head."""
    if isinstance(model, Decoder):
        model.model.layers = model.model.layers[:1]
    else:
        assert isinstance(model, GPT2)
        model.transformer.h = model.transformer.h[:1]
    return model


@pytest.fixture(autouse=True)
def always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens are drafted in every step, however long steps take."""
    draft_always(monkeypatch)


def drafts_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], list[int]]]:
    """Of each request that is drafted for, its tokens and its drafts, filled while an engine works."""
    found = list[tuple[tuple[int, ...], list[int]]]()
    draft = EarlyLayersDrafter.draft

    def recorded(self: EarlyLayersDrafter, wanted: Sequence[tuple[ActiveRequest, int]]) -> list[list[int]]:
        results = draft(self, wanted)
        found.extend((tuple(active.tokens), one) for (active, _), one in zip(wanted, results, strict=True))
        return results

    monkeypatch.setattr(EarlyLayersDrafter, "draft", recorded)
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_drafts_are_the_likeliest_tokens_of_the_first_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = drafts_of(monkeypatch)
    requests = [Request(str(i), tuple(range(i, i + 5 + i)), 9, GREEDY) for i in range(3)]
    engine = make_engine(tiny_model(name), speculate=EarlyLayers(1))
    assert tokens_of(serve_all(engine, requests)) == {
        one.name: likeliest(tiny_model(name), one.tokens, one.max_tokens) for one in requests
    }
    early, whole = first_layer_of(name), tiny_model(name)
    assert sum(len(drafts) for _, drafts in found) == engine.state().num_drafted > 20
    assert all(drafts == likeliest(early, tokens, len(drafts)) for tokens, drafts in found)
    assert any(drafts != likeliest(whole, tokens, len(drafts)) for tokens, drafts in found)


def test_the_cache_is_the_models_own_and_holds_what_it_holds_without_drafts() -> None:
    plain, early = (make_engine(tiny_model("llama"), speculate=one) for one in (None, EarlyLayers(1)))
    request = Request("x", tuple(range(9)), 7, GREEDY)
    for engine in (plain, early):
        serve_all(engine, [request])
    assert early.state().num_drafted > early.state().num_accepted
    for one, other in zip(plain._part.cache, early._part.cache, strict=True):
        for page, with_drafts in zip(one.pages, other.pages, strict=True):
            assert page.shape == with_drafts.shape
            # Of 9 tokens and 7 answers, the last is never computed; behind it, rejected drafts may be left.
            torch.testing.assert_close(page.flatten(0, 1)[:15], with_drafts.flatten(0, 1)[:15])


def test_a_cache_of_four_bits_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)
    requests = [Request(str(i), tuple(range(i, i + 20)), 11, GREEDY) for i in range(3)]
    sizes = {"block_size": 64, "num_blocks": 6, "cache": CacheFormat(FourBitStorage())}
    expected = tokens_of(serve_all(make_engine(tiny_model("llama"), **sizes), requests))
    engine = make_engine(tiny_model("llama"), **sizes, speculate=EarlyLayers(1))
    assert tokens_of(serve_all(engine, requests)) == expected
    assert engine.state().num_drafted > 0


def test_drafts_have_the_adapter_of_their_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = drafts_of(monkeypatch)
    folder = save_adapter(tmp_path / "one", "llama", 3, 2)
    requests = [Request(one or "plain", tuple(range(8)), 9, GREEDY, adapter=one) for one in ("one", "")]
    engine = make_engine(tiny_model("llama"), adapters={"one": folder}, speculate=EarlyLayers(1))
    answers = tokens_of(serve_all(engine, requests))
    plain, adapted = first_layer_of("llama"), first_layer(merged_model("llama", folder))
    assert answers["one"] != answers["plain"]
    for adapter, early, other in (("one", adapted, plain), ("plain", plain, adapted)):
        text = (*range(8), *answers[adapter])
        own = [(tokens, drafts) for tokens, drafts in found if tokens == text[: len(tokens)] and len(tokens) > 9]
        assert own
        assert all(drafts == likeliest(early, tokens, len(drafts)) for tokens, drafts in own)
        assert any(drafts != likeliest(other, tokens, len(drafts)) for tokens, drafts in own)


def test_what_cannot_draft_is_refused_in_words() -> None:
    for number in (0, 2):
        with pytest.raises(ConfigError, match=f"layers={number} of a model with 2 layers; drafts need at least 1"):
            make_engine(tiny_model("llama"), speculate=EarlyLayers(number))
    assert early_layers("layers=3") == EarlyLayers(3)
    with pytest.raises(ConfigError, match="layers=some must be layers=K"):
        early_layers("layers=some")

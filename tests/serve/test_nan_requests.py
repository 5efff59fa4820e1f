"""A request whose logits are NaN ends alone; damaged weights end the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx
import parallel_serving_for_tests
import pytest
import torch
from parallel_serving_for_tests import LIMIT_SECONDS, tokens_on_ranks
from serve_for_tests import serving
from serving_for_tests import GREEDY, serve_all, tiny_model, tokens_of
from torch import nn

from weft.data.tokenizer import ByteTokenizer
from weft.errors import NumbersError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import DecoderConfig, build, initialise
from weft.plan import Context, Pipe, Plan, Tensor
from weft.serve.attention.attend import attend_decodes
from weft.serve.attention.batch import PagedBatch, PageShare
from weft.serve.attention.choice import LokiChoice
from weft.serve.attention.formats import CacheFormat, Loki
from weft.serve.attention.four_bits import FourBitStorage
from weft.serve.engine import Engine, EngineOptions
from weft.serve.generate import generate
from weft.serve.scheduling.request import Request, Sampling

BAD = 60  # a token after which the model gives NaN
NEVER_BAD = Sampling(temperature=0, logit_bias={BAD: -1e9})
AXES = torch.eye(4).expand(2, 2, 4, 4).contiguous()
LOKI = CacheFormat(loki=Loki(AXES, LokiChoice(dims=0.5, tokens=0.3, newest=2, dense_below=1)))
FORMATS: dict[str, tuple[CacheFormat, int]] = {
    "plain": (CacheFormat(), 4),
    "int4": (CacheFormat(FourBitStorage(32)), 32),
    "loki": (LOKI, 4),
}


def model_of(name: str) -> nn.Module:
    model: Any = tiny_model(name)
    with torch.no_grad():
        embedding = model.wte if name == "gpt2" else model.model.embed_tokens
        embedding.weight[BAD] = math.inf
    return model


def engine_of(model: nn.Module, **options: Any) -> Engine:
    return Engine(model, EngineOptions(**{"block_size": 4, "num_blocks": 32, **options}))


def good_requests() -> list[Request]:
    """Of different lengths, so that steps attend to some places of each table only."""
    prompts = [(3,), (5, 6, 7, 8, 9, 1, 2), (11, 12), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)]
    return [Request(f"good {index}", prompt, 9, NEVER_BAD) for index, prompt in enumerate(prompts)]


def bad_requests(number: int, length: int = 20) -> list[Request]:
    return [Request(f"bad {index}", (index + 1, *[BAD] * (length - 1)), 9) for index in range(number)]


def ends(results: dict[str, list[Any]], prefix: str) -> list[str | None]:
    return [tokens[-1].finish for name, tokens in results.items() if name.startswith(prefix)]


@pytest.mark.parametrize(
    ("name", "form", "overlap"),
    [
        ("llama", "plain", False),
        ("llama", "plain", True),
        ("mistral", "plain", False),
        ("mixtral", "plain", False),
        ("llama", "int4", False),
        ("llama", "loki", False),
    ],
)
def test_requests_with_nan_end_alone_and_leave_no_trace(name: str, form: str, overlap: bool) -> None:
    model, (cache, block_size) = model_of(name), FORMATS[form]
    sizes = {"cache": cache, "block_size": block_size, "num_blocks": 128 // block_size, "overlap": overlap}
    expected = tokens_of(serve_all(engine_of(model, **sizes), good_requests()))
    assert all(len(tokens) == 9 for tokens in expected.values())
    engine = engine_of(model, **sizes)
    for number in (4, 1):  # together with good requests, and in blocks that they have used
        bad = bad_requests(number)
        mixed = [one for pair in zip(bad, good_requests(), strict=False) for one in pair]
        results = serve_all(engine, [*mixed, *good_requests()[number:]])
        assert ends(results, "bad") == ["nan"] * number
        assert {name: found for name, found in tokens_of(results).items() if name in expected} == expected
    assert engine.state().num_free_blocks == 128 // block_size
    serve_all(engine, bad_requests(6))  # every block has NaN
    assert tokens_of(serve_all(engine, good_requests())) == expected


def test_a_request_alone_with_nan_ends_and_damaged_weights_end_the_engine() -> None:
    model: Any = model_of("llama")
    engine = engine_of(model)
    results = serve_all(engine, bad_requests(2))
    assert ends(results, "bad") == ["nan", "nan"]
    assert len(serve_all(engine, good_requests())) == 4
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    engine.add(Request("x", (1, 2, 3), 2))
    assert engine.step() == []
    assert engine.has_work()
    with pytest.raises(NumbersError, match="gives NaN for every text: its weights are damaged"):
        engine.step()


def test_a_bad_first_token_does_not_blame_the_weights() -> None:
    """Another text is tried by a token that gave numbers, whatever the likeliest first token is."""
    model: Any = tiny_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = math.inf
    engine = engine_of(model)
    serve_all(engine, [Request("good", (3, 4), 1, GREEDY)])
    assert ends(serve_all(engine, [Request("bad", (0, 3), 1)]), "bad") == ["nan"]


def test_a_cancelled_request_with_nan_is_forgotten() -> None:
    engine = engine_of(model_of("llama"))
    engine.add(bad_requests(1)[0])
    assert engine.step() == []
    engine.cancel("bad 0")
    assert not engine.has_work()


def test_blocks_of_a_request_with_nan_are_not_shared() -> None:
    engine, prompt = engine_of(model_of("llama")), (1, 2, 3, 4, 5, 6, 7, 8, 9)
    serve_all(engine, [Request("good", prompt, 1, GREEDY), *bad_requests(1)])
    serve_all(engine, [Request("good", prompt, 1, GREEDY)])
    assert engine.state().num_prefix_tokens == 8
    serve_all(engine, bad_requests(1))
    assert engine.state().num_prefix_tokens == 8
    serve_all(engine, [Request("bad", (*prompt, BAD), 1, GREEDY)])
    assert engine.state().num_prefix_tokens == 16
    serve_all(engine, [Request("good", prompt, 1, GREEDY)])
    assert engine.state().num_prefix_tokens == 16


def test_drafts_end_where_numbers_do() -> None:
    """A request may have tokens of a step before the NaN in it."""
    expected = tokens_of(serve_all(engine_of(model_of("llama")), good_requests()))
    engine = engine_of(model_of("llama"), speculate="ngram")
    results = serve_all(engine, [*bad_requests(2), *good_requests()])
    assert ends(results, "bad") == ["nan", "nan"]
    assert {name: found for name, found in tokens_of(results).items() if name in expected} == expected


@pytest.mark.parametrize("share", [None, PageShare(0, 2, 4)], ids=["whole", "share"])
@pytest.mark.parametrize("is_of_heads", [False, True])
def test_decodes_do_not_read_what_they_do_not_see(share: PageShare | None, is_of_heads: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, number, 2, 4, generator=generator) for number in (1, 3, 3))
    mask = torch.tensor([[True, False, True], [False, True, False]])
    seen = mask[:, None].expand(2, 2, 3) if is_of_heads else mask
    batch = PagedBatch(*[torch.ones(2)] * 3, torch.zeros(2, 1), *[torch.ones(2)] * 2, 4, 2, share=share)
    reader = SimpleNamespace(requests_at_once=lambda batch: 2, read=lambda *given: (key, value, seen))
    expected = attend_decodes(query[:, 0], reader, batch, None)
    for tensor in (key, value):
        tensor.masked_fill_(~mask[..., None, None], math.nan)
    torch.testing.assert_close(attend_decodes(query[:, 0], reader, batch, None), expected)


@pytest.mark.processes
def test_on_ranks_requests_with_nan_end_alone() -> None:
    """One alone, and others in the blocks that they have used."""
    given = [*bad_requests(1), *good_requests(), *bad_requests(3)[1:]]
    plans = [Plan(tensor=Tensor(x=2)), Plan(pipe=Pipe(2)), Plan(context=Context(2)), Plan(data=2)]
    double = lambda name: model_of(name).double()  # noqa: E731

    def rank(index: int) -> list[Any]:
        with patch.object(parallel_serving_for_tests, "whole_model", double):
            return [
                tokens_on_ranks("llama", mesh, given, EngineOptions(block_size=4, num_blocks=20, max_running=4))
                for mesh in map(Mesh, plans)
            ]

    found, _ = run_local(rank, 2, LIMIT_SECONDS)
    expected = tokens_of(serve_all(engine_of(double("llama")), good_requests()))
    for plan, one in zip(plans, found, strict=True):
        tokens = {name: tokens for name, tokens in one["tokens"].items() if name in expected}
        assert tokens == expected, plan
        assert [one["tokens"][f"bad {index}"] for index in range(3)] == [[-1]] * 3


def test_texts_with_nan_are_refused_and_generation_ends() -> None:
    model = model_of("llama")
    engine = engine_of(model)
    for compute in (
        lambda tokens: engine.embed(tokens, "mean"),
        lambda tokens: engine.score(Request("x", tokens, 1)),
    ):
        with pytest.raises(NumbersError, match="gives NaN for this text"):
            compute((1, BAD, 2))
        compute((1, 2, 3))
    with pytest.raises(NumbersError, match="gives NaN for this text"):
        generate(byte_model(), ByteTokenizer(), "ab~", num_tokens=2)


def byte_model() -> nn.Module:
    """A model of bytes that gives NaN after `~`."""
    sizes: dict[str, Any] = {"vocab_size": 257, "max_position_embeddings": 64, "num_hidden_layers": 1}
    config = DecoderConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=2, **sizes)
    model: Any = build(config)
    initialise(model, 0)
    with torch.no_grad():
        model.model.embed_tokens.weight[ord("~")] = math.inf
    return model.eval()  # type: ignore[no-any-return]


def choices_of(body: dict[str, Any]) -> Sequence[Any]:
    return [one["text"] for one in body["choices"]]


def test_over_http_that_client_alone_gets_an_error() -> None:
    options = EngineOptions(block_size=4, num_blocks=64, context_length=64)
    bias = {"logit_bias": {str(ord("~")): -100}, "temperature": 0, "max_tokens": 8}
    with serving(Engine(byte_model(), options)) as server:
        before = server.post("/v1/completions", {"prompt": "abc", **bias}).json()
        together = server.post("/v1/completions", {"prompt": ["abc", "ab~"], **bias})
        streamed = server.post("/v1/completions", {"prompt": "~~~~~~~~", "stream": True, **bias})
        scored = server.post("/v1/completions", {"prompt": "ab~c", "echo": True, "logprobs": 1, **bias})
        embedded = server.post("/v1/embeddings", {"input": "ab~c"})
        after = server.post("/v1/completions", {"prompt": "abc", **bias}).json()
        assert server.get("/health").status_code == 200
    assert choices_of(before) == choices_of(after)
    for answer in (together, scored, embedded):
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert "the model gives NaN for this text, and numbers for other texts" in error["message"]
        assert error["code"] == "not_a_number"
    assert streamed.status_code == 200  # which was sent before
    assert '"code": "not_a_number"' in streamed.text
    assert "[DONE]" not in streamed.text


def test_over_http_damaged_weights_end_the_engine() -> None:
    model: Any = byte_model()
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    with serving(Engine(model, EngineOptions(block_size=4, num_blocks=64, context_length=64))) as server:
        answer = server.post("/v1/completions", {"prompt": "abc", "max_tokens": 2})
        assert answer.status_code == 503
        assert "the engine failed" in answer.json()["error"]["message"]
        with suppress(httpx.ConnectError):  # a failed engine ends its server once those who wait are answered
            assert server.get("/health").status_code == 503
        assert "gives NaN for every text" in server.worker.failure

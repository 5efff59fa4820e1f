"""The warm-up of a server: all that it computes leaves no trace in answers, caches or counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from serving_for_tests import GREEDY, serve_all, tiny_model

from weft.data.tokenizer import ByteTokenizer
from weft.errors import WeftError
from weft.serve.engine import Engine, EngineOptions
from weft.serve.http.end_points import answer_once
from weft.serve.scheduling.grammar import Grammars
from weft.serve.scheduling.request import Request
from weft.serve.scheduling.speculation import EarlyLayers
from weft.serve.spec import ServerLimits
from weft.serve.text import ServedModel
from weft.serve.warm_up import warm_up

BYTES = ByteTokenizer()
OPTIONS = EngineOptions(block_size=4, num_blocks=60, max_running=5, token_budget=12)
REQUESTS = [Request(str(i), tuple(range(1, 4 + 5 * i)), 6, GREEDY) for i in range(4)]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"speculate": "ngram"},
    "layers": {"speculate": EarlyLayers(1)},
    "draft model": {"speculate": tiny_model("llama", seed=3)},
    "small cache": {"num_blocks": 8},
    "grammars": {"grammars": Grammars(BYTES, [BYTES.end])},
}


def seen(model_name: str, options: EngineOptions, prepare: Callable[[Engine], object]) -> tuple[Any, ...]:
    """What an engine answers, and its state, after something was done with it."""
    engine = Engine(tiny_model(model_name), options)
    prepare(engine)
    before = engine.state()
    answers = serve_all(engine, REQUESTS)
    return before, answers, replace(engine.state(), num_drafted=0)  # how many are drafted depends on times


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_warm_up_leaves_no_trace(way: str, kind: str) -> None:
    """`cuda` asks for all that a GPU computes beforehand; this engine is on a CPU."""
    options = replace(OPTIONS, **WAYS[way])
    told = list[tuple[int, int]]()
    computed = list[int]()

    @contextmanager
    def bar(title: str) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: told.append((done, total))

    def warm(engine: Engine) -> None:
        seconds = warm_up(engine, replace(options, device=kind), bar)
        assert seconds > 0

    def counted(engine: Engine) -> None:
        """The control: made-up requests are counted until they are forgotten."""
        engine.reset = lambda: computed.append(engine.state().num_generated)  # type: ignore[method-assign]
        warm_up(engine, replace(options, device=kind))

    expected = seen("llama", options, lambda engine: None)
    assert seen("llama", options, warm) == expected
    seen("llama", options, counted)
    assert computed[0] > (30 if kind == "cuda" else 1)
    assert told == [(number, len(told)) for number in range(1, len(told) + 1)]
    assert len(told) > 10 if kind == "cuda" else len(told) == 1


def test_a_cache_without_room_for_a_request_is_not_warmed_up() -> None:
    engine = Engine(tiny_model("llama"), replace(OPTIONS, block_size=1, num_blocks=4))
    warm_up(engine, replace(OPTIONS, device="cuda"))
    assert engine.state().num_generated == 0


@pytest.mark.parametrize("sizes", [{"context_length": length} for length in (5, 6, 7)] + [{"num_blocks": 2}])
def test_a_short_context_and_a_small_cache_are_warmed_up(sizes: dict[str, int]) -> None:
    options = replace(OPTIONS, **sizes)
    engine = Engine(tiny_model("llama"), options)
    assert warm_up(engine, replace(options, device="cuda")) > 0


def test_each_size_of_a_decode_is_computed() -> None:
    """A burst has as many prompts as graphs have rows, up to all that run at once."""
    engine = Engine(tiny_model("llama"), OPTIONS)
    sizes = set[int]()
    step = engine.step

    def noted() -> Any:
        found = step()
        sizes.add(len(found))
        return found

    engine.step = noted  # type: ignore[method-assign]
    warm_up(engine, replace(OPTIONS, device="cuda"))
    assert {1, 2, 4, 5} <= sizes


def served_model() -> ServedModel:
    grammars = Grammars(BYTES, [BYTES.end])
    return ServedModel("tiny", BYTES, 32, 61, frozenset([256]), grammars, None, ())


def test_an_answer_before_the_server_is_ready_goes_through_all_of_it() -> None:
    engine = Engine(tiny_model("llama"), OPTIONS)
    answer_once(served_model(), engine, ServerLimits(), "127.0.0.1")
    assert engine.state().num_generated == 3
    assert not engine.has_work()
    engine.reset()
    assert serve_all(engine, REQUESTS) == serve_all(Engine(tiny_model("llama"), OPTIONS), REQUESTS)


def test_an_answer_that_fails_before_the_server_is_ready_is_told() -> None:
    engine = Engine(tiny_model("llama"), OPTIONS)

    def fail() -> Any:
        raise RuntimeError("no step")

    engine.step = fail  # type: ignore[method-assign]
    with pytest.raises(WeftError, match=r"before the server was ready failed: .*no step"):
        answer_once(served_model(), engine, ServerLimits(), "127.0.0.1")

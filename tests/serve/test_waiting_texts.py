"""Texts that are embedded or scored: they wait as requests do, and answers go on between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from serve_for_tests import LIMIT_SECONDS, NO_CERTIFICATES, RepeatingEngine, Served, serving, wait_for

from weft.serve.scheduling.request import GeneratedToken, Request, RequestError, TokenLogprobs
from weft.serve.spec import ServerLimits
from weft.serve.worker import EngineWorker

EMBED = ("/v1/embeddings", {"input": "ab"})
SCORE = ("/v1/completions", {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0})


class NotingEngine(RepeatingEngine):
    """Notes in which order it computes. Texts, too, are held back by `go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def step(self) -> list[GeneratedToken]:
        found = super().step()
        self.order.append("step")
        return found

    def embed(self, *arguments: Any) -> torch.Tensor:
        return self._text(lambda: super(NotingEngine, self).embed(*arguments))

    def score(self, request: Request) -> list[TokenLogprobs]:
        return self._text(lambda: super(NotingEngine, self).score(request))

    def _text(self, function: Callable[[], Any]) -> Any:
        self.order.append("text")
        assert self.go_on.wait(LIMIT_SECONDS), "a test left the engine paused"
        return function()


def post(pool: ThreadPoolExecutor, served: Served, path: str, body: dict[str, Any]) -> Any:
    return pool.submit(served.post, path, body)


@pytest.mark.parametrize(("path", "body"), [EMBED, SCORE])
def test_answers_go_on_between_texts(path: str, body: dict[str, Any]) -> None:
    engine = NotingEngine()
    engine.go_on.clear()
    with ThreadPoolExecutor(5) as pool, serving(engine) as served:
        answer = post(pool, served, "/v1/completions", {"prompt": "x", "max_tokens": 20})
        wait_for(lambda: engine.held)
        texts = [post(pool, served, path, body) for _ in range(4)]
        wait_for(lambda: served.worker.num_requests == 5)
        engine.go_on.set()
        assert [one.result(LIMIT_SECONDS).status_code for one in (answer, *texts)] == [200] * 5
    assert engine.order.count("text") == 4
    assert engine.order.count("step") == 20
    words = " ".join(engine.order)
    assert "text text" not in words[: words.rindex("step")]


@pytest.mark.parametrize(("path", "body"), [EMBED, SCORE])
def test_texts_that_wait_fill_the_queue(path: str, body: dict[str, Any]) -> None:
    engine = NotingEngine()
    engine.go_on.clear()
    with ThreadPoolExecutor(2) as pool, serving(engine, max_requests=2) as served:
        held = [post(pool, served, path, body) for _ in range(2)]
        wait_for(lambda: served.worker.num_requests == 2)
        for refused in (served.post(path, body), served.post("/v1/completions", {"prompt": "x"})):
            assert (refused.status_code, refused.headers.get("retry-after")) == (429, "1")
            assert "the server holds 2 requests of at most 2" in refused.json()["error"]["message"]
        engine.go_on.set()
        assert [one.result(LIMIT_SECONDS).status_code for one in held] == [200, 200]
        assert served.post(path, body).status_code == 200
        assert served.worker.num_requests == 0


def test_places_are_held_between_the_texts_of_a_client() -> None:
    """Whatever comes meanwhile, a client whose texts have begun gets all of them."""

    worker = EngineWorker(RepeatingEngine(), max_requests=1)

    async def client() -> None:
        worker.start()
        with worker.holding(1):
            for _ in range(2):
                assert len(await worker.embed((1, 2), "mean"))
                with pytest.raises(RequestError, match="holds 1 requests of at most 1 and was asked for 1 more"):
                    worker.require_room(1)
        worker.require_room(1)
        worker.close()

    asyncio.run(asyncio.wait_for(client(), LIMIT_SECONDS))
    assert worker.join(LIMIT_SECONDS)


def test_a_prompt_that_is_scored_holds_the_places_of_its_answers() -> None:
    engine = NotingEngine()
    engine.go_on.clear()
    with ThreadPoolExecutor(1) as pool, serving(engine, max_requests=2) as served:
        several = post(pool, served, SCORE[0], {**SCORE[1], "prompt": ["ab", "cd"], "max_tokens": 1})
        wait_for(lambda: engine.order == ["text"])
        assert served.post("/v1/completions", {"prompt": "y"}).status_code == 429
        engine.go_on.set()
        assert several.result(LIMIT_SECONDS).status_code == 200
        assert served.worker.num_requests == 0


@pytest.mark.parametrize(("path", "body"), [EMBED, SCORE])
def test_texts_end_at_the_time_limit(path: str, body: dict[str, Any]) -> None:
    engine = NotingEngine()
    engine.go_on.clear()
    with serving(engine, limits=ServerLimits(request_seconds=0.2)) as served:
        late = served.post(path, body)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        assert served.worker.num_requests == 0


def test_texts_whose_clients_are_gone_are_not_computed() -> None:
    engine = NotingEngine()
    engine.go_on.clear()
    with ThreadPoolExecutor(1) as pool, serving(engine) as served:
        first = post(pool, served, *EMBED)
        wait_for(lambda: engine.order == ["text"])
        timeout = httpx.Timeout(LIMIT_SECONDS, read=0.2)
        for _ in range(3):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(served.url + EMBED[0], json=EMBED[1], timeout=timeout, **NO_CERTIFICATES)
        wait_for(lambda: served.worker.num_requests == 1)
        engine.go_on.set()
        assert first.result(LIMIT_SECONDS).status_code == 200
        assert served.post(*EMBED).status_code == 200
    assert engine.order == ["text", "text"]

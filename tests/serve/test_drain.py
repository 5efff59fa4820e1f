"""A server that stops: what an HTTP request asks for one after the other is done before the server ends."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from serve_for_tests import LIMIT_SECONDS, RepeatingEngine, serving, wait_for

from weft.serve.scheduling.request import Request, TokenLogprobs


class SlowTexts(RepeatingEngine):
    """Embeds and scores texts when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.num_texts = 0
        self.go_on.clear()

    def embed(self, *arguments: Any) -> torch.Tensor:
        self._wait()
        return super().embed(*arguments)

    def score(self, request: Request) -> list[TokenLogprobs]:
        self._wait()
        return super().score(request)

    def _wait(self) -> None:
        self.num_texts += 1
        assert self.go_on.wait(LIMIT_SECONDS), "a test left the engine paused"


CASES = [
    ("/v1/embeddings", {"input": ["ab", "c"]}),
    ("/v1/completions", {"prompt": ["ab", "c"], "echo": True, "logprobs": 1, "max_tokens": 2}),
    ("/v1/completions", {"prompt": ["ab"], "echo": True, "logprobs": 1, "max_tokens": 0}),
]


@pytest.mark.parametrize(("path", "body"), CASES)
def test_texts_of_a_request_are_computed_though_the_server_stops(path: str, body: dict[str, Any]) -> None:
    engine = SlowTexts()
    with ThreadPoolExecutor() as pool, serving(engine) as served:
        answer = pool.submit(served.post, path, body)
        wait_for(lambda: engine.num_texts == 1)
        served.server.drain()
        for refused in (served.post(path, body), served.post("/v1/chat/completions", {})):
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert "takes no more requests" in refused.json()["error"]["message"]
        assert asyncio.run(served.server.on_tick(1)) is False
        assert not served.server.should_exit
        engine.go_on.set()
        found = answer.result(LIMIT_SECONDS)
        assert found.status_code == 200, found.text
        assert len(found.json()["data" if "input" in body else "choices"]) == len(body.get("input") or body["prompt"])
        wait_for(lambda: served.server.should_exit)
        assert served.worker.num_clients == 0

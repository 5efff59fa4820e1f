"""Many clients of the real engine at once, of which some leave, and some send nonsense: every answer is right."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import httpx
import pytest
from serve_for_tests import LIMIT_SECONDS, NO_CERTIFICATES, serving, wait_for
from serving_for_tests import CONTEXT, likeliest, tiny_model

from weft.serve.engine import Engine, EngineOptions
from weft.serve.spec import ServerLimits

NUM_PROMPTS, NUM_CLIENTS = 8, 24
BAD: list[tuple[str, str, bytes, int]] = [
    *(
        ("POST", "/v1/completions", body, 400)
        for body in (
            b"{",
            b"[]",
            b'{"prompt": [61]}',
            b'{"prompt": "A", "n": 0}',
            b'{"prompt": "0", "wat": 1}',
            b"\xff",
        )
    ),
    ("POST", "/v1/completions", b'{"prompt": "' + b"A" * (CONTEXT + 1) + b'"}', 400),
    ("POST", "/v1/completions", b'{"prompt": "' + b"A" * 9000 + b'"}', 413),
    ("POST", "/v1/chat/completions", b'{"messages": [{"role": "user"}]}', 400),
    ("POST", "/v1/embeddings", b'{"input": []}', 400),
    ("POST", "/tokenize", b"{}", 400),
    ("POST", "/v1/nothing", b"{}", 404),
    ("GET", "/v1/completions", b"", 405),
]
GROWTH = 1024  # bytes a request by which memory may grow, in 8,000 requests


class Clients:
    """Sends requests of random kinds, and compares answers with `expected`, the whole answer to each prompt."""

    def __init__(self, url: str, expected: dict[str, str]) -> None:
        self.url, self.expected = url, expected
        self.seen: Counter[str] = Counter()

    async def run(self, names: Iterable[int]) -> None:
        numbers = iter(names)

        async def client() -> None:
            async with httpx.AsyncClient(base_url=self.url, timeout=10 * LIMIT_SECONDS, **NO_CERTIFICATES) as http:
                for number in numbers:
                    await self.ask(http, random.Random(number))

        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))

    async def ask(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        prompt = rng.choice(list(self.expected))
        num_tokens = rng.randint(1, len(self.expected[prompt]))
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        kind = rng.choice(["whole", "whole", "stream", "leave", "give up", "bad"])
        if kind == "whole":
            await self.whole(http, {**body, "n": rng.randint(1, 3)})
        elif kind == "give up":
            try:
                await http.post("/v1/completions", json={**body, "n": 3}, timeout=rng.uniform(0.001, 0.02))
            except httpx.TimeoutException:
                self.seen["gave up"] += 1
        elif kind == "bad":
            method, path, content, status = rng.choice(BAD)
            headers = {"Content-Type": "application/json"}
            refused = await http.request(method, path, content=content, headers=headers)
            assert refused.status_code == status, (path, content[:80], refused.text)
            assert refused.json()["error"]["message"]
            self.seen[f"refused {path} {status}"] += 1
        else:
            await self.stream(http, body, leaves_after=rng.randint(1, 3) if kind == "leave" else None)

    async def whole(self, http: httpx.AsyncClient, body: dict[str, object]) -> None:
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        right = self.expected[str(body["prompt"])][: int(str(body["max_tokens"]))]
        assert [choice["text"] for choice in response.json()["choices"]] == [right] * int(str(body["n"]))
        self.seen["whole"] += 1

    async def stream(self, http: httpx.AsyncClient, body: dict[str, object], leaves_after: int | None) -> None:
        text = ""
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    if leaves_after is not None and len(text) >= leaves_after:
                        self.seen["left"] += 1
                        break
        right = self.expected[str(body["prompt"])][: int(str(body["max_tokens"]))]
        assert right.startswith(text) if leaves_after is not None else right == text
        self.seen["streamed"] += leaves_after is None


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("num_requests", [40, pytest.param(10_000, marks=pytest.mark.soak)])
def test_many_clients_get_right_answers_and_nothing_is_left_behind(
    num_requests: int, record_property: Callable[[str, object], None]
) -> None:
    model, rng = tiny_model("llama"), random.Random(0)
    expected = {}
    for _ in range(NUM_PROMPTS):
        prompt = [rng.randrange(1, 61) for _ in range(rng.randint(1, CONTEXT // 2))]
        expected[bytes(prompt).decode()] = bytes(likeliest(model, prompt, CONTEXT - len(prompt))).decode()
    engine = Engine(model, EngineOptions(block_size=4, num_blocks=24, max_running=6, token_budget=16))
    with serving(engine, max_requests=1000, limits=ServerLimits(body_bytes=8192)) as served:
        clients = Clients(served.url, expected)
        asyncio.run(clients.run(range(num_requests // 5)))  # what is allocated once is allocated now
        before = resident_bytes()
        asyncio.run(clients.run(range(num_requests // 5, num_requests)))
        wait_for(lambda: served.worker.num_requests == 0 and not engine.has_work())
        wait_for(lambda: served.worker.state.num_free_blocks == 24)
        assert (served.worker.state.num_running, served.worker.state.num_waiting) == (0, 0)
        assert served.worker.state.num_preempted > 0
        growth = resident_bytes() - before
    record_property("seen", dict(clients.seen))
    record_property("growth", growth)
    assert {"whole", "streamed", "left", "gave up"} <= set(clients.seen)
    if num_requests > 1000:
        assert growth <= GROWTH * num_requests
        assert {f"refused {path} {status}" for _, path, _, status in BAD} <= set(clients.seen)

"""Connections that send nothing, or slowly, end and keep nobody out; a server that stops does what it has begun."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from serve_for_tests import LIMIT_SECONDS, RepeatingEngine, Served, serving, wait_for

from weft.serve.http import server
from weft.serve.scheduling.request import Request, TokenLogprobs
from weft.serve.spec import ServerLimits

PLACES = 4
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(server, "connection_places", lambda: PLACES)
    with serving(
        RepeatingEngine(), keys=["first"], limits=ServerLimits(request_seconds=1.0, body_seconds=1.0)
    ) as found:
        yield found


def connect(served: Served) -> socket.socket:
    return socket.create_connection(served.address, LIMIT_SECONDS)


def read_all(client: socket.socket) -> bytes:
    found = b""
    while part := client.recv(1 << 16):
        found += part
    return found


def error_of(answer: bytes) -> tuple[int, str]:
    """The status of an answer, and the message in its body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def test_idle_connections_give_their_places_to_new_ones(served: Served) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(served)) for _ in range(3 * PLACES)]
        with_key = {"Authorization": "Bearer first"}
        for _ in range(PLACES):
            assert served.post("/v1/completions", {"prompt": "x"}, headers=with_key).status_code == 200
            assert served.get("/health").status_code == 200
        assert error_of(read_all(idle[0])) == (503, server.FULL)


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"Content-Length: 9\r\n\r\n{"])
def test_a_connection_without_a_whole_request_ends(
    served: Served, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """A byte now and then does not lengthen its time. The third is refused for its key and sends its body."""
    monkeypatch.setattr(server, "WAIT_SECONDS", 0.5)
    with connect(served) as client:
        client.sendall(sent)
        wait_for(partial(drip, client))
    wait_for(lambda: not served.server.server_state.connections)


def drip(client: socket.socket) -> bool:
    """Send a byte. Returns whether the server has closed the connection."""
    try:
        client.sendall(b"x")
        return client.recv(1 << 16, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_a_head_that_comes_too_late_is_said(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WAIT_SECONDS", 0.2)
    with connect(served) as client:
        client.sendall(HEAD)
        status, words = error_of(read_all(client))
    assert (status, words) == (408, "the head of the request did not arrive within 0.2 s")


def test_what_is_not_http_is_refused_as_json(served: Served) -> None:
    with connect(served) as client:
        client.sendall(b"\x16\x03\x01 no http\r\n\r\n")
        assert error_of(read_all(client))[0] == 400


def test_a_client_that_asks_and_never_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the time of an answer that the engine computes."""
    monkeypatch.setattr(server, "SHORT_SECONDS", 0.5)
    with serving(RepeatingEngine()) as served, connect(served) as client:
        client.setblocking(False)

        def ask() -> bool:
            try:
                while client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100):
                    pass
            except BlockingIOError:
                return False
            except OSError:
                return True
            return False

        wait_for(ask)


def test_when_every_place_is_busy_a_new_client_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "connection_places", lambda: PLACES)
    engine = RepeatingEngine()
    engine.go_on.clear()
    body = b'{"prompt": "x"}'
    with serving(engine) as served, ExitStack() as stack:
        for _ in range(PLACES):
            client = stack.enter_context(connect(served))
            client.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: served.worker.num_requests == PLACES)
        refused = served.get("/health")
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, server.FULL)
        engine.go_on.set()


def test_the_system_is_asked_for_as_many_connections_as_it_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[int, int]]()
    limits = {"value": (1024, 4096)}
    monkeypatch.setattr(server.resource, "getrlimit", lambda which: limits["value"])
    monkeypatch.setattr(server.resource, "setrlimit", lambda which, value: asked.append(value))
    assert server.connection_places() == 2048
    assert asked == [(2368, 4096)]
    limits["value"] = (1024, 1024)
    assert server.connection_places() == 1024 - 320


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_requests_end(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGHUP comes when a terminal is closed. It ended the server's loop by an error."""
    monkeypatch.setattr(server.HttpServer, "_end_after", lambda *_: None)  # it would end this process later
    before = signal.signal(number, signal.SIG_DFL)  # under nohup, a hangup is ignored
    engine = RepeatingEngine()
    engine.go_on.clear()
    with ThreadPoolExecutor() as pool, serving(engine) as served, served.server.capture_signals():
        answer = pool.submit(served.post, "/v1/completions", {"prompt": "ab", "max_tokens": 2})
        wait_for(lambda: engine.requests)
        signal.raise_signal(number)
        assert served.post("/v1/completions", {"prompt": "ab"}).status_code == 503
        engine.go_on.set()
        assert answer.result(LIMIT_SECONDS).status_code == 200
        wait_for(lambda: served.server.should_exit)
    signal.signal(number, before)


def test_a_hangup_that_nohup_has_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with serving(RepeatingEngine()) as served, served.server.capture_signals():
            signal.raise_signal(signal.SIGHUP)
            assert served.post("/v1/completions", {"prompt": "ab", "max_tokens": 2}).status_code == 200
    finally:
        signal.signal(signal.SIGHUP, before)

"""The server's edges: keys, bodies, queues, disconnects, failures and the end of the server."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from serve_for_tests import LIMIT_SECONDS, NO_CERTIFICATES, RepeatingEngine, Served, serving, wait_for

from weft import __version__
from weft.serve import worker as worker_module
from weft.serve.http import request_body
from weft.serve.http.guard import HttpGuard, read_body
from weft.serve.http.metrics import ServerMetrics
from weft.serve.http.request_body import ApiError
from weft.serve.spec import ServerLimits
from weft.serve.worker import StepLimit

FOREVER = 1 << 30


@pytest.fixture(scope="module")
def engine() -> RepeatingEngine:
    return RepeatingEngine()


@pytest.fixture(scope="module")
def served(engine: RepeatingEngine) -> Iterator[Served]:
    limits = ServerLimits(body_bytes=4096, body_seconds=0.5)
    with serving(engine, limits=limits, keys=["first", "second"], max_requests=3, template=None) as found:
        yield found


KEY = {"Authorization": "Bearer first"}


def message(response: httpx.Response) -> str:
    """The message of an error, which must have OpenAI's form."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if response.status_code >= 500 else error["type"])
    return str(error["message"])


def test_the_api_key(served: Served, engine: RepeatingEngine) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for headers in (
        {},
        {"Authorization": "Bearer firs"},
        {"Authorization": "Basic first"},
        {"Authorization": "Bearer \xe9"},
    ):
        refused = served.post("/v1/completions", body, headers=[(k, v.encode("latin-1")) for k, v in headers.items()])
        assert refused.status_code == 401
        assert message(refused).startswith("the API key is missing or wrong")
    for path in ("/v1/models", "/metrics"):
        assert served.get(path).status_code == 401
    for path in ("/", "/health"):
        assert served.get(path).status_code == 200
    for key, tenant in (("first", "0/"), ("second", "1/")):
        assert served.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert engine.requests[-1].tenant == tenant
    for given in ("bearer first", "BEARER first", "Bearer  first"):  # the scheme's case does not matter (RFC 9110)
        assert served.post("/v1/completions", body, headers={"Authorization": given}).status_code == 200


def test_another_host_name_is_refused(served: Served) -> None:
    """A page of a stranger whose name was made to lead to this machine."""
    refused = served.get("/health", headers={"Host": "evil.example"})
    assert refused.status_code == 403
    assert "not as 'evil.example'" in message(refused)
    assert served.get("/health", headers={"Host": "localhost:1"}).status_code == 200


def test_pages_of_allowed_origins_may_ask_from_a_browser() -> None:
    """A browser asks first, without the key, whether a page may send one."""
    ours, other = "https://chat.example", "https://evil.example"
    with serving(RepeatingEngine(), keys=["first"], origins=[ours]) as served:

        def asked_first(origin: str) -> httpx.Response:
            wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
            url = f"{served.url}/v1/completions"
            return httpx.options(url, headers={"Origin": origin, **wanted}, timeout=LIMIT_SECONDS, **NO_CERTIFICATES)

        assert asked_first(ours).status_code == 200
        assert asked_first(ours).headers["access-control-allow-origin"] == ours
        assert "authorization" in asked_first(ours).headers["access-control-allow-headers"]
        assert asked_first(other).status_code == 400
        for origin, allowed in ((ours, ours), (other, None)):
            answer = served.post("/v1/completions", {"prompt": "x"}, headers={**KEY, "Origin": origin})
            assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (200, allowed)
        refused = served.post("/v1/completions", {"prompt": "x"}, headers={"Origin": ours})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ours)


def test_no_page_of_another_origin_may_ask_unless_it_is_allowed(served: Served) -> None:
    answer = served.post("/v1/completions", {"prompt": "x"}, headers={**KEY, "Origin": "https://chat.example"})
    assert "access-control-allow-origin" not in answer.headers


BAD_BODIES = [
    (b"{", "not valid JSON"),
    (b"[" * 100_00, "not valid JSON"),
    (b'{"prompt": NaN}', "NaN is no JSON number"),
    (b"[1]", "it must be an object"),
    (b"\xff\xfe", "not valid JSON"),
    ({}, "'prompt' is None"),
    ({"prompt": 3}, "'prompt' is 3; it must be a text"),
    ({"prompt": []}, "'prompt' has 0 prompts"),
    ({"prompt": [True]}, "'prompt' is [True]"),
    ({"prompt": [["a"]]}, "'prompt' is [['a']]"),
    ({"prompt": [257]}, "'prompt' has the token 257; tokens of this model are from 0 to 256"),
    ({"prompt": [-1]}, "token -1"),
    ({"prompt": [10**30]}, "token 1000"),
    ({"prompt": "\ud800"}, "surrogate"),
    ({"prompt": "x", "cache_salt": "\ud800"}, "surrogate"),
    ({"prompt": "x", "\ud800": 1}, "surrogate"),
    ({"prompt": "x", "logit_bias": {"1": 10**400}}, "finite numbers"),
    ({"prompt": "x", "promt": "x"}, "unknown key 'promt'; did you mean 'prompt'?"),
    ({"prompt": "x", "beam": 2}, "unknown key 'beam'"),
    ({"prompt": "x", "n": 2, "best_of": 1}, "'best_of' = 1 needs 'n' of at most as many answers, and no 'stream'"),
    ({"prompt": "x", "best_of": 2, "stream": True}, "'best_of' = 2 needs"),
    ({"prompt": ["x"] * 100, "best_of": 2}, "100 prompts with 'best_of' = 2 are more than 128 answers"),
    ({"prompt": "x", "n": 0}, "'n' = 0; it must be from 1 to 128"),
    ({"prompt": ["x"] * 100, "n": 2}, "100 prompts with 'n' = 2 are more than 128 answers"),
    ({"prompt": "x", "max_tokens": 0}, "'max_tokens' = 0 generates nothing"),
    ({"prompt": "x", "max_tokens": "many"}, "'max_tokens' = 'many' (a string) but it expects an integer"),
    ({"prompt": "x", "logprobs": 21}, "'logprobs' = 21"),
    ({"prompt": "x", "logprobs": 5e4}, "'logprobs' = 50000"),
    ({"prompt": "x", "logprobs": "50K"}, "'logprobs' = 51200"),
    ({"prompt": "x", "n": 0.0}, "'n' = 0; it must be from 1 to 128"),
    ({"prompt": "x", "stop": [""]}, "each text of 'stop' must have"),
    ({"prompt": "x", "stop": ["a"] * 17}, "'stop' has 17 entries"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "'logit_bias' must be"),
    ({"prompt": "x", "seed": 1 << 63}, "'seed' ="),
    ({"prompt": "x", "stream": "yes"}, "'stream' = 'yes'"),
]


def test_bad_bodies_are_refused_in_words(served: Served, engine: RepeatingEngine) -> None:
    before = len(engine.requests)
    for body, words in BAD_BODIES:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {**KEY, "Content-Type": "application/json"}
        response = served.post("/v1/completions", headers=headers, content=data[:4096])
        assert response.status_code == 400, (body, response.text)
        assert words in message(response), body
    assert len(engine.requests) == before


def test_a_bias_of_too_many_tokens_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(request_body.MAX_LENGTHS, "logit_bias", 2)
    response = served.post("/v1/completions", {"prompt": "x", "logit_bias": {"1": 1, "2": 1, "3": 1}}, headers=KEY)
    assert (response.status_code, message(response)) == (400, "'logit_bias' has 3 entries; at most 2 are taken")


def test_bad_chats_are_refused_in_words(served: Served) -> None:
    cases = [
        ({"messages": [{"role": "user", "content": "x"}]}, "'tiny' has no chat template; use /v1/completions"),
        ({"messages": []}, "'messages' is []"),
        ({"messages": [{"content": "x"}]}, "'messages[0]' is {'content': 'x'}; it must be an object with a 'role'"),
        ({"messages": [{"role": "user"}]}, "'messages[0].content' is None"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text is taken"),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "needs 'logprobs' true"),
        ({"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, "'tool_choice' = 'required'"),
    ]
    for body, words in cases:
        response = served.post("/v1/chat/completions", body, headers=KEY)
        assert response.status_code == 400
        assert words in message(response), body


def test_wrong_paths_methods_and_types(served: Served) -> None:
    assert served.get("/v1/nothing", headers=KEY).status_code == 404
    assert served.get("/v1/completions", headers=KEY).status_code == 405
    refused = served.post("/v1/completions", headers={**KEY, "Content-Type": "text/plain"}, content=b"{}")
    assert (refused.status_code, message(refused)[:22]) == (415, "the body's type is 'te")


def test_a_body_that_is_too_large_or_too_slow(served: Served) -> None:
    large = served.post("/v1/completions", {"prompt": "x" * 5000}, headers=KEY)
    assert (large.status_code, message(large)) == (413, "the body is larger than 4096 bytes; send a shorter prompt")
    pieces = (b"x" * 1000 for _ in range(9))  # without a length
    chunked = served.post("/v1/completions", headers={**KEY, "Content-Type": "application/json"}, content=pieces)
    assert chunked.status_code == 413
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_SECONDS) as slow:
        head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer first\r\nContent-Length: 9\r\n"
        slow.sendall(f"{head}Content-Type: application/json\r\n\r\n{{".encode())
        assert slow.recv(100).startswith(b"HTTP/1.1 408 ")


def test_bytes_of_a_body_beyond_the_limit_are_not_kept() -> None:
    class Part:
        """A part of a body that has a length, and no bytes that could be kept."""

        def __len__(self) -> int:
            return 5000

    async def parts() -> AsyncIterator[Any]:
        for _ in range(3):
            yield Part()

    request: Any = SimpleNamespace(headers={"content-type": "application/json"}, stream=parts)
    with pytest.raises(ApiError, match="larger than 4096 bytes"):
        asyncio.run(read_body(request, ServerLimits(body_bytes=4096)))


def test_tokenize(served: Served) -> None:
    assert served.post("/tokenize", {"prompt": "hi"}, headers=KEY).json() == {
        "tokens": [104, 105], "count": 2, "context_length": 64,
    }  # fmt: skip
    assert served.post("/tokenize", {}, headers=KEY).status_code == 400


def test_tokens_have_their_text_again(served: Served) -> None:
    for tokens, text in (([104, 195, 169, 105], "héi"), ([104, 256], "h"), ([], "")):
        found = served.post("/detokenize", {"tokens": tokens}, headers=KEY)
        assert (found.status_code, found.json()) == (200, {"prompt": text})
    for tokens, words in (([257], "the token 257; tokens of"), ("hi", "'tokens' is 'hi'"), ([True], "'tokens' is [Tr")):
        refused = served.post("/detokenize", {"tokens": tokens}, headers=KEY)
        assert (refused.status_code, words in message(refused)) == (400, True), message(refused)


def test_the_version_is_told_to_who_has_a_key(served: Served) -> None:
    assert served.get("/version", headers=KEY).json() == {"version": __version__}
    assert served.get("/version").status_code == 401


def open_stream(served: Served, max_tokens: int = FOREVER) -> httpx.Response:
    """A stream of which nothing was read yet."""
    client = httpx.Client(timeout=LIMIT_SECONDS, **NO_CERTIFICATES)
    body = {"prompt": "x", "max_tokens": max_tokens, "stream": True}
    request = client.build_request("POST", f"{served.url}/v1/completions", json=body, headers=KEY)
    response = client.send(request, stream=True)
    assert response.status_code == 200
    return response


def test_a_full_queue_and_disconnects(served: Served, engine: RepeatingEngine) -> None:
    """Requests beyond the limit are refused; those whose client is gone are cancelled before the next step."""
    streams = [open_stream(served) for _ in range(2)]
    whole = threading.Thread(target=give_up_after_a_second, args=(served,))
    whole.start()
    wait_for(lambda: len(engine.held) == 3)
    engine.go_on.clear()
    full = served.post("/v1/completions", {"prompt": "x"}, headers=KEY)
    assert (full.status_code, full.headers["retry-after"]) == (429, "1")
    assert "the server holds 3 requests of at most 3" in message(full)
    num_before, num_cancelled = engine.num_generated, len(engine.cancelled)
    for stream in streams:
        stream.close()
    whole.join(LIMIT_SECONDS)
    wait_for(lambda: served.worker.num_requests == 0)
    engine.go_on.set()
    wait_for(lambda: len(engine.cancelled) == num_cancelled + 3)
    assert engine.num_generated - num_before <= 3  # the step that was under way
    assert served.post("/v1/completions", {"prompt": "x"}, headers=KEY).status_code == 200


def give_up_after_a_second(served: Served) -> None:
    body, timeout = {"prompt": "x", "max_tokens": FOREVER}, httpx.Timeout(LIMIT_SECONDS, read=1.0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/completions", json=body, headers=KEY, timeout=timeout, **NO_CERTIFICATES)


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"echo": True, "logprobs": 1}])
def test_more_answers_than_the_server_ever_holds_are_refused_for_good(
    served: Served, engine: RepeatingEngine, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setattr(engine, "score", lambda request: pytest.fail("a prompt was scored for nothing"))
    refused = served.post("/v1/completions", {"prompt": "x", "n": 4, **more}, headers=KEY)
    assert (refused.status_code, "retry-after" in refused.headers) == (400, False)
    assert message(refused).startswith("4 answers at once are more than the 3 requests that this server holds")


def metric(served: Served, name: str) -> float:
    lines = served.get("/metrics", headers=KEY).text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


def test_tokens_of_prompts_count_once_for_each_answer_when_they_are_taken(served: Served) -> None:
    before = metric(served, "weft_prompt_tokens_total")
    for body, status in (
        ({"prompt": "x" * 65}, 400),
        ({"prompt": "x", "n": 4}, 400),
        ({"prompt": "abc", "n": 3, "max_tokens": 1}, 200),
        ({"prompt": "abcd", "echo": True, "logprobs": 0, "max_tokens": 0}, 200),
    ):
        assert served.post("/v1/completions", body, headers=KEY).status_code == status
    assert metric(served, "weft_prompt_tokens_total") - before == 3 * 3 + 4


def test_responses_are_counted_by_end_point_without_a_route_in_the_scope() -> None:
    """Older versions of starlette set none."""
    metrics = ServerMetrics()

    async def end_point(*_: object) -> None: ...

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["endpoint"] = end_point
        await send({"type": "http.response.start", "status": 200})

    async def send(event: object) -> None: ...

    guard = HttpGuard(app, (), None, metrics, {end_point: "/v1/models"})
    scope = {"type": "http", "headers": [], "path": "/v1/models"}
    asyncio.run(guard(scope, send, send))  # type: ignore[arg-type]
    assert metrics.responses == {("/v1/models", 200): 1}


def test_metrics_and_health(served: Served) -> None:
    served.post("/v1/completions", {"prompt": "abc", "max_tokens": 4}, headers=KEY)
    lines = served.get("/metrics", headers=KEY).text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values['weft_responses_total{endpoint="/v1/completions",status="200"}']) >= 1
    assert float(values["weft_generated_tokens_total"]) >= 4
    assert float(values["weft_time_to_first_token_seconds_count"]) >= 1
    assert values['weft_request_seconds_bucket{le="+Inf"}'] == values["weft_request_seconds_count"]
    assert float(values["weft_cache_blocks"]) == 8
    assert served.get("/v1/completions", headers=KEY).status_code == 405
    assert served.get("/nothing", headers=KEY).status_code == 404
    counted = served.get("/metrics", headers=KEY).text
    assert 'weft_responses_total{endpoint="/v1/completions",status="405"}' in counted
    assert 'weft_responses_total{endpoint="other",status="404"}' in counted
    health = served.get("/health").json()
    assert (health["status"], health["weights"]) == ("ok", "step-00000001")


def test_requests_end_at_the_time_limit() -> None:
    engine = RepeatingEngine()
    engine.go_on.clear()
    with serving(engine, limits=ServerLimits(request_seconds=0.2)) as served:
        late = served.post("/v1/completions", {"prompt": "x"})
        assert late.status_code == 504
        text = served.post("/v1/completions", {"prompt": "x", "stream": True}).text
        assert json.loads(text.removeprefix("data: "))["error"]["code"] == "timeout"
        assert served.worker.num_requests == 0


def test_an_engine_that_fails_answers_503_to_all_who_wait_and_the_server_ends(
    capfd: pytest.CaptureFixture[str],
) -> None:
    engine = RepeatingEngine()
    with ThreadPoolExecutor() as pool, serving(engine) as served:
        stream = open_stream(served)
        engine.go_on.clear()
        bodies = {"/v1/completions": {"prompt": "x"}, "/v1/embeddings": {"input": "x"}}
        others = [pool.submit(served.post, path, body) for path, body in bodies.items()]
        wait_for(lambda: served.worker.num_clients == 3)
        engine.error = ValueError("the device is lost")
        engine.go_on.set()
        text = "".join(stream.iter_text())
        assert "the engine failed, and with it this answer; the server's log says why. Ask again in" in text
        assert "the device is lost" not in text  # a traceback's words are for operators
        for one in others:
            after = one.result(LIMIT_SECONDS)
            assert (after.status_code, after.json()["error"]["code"]) == (503, "unavailable")
        wait_for(lambda: served.server.should_exit)
    assert "ValueError: the device is lost" in capfd.readouterr().err


def test_a_step_of_many_tokens_may_take_as_long_as_its_tokens_need() -> None:
    """On a slow CPU, a prompt takes longer than ten decodes, and than 20 seconds."""
    limit = StepLimit()
    assert limit.seconds(1) == pytest.approx(101)
    assert limit.seconds(2048) > 2048  # before a step was measured
    for _ in range(20):
        limit.add(1, 0.05)  # decodes
    assert limit.seconds(1) == 20
    assert limit.seconds(2048) == pytest.approx(10 * 2048 * 0.05)
    for _ in range(15):
        limit.add(2048, 40.0)
    assert limit.seconds(2048) == pytest.approx(400)
    assert limit.seconds(1) == pytest.approx(400)  # a larger step bounds it, too
    for _ in range(15):
        limit.add(4, 0.001)
    assert limit.seconds(8) == 20


def test_health_is_503_while_a_step_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "STALL_SECONDS", 0.3)
    engine = RepeatingEngine()
    with ThreadPoolExecutor() as pool, serving(engine) as served:
        assert served.post("/v1/completions", {"prompt": "xyz"}).status_code == 200
        engine.go_on.clear()
        waiting = pool.submit(served.post, "/v1/completions", {"prompt": "x"})
        wait_for(lambda: served.get("/health").status_code == 503)
        assert "a step has lasted" in served.get("/health").json()["status"]
        engine.num_step_tokens = 1 << 20  # a long prompt takes as long as its tokens need
        assert served.get("/health").status_code == 200
        engine.num_step_tokens = 1
        engine.go_on.set()
        assert waiting.result(LIMIT_SECONDS).status_code == 200
        wait_for(lambda: served.get("/health").json()["status"] == "ok")
        engine.go_on.clear()
        waiting = pool.submit(served.post, "/v1/completions", {"prompt": "x"})
        wait_for(lambda: served.get("/health").status_code == 503)
        served.server.drain()  # as on SIGTERM: the clients of a step that does not end are not waited for
        wait_for(lambda: served.server.should_exit)
        engine.go_on.set()


def test_a_server_that_stops_finishes_what_it_has() -> None:
    engine = RepeatingEngine()
    with serving(engine) as served:
        engine.go_on.clear()
        stream = open_stream(served, max_tokens=3)
        served.server.drain()
        refused = served.post("/v1/completions", {"prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert served.get("/health").status_code == 503
        engine.go_on.set()
        text = "".join(stream.iter_text())
        assert text.count('"text": "x"') == 3
        assert text.endswith("data: [DONE]\n\n")
        wait_for(lambda: served.server.should_exit)


def test_a_server_that_stops_does_not_wait_for_ever() -> None:
    engine = RepeatingEngine()
    with serving(engine, limits=ServerLimits(drain_seconds=0.3)) as served:
        stream = open_stream(served)
        served.server.drain()
        assert "the server stops" in "".join(stream.iter_text())

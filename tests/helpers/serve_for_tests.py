"""A server on a loopback port in a thread, over an engine that repeats prompts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import torch
from torch import nn

from weft.data.chat_template import ChatTemplate
from weft.data.tokenizer import ByteTokenizer, Tokenizer
from weft.plan import Plan
from weft.serve.http.addresses import listen
from weft.serve.http.end_points import Api, build_app
from weft.serve.http.run_server import Serving
from weft.serve.http.server import HttpServer
from weft.serve.scheduling.grammar import Grammars
from weft.serve.scheduling.request import EngineState, GeneratedToken, Request, RequestError, TokenLogprobs
from weft.serve.spec import ServerLimits, ServingSpec
from weft.serve.text import ServedModel
from weft.serve.worker import EngineWorker, StepEngine

TEMPLATE = (
    "{% if tools %}[{{ tools[0].function.name }}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LIMIT_SECONDS = 60.0
OPTIONS = ServingSpec(port=0, device="cpu", tokenizer="bytes", max_running=2, max_waiting=2, token_budget=16)
# Clients of a loopback port encrypt nothing. Without this, each of them reads all certificates of the machine.
NO_CERTIFICATES: dict[str, Any] = {"verify": False}


def to_serve(source: Path, spec: ServingSpec, plan: Plan = Plan()) -> Serving:  # noqa: B008 (a frozen value)
    """What `weft serve` is asked for, by a caller who is told nothing."""
    return Serving(source, spec, plan, lambda about: None, lambda message: None)


class ReachedError(Exception):
    """What a test replaced was called; what follows is of no interest."""


class RepeatingEngine:
    """Answers with the prompt's own tokens, again and again. `go_on` holds the steps back; `error` fails them."""

    context_length, vocab_size = 64, 257
    num_step_tokens, token_budget = 1, 64

    def __init__(self) -> None:
        self.held: dict[str, list[Any]] = {}  # request and the number of its tokens
        self.go_on = threading.Event()
        self.go_on.set()
        self.cancelled: list[str] = []
        self.requests: list[Request] = []
        self.error: Exception | None = None
        self.logprob = -0.5
        self.num_cached = 0
        self.num_generated = 0

    def add(self, request: Request) -> None:
        if len(request.tokens) > self.context_length:
            raise RequestError("too_long", f"a prompt of {len(request.tokens)} tokens is longer than 64")
        if request.sampling.temperature > 100:
            raise RequestError("invalid", "temperature is above 100")
        self.requests.append(request)
        self.held[request.name] = [request, 0]

    def cancel(self, name: str) -> None:
        if self.held.pop(name, None) is not None:
            self.cancelled.append(name)

    def has_work(self) -> bool:
        return bool(self.held)

    def step(self) -> list[GeneratedToken]:
        assert self.go_on.wait(LIMIT_SECONDS), "a test left the engine paused"
        time.sleep(0.001)  # as a device would
        if self.error is not None:
            raise self.error
        return [self._next(*pair) for pair in list(self.held.values())]

    def _next(self, request: Request, number: int) -> GeneratedToken:
        token = request.tokens[number % len(request.tokens)]
        finish = "stop" if token in request.stop_tokens else "length" if number + 1 == request.max_tokens else None
        self.num_generated += 1
        if finish is None:
            self.held[request.name][1] += 1
        else:
            del self.held[request.name]
        logprobs = None if request.sampling.num_logprobs is None else self._logprobs(request, token)
        return GeneratedToken(request.name, token, logprobs, finish, self.num_cached)  # type: ignore[arg-type]

    def _logprobs(self, request: Request, token: int) -> TokenLogprobs:
        count = request.sampling.num_logprobs or 0
        return TokenLogprobs(self.logprob, tuple((token + i, self.logprob - i) for i in range(count)))

    def score(self, request: Request) -> list[TokenLogprobs]:
        if len(request.tokens) > self.context_length:
            raise RequestError("too_long", f"a prompt of {len(request.tokens)} tokens is longer than 64")
        return [self._logprobs(request, token) for token in request.tokens[1:]]

    def state(self) -> EngineState:
        return EngineState(len(self.held), 0, 8, max(0, 8 - len(self.held)), 16, 0, 0, self.num_generated)

    def replace_weights(self, model: nn.Module) -> None: ...

    def replace_weights_from(self, checkpoint: Path) -> None: ...

    def idle(self) -> None: ...

    def embed(self, tokens: Sequence[int], pool: str) -> torch.Tensor:
        values = torch.tensor(tokens, dtype=torch.float32)
        return torch.stack([values.mean() if pool == "mean" else values[-1], values.sum()])


class Served:
    """A server that runs: its address, and what it is made of."""

    def __init__(self, server: HttpServer, worker: EngineWorker, api: Api, url: str) -> None:
        self.server, self.worker, self.api, self.url = server, worker, api, url

    @property
    def address(self) -> tuple[str, int]:
        """Its host and port."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return httpx.post(self.url + path, timeout=LIMIT_SECONDS, **NO_CERTIFICATES, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=LIMIT_SECONDS, **NO_CERTIFICATES, **options)


@contextmanager
def serving(
    engine: StepEngine,
    *,
    limits: ServerLimits = ServerLimits(),  # noqa: B008 (a frozen value)
    keys: Sequence[str] = (),
    max_requests: int = 64,
    template: str | None = TEMPLATE,
    adapters: tuple[str, ...] = (),
    host: str = "127.0.0.1",
    origins: Sequence[str] = (),
    tokenizer: Tokenizer = ByteTokenizer(),  # noqa: B008 (a frozen value)
    special: Mapping[str, str] = MappingProxyType({}),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Served]:
    """Serve an engine from a thread, until the block ends. `special` are variables of the template, `defaults` those of
    a request's keys.
    """
    chat = None if template is None else ChatTemplate(template, special, "the test")
    ends, sizes = frozenset([tokenizer.end]), (engine.context_length, engine.vocab_size)
    model = ServedModel("tiny", tokenizer, *sizes, ends, Grammars(tokenizer, ends), chat, adapters, defaults)
    worker = EngineWorker(engine, max_requests)
    api = Api(model, worker, limits, "step-00000001")
    ready = threading.Event()
    server = HttpServer(build_app(api, keys, host, origins), worker, limits, ready.set)
    sock = listen(host, 0)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])))
    thread.start()
    try:
        assert ready.wait(LIMIT_SECONDS)
        yield Served(server, worker, api, f"http://{host}:{sock.getsockname()[1]}")
    finally:
        if isinstance(engine, RepeatingEngine):
            engine.go_on.set()
        server.should_exit = True
        thread.join(LIMIT_SECONDS)
        assert worker.join(LIMIT_SECONDS)


def wait_for(condition: Any) -> None:
    """Wait until a condition holds, for a minute at most."""
    tick = threading.Event()
    for _ in range(int(LIMIT_SECONDS / 0.02)):
        if condition():
            return
        tick.wait(0.02)
    raise AssertionError("it did not happen within a minute")


def is_in_event_loop() -> bool:
    """Does the caller run in the thread of an event loop?"""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True

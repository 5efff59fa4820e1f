"""The HTTP server's end points: OpenAI's API, and what operators need.

app = build_app(Api(model, worker, ServerLimits()), api_keys=["secret"])      # an ASGI application
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import resources
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.errors import WeftError
from weft.serve.http.addresses import names_of, url_name
from weft.serve.http.answers import AnswerForm, ChatForm, CompletionForm, TokenWords, json_body, json_text
from weft.serve.http.chat_body import ChatBody, chat
from weft.serve.http.guard import ERROR_HANDLERS, HttpGuard, OpenRequests, read_body, unless_disconnected
from weft.serve.http.metrics import ServerMetrics
from weft.serve.http.request_body import (
    MAX_INPUTS,
    ApiError,
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    Generation,
    TokenizeBody,
    completion,
    messages_of,
    parse_body,
    prompts_of,
    refuse_other_model,
    text_of,
)
from weft.serve.http.responses import ResponsesBody, RunningResponse
from weft.serve.http.running_answer import EventStream, RunningAnswer, SchemaQueue
from weft.serve.spec import ServerLimits
from weft.serve.text import ServedModel
from weft.serve.worker import EngineWorker, StepEngine
from weft.version import VERSION

_NUM_TOKENS, _END_SECONDS = 4, 10.0  # of the answer before the server is ready, and for its thread to end
B = TypeVar("B")
T = TypeVar("T")
LARGE_BYTES = 256 << 10  # of a body that takes Python a while
PAGE = "page.html"
# The page loads nothing, from nowhere; it talks to this server alone.
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)


class Api:
    """The end points. `fingerprint` names the weights in use; `--follow` changes it."""

    def __init__(
        self,
        model: ServedModel,
        worker: EngineWorker,
        limits: ServerLimits,
        fingerprint: str = "",
        warm_up_seconds: float | None = None,
    ) -> None:
        self._model, self._worker, self._limits = model, worker, limits
        self.fingerprint = fingerprint
        self._warm_up_seconds = warm_up_seconds
        self.metrics = ServerMetrics(warm_up_seconds)
        self._created = int(time.time())
        self._words = TokenWords(model.tokenizer)
        self._schemas = SchemaQueue(model.grammars)
        self._large = ThreadPoolExecutor(1, "large bodies")
        self._page = resources.files("weft.serve.http").joinpath(PAGE).read_text(encoding="utf-8")

    @property
    def routes(self) -> list[Route]:
        """Every end point."""
        counted = [Middleware(OpenRequests, self._worker)]
        return [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/metrics", self.prometheus),
            Route("/version", self.version),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.one_model),
            Route("/v1/completions", self.completions, methods=["POST"], middleware=counted),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"], middleware=counted),
            Route("/v1/responses", self.responses, methods=["POST"], middleware=counted),
            Route("/v1/embeddings", self.embeddings, methods=["POST"], middleware=counted),
        ]

    async def page(self, request: HttpRequest) -> Response:
        return HTMLResponse(self._page, headers={"Content-Security-Policy": PAGE_POLICY})

    async def health(self, request: HttpRequest) -> Response:
        refusal, state, stalled = self._worker.refusal, self._worker.state, self._worker.stalled_seconds
        status = "ok" if refusal is None else str(refusal)
        if refusal is None and stalled is not None:
            status = f"a step has lasted {stalled:.0f} s: the device or another rank hangs, or the step is very long"
        body = {
            "status": status,
            "weights": self.fingerprint,
            "warm_up_seconds": self._warm_up_seconds,
            "num_running": state.num_running,
            "num_waiting": state.num_waiting,
            "num_generated": state.num_generated,
            "cache_share": 1 - state.num_free_blocks / max(1, state.num_blocks),
        }
        return JSONResponse(body, 200 if status == "ok" else 503)

    async def prometheus(self, request: HttpRequest) -> Response:
        text = self.metrics.text(self._worker.state, self._worker.num_requests)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def version(self, request: HttpRequest) -> Response:
        return JSONResponse({"version": VERSION})

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._about_model(name) for name in self._names]})

    async def one_model(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        refuse_other_model(name, self._names)
        return JSONResponse(self._about_model(name))

    @property
    def _names(self) -> tuple[str, ...]:
        """The model, and its adapters."""
        return self._model.name, *self._model.adapters

    def _about_model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "parent": None if name == self._model.name else self._model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "weft",
            "context_length": self._model.context_length,
            "vocab_size": self._model.vocab_size,
            "has_chat_template": self._model.template is not None,
        }

    async def tokenize(self, request: HttpRequest) -> Response:
        body = await self._read(TokenizeBody, request, self._names)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give 'prompt' or 'messages', and not both")
        if body.prompt is not None:
            tokens = await self._beside(request, self._model.encode, body.prompt, body.add_special_tokens)
        else:
            adds = body.add_special_tokens is True
            tokens = await self._beside(request, lambda: self._model.encode_chat(messages_of(body.messages), (), adds))
        found = {"tokens": tokens, "count": len(tokens), "context_length": self._model.context_length}
        return JSONResponse(found)

    async def detokenize(self, request: HttpRequest) -> Response:
        body = await self._read(DetokenizeBody, request, self._names)
        return JSONResponse({"prompt": await self._beside(request, text_of, body.tokens, self._model)})

    async def completions(self, request: HttpRequest) -> Response:
        body = await self._read(CompletionBody, request, self._names)
        asked = await self._beside(request, completion, body, self._model, request.scope["tenant"])
        return await self._respond(request, asked, CompletionForm(self._words, asked.has_logprobs))

    async def chat_completions(self, request: HttpRequest) -> Response:
        body = await self._read(ChatBody, request, self._names)
        asked = await self._beside(request, chat, body, self._model, request.scope["tenant"])
        return await self._respond(request, asked, ChatForm(self._words, asked.has_logprobs, asked.answer))

    async def responses(self, request: HttpRequest) -> Response:
        body = await self._read(ResponsesBody, request, self._names)
        asked = await self._beside(request, lambda: chat(body.as_chat(), self._model, request.scope["tenant"]))
        return await self._respond(request, asked, ChatForm(self._words, False, asked.answer), RunningResponse)

    async def embeddings(self, request: HttpRequest) -> Response:
        body = await self._read(EmbeddingsBody, request, (self._model.name,))
        adds = body.add_special_tokens
        inputs = await self._beside(request, prompts_of, body.input, self._model, "input", adds, MAX_INPUTS)
        rows = []
        async with asyncio.timeout(self._limits.request_seconds):
            with self._worker.holding(1):
                for index, tokens in enumerate(inputs):
                    vector = await unless_disconnected(request.receive, self._worker.embed(tokens, body.pool))
                    vector = _shortened(vector, body.dimensions)
                    packed = base64.b64encode(vector.astype("<f4").tobytes()).decode()
                    value = packed if body.encoding_format == "base64" else vector.tolist()
                    rows.append(json_text({"object": "embedding", "index": index, "embedding": value}))
        count = sum(map(len, inputs))
        used = {"prompt_tokens": count, "total_tokens": count}
        about = {"object": "list", "model": self._model.name, "usage": used}
        return Response(json_body(about, "data", rows), media_type="application/json")

    async def _read(self, kind: type[B], request: HttpRequest, names: Sequence[str]) -> B:
        """Returns the body of a request. A large one is parsed while other clients are answered."""
        data = await read_body(request, self._limits)
        request.scope["large"] = len(data) > LARGE_BYTES
        return await self._beside(request, parse_body, kind, data, names)

    async def _beside(self, request: HttpRequest, function: Callable[..., T], *given: Any) -> T:
        """Returns what a function returns that works on a request's body, beside the event loop. Large bodies wait for
        each other in one thread, so that small ones find others free.
        """
        threads = self._large if request.scope["large"] else None
        return await asyncio.get_running_loop().run_in_executor(threads, partial(function, *given))

    async def _respond(
        self, request: HttpRequest, asked: Generation, form: AnswerForm, kind: type[RunningAnswer] = RunningAnswer
    ) -> Response:
        """Give the engine what was asked for, and answer whole or in a stream."""
        running = kind(self._model, self._worker, self.metrics, self.fingerprint, asked, form)
        request.scope["answer"] = running
        seconds = self._limits.request_seconds
        try:
            async with asyncio.timeout(seconds):
                running.schema = await unless_disconnected(request.receive, self._schemas.compiled(asked.schema))
                await unless_disconnected(request.receive, running.start())
                self.metrics.num_prompt_tokens += sum(len(one.tokens) for one in asked.requests)
                if not asked.stream:
                    body = await unless_disconnected(request.receive, running.whole())
                    return Response(body, media_type="application/json")
        except BaseException:
            running.close()
            raise
        return EventStream(running, seconds)


def _shortened(vector: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """Returns the first `dimensions` numbers of an embedding, scaled to length 1; for None, the embedding as it is."""
    if dimensions is None:
        return vector
    if dimensions > len(vector):
        raise ApiError(400, f"'dimensions' = {dimensions}; embeddings of this model have {len(vector)}, give fewer")
    first = vector[:dimensions]
    length = float(np.linalg.norm(first))
    return first if length == 0 else (first / length).astype(np.float32)


def build_app(
    api: Api, api_keys: Sequence[str] = (), host: str = "127.0.0.1", allowed_origins: Sequence[str] = ()
) -> ASGIApp:
    """Returns the server as an ASGI application, which listens on `host`. Pages of `allowed_origins` may use it from a
    browser.
    """
    routes = api.routes
    app = Starlette(routes=routes, exception_handlers=ERROR_HANDLERS)
    paths = {route.endpoint: route.path for route in routes}
    guard = HttpGuard(app, api_keys, names_of(host), api.metrics, paths)
    if not allowed_origins:
        return guard
    # Before the guard: a browser asks without a key whether a page may send one.
    return CORSMiddleware(guard, allowed_origins, allow_methods=["GET", "POST"], allow_headers=["*"])


def answer_once(model: ServedModel, engine: StepEngine, limits: ServerLimits, host: str) -> None:
    """Stream one answer before the server is ready, by an application of its own. No client then waits for modules that
    are imported late, or for what is made for the first answer. Raises WeftError if the answer fails.
    """
    if model.context_length < _NUM_TOKENS:
        return
    worker = EngineWorker(engine)
    app = build_app(Api(model, worker, limits), (), host)
    body = {"model": model.name, "prompt": [0], "max_tokens": _NUM_TOKENS - 1, "stream": True}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"host", url_name(host).encode()), (b"content-type", b"application/json")],
    }
    sent = list[dict[str, Any]]()

    async def answered() -> None:
        worker.start()
        parts = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            return parts.pop() if parts else await asyncio.Future()  # the client stays

        async def send(message: Any) -> None:
            sent.append(message)

        try:
            await app(scope, receive, send)  # type: ignore[arg-type]
        finally:
            worker.close()
            worker.join(_END_SECONDS)

    asyncio.run(answered())
    answer = b"".join(one.get("body", b"") for one in sent).decode()
    if worker.has_failed or sent[0]["status"] != 200 or "[DONE]" not in answer:
        raise WeftError(f"the answer before the server was ready failed: {worker.failure or answer[:500]}")

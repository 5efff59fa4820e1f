"""The answers to one HTTP request while the engine generates them: as one body, or as server-sent events.

Schemas of clients wait in a queue of their own, not in the threads that read bodies, as compiling one may take seconds.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.serve.http.answers import AnswerForm, GeneratedAnswer, envelope, json_body, json_text, usage
from weft.serve.http.guard import error_answer, unless_disconnected
from weft.serve.http.metrics import ServerMetrics
from weft.serve.http.request_body import ApiError, Echo, Generation
from weft.serve.scheduling.grammar import CompiledSchema, Grammars
from weft.serve.scheduling.request import Finish, GeneratedToken, RequestError
from weft.serve.scheduling.schema_trial import NUM_PROCESSES, SchemaTrial
from weft.serve.text import ServedModel, TextChunk, TextStream
from weft.serve.worker import EngineWorker, TokenStream

STUCK = "the answer cannot go on: the tokenizer has no token that the schema allows next, or the schema is too complex"
TURN_SECONDS = 0.005  # after which other clients have a turn, though more tokens are there
LAST_WORDS_SECONDS = 5.0  # to send the error that ends a stream
MAX_WAITING = 16  # schemas that nobody knows yet; each takes milliseconds, or a few seconds until it is refused


class SchemaQueue:
    """Compiles schemas for an event loop, a few at a time and in the order in which they come."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._threads = ThreadPoolExecutor(NUM_PROCESSES, "schemas")
        self._num_waiting = 0

    async def compiled(self, schema: str | None) -> CompiledSchema | None:
        """Returns a schema for answers; None for none. If it is cancelled, the schema's process ends. Raises
        RequestError for a schema that cannot be used, and if too many wait.
        """
        known = None if schema is None else self._grammars.known(schema)
        if schema is None or known is not None:
            return known
        if self._num_waiting >= MAX_WAITING:
            raise RequestError("queue_full", f"{MAX_WAITING} new schemas wait to be compiled; try again later")
        trial = SchemaTrial()
        self._num_waiting += 1
        try:
            return await asyncio.wrap_future(self._threads.submit(self._grammars.compile, schema, trial))
        finally:
            self._num_waiting -= 1
            trial.cancel()


class RunningAnswer:
    """The answers to one HTTP request. `close` cancels those that are not finished."""

    prefix = ""  # of its id; without one, the form's

    def __init__(
        self,
        model: ServedModel,
        worker: EngineWorker,
        metrics: ServerMetrics,
        fingerprint: str,
        asked: Generation,
        form: AnswerForm,
    ) -> None:
        self._model, self._worker, self._metrics = model, worker, metrics
        self._fingerprint, self._asked, self._form = fingerprint, asked, form
        self._name = f"{self.prefix or form.prefix}-{uuid.uuid4().hex}"
        self._stream: TokenStream | None = None
        self._began, self._created = time.monotonic(), int(time.time())
        self.num_prompt_tokens, self.num_tokens = asked.num_prompt_tokens, 0
        self._sums, self._counts = [0.0] * len(asked.requests), [0] * len(asked.requests)  # of log-probabilities
        self._num_cached = [0] * len(asked.requests)  # tokens of the prompt of each answer that the prefix cache had
        self.schema: CompiledSchema | None = None  # held until the engine has its own copies
        self._prompts: dict[
            tuple[int, ...], list[GeneratedToken]
        ] = {}  # with log-probabilities, if these are asked for
        self._offsets: dict[tuple[Echo, tuple[int, ...]], list[int]] = {}  # where tokens of prompts begin

    async def start(self) -> None:
        """Give the engine the requests. Raises RequestError or UnavailableError."""
        requests = [one for one in self._asked.requests if one.max_tokens > 0]
        if self._asked.scores_prompts:
            with self._worker.holding(max(1, len(requests))):
                await self._score_prompts()
        self._stream = await self._worker.submit(requests)

    async def _score_prompts(self) -> None:
        for request in self._asked.requests:
            if request.tokens not in self._prompts:
                logprobs = [None, *await self._worker.score(request)]
                pairs = zip(request.tokens, logprobs, strict=True)
                self._prompts[request.tokens] = [GeneratedToken(request.name, *pair) for pair in pairs]
        for echo, request in zip(self._asked.echoes, self._asked.requests, strict=True):
            if (echo, request.tokens) not in self._offsets:
                offsets = await asyncio.to_thread(echo.offsets, request.tokens, self._model.tokenizer)
                self._offsets[echo, request.tokens] = offsets

    def close(self) -> None:
        """Cancel what is not finished."""
        if self._stream is not None:
            self._stream.cancel()

    async def whole(self) -> bytes:
        """Returns the body with all answers, as JSON."""
        answers = self._echoes()
        async for index, chunk in self._chunks():
            answers[index].add(chunk)
            if self._asked.num_given < self._asked.n and chunk.token.logprobs is not None:
                self._sums[index] += chunk.token.logprobs.token
                self._counts[index] += 1
        return await asyncio.to_thread(self._body, answers)  # with log-probabilities, it may have megabytes

    async def events(self) -> AsyncIterator[str]:
        """Yields the chunks of a stream, as JSON."""
        asked, form = self._asked, self._form
        echoes = self._echoes()
        for index, echo in enumerate(echoes):
            first = await asyncio.to_thread(self._first, index, echo)
            if first is not None:
                yield first
        async for index, chunk in self._chunks():
            choice = form.chunk(index, chunk, echoes[index].num_echoed)
            if choice is not None:
                yield self._chunk([choice])
        if asked.include_usage:
            yield self._chunk([], usage=self._usage())

    def _body(self, answers: list[GeneratedAnswer]) -> bytes:
        choices = [json_text(self._form.whole(index, answer)) for index, answer in enumerate(self._chosen(answers))]
        about = {**self._envelope(self._form.whole_object), "usage": self._usage()}
        return json_body(about, "choices", choices)

    def _chosen(self, answers: list[GeneratedAnswer]) -> list[GeneratedAnswer]:
        """Returns the answers to each prompt that the client is given: all, or those with the likeliest mean token."""
        n, chosen = self._asked.n, list[GeneratedAnswer]()
        for first in range(0, len(answers), n):
            means = {index: self._sums[index] / max(1, self._counts[index]) for index in range(first, first + n)}
            best = sorted(means, key=lambda index: -means[index])[: self._asked.num_given]
            chosen += [answers[index] for index in best]
        return chosen

    def _first(self, index: int, echo: GeneratedAnswer) -> str | None:
        first = self._form.first(index, echo)
        return None if first is None else self._chunk([first])

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return json.dumps({**self._envelope(self._form.chunk_object), "choices": choices, **more})

    def _echoes(self) -> list[GeneratedAnswer]:
        """Returns what each answer begins with: nothing, or its prompt, which may be the whole answer."""
        asked, echoes = self._asked, []
        for echo, one in zip(asked.echoes or [Echo("")] * len(asked.requests), asked.requests, strict=True):
            tokens, offsets = list(self._prompts.get(one.tokens, ())), list(self._offsets.get((echo, one.tokens), ()))
            finish: Finish | None = None if one.max_tokens else "length"
            echoes.append(GeneratedAnswer([echo.text], tokens, finish, offsets, len(echo.text)))
        return echoes

    async def _chunks(self) -> AsyncIterator[tuple[int, TextChunk]]:
        """Yields what is generated, with the index of the answer that it belongs to."""
        assert self._stream is not None
        asked, requests = self._asked, self._asked.requests
        index_of = {request.name: index for index, request in enumerate(requests)}
        tokenizer = self._model.tokenizer.keeping(asked.answer.marks) if asked.answer.marks else self._model.tokenizer
        texts = [TextStream(tokenizer, one, asked.stops, asked.skip_special_tokens) for one in requests]
        last_seconds = [self._began] * len(requests)
        others_since = self._began  # when other clients had their turn
        async for token in self._stream.tokens():
            token.require_number()
            index, now = index_of[token.request], time.monotonic()
            times = self._metrics.first_token if last_seconds[index] == self._began else self._metrics.next_token
            times.add(now - last_seconds[index])
            last_seconds[index] = now
            if now - others_since > TURN_SECONDS:
                await asyncio.sleep(0)
                others_since = time.monotonic()
            self.num_tokens += 1
            self._num_cached[index] = token.num_cached
            if token.finish == "stuck":
                raise ApiError(400, STUCK)
            chunk = texts[index].push(token)
            if chunk.finish is not None:
                self._stream.cancel(token.request)  # a stop string ends an answer before the engine does
            yield index, chunk
        self._metrics.whole.add(time.monotonic() - self._began)

    def _envelope(self, kind: str) -> dict[str, Any]:
        model = self._asked.requests[0].adapter or self._model.name
        return envelope(self._name, kind, self._created, model, self._fingerprint)

    def _usage(self) -> dict[str, Any]:
        num_cached = sum(self._num_cached[:: self._asked.n])  # of each prompt once, as its first answer found it
        return usage(self.num_prompt_tokens, self.num_tokens, num_cached)


class EventStream(Response):
    """Answers as server-sent events. Whatever ends it, what is not finished is cancelled."""

    media_type = "text/event-stream"

    def __init__(self, running: RunningAnswer, seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._running, self._seconds = running, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send))
        except ClientDisconnect:
            pass  # nobody is left to be told
        finally:
            self._running.close()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            async with asyncio.timeout(self._seconds):  # a client that does not read holds nothing for longer
                await send(start)
                async for event in self._running.events():
                    await _send_event(send, event)
                last = "[DONE]"
        except Exception as error:
            last = json.dumps(error_answer(error)[1])
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await _send_event(send, last)
                await send({"type": "http.response.body", "body": b""})


async def _send_event(send: Send, data: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

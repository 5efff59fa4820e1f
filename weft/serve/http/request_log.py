"""What a server says of its work on stderr: a line for each request, and one now and then for all of them. No texts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from weft.serve.http.prometheus import ServerMetrics
from weft.serve.worker import EngineWorker

Say = Callable[[str], None]
EVERY_SECONDS = 10.0
PATH_CHARACTERS = 100


class LoggedAnswer(Protocol):
    """What is logged of an answer. An end point puts it into `scope["answer"]`."""

    num_prompt_tokens: int
    num_tokens: int


class RequestLog:
    """Says for each request, when it has been answered: who asked for what, the status, tokens and seconds."""

    def __init__(self, app: ASGIApp, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._say, self._clock = app, say, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = self._clock(), "no answer"

        async def noted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            self._say(f"{_asked(scope)} {status}{_tokens(scope.get('answer'))}, {self._clock() - began:.3f} s")


def _asked(scope: Scope) -> str:
    """Who asked for what, in printable characters: clients choose their paths."""
    host = scope["client"][0] if scope.get("client") else "-"
    path = ascii(scope["path"][:PATH_CHARACTERS])[1:-1]
    return f"{host} {ascii(scope['method'])[1:-1]} {path}"


def _tokens(answer: LoggedAnswer | None) -> str:
    return "" if answer is None else f", {answer.num_prompt_tokens} + {answer.num_tokens} tokens"


async def say_rates(worker: EngineWorker, metrics: ServerMetrics, say: Say, seconds: float = EVERY_SECONDS) -> None:
    """Say every so many seconds what the server did in them, for ever. Nothing is said while there is no work."""
    before, began = _counts(worker, metrics), time.monotonic()
    while True:
        await asyncio.sleep(seconds)
        after, now = _counts(worker, metrics), time.monotonic()
        state = worker.state
        if after != before or state.num_running or state.num_waiting:
            answers, prompt, generated = ((new - old) / (now - began) for new, old in zip(after, before, strict=True))
            share = 1 - state.num_free_blocks / max(1, state.num_blocks)
            say(
                f"{answers:.1f} requests/s, {prompt:.0f} prompt and {generated:.0f} generated tokens/s; "
                f"{state.num_running} running, {state.num_waiting} waiting, {share:.0%} of the cache in use"
            )
        before, began = after, now


def _counts(worker: EngineWorker, metrics: ServerMetrics) -> tuple[int, int, int]:
    """Answers that were whole, and tokens of prompts and of answers, since the start."""
    return metrics.whole.count, metrics.num_prompt_tokens, worker.state.num_generated

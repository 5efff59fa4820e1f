"""What a server tells its operator: counts and times, as Prometheus reads them, and lines of a log."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from weft.serve.scheduling.request import EngineState
from weft.serve.worker import EngineWorker

Say = Callable[[str], None]
EVERY_SECONDS = 10.0
PATH_CHARACTERS = 100
BOUNDS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """Counts of values up to each of `BOUNDS_SECONDS`, and their sum."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Count a value."""
        self._counts[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self._sum += seconds

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self._counts)

    def lines(self, name: str) -> Iterator[str]:
        """Yields the lines of a histogram with this name."""
        total = 0
        for bound, count in zip([*map(str, BOUNDS_SECONDS), "+Inf"], self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {total}"


class ServerMetrics:
    """What the server measures: answers by end point and status, tokens of prompts, and times."""

    def __init__(self, warm_up_seconds: float | None = None) -> None:
        self._warm_up_seconds = warm_up_seconds or 0.0
        self.responses: Counter[tuple[str, int]] = Counter()
        self.num_prompt_tokens = 0
        self.first_token = Histogram()
        self.next_token = Histogram()
        self.whole = Histogram()

    def text(self, state: EngineState, num_requests: int) -> str:
        """Returns all metrics in Prometheus' text format."""
        return "\n".join(self._lines(state, num_requests)) + "\n"

    def _lines(self, state: EngineState, num_requests: int) -> Iterator[str]:
        yield from _head("weft_responses_total", "counter", "HTTP responses by end point and status.")
        for (endpoint, status), count in sorted(self.responses.items()):
            yield f'weft_responses_total{{endpoint="{endpoint}",status="{status}"}} {count}'
        used = state.num_blocks - state.num_free_blocks
        for name, kind, value, about in (
            ("requests", "gauge", num_requests, "Requests that clients wait for."),
            ("running", "gauge", state.num_running, "Requests that the engine computes."),
            ("waiting", "gauge", state.num_waiting, "Requests in the engine's queue."),
            ("cache_blocks", "gauge", state.num_blocks, "Blocks of the key-value cache."),
            ("cache_blocks_used", "gauge", used, "Blocks of the key-value cache in use."),
            ("preempted_total", "counter", state.num_preempted, "Requests sent back to the queue for lack of memory."),
            ("prefix_tokens_total", "counter", state.num_prefix_tokens, "Prompt tokens found in the prefix cache."),
            ("generated_tokens_total", "counter", state.num_generated, "Tokens generated."),
            ("draft_tokens_total", "counter", state.num_drafted, "Tokens drafted by speculative decoding."),
            ("accepted_draft_tokens_total", "counter", state.num_accepted, "Drafted tokens that the model accepted."),
            ("warm_up_seconds", "gauge", self._warm_up_seconds, "Seconds of the warm-up before the first request."),
            ("prompt_tokens_total", "counter", self.num_prompt_tokens, "Tokens of prompts."),
        ):
            yield from _head(f"weft_{name}", kind, about)
            yield f"weft_{name} {value}"
        for name, histogram, about in (
            ("time_to_first_token_seconds", self.first_token, "From a request to its first token."),
            ("time_per_token_seconds", self.next_token, "Between two tokens of an answer."),
            ("request_seconds", self.whole, "From a request to the end of its answers."),
        ):
            yield from _head(f"weft_{name}", "histogram", about)
            yield from histogram.lines(f"weft_{name}")


def _head(name: str, kind: str, about: str) -> tuple[str, str]:
    return f"# HELP {name} {about}", f"# TYPE {name} {kind}"


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
    """Returns who asked for what, in printable characters, as clients choose their paths."""
    host = scope["client"][0] if scope.get("client") else "-"
    path = ascii(scope["path"][:PATH_CHARACTERS])[1:-1]
    return f"{host} {ascii(scope['method'])[1:-1]} {path}"


def _tokens(answer: LoggedAnswer | None) -> str:
    return "" if answer is None else f", {answer.num_prompt_tokens} + {answer.num_tokens} tokens"


async def say_rates(worker: EngineWorker, metrics: ServerMetrics, say: Say, seconds: float = EVERY_SECONDS) -> None:
    """Say every `seconds` what the server did meanwhile, until it is cancelled. Nothing is said while there is no
    work.
    """
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
    """Returns the numbers of whole answers, of prompt tokens and of generated tokens since the start."""
    return metrics.whole.count, metrics.num_prompt_tokens, worker.state.num_generated

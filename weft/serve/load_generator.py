"""A load for a server: requests at random times, as many clients would send them, and what the clients see.

Requests arrive as a Poisson process and do not wait for each other. Times count from when a request was due, so that a
client which could not send in time does not hide a slow server.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from weft.errors import ConfigError

GROWTH = 1.1  # a server is saturated when twice the rate gives less than this factor of tokens
EXAMPLE_URL = "http://127.0.0.1:8000"
ANSWER_BYTES = 1 << 20  # a line of an answer is shorter


@dataclass(frozen=True)
class LoadOptions:
    """What is sent: `num_requests` at each rate, with prompts and answers of half to one and a half times the mean."""

    first_rate: float = 1.0  # requests a second; doubled until the server is saturated
    max_rates: int = 10
    num_requests: int = 50
    mean_prompt_tokens: int = 64
    mean_answer_tokens: int = 32
    seconds: float = 60.0  # for a rate; what is not answered by then is unfinished
    seed: int = 0


@dataclass(frozen=True)
class LoadTarget:
    """A server, and what it says of its model."""

    host: str
    port: int
    key: str | None
    model: str
    vocab_size: int
    context_length: int


@dataclass
class ClientTimes:
    """What one client saw, in seconds after its request was due."""

    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class RateResult:
    """What clients saw at one rate. Times are in seconds; percentiles are of requests that were answered whole."""

    rate: float  # requests a second, offered
    num_requests: int
    num_answered: int
    tokens_per_second: float
    first_token: dict[str, float]  # by percentile: p50, p90, p99
    per_token: dict[str, float]
    errors: dict[str, int] = field(default_factory=dict)


async def open_target(url: str, key: str | None) -> LoadTarget:
    """Ask a server for its model. Raises ConfigError if there is none."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
    except ValueError as error:  # a port that is no number, half of a pair of brackets
        raise ConfigError(f"'{url}' is no address of a server ({error}); give one such as {EXAMPLE_URL}") from None
    if parts.scheme != "http" or not host or parts.path not in ("", "/"):
        raise ConfigError(f"'{url}' is no address of a server; give one such as {EXAMPLE_URL}")
    try:
        status, body = await _get(LoadTarget(host, port, key, "", 0, 0), "/v1/models")
        about = json.loads(body)["data"][0] if status == 200 else None
        if about is not None:
            return LoadTarget(host, port, key, about["id"], about["vocab_size"], about["context_length"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{url} is no server of weft ({type(error).__name__}: {error})") from None
    raise ConfigError(f"{url} answers /v1/models with status {status}; give --api-key, or another address")


async def run_load(target: LoadTarget, options: LoadOptions, tell: Callable[[RateResult], None]) -> list[RateResult]:
    """Returns the results of rising rates, up to the first at which the server is saturated. `tell` is told of each."""
    _refuse_lengths(target, options)
    results: list[RateResult] = []
    for number in range(options.max_rates):
        found = await run_rate(target, options, options.first_rate * 2**number)
        results.append(found)
        tell(found)
        is_late = found.num_answered < found.num_requests
        if is_late or (number and found.tokens_per_second < GROWTH * results[-2].tokens_per_second):
            break
    return results


async def run_rate(target: LoadTarget, options: LoadOptions, rate: float) -> RateResult:
    """Returns what clients see at one rate. Arrivals are those of any other rate, at another pace; prompts differ."""
    rng, words = random.Random(options.seed), random.Random(f"{options.seed} {rate}")
    began = time.monotonic()
    due, tasks = 0.0, []
    for _ in range(options.num_requests):
        prompt = words.choices(range(target.vocab_size), k=_draw(rng, options.mean_prompt_tokens))
        num_tokens = _draw(rng, options.mean_answer_tokens)
        tasks.append(asyncio.create_task(_ask(target, prompt, num_tokens, began + due)))
        due += rng.expovariate(rate)
    done, late = await asyncio.wait(tasks, timeout=options.seconds)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    seen = [task.result() for task in done]
    return _result(rate, options.num_requests, seen, time.monotonic() - began)


def _result(rate: float, num_requests: int, seen: list[ClientTimes], seconds: float) -> RateResult:
    answered = [one for one in seen if one.error is None]
    words = [one.error for one in seen if one.error is not None] + ["unfinished"] * (num_requests - len(seen))
    firsts = [one.first_token for one in answered if one.first_token is not None]
    gaps = [
        (one.last_token - one.first_token) / (one.num_tokens - 1)
        for one in answered
        if one.first_token is not None and one.last_token is not None and one.num_tokens > 1
    ]
    return RateResult(
        rate=rate,
        num_requests=num_requests,
        num_answered=len(answered),
        tokens_per_second=sum(one.num_tokens for one in answered) / seconds,
        first_token=_percentiles(firsts),
        per_token=_percentiles(gaps),
        errors={word: words.count(word) for word in sorted(set(words))},
    )


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 90, 99)} if ordered else {}


def _draw(rng: random.Random, mean: int) -> int:
    return rng.randint(max(1, mean // 2), max(1, mean + mean // 2))


def _refuse_lengths(target: LoadTarget, options: LoadOptions) -> None:
    longest = (options.mean_prompt_tokens + options.mean_answer_tokens) * 3 // 2
    if longest > target.context_length:
        raise ConfigError(
            f"prompts and answers of up to {longest} tokens do not fit the server's context of "
            f"{target.context_length}; lower --prompt-tokens or --answer-tokens"
        )


async def _ask(target: LoadTarget, prompt: list[int], num_tokens: int, due: float) -> ClientTimes:
    """Send one request when it is due, and read its stream."""
    await asyncio.sleep(max(0.0, due - time.monotonic()))
    body = {"model": target.model, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "logprobs": 0}
    seen = ClientTimes()
    try:
        status, reader, writer = await _open(target, "POST", "/v1/completions", json.dumps({**body, "stream": True}))
    except OSError as error:
        return ClientTimes(error=type(error).__name__)
    try:
        if status != 200:
            return ClientTimes(error=f"status {status}")
        async for line in reader:
            if line.startswith(b"data: {"):
                seen.last_token = time.monotonic() - due
                seen.first_token = seen.first_token or seen.last_token
                seen.num_tokens += 1  # with logprobs every token has a chunk
    except (OSError, ValueError) as error:
        seen.error = type(error).__name__
    finally:
        writer.close()
    if seen.error is None and seen.num_tokens != num_tokens:
        seen.error = "cut short"
    return seen


async def _get(target: LoadTarget, path: str) -> tuple[int, bytes]:
    status, reader, writer = await _open(target, "GET", path, "")
    try:
        return status, await reader.read(ANSWER_BYTES)
    finally:
        writer.close()


async def _open(
    target: LoadTarget, method: str, path: str, body: str
) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request. Returns the status of the answer and a reader of its body, which HTTP/1.0 does not cut up."""
    reader, writer = await asyncio.open_connection(target.host, target.port, limit=ANSWER_BYTES)
    name = f"[{target.host}]" if ":" in target.host else target.host
    lines = [f"{method} {path} HTTP/1.0", f"Host: {name}:{target.port}", f"Content-Length: {len(body)}"]
    lines += ["Content-Type: application/json"] + ([f"Authorization: Bearer {target.key}"] if target.key else [])
    writer.write(("\r\n".join(lines) + "\r\n\r\n" + body).encode())
    await writer.drain()
    words = (await reader.readline()).split()
    while (await reader.readline()).strip():
        pass
    if len(words) < 2 or not words[1].isdigit():
        writer.close()
        raise ConnectionError(f"the answer is not HTTP: {b' '.join(words)!r:.100}")
    return int(words[1]), reader, writer

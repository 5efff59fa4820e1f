"""A load for a server: requests at random times, as many clients would send them, and what the clients see.

Requests arrive as a Poisson process and do not wait for each other. Times count from when a request was due, so that a
client which could not send in time does not hide a slow server. Results are a table, and a page (SVG).
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from urllib.parse import urlsplit

from weft.errors import ConfigError

GROWTH = 1.1  # a server is saturated when twice the rate gives less than this factor of tokens
EXAMPLE_URL = "http://127.0.0.1:8000"
ANSWER_BYTES = 1 << 20  # a line of an answer is shorter
TIMES_WIDTH = 21  # columns of three times in ms
HEAD = (
    f"{'requests/s':>10}{'answered':>12}{'tokens/s':>9}  {'first token, ms':<{TIMES_WIDTH}}  per token, ms: p50 90 99"
)
COLOURS = {"p50": "#2a78d6", "p90": "#eda100", "p99": "#b3261e"}
WIDTH, PANEL_HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 220, 90, 70, 46, 30
Line = tuple[str, str, list[float]]  # a name, a colour, and a value for each rate


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
        result = await run_rate(target, options, options.first_rate * 2**number)
        results.append(result)
        tell(result)
        is_late = result.num_answered < result.num_requests
        if is_late or (number and result.tokens_per_second < GROWTH * results[-2].tokens_per_second):
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


def table_row(one: RateResult) -> str:
    """Returns a line of the table below `HEAD`."""
    errors = ", ".join(f"{count} {word}" for word, count in one.errors.items())
    counts = f"{one.num_answered} of {one.num_requests}"
    times = f"{_times(one.first_token)}  {_times(one.per_token)}"
    return f"{one.rate:>10g}{counts:>12}{one.tokens_per_second:>9.0f}  {times}  {errors}".rstrip()


def svg(results: Sequence[RateResult], title: str) -> str:
    """Returns a page with three plots over the rate of requests: tokens a second, time to the first token, time per
    token.
    """
    shown = [one for one in results if one.first_token and one.per_token]
    rates = [one.rate for one in shown]
    firsts: list[Line] = [(p, COLOURS[p], [one.first_token[p] * 1e3 for one in shown]) for p in COLOURS]
    nexts: list[Line] = [(p, COLOURS[p], [one.per_token[p] * 1e3 for one in shown]) for p in COLOURS]
    tokens: list[Line] = [("", COLOURS["p50"], [one.tokens_per_second for one in shown])]
    panels = (("output tokens/s", tokens), ("time to first token, ms", firsts), ("time per token, ms", nexts))
    height = TOP + len(panels) * PANEL_HEIGHT + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" fill="#1b1f27">{escape(title)}</text>',
    ]
    for number, (name, lines) in enumerate(panels):
        parts += _panel(name, rates, lines, TOP + number * PANEL_HEIGHT, number == len(panels) - 1)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(name: str, rates: list[float], lines: list[Line], top: int, is_last: bool) -> list[str]:
    values = [value for _, _, found in lines for value in found]
    if not values:
        return [f'<text x="{LEFT}" y="{top + 40}" fill="#667085">{name}: nothing was answered</text>']
    low, high = top + PANEL_HEIGHT - BOTTOM, top + 18
    across = _scale(min(rates), max(rates), LEFT + 20, WIDTH - RIGHT - 20)
    up = _scale(min(values) / 1.2, max(values) * 1.2, low, high)
    parts = [f'<text x="{LEFT}" y="{top + 8}" fill="#1b1f27" font-weight="bold">{name}</text>']
    for value in _ticks(min(values) / 1.2, max(values) * 1.2):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(value):.1f}" y2="{up(value):.1f}" stroke="#e3e6ec"/>'
        )
        parts.append(f'<text x="{LEFT - 8}" y="{up(value) + 4:.1f}" text-anchor="end" fill="#667085">{value:g}</text>')
    for rate in rates:
        parts.append(f'<text x="{across(rate):.1f}" y="{low + 16}" text-anchor="middle" fill="#667085">{rate:g}</text>')
    if is_last:
        parts.append(f'<text x="{WIDTH - 8}" y="{low + 16}" text-anchor="end" fill="#667085">requests/s</text>')
    ends: list[float] = []
    for label, colour, found in lines:
        points = [(across(rate), up(value)) for rate, value in zip(rates, found, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        place = points[-1][1] + 4
        while any(abs(place - other) < 13 for other in ends):  # labels do not lie on each other
            place -= 13
        ends.append(place)
        parts.append(f'<text x="{points[-1][0] + 9:.1f}" y="{place:.1f}" fill="{colour}">{label}</text>')
    return parts


def _scale(smallest: float, largest: float, start: float, end: float) -> Callable[[float], float]:
    """Returns a logarithmic scale from values to places; the middle if there is one value alone."""
    if largest <= smallest:
        return lambda value: (start + end) / 2
    span = math.log(largest / smallest)
    return lambda value: start + (end - start) * math.log(value / smallest) / span


def _ticks(smallest: float, largest: float) -> list[float]:
    """Returns round numbers between two values: 1, 2 and 5 times powers of ten."""
    exponents = range(math.floor(math.log10(smallest)), math.ceil(math.log10(largest)) + 1)
    ticks = [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]
    return [value for value in ticks if smallest <= value <= largest]


def _times(by_percentile: dict[str, float]) -> str:
    found = "".join(f"{seconds * 1e3:>7,.{0 if seconds >= 1 else 1}f}" for seconds in by_percentile.values())
    return f"{found or '–':<{TIMES_WIDTH}}"

"""Answers for people who run a service: which rate of requests a layout serves well, and with how many devices.

Requests arrive at random with a mean rate. A rate is served well if, of all requests, 99 % get their first token and
99 % their following tokens within the times that are asked for. Each replica of a layout is run by the engine's
scheduler at rates between nothing and its capacity. Replicas share the requests, so a rate needs so many of them.

Draws of lengths and of times between requests are fixed: only the time scale depends on the rate. The search for the
highest rate tries the same rates for any limits, so that looser limits never give a lower one.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random

from weft.architectures import ModelConfig
from weft.errors import ConfigError
from weft.plan import Plan
from weft.planner.serving import ServingModel, ServingWorkload
from weft.serve.scheduling.scheduler_run import RequestArrival, RunTimes

NUM_REQUESTS = 200  # that are run for each rate, unless a trace has its own
NUM_RATES = 32  # shares of the capacity that are tried, of which the search runs five
SHARE = 0.99  # of requests that are to be served in time
LOG_NORMAL_SIGMA = 1.0  # of lengths such as those of ShareGPT's requests


@dataclass(frozen=True)
class Lengths:
    """How many tokens prompts or answers have: so many, evenly between two numbers, or log-normal with a mean."""

    least: int
    most: int
    is_log_normal: bool = False

    @staticmethod
    def of(text: str, name: str) -> Lengths:
        """Read `512`, `100-1024` or `~220`. Raises ConfigError."""
        numbers = text.removeprefix("~").split("-")
        is_fine = all(one.isdecimal() and 0 < int(one) <= 1 << 20 for one in numbers) and len(numbers) <= 2
        if not is_fine or int(numbers[0]) > int(numbers[-1]) or (text.startswith("~") and len(numbers) > 1):
            raise ConfigError(
                f"--{name} {text} must be a number of tokens, as 512; a range, as 100-1024; or a mean of log-normal "
                f"lengths, as ~220"
            )
        return Lengths(int(numbers[0]), int(numbers[-1]), text.startswith("~"))

    def draw(self, rng: Random, longest: int) -> int:
        """Return a length of at most `longest`."""
        if self.is_log_normal:
            mean = math.log(self.least) - LOG_NORMAL_SIGMA**2 / 2
            return min(longest, max(4, round(rng.lognormvariate(mean, LOG_NORMAL_SIGMA))))
        return rng.randint(self.least, self.most)

    @property
    def is_one(self) -> bool:
        return self.least == self.most and not self.is_log_normal


@dataclass(frozen=True)
class Limits:
    """How long requests may wait for the first token, and from each token to the next in the mean; None: any time."""

    first_token_seconds: float | None = None
    next_token_seconds: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("first", self.first_token_seconds), ("next", self.next_token_seconds)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{name}-token {value} must be a number of seconds above 0")

    def hold(self, waits: Waits) -> bool:
        pairs = ((self.first_token_seconds, waits.first), (self.next_token_seconds, waits.following))
        return all(limit is None or wait <= limit for limit, wait in pairs)


@dataclass(frozen=True)
class Waits:
    """Seconds within which 99 % of requests get their first token, and the mean of 99 % of them for each next one."""

    first: float
    following: float
    tokens_per_second: float  # of one replica

    @staticmethod
    def of(arrivals: Sequence[RequestArrival], times: RunTimes) -> Waits:
        first = [given - one.seconds for one, given in zip(arrivals, times.first, strict=True)]
        pairs = zip(arrivals, times.first, times.last, strict=True)
        following = [(last - begin) / (one.output - 1) for one, begin, last in pairs if one.output > 1]
        tokens = sum(one.output for one in arrivals) / times.seconds
        return Waits(_upper(first), _upper(following or [0.0]), tokens)


@dataclass(frozen=True)
class ServiceTraffic:
    """Requests of a service, in the order of their arrival. `seconds` are for a rate of one request a second."""

    arrivals: tuple[RequestArrival, ...]

    @staticmethod
    def drawn(
        prompt: Lengths, output: Lengths, longest: int, num_shared: int = 0, number: int = NUM_REQUESTS
    ) -> ServiceTraffic:
        """Draw requests with independent times between them, whose prompts begin with `num_shared` equal tokens."""
        rng, now, found = Random(0), 0.0, list[RequestArrival]()
        for _ in range(number):
            answer = output.draw(rng, longest - 1)
            question = prompt.draw(rng, longest - answer)
            found.append(RequestArrival(question, answer, now, min(num_shared, question)))
            now += rng.expovariate(1.0)
        return ServiceTraffic(tuple(found))

    @staticmethod
    def read(path: Path, num_shared: int = 0) -> ServiceTraffic:
        """Read a trace: CSV with a header, or JSON lines, with prompt, output and seconds. Raises ConfigError."""
        try:
            text = path.read_text(encoding="utf-8")
            lines: Iterable[dict[str, str]] = csv.DictReader(text.splitlines())
            if text.lstrip().startswith("{"):
                lines = [json.loads(line) for line in text.splitlines() if line.strip()]
            rows = [(float(one["seconds"]), int(one["prompt"]), int(one["output"])) for one in lines]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--trace {path} cannot be read ({error!r}); give CSV with the header seconds,prompt,output, or lines "
                f"of JSON with these keys"
            ) from None
        if len(rows) < 2 or min(min(one[1:]) for one in rows) < 1 or any(not math.isfinite(one[0]) for one in rows):
            raise ConfigError(f"--trace {path} needs two requests or more, each with 1 token or more in and out")
        rows.sort()
        scale = (len(rows) - 1) / max(rows[-1][0] - rows[0][0], 1e-9)
        return ServiceTraffic(
            tuple(
                RequestArrival(prompt, output, scale * (seconds - rows[0][0]), min(num_shared, prompt))
                for seconds, prompt, output in rows
            )
        )

    def at(self, rate: float) -> list[RequestArrival]:
        """Return the requests at a mean rate, in requests a second."""
        return [one._replace(seconds=one.seconds / rate) for one in self.arrivals]

    @cached_property
    def mean_output(self) -> float:
        return sum(one.output for one in self.arrivals) / len(self.arrivals)

    @property
    def longest(self) -> int:
        return max(one.prompt + one.output for one in self.arrivals)


@dataclass(frozen=True)
class ServedRate:
    """A rate that one replica of a layout serves, and how long requests wait for it."""

    rate: float
    waits: Waits


class ReplicaLoad:
    """What one replica of a layout does at rates of requests."""

    def __init__(self, model: ServingModel, traffic: ServiceTraffic) -> None:
        """Raises PlanError if a request does not fit the cache."""
        self._model, self._traffic = model, traffic
        self._cache_tokens = model.cache_tokens
        at_once = [one._replace(seconds=0.0) for one in traffic.arrivals]
        seconds = model.run(at_once, self._cache_tokens).seconds
        self.capacity = len(at_once) / seconds  # requests a second, if all are there at once
        self._waits = dict[int, Waits]()

    def waits(self, index: int) -> Waits:
        """Return the waits at a share (index + 1) / NUM_RATES of the capacity."""
        if index not in self._waits:
            arrivals = self._traffic.at(self._rate(index))
            self._waits[index] = Waits.of(arrivals, self._model.run(arrivals, self._cache_tokens))
        return self._waits[index]

    def _rate(self, index: int) -> float:
        return self.capacity * (index + 1) / NUM_RATES

    def best(self, limits: Limits) -> ServedRate | None:
        """Return the highest rate within limits that a search by halves finds; None if the lowest one is too high."""
        low, high = -1, NUM_RATES
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if limits.hold(self.waits(middle)) else (low, middle)
        return None if low < 0 else ServedRate(self._rate(low), self.waits(low))

    def tried(self) -> list[ServedRate]:
        """Return all rates that were run."""
        return [ServedRate(self._rate(index), waits) for index, waits in sorted(self._waits.items())]


@dataclass(frozen=True)
class ServiceAnswer:
    """A layout of one replica on `replica_devices`, the highest rate that it serves within limits, and what the rate
    that is asked for takes: replicas, devices, and dollars for a million generated tokens if a device's hour has a
    price.
    """

    plan: Plan
    options: str  # of `weft serve`, beside the plan's
    replica_devices: int
    served: ServedRate
    num_replicas: int
    dollars_per_million: float | None

    @property
    def num_devices(self) -> int:
        return self.num_replicas * self.replica_devices

    @property
    def goodput_per_device(self) -> float:
        return self.served.rate / self.replica_devices


def answer(
    load: ReplicaLoad,
    plan: Plan,
    options: str,
    traffic: ServiceTraffic,
    rate: float | None,
    limits: Limits,
    price: float | None,
) -> ServiceAnswer | None:
    """Return what a layout gives to a service; None if it keeps no limits. Without a rate, one replica is used."""
    best = load.best(limits)
    if best is None:
        return None
    num_replicas = 1 if rate is None else math.ceil(rate / best.rate - 1e-9)
    alone = replace(plan, data=1)
    served = best.rate * num_replicas if rate is None else rate
    dollars = None
    if price is not None:
        per_second = price / 3600 * num_replicas * alone.num_ranks
        dollars = 1e6 * per_second / (served * traffic.mean_output)
    return ServiceAnswer(alone, options, alone.num_ranks, best, num_replicas, dollars)


def frontier(points: Iterable[tuple[str, int, ServedRate]]) -> list[tuple[str, int, ServedRate]]:
    """Return the layouts and rates that no other beats both in tokens a second of a device and in the wait for a next
    token, the fastest for users first. A point is (layout, devices of a replica, rate).
    """
    kept, most = list[tuple[str, int, ServedRate]](), 0.0
    for name, num_devices, served in sorted(points, key=lambda one: (one[2].waits.following, -one[2].rate / one[1])):
        if served.waits.tokens_per_second / num_devices > most:
            most = served.waits.tokens_per_second / num_devices
            kept.append((name, num_devices, served))
    return kept


def _upper(values: Sequence[float]) -> float:
    """Return the least value that a share of SHARE does not exceed."""
    return sorted(values)[math.ceil(SHARE * len(values)) - 1]


@dataclass(frozen=True)
class ServiceQuestion:
    """What is asked about a service: which requests come, at which rate, and within which limits they are served."""

    prompt: Lengths
    output: Lengths
    rate: float | None = None  # requests a second; None: the highest that one replica serves
    trace: Path | None = None  # in place of lengths that are drawn
    limits: Limits = Limits()
    device_hour_price: float | None = None  # dollars
    num_shared: int = 0  # tokens with which all prompts begin
    searches_formats: bool = False
    report: Path | None = None  # the page that is written

    def __post_init__(self) -> None:
        for name, value in (("rate", self.rate), ("price", self.device_hour_price)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{name} {value} must be a number above 0")

    def at_once(self, number: int, config: ModelConfig) -> ServingWorkload:
        """Return so many requests that arrive at once."""
        if self.prompt.is_one and self.output.is_one:
            return ServingWorkload.of(number, self.prompt.least, self.output.least)
        longest = getattr(config, "context_length", 1 << 20)
        drawn = ServiceTraffic.drawn(self.prompt, self.output, longest, number=number).arrivals
        return ServingWorkload(tuple((one.prompt, one.output) for one in drawn))

    def traffic(self, context_length: int) -> ServiceTraffic:
        """Return the requests. Raises ConfigError for requests that are longer than a model's context."""
        if self.trace is None:
            if self.prompt.least + self.output.least > context_length:
                raise ConfigError(f"--prompt and --output are more than the {context_length} tokens of the model")
            return ServiceTraffic.drawn(self.prompt, self.output, context_length, self.num_shared)
        found = ServiceTraffic.read(self.trace, self.num_shared)
        if found.longest > context_length:
            raise ConfigError(
                f"--trace {self.trace} has a request of {found.longest} tokens, and the model is made for "
                f"{context_length}; leave such requests out"
            )
        return found

"""What a decode of one request takes on a CPU, measured once (`serve/measurement/measure_decode.py`) and kept in the
cluster file.

    product with a weight    start + weights / rate; the rate depends on how long rows are and on what caches hold
    layer                    all but reading its weights: small operations, whose code products push out of the caches
    attention                longer with every token of the cache
    search in a graph        by rounds, edges that are followed, logits that are computed and their bytes

Between measured points, figures are interpolated on logarithmic scales; beyond them the nearest one counts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from weft.errors import ConfigError

LayerKind = Literal["decoder", "gpt2", "lstm", "gru"]
STEADY_SPREAD = 1.15  # of equal reads of memory, at most, on a machine that nobody else uses
HOW_TO_MEASURE = "weft bench machine --serve --write machine.toml"


def interpolated(places: Sequence[float], figures: Sequence[float], place: float) -> float:
    """The figure at a place, between those of measured places. All are positive, and places grow."""
    if place <= places[0] or len(places) == 1:
        return figures[0]
    if place >= places[-1]:
        return figures[-1]
    right = bisect_left(places, place)
    share = math.log(place / places[right - 1]) / math.log(places[right] / places[right - 1])
    return float(figures[right - 1] * (figures[right] / figures[right - 1]) ** share)


def _check(what: str, places: Sequence[float], *figures: Sequence[float]) -> None:
    """Raise ConfigError unless places grow and each has a positive figure in every row."""
    if not places or min(places) <= 0 or any(right <= left for left, right in pairwise(places)):
        raise ConfigError(f"decode: {what} is measured at {list(places)}; give positive numbers that grow")
    for row in figures:
        if len(row) != len(places) or not all(0 < figure < math.inf for figure in row):
            raise ConfigError(f"decode: {what} has {list(row)} for {list(places)}; give a positive figure for each")


@dataclass(frozen=True)
class ProductRates:
    """Products of one row with weights [outputs, inputs] that are kept as `weights` says: a dtype, or a format of
    `weft serve --weights`. `weights_per_second` has a row of rates for each number of inputs, by the bytes that were
    read since the weight was: what a cache holds is read faster. A product of a format starts `start_seconds` later
    than a plain one, by the bytes that each product of a layer reads: they push its code out of the caches.
    """

    weights: str
    inputs: tuple[int, ...]
    read_bytes: tuple[int, ...]
    weights_per_second: tuple[tuple[float, ...], ...]
    start_bytes: tuple[int, ...] = ()
    start_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        rates = self.weights_per_second
        _check(f"products with {self.weights}", self.read_bytes, *rates)
        _check(f"inputs of products with {self.weights}", self.inputs, [one[0] for one in rates])

        if self.start_bytes or self.start_seconds:
            _check(f"the start of products with {self.weights}", self.start_bytes, self.start_seconds)

    def start(self, read_bytes: float) -> float:
        """By which a product starts later than a plain one, if it and those before it read so many bytes."""
        return interpolated(self.start_bytes, self.start_seconds, read_bytes) if self.start_bytes else 0.0

    def seconds(self, outputs: int, inputs: int, read_bytes: float) -> float:
        """Seconds of a product in a step that reads so many bytes, without its start."""
        rates = [interpolated(self.read_bytes, row, read_bytes) for row in self.weights_per_second]
        return outputs * inputs / interpolated(self.inputs, rates, inputs)


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of a layer without reading its weights, with the start of its plain products; and of what a step does
    outside of its layers, with the start of a plain head. What a layer takes depends on the bytes that each layer
    reads, because its code runs once in each; what a step takes, on `step_bytes`, all that it reads. A recurrent layer
    takes `unit_seconds` more for each unit of its state. A first one whose products with inputs are in a table takes
    `first_seconds`, by the bytes that each other layer reads.
    """

    kind: LayerKind
    dtype: str
    read_bytes: tuple[int, ...]
    layer_seconds: tuple[float, ...]
    step_bytes: tuple[int, ...]
    step_seconds: tuple[float, ...]
    first_seconds: tuple[float, ...] = ()
    unit_seconds: float = 0.0

    def __post_init__(self) -> None:
        rows = (self.layer_seconds, self.first_seconds) if self.first_seconds else (self.layer_seconds,)
        _check(f"a layer of {self.kind}", self.read_bytes, *rows)
        _check(f"a step of {self.kind}", self.step_bytes, self.step_seconds)
        if not 0 <= self.unit_seconds < math.inf:
            raise ConfigError(f"decode: a layer of {self.kind} has unit_seconds = {self.unit_seconds}; give 0 or more")

    def layer(self, read_bytes: float, num_units: int = 0, has_table: bool = False) -> float:
        """Of a layer, where each but a first one with a table reads so many bytes."""
        row = self.first_seconds if has_table and self.first_seconds else self.layer_seconds
        return interpolated(self.read_bytes, row, read_bytes) + num_units * self.unit_seconds

    def step(self, read_bytes: float) -> float:
        """Of a step that reads so many bytes, outside of its layers."""
        return interpolated(self.step_bytes, self.step_seconds, read_bytes)


@dataclass(frozen=True)
class AttentionTimes:
    """Seconds by which the attention of a layer is longer than over few tokens, by the bytes of keys and values, where
    so many queries share a key head.
    """

    dtype: str
    num_queries: int
    cache_bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.num_queries < 1:
            raise ConfigError(f"decode: attention has num_queries = {self.num_queries}; give 1 or more")
        _check("attention", self.cache_bytes, self.seconds)

    def of(self, cache_bytes: float) -> float:
        if cache_bytes <= self.cache_bytes[0]:  # in proportion outside of what was measured
            return self.seconds[0] * cache_bytes / self.cache_bytes[0]
        beyond = max(1.0, cache_bytes / self.cache_bytes[-1])
        return interpolated(self.cache_bytes, self.seconds, cache_bytes) * beyond


@dataclass(frozen=True)
class SearchTimes:
    """Seconds of a graph search (`serve/head/graph_head.py`): for each round, edge that is followed, logit that
    is computed, and byte of a row that a logit is computed of.
    """

    round_seconds: float
    edge_seconds: float
    logit_seconds: float
    byte_seconds: float

    def __post_init__(self) -> None:
        if min(self.round_seconds, self.edge_seconds, self.logit_seconds, self.byte_seconds) < 0:
            raise ConfigError("decode.search has a time below 0; measure it again")

    def seconds(self, rounds: float, edges: float, logits: float, row_bytes: int) -> float:
        each = self.logit_seconds + self.byte_seconds * row_bytes
        return rounds * self.round_seconds + edges * self.edge_seconds + logits * each


@dataclass(frozen=True)
class DecodeRates:
    """All that is known of decodes of one request by one process with so many threads."""

    threads: int
    vocabulary_seconds: float  # to choose a token, for each token of the vocabulary
    products: tuple[ProductRates, ...]
    layers: tuple[LayerTimes, ...]
    attention: tuple[AttentionTimes, ...]
    search: SearchTimes
    memory_spread: float = 1.0  # upper by lower quartile of equal reads of memory while all this was measured

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError(f"decode.threads = {self.threads} measured nothing; give 1 or more")
        if not 0 <= self.vocabulary_seconds < math.inf:
            raise ConfigError(f"decode.vocabulary_seconds = {self.vocabulary_seconds} is no time; give 0 or more")
        if not 1 <= self.memory_spread < math.inf:
            raise ConfigError(f"decode.memory_spread = {self.memory_spread} is no ratio of quartiles; give 1 or more")

    @property
    def doubt(self) -> str | None:
        """What makes these figures doubtful; None if nothing does."""
        if self.memory_spread <= STEADY_SPREAD:
            return None
        return (
            f"while this CPU was measured, equal reads of memory differed by a factor of {self.memory_spread:.2f}, as "
            f"if others used the machine too; predictions may be off by as much: measure it again when it is idle"
        )

    def product(self, weights: str) -> ProductRates:
        """Those of weights of a dtype or format. Raises ConfigError."""
        found = {one.weights: one for one in self.products}
        if weights not in found:
            raise ConfigError(
                f"products with {weights} weights are not in the cluster file, which has {', '.join(found)}; measure "
                f"this machine again: {HOW_TO_MEASURE}"
            )
        return found[weights]

    def layer(self, kind: LayerKind, dtype: str) -> LayerTimes:
        """Those of a kind of layer. Raises ConfigError."""
        for one in self.layers:
            if (one.kind, one.dtype) == (kind, dtype):
                return one
        known = ", ".join(f"{one.kind} in {one.dtype}" for one in self.layers)
        raise ConfigError(f"layers of {kind} in {dtype} are not in the cluster file, which has {known}")

    def attention_seconds(self, dtype: str, num_queries: int, cache_bytes: float) -> float:
        """Of a layer whose request has so many bytes of keys and values. Raises ConfigError."""
        found = {one.num_queries: one.of(cache_bytes) for one in self.attention if one.dtype == dtype}
        if not found:
            raise ConfigError(f"attention in {dtype} is not in the cluster file; measure it: {HOW_TO_MEASURE}")
        numbers = sorted(found)
        return interpolated(numbers, [max(found[one], 1e-12) for one in numbers], num_queries)

"""Measures products of one row with weights of each dtype and format on this CPU, and attention of one request.

Products are those that a decode makes (`serve/model/linear.py`). Before each, other memory is read (`ballast.py`), as
the rest of a step would: weights that stay in a cache are read faster than those that do not. Seconds are those that
this thread had a core, so that other processes lengthen them little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product as product_of
from statistics import median
from time import thread_time as clock

import torch
from torch import Tensor, nn

from weft.cluster.decode_rates import AttentionTimes, ProductRates
from weft.serve.attention.plain import decode_at
from weft.serve.measurement.ballast import Ballast
from weft.serve.model.linear import PlainLinear, ShardedLinear, served_linear
from weft.serve.weights.cpu_products import HALF_DTYPES, takes_vectors
from weft.serve.weights.fast_path import place_of
from weft.serve.weights.packed_linear import PackedLinear
from weft.serve.weights.weight_formats import FORMATS, weight_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
INPUTS = (256, 1024, 4096)
READ_BYTES = tuple(1 << power for power in (20, 22, 24, 25, 26, 28))
MOST_WEIGHTS = 1 << 22  # of a weight
ATTENTION_READ_BYTES = 1 << 25  # before attention
START_BYTES = tuple(1 << power for power in (16, 19, 21, 23))  # that each product of a layer reads
START_SIDE = 64  # inputs and outputs of a weight that takes no time
PASSES, LEAST_SECONDS, LEAST_CALLS, MOST_CALLS = 3, 0.01, 7, 30
NUM_TOLD = len(DTYPES) + len(FORMATS) + PASSES
FEW_TOKENS, TOKENS = 16, (64, 256, 1024, 4096)
QUERIES = (1, 4)  # that share a key head
KEY_HEADS, HEAD_DIM = 4, 64


class Timings:
    """Times of calls, before each of which other memory is read. All calls are timed in several passes, of which the
    median counts: one in which others use the machine does not, and the sum of many least times would be too low.
    """

    def __init__(self) -> None:
        self._ballast = Ballast()
        self._calls = list[tuple[Callable[[], object], int]]()

    def add(self, call: Callable[[], object], read_bytes: int) -> None:
        """Time a call after so many bytes of other memory were read."""
        self._calls.append((call, read_bytes))

    def seconds(self, tell: Callable[[], None]) -> list[float]:
        """The median of the passes' medians for each call, in the order in which calls were added. Calls `tell` after
        each pass.
        """
        passes = list[list[float]]()
        for _ in range(PASSES):
            passes.append([])
            for call, read_bytes in self._calls:
                self._ballast.set_bytes(read_bytes)
                passes[-1].append(median(self._times(call)))
            tell()
        return [median(found) for found in zip(*passes, strict=True)]

    def _times(self, call: Callable[[], object]) -> list[float]:
        call()
        seconds, start = list[float](), clock()
        while len(seconds) < LEAST_CALLS or (len(seconds) < MOST_CALLS and clock() - start < LEAST_SECONDS):
            self._ballast.read_again()
            begin = clock()
            call()
            seconds.append(clock() - begin)
        return seconds


def measured_products(starts: Callable[[str], tuple[float, ...]], tell: Callable[[], None]) -> list[ProductRates]:
    """The rates of each dtype and of each format of weights; inputs are those of float32 for formats. `starts` measures
    by which a format's products start later than plain ones, for each of START_BYTES. Calls `tell` NUM_TOLD times.
    """
    timings, numbers, own = Timings(), dict[str, list[int]](), dict[str, tuple[tuple[float, ...], ...]]()
    for name in (*DTYPES, *FORMATS):
        numbers[name] = _add_products(name, timings)
        own[name] = () if name in DTYPES else (START_BYTES, starts(name))
        tell()
    found, rates = timings.seconds(tell), list[ProductRates]()
    for name, weights in numbers.items():
        seconds, found = found[: len(weights)], found[len(weights) :]
        rates.append(ProductRates(name, INPUTS, READ_BYTES, _rates(weights, seconds), *own[name]))  # type: ignore[arg-type]
    return rates


def kept_bytes(name: str, outputs: int, inputs: int) -> int:
    """Bytes of a weight of a dtype or format."""
    if name in DTYPES:
        return outputs * inputs * DTYPES[name].itemsize
    return weight_bytes(FORMATS[name], outputs, inputs)


def _add_products(name: str, timings: Timings) -> list[int]:
    """Time products with a weight of no size and with large ones, each for READ_BYTES. Returns the weights of each."""
    small, numbers = _product(name, START_SIDE, START_SIDE), [0] * len(READ_BYTES)
    for read_bytes in READ_BYTES:
        timings.add(small, read_bytes)
    for inputs in INPUTS:
        products = dict[int, Callable[[], Tensor]]()
        for read_bytes in READ_BYTES:
            most = min(MOST_WEIGHTS, read_bytes * inputs // kept_bytes(name, 1, inputs) // 2)
            outputs = max(16, most // inputs // 16 * 16)
            if outputs not in products:
                products[outputs] = _product(name, outputs, inputs)
            timings.add(products[outputs], max(0, read_bytes - kept_bytes(name, outputs, inputs)))
            numbers.append(outputs * inputs)
    return numbers


def _rates(numbers: Sequence[int], seconds: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """Weights a second by inputs, and by the bytes that are read from one product with a weight to the next with it."""
    width = len(READ_BYTES)
    rates = [
        number / max(whole - seconds[index % width], 0.1 * whole)
        for index, (number, whole) in enumerate(zip(numbers, seconds, strict=True))
    ]
    return tuple(tuple(rates[first : first + width]) for first in range(width, len(rates), width))


def _product(name: str, outputs: int, inputs: int) -> Callable[[], Tensor]:
    """A product of one row with a weight, by what a decode calls. The weight's values are as large as in models: some
    CPUs decode tiny ones slower.
    """
    generator, dtype = torch.Generator().manual_seed(0), DTYPES.get(name, torch.float32)
    layer = _layer(name, (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype))
    hidden = torch.ones(1, inputs, dtype=dtype)
    linear = served_linear(layer, place_of(hidden.device, dtype))
    assert not isinstance(linear, ShardedLinear)
    if isinstance(linear, PlainLinear) and dtype in HALF_DTYPES:
        linear.choose(takes_vectors(layer))
    return lambda: linear.product(hidden, None)


def _layer(name: str, weight: Tensor) -> nn.Linear:
    if name in DTYPES:
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        plain.weight = nn.Parameter(weight, requires_grad=False)
        return plain
    form = FORMATS[name]
    packed = PackedLinear(form, form.quantise(weight), weight.shape[1], None)
    packed.arrange_for_cpu(weight.dtype)
    return packed


def measured_attention(tell: Callable[[], None]) -> list[AttentionTimes]:
    """What attention takes beside that over few tokens, by dtype and queries that share a key head. Calls `tell` PASSES
    times.
    """
    timings, cases = Timings(), list(product_of(DTYPES.items(), QUERIES))
    for (_, dtype), num_queries in cases:
        for number in (FEW_TOKENS, *TOKENS):
            timings.add(_attention(dtype, num_queries, number), ATTENTION_READ_BYTES)
    found, width, times = timings.seconds(tell), 1 + len(TOKENS), list[AttentionTimes]()
    for index, ((name, dtype), num_queries) in enumerate(cases):
        few, *more = found[index * width : (index + 1) * width]
        sizes = tuple(2 * number * KEY_HEADS * HEAD_DIM * dtype.itemsize for number in TOKENS)
        times.append(AttentionTimes(name, num_queries, sizes, tuple(max(one - few, 1e-9) for one in more)))
    return times


def _attention(dtype: torch.dtype, num_queries: int, num_tokens: int) -> Callable[[], Tensor]:
    """Attention of one request over a cache whose blocks lie end to end."""
    keys, values = torch.ones(2, num_tokens, KEY_HEADS, HEAD_DIM, dtype=dtype)
    query = torch.ones(1, num_queries * KEY_HEADS, HEAD_DIM, dtype=dtype)
    return lambda: decode_at(query, keys, values, slice(0, num_tokens))

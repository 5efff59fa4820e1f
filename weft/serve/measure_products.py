"""Measures products of one row with weights of each dtype and format on this CPU, and attention of one request.

Products are those that a decode makes (`fused.product`). Many equal weights take turns, so that none is read again
before as many bytes as a set has: sets that fit a cache are read faster than those that do not. Seconds are those that
this thread had a core, so that other processes lengthen them little.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import thread_time as clock

import torch
from torch import Tensor, nn

from weft.cluster.decode_rates import AttentionTimes, ProductRates
from weft.serve.fused import product
from weft.serve.packed_linear import PackedLinear
from weft.serve.paged_attention import decode_at
from weft.serve.weight_formats import FORMATS, weight_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
INPUTS = (256, 512, 1024, 4096)
SET_BYTES = tuple(1 << power for power in (20, 22, 24, 25, 27))
MOST_WEIGHTS = 1 << 20  # of one of the weights of a set
START_SIDE = 64  # inputs and outputs of a weight that takes no time
LEAST_SECONDS, LEAST_CALLS, MOST_CALLS = 0.02, 5, 400
FEW_TOKENS, TOKENS = 16, (64, 256, 1024, 4096)
QUERIES = (1, 4)  # that share a key head
KEY_HEADS, HEAD_DIM = 4, 64


def median_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """The median of calls that take turns, after one of each, or as many as there is time for."""
    seconds, begin = list[float](), clock()
    for call in calls[:MOST_CALLS]:
        call()
        if clock() - begin > LEAST_SECONDS:
            break
    begin = clock()
    while len(seconds) < LEAST_CALLS or (len(seconds) < MOST_CALLS and clock() - begin < LEAST_SECONDS):
        call = calls[len(seconds) % len(calls)]
        start = clock()
        call()
        seconds.append(clock() - start)
    return median(seconds)


def measured_products() -> Iterator[ProductRates]:
    """Yields the rates of each dtype and of each format of weights; inputs are those of float32 for formats."""
    for name in (*DTYPES, *FORMATS):
        start = median_seconds(_products(_layers(name, START_SIDE, START_SIDE, 1)))
        rows = tuple(_rates(name, inputs, start) for inputs in INPUTS)
        yield ProductRates(name, start, INPUTS, SET_BYTES, rows)


def kept_bytes(name: str, outputs: int, inputs: int) -> int:
    """Bytes of a weight of a dtype or format."""
    if name in DTYPES:
        return outputs * inputs * DTYPES[name].itemsize
    return weight_bytes(FORMATS[name], outputs, inputs)


def _rates(name: str, inputs: int, start: float) -> tuple[float, ...]:
    """Weights a second, by set. The weights of a set are used for larger ones too."""
    layers, found = list[nn.Linear](), list[float]()
    for set_bytes in SET_BYTES:
        most = min(MOST_WEIGHTS, set_bytes * inputs // kept_bytes(name, 1, inputs) // 2)
        outputs = max(16, most // inputs // 16 * 16)
        number = max(1, round(set_bytes / kept_bytes(name, outputs, inputs)))
        if not layers or layers[0].out_features != outputs:
            layers = _layers(name, outputs, inputs, number)
        layers += [copy.deepcopy(layers[0]) for _ in range(number - len(layers))]
        seconds = median_seconds(_products(layers))
        found.append(outputs * inputs / max(seconds - start, 0.1 * seconds))
    return tuple(found)


def _products(layers: Sequence[nn.Linear]) -> list[Callable[[], Tensor]]:
    """Products of one row with weights, by what a decode calls."""
    weight = layers[0].weight
    dtype = torch.float32 if isinstance(layers[0], PackedLinear) else weight.dtype
    hidden = torch.ones(1, weight.shape[1], dtype=dtype)
    return [lambda one=one: product(hidden, one) for one in layers]  # type: ignore[misc]


def _layers(name: str, outputs: int, inputs: int, number: int) -> list[nn.Linear]:
    """So many linears with equal weights."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs
    layer = _layer(name, weight.to(DTYPES.get(name, torch.float32)))
    return [layer, *(copy.deepcopy(layer) for _ in range(number - 1))]


def _layer(name: str, weight: Tensor) -> nn.Linear:
    if name in DTYPES:
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        plain.weight = nn.Parameter(weight, requires_grad=False)
        return plain
    form = FORMATS[name]
    packed = PackedLinear(form, form.encode(weight), weight.shape[1], None)
    packed.arrange_for_cpu(weight.dtype)
    return packed


def measured_attention() -> Iterator[AttentionTimes]:
    """Yields what attention takes beside that over few tokens, by dtype and queries that share a key head."""
    for name, dtype in DTYPES.items():
        for num_queries in QUERIES:
            few, *more = (median_seconds(_attention(dtype, num_queries, number)) for number in (FEW_TOKENS, *TOKENS))
            sizes = [2 * number * KEY_HEADS * HEAD_DIM * dtype.itemsize for number in TOKENS]
            longer = [max(seconds - few, 1e-9) for seconds in more]
            yield AttentionTimes(name, num_queries, tuple(sizes), tuple(longer))


def _attention(dtype: torch.dtype, num_queries: int, num_tokens: int) -> list[Callable[[], Tensor]]:
    """Attention of one request over caches that take turns."""
    each = 2 * num_tokens * KEY_HEADS * HEAD_DIM * dtype.itemsize
    number = max(1, min(64, SET_BYTES[-1] // each))
    pages = [torch.ones(2, num_tokens, KEY_HEADS, HEAD_DIM, dtype=dtype) for _ in range(number)]
    query = torch.ones(1, num_queries * KEY_HEADS, HEAD_DIM, dtype=dtype)
    slots, mask = torch.arange(num_tokens)[None], torch.ones(1, num_tokens, dtype=torch.bool)
    return [lambda one=one: decode_at(query, one[0], one[1], slots, mask) for one in pages]  # type: ignore[misc]

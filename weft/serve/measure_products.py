"""Measures products of one row with weights of each dtype and format on this CPU, and attention of one request.

Products are those that a decode makes (`fused.product`). Before each, other memory is read (`ballast.py`), as the rest
of a step would: weights that stay in a cache are read faster than those that do not. Seconds are those that this thread
had a core, so that other processes lengthen them little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import thread_time as clock

import torch
from torch import Tensor, nn

from weft.cluster.decode_rates import AttentionTimes, ProductRates
from weft.serve.ballast import Ballast
from weft.serve.fused import product
from weft.serve.packed_linear import PackedLinear
from weft.serve.paged_attention import decode_at
from weft.serve.weight_formats import FORMATS, weight_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
INPUTS = (256, 512, 1024, 4096)
READ_BYTES = tuple(1 << power for power in (20, 22, 24, 25, 27))
MOST_WEIGHTS = 1 << 22  # of a weight
START_BYTES = tuple(1 << power for power in (16, 19, 21, 23))  # that each product of a layer reads
START_SIDE = 64  # inputs and outputs of a weight that takes no time
LEAST_SECONDS, LEAST_CALLS, MOST_CALLS = 0.05, 5, 100
FEW_TOKENS, TOKENS = 16, (64, 256, 1024, 4096)
QUERIES = (1, 4)  # that share a key head
KEY_HEADS, HEAD_DIM = 4, 64


def median_seconds(call: Callable[[], object], ballast: Ballast, read_bytes: int) -> float:
    """The median of calls, before each of which so many bytes of other memory are read."""
    ballast.set_bytes(read_bytes)
    call()
    seconds, start = list[float](), clock()
    while len(seconds) < LEAST_CALLS or (len(seconds) < MOST_CALLS and clock() - start < LEAST_SECONDS):
        ballast.read()
        begin = clock()
        call()
        seconds.append(clock() - begin)
    return median(seconds)


def measured_products(starts: Callable[[str], tuple[float, ...]]) -> Iterator[ProductRates]:
    """Yields the rates of each dtype and of each format of weights; inputs are those of float32 for formats. `starts`
    measures by which a format's products start later than plain ones, for each of START_BYTES.
    """
    ballast = Ballast(READ_BYTES[-1])
    for name in (*DTYPES, *FORMATS):
        small = _product(name, START_SIDE, START_SIDE)
        alone = [median_seconds(small, ballast, read_bytes) for read_bytes in READ_BYTES]
        rows = tuple(_rates(name, inputs, alone, ballast) for inputs in INPUTS)
        own = () if name in DTYPES else (START_BYTES, starts(name))
        yield ProductRates(name, INPUTS, READ_BYTES, rows, *own)


def kept_bytes(name: str, outputs: int, inputs: int) -> int:
    """Bytes of a weight of a dtype or format."""
    if name in DTYPES:
        return outputs * inputs * DTYPES[name].itemsize
    return weight_bytes(FORMATS[name], outputs, inputs)


def _rates(name: str, inputs: int, starts: Sequence[float], ballast: Ballast) -> tuple[float, ...]:
    """Weights a second, by the bytes that are read from one product with a weight to the next with it."""
    products, found = dict[int, Callable[[], Tensor]](), list[float]()
    for read_bytes, start in zip(READ_BYTES, starts, strict=True):
        most = min(MOST_WEIGHTS, read_bytes * inputs // kept_bytes(name, 1, inputs) // 2)
        outputs = max(16, most // inputs // 16 * 16)
        if outputs not in products:
            products[outputs] = _product(name, outputs, inputs)
        others = max(0, read_bytes - kept_bytes(name, outputs, inputs))
        seconds = median_seconds(products[outputs], ballast, others)
        found.append(outputs * inputs / max(seconds - start, 0.1 * seconds))
    return tuple(found)


def _product(name: str, outputs: int, inputs: int) -> Callable[[], Tensor]:
    """A product of one row with a weight, by what a decode calls."""
    generator, dtype = torch.Generator().manual_seed(0), DTYPES.get(name, torch.float32)
    layer = _layer(name, (torch.randn(outputs, inputs, generator=generator) / inputs).to(dtype))
    hidden = torch.ones(1, inputs, dtype=dtype)
    return lambda: product(hidden, layer)


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
    ballast = Ballast(READ_BYTES[-1])
    for name, dtype in DTYPES.items():
        for num_queries in QUERIES:
            calls = [_attention(dtype, num_queries, number) for number in (FEW_TOKENS, *TOKENS)]
            few, *more = (median_seconds(call, ballast, READ_BYTES[-2]) for call in calls)
            sizes = [2 * number * KEY_HEADS * HEAD_DIM * dtype.itemsize for number in TOKENS]
            longer = [max(seconds - few, 1e-9) for seconds in more]
            yield AttentionTimes(name, num_queries, tuple(sizes), tuple(longer))


def _attention(dtype: torch.dtype, num_queries: int, num_tokens: int) -> Callable[[], Tensor]:
    """Attention of one request over a cache whose blocks lie end to end."""
    keys, values = torch.ones(2, num_tokens, KEY_HEADS, HEAD_DIM, dtype=dtype)
    query = torch.ones(1, num_queries * KEY_HEADS, HEAD_DIM, dtype=dtype)
    return lambda: decode_at(query, keys, values, slice(0, num_tokens))

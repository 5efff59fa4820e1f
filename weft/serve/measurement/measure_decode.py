"""Measures all that `weft plan --serve` needs of this CPU, in about two minutes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from statistics import quantiles

import torch

from weft.cluster.decode_rates import DecodeRates
from weft.serve.measurement import measure_layers, measure_products
from weft.serve.measurement.ballast import Ballast
from weft.serve.measurement.measure_search import measured_search

# Between two pieces of the measurement this memory is read again, to see whether others use the machine too.
SPREAD_READ_BYTES, SPREAD_READS = 1 << 26, 4


@torch.inference_mode()
def measure_decode(progress: Callable[[int, int], None] = lambda done, total: None) -> DecodeRates:
    """Measure with the threads that torch has. `progress` is told how much is done, and of how much."""
    with (
        warnings.catch_warnings()
    ):  # CPUs without products of bf16 are measured too; torch warns with a trace of frames
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed", category=UserWarning)
        return _measured(progress)


def _measured(progress: Callable[[int, int], None]) -> DecodeRates:
    layers = measure_layers.PASSES * len(measure_layers.KINDS)
    total, done, memory = measure_products.NUM_TOLD + measure_products.PASSES + layers + 2, 0, Ballast()
    memory.set_bytes(SPREAD_READ_BYTES)

    def tell() -> None:
        nonlocal done
        done += 1
        for _ in range(SPREAD_READS):
            memory.read_again()
        progress(done, total)

    products = measure_products.measured_products(measure_layers.product_starts, tell)
    times = measure_layers.measured_layers(tell)
    attention = measure_products.measured_attention(tell)
    per_token = measure_layers.vocabulary_seconds()
    tell()
    search = measured_search()
    tell()
    threads = torch.get_num_threads()
    lower, _, upper = quantiles(memory.seconds[1:], n=4)
    return DecodeRates(
        threads, per_token, tuple(products), tuple(times), tuple(attention), search, max(1.0, upper / lower)
    )

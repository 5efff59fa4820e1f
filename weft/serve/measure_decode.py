"""Measures all that `weft plan --serve` needs of this CPU, in less than a minute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from weft.cluster.decode_rates import DecodeRates
from weft.serve.measure_layers import KINDS, measured_layers, product_starts, vocabulary_seconds
from weft.serve.measure_products import DTYPES, QUERIES, measured_attention, measured_products
from weft.serve.measure_search import measured_search
from weft.serve.weight_formats import FORMATS


@torch.inference_mode()
def measure_decode(progress: Callable[[int, int], None] = lambda done, total: None) -> DecodeRates:
    """Measure with the threads that torch has. `progress` is told how much is done, and of how much."""
    total = len(DTYPES) + len(FORMATS) + len(KINDS) + len(DTYPES) * len(QUERIES) + 2
    done = 0

    def tell() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    found: dict[str, list[object]] = {"products": [], "layers": [], "attention": []}
    parts = {
        "products": partial(measured_products, product_starts),
        "layers": measured_layers,
        "attention": measured_attention,
    }
    for name, measure in parts.items():
        for one in measure():  # type: ignore[operator]
            found[name].append(one)
            tell()
    per_token = vocabulary_seconds()
    tell()
    search = measured_search()
    tell()
    tables = {name: tuple(rows) for name, rows in found.items()}
    return DecodeRates(torch.get_num_threads(), per_token, search=search, **tables)  # type: ignore[arg-type]

"""A made-up CPU whose decodes follow from numbers that are easy to multiply."""

from __future__ import annotations

from pathlib import Path

from weft.bench.cluster_file import MeasuredMachine, cluster_text
from weft.bench.fit import LinkFit
from weft.cluster.decode_rates import AttentionTimes, DecodeRates, LayerTimes, ProductRates, SearchTimes
from weft.serve.weights.weight_formats import FORMATS

START = 5e-6  # later than plain products
WEIGHTS_PER_SECOND = {"float32": 1e9, "bfloat16": 2e9, "int8": 4e9, "int4": 8e9}
LAYER_SECONDS = {"decoder": 1e-3, "gpt2": 2e-3, "lstm": 3e-3, "gru": 4e-3}
FIRST_SECONDS, UNIT_SECONDS = {"lstm": 1e-3, "gru": 2e-3}, {"lstm": 3e-7, "gru": 2e-7}
STEP_SECONDS, VOCABULARY_SECONDS = 7e-4, 1e-8
SEARCH = SearchTimes(1e-4, 1e-7, 1e-6, 1e-9)
ATTENTION_NANOSECONDS = 1  # a byte


def products(name: str) -> ProductRates:
    rate = WEIGHTS_PER_SECOND.get(name, 4e9)
    start = () if name in ("float32", "bfloat16") else ((1000, 10**9), (START, START))
    return ProductRates(name, (64, 4096), (1 << 10, 1 << 30), ((rate, rate), (rate, rate)), *start)  # type: ignore[arg-type]


def made_up_rates() -> DecodeRates:
    both = (1 << 10, 1 << 30)
    steps, layers = (STEP_SECONDS, STEP_SECONDS), list[LayerTimes]()
    for kind, seconds in LAYER_SECONDS.items():
        first, unit = (FIRST_SECONDS[kind],) * 2 if kind in FIRST_SECONDS else (), UNIT_SECONDS.get(kind, 0.0)
        for dtype in ("float32", "bfloat16"):
            layers.append(LayerTimes(kind, dtype, both, (seconds, seconds), both, steps, first, unit))  # type: ignore[arg-type]
    sizes = (1000, 1_000_000)  # figures have four digits in the file
    attention = [
        AttentionTimes(dtype, number, sizes, tuple(one * ATTENTION_NANOSECONDS / 1e9 for one in sizes))
        for dtype in ("float32", "bfloat16")
        for number in (1, 4)
    ]
    names = ("float32", "bfloat16", *FORMATS)
    rates = tuple(products(name) for name in names)
    return DecodeRates(1, VOCABULARY_SECONDS, rates, tuple(layers), tuple(attention), SEARCH)


def write_machine(path: Path, decode: DecodeRates | None) -> Path:
    """A cluster file of this machine's topology, with or without decodes."""
    link = LinkFit(2e-3, 1e6, 0.1)
    machine = MeasuredMachine(
        1, 2, 10**9, 2 * 10**9, {"fp32": 1e10}, 1e10, None, link, "Gloo", "2026-01-01", decode=decode
    )
    path.write_text(cluster_text(machine))
    return path

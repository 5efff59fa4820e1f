"""Measures what a decode on this CPU does beside reading weights: small operations of a layer, and of a step.

Products read many bytes, which push the code and data of small operations out of the caches, so these take longer the
more bytes a layer reads. The engine itself decodes with a small model here. After each of its products, a *ballast* of
other memory is read as a large weight would be; the time of that is taken off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import thread_time as clock
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.architectures import DecoderConfig, GPT2Config
from weft.architectures.language import RecurrentConfig
from weft.cluster.decode_rates import LayerKind, LayerTimes
from weft.models import build
from weft.models.recurrent import RecurrentLayer, RecurrentModel
from weft.serve.engine import Engine
from weft.serve.measurement.ballast import Ballast
from weft.serve.measurement.measure_products import DTYPES, START_BYTES, START_SIDE, Timings
from weft.serve.model.paged_model import PagedModel
from weft.serve.model.recurrent import FusedGRU, FusedLSTM, Multiply, RecurrentRows
from weft.serve.scheduling.request import Request, Sampling
from weft.serve.spec import EngineOptions
from weft.serve.weights.cpu_products import CpuWeight
from weft.serve.weights.packed_linear import PackedLinear, pack_head, pack_model
from weft.serve.weights.weight_formats import FORMATS

NUM_LAYERS, HIDDEN, VOCAB, PROMPT = 4, 64, 1024, 16
PASSES, LEAST_STEPS, MOST_STEPS, LEAST_SECONDS = 3, 7, 21, 0.03
LARGE_VOCAB, WIDE, UNIT_READ_BYTES = 1 << 16, 1024, 1 << 22
READ_BYTES = tuple(1 << power for power in (18, 21, 23, 25, 26))  # of a layer; the first are its own small weights
KINDS: tuple[tuple[LayerKind, str], ...] = (
    *(("decoder", name) for name in DTYPES),
    *(("gpt2", name) for name in DTYPES),
    ("lstm", "float32"),
    ("gru", "float32"),
)


@dataclass(frozen=True)
class _Measured:
    """An engine with a small model whose products read ballast; how many products a layer has, but for the first of a
    recurrent model, which has one; and whether its first layer is such a one.
    """

    engine: Engine
    num_products: int
    has_table: bool = False

    def product_bytes(self, layer_bytes: int) -> int:
        """What is set for each product, and read by the head: recurrent layers read shares of it."""
        return layer_bytes if self.has_table else layer_bytes // self.num_products

    def step_bytes(self, layer_bytes: int) -> int:
        """That a step reads in all, where each layer reads so many; a first one with a table half of them."""
        halves = 2 * NUM_LAYERS - self.has_table
        return halves * layer_bytes // 2 + self.product_bytes(layer_bytes)

    @property
    def starts(self) -> list[int]:
        """The index of the first product of each layer, among all of a step."""
        others = range(NUM_LAYERS - self.has_table)
        return [0] * self.has_table + [self.has_table + index * self.num_products for index in others]


class _LargeProduct:
    """Stands in `PackedLinear.for_cpu`: a small product, then ballast."""

    max_rows = 1 << 30

    def __init__(self, ballast: Ballast, small: Callable[[Tensor], Tensor]) -> None:
        self._ballast, self._small = ballast, small

    def product(self, hidden: Tensor) -> Tensor:
        self._ballast.begin()
        out = self._small(hidden)
        self._ballast.read()
        return out


class _LargeHead(nn.Module):
    """The head of a recurrent model, by a large product."""

    def __init__(self, large: _LargeProduct) -> None:
        super().__init__()
        self._large = large

    def forward(self, hidden: Tensor) -> Tensor:
        return self._large.product(hidden)


def measured_layers(tell: Callable[[], None]) -> list[LayerTimes]:
    """The times of each kind of layer and dtype that is measured: the median of PASSES passes. Calls `tell` after each
    kind of each pass.
    """
    ballast = Ballast()
    engines = [_engine(kind, DTYPES[dtype], VOCAB, ballast) for kind, dtype in KINDS]
    passes = list[list[list[tuple[float, float, float]]]]()
    for _ in range(PASSES):
        passes.append([])
        for measured in engines:
            passes[-1].append([_times(measured, ballast, size) for size in (0, *READ_BYTES[1:])])
            tell()
    times = list[LayerTimes]()
    for (kind, dtype), measured, found in zip(KINDS, engines, zip(*passes, strict=True), strict=True):
        layers, steps, firsts = (
            tuple(median(one[index] for one in point) for point in zip(*found, strict=True)) for index in range(3)
        )
        of_step = tuple(measured.step_bytes(size) for size in READ_BYTES)
        if not measured.has_table:
            times.append(LayerTimes(kind, dtype, READ_BYTES, layers, of_step, steps))
            continue
        unit = unit_seconds(kind, DTYPES[dtype])
        layers, firsts = (tuple(one - HIDDEN * unit for one in row) for row in (layers, firsts))
        times.append(LayerTimes(kind, dtype, READ_BYTES, layers, of_step, steps, firsts, unit))
    return times


def unit_seconds(kind: LayerKind, dtype: torch.dtype) -> float:
    """By which a recurrent layer is longer for each unit of its state, without its products: gates have functions."""
    timings = Timings()
    for size in (HIDDEN, WIDE):
        with torch.device("meta"):
            weights = RecurrentLayer(RecurrentConfig(kind, VOCAB, size))  # type: ignore[arg-type]
        layer = (FusedLSTM if kind == "lstm" else FusedGRU)(weights, has_table=True)
        gates, hidden, cell = (torch.zeros(1, number, dtype=dtype) for number in (4 * size, size, size))
        gates = gates[:, : (4 if kind == "lstm" else 3) * size]
        layer.multiply = lambda rows, weight, added, gates=gates: gates  # type: ignore[misc]
        timings.add(partial(layer.step_hoisted, gates, (hidden, cell)), UNIT_READ_BYTES)
    narrow, wide = timings.seconds(lambda: None)
    return max(wide - narrow, 1e-12) / (WIDE - HIDDEN)


def vocabulary_seconds() -> float:
    """Seconds to choose a token, for each token of the vocabulary."""
    ballast = Ballast()
    few, many = (
        _times(_engine("decoder", torch.float32, size, ballast), ballast, READ_BYTES[-2])[1]
        for size in (VOCAB, LARGE_VOCAB)
    )
    return max(many - few, 1e-9) / (LARGE_VOCAB - VOCAB)


def product_starts(name: str) -> tuple[float, ...]:
    """By which products of a format start later than plain ones in the layers of an engine, for each of START_BYTES.
    An engine with either kind of products takes turns with the other.
    """
    ballast = Ballast()
    plain, own = (_engine("decoder", torch.float32, VOCAB, ballast, form) for form in (None, name))
    found = []
    for read_bytes in START_BYTES:
        ballast.set_bytes(read_bytes)
        later = []
        for measured in (plain, own):
            _begin(measured.engine)
        for _ in range(MOST_STEPS // 2):
            first, second = (_step(measured, ballast)[0] for measured in (plain, own))
            later.append((second - first) / own.num_products)
        for measured in (plain, own):
            measured.engine.cancel("one")
        found.append(max(median(later[2:]), 1e-9))
    return tuple(found)


def _engine(kind: LayerKind, dtype: torch.dtype, vocab: int, ballast: Ballast, form: str | None = None) -> _Measured:
    """An engine with a small model. Products are plain ones, or those of a format; that of the head is plain."""
    few = torch.ones(START_SIDE, HIDDEN, dtype=dtype)
    logits = torch.arange(vocab, dtype=torch.float32).to(dtype).repeat(2, 1)
    head = _LargeProduct(ballast, lambda hidden: (F.linear(hidden, few), logits[: len(hidden)])[1])
    options = EngineOptions(max_running=1, num_blocks=32, prefix_cache=False)
    if kind in ("lstm", "gru"):
        config = RecurrentConfig(kind, VOCAB, HIDDEN, NUM_LAYERS)  # type: ignore[arg-type]
        engine = Engine(RecurrentModel(config).to(dtype), options)
        rows = cast(RecurrentRows, engine._part.paged)
        for index, layer in enumerate(rows.layers):
            share = 1.0 if kind == "lstm" and index else 0.5  # of what a layer reads that has products with inputs too
            layer.multiply = _large_multiply(layer.multiply, ballast, share)
        rows.model.lm_head = _LargeHead(head)  # type: ignore[assignment]
        return _Measured(engine, 1 if kind == "lstm" else 2, has_table=True)
    model = build(_config(kind, vocab)).to(dtype)
    pack_model(model, FORMATS[form or "int8"])
    pack_head(model, "int8", "cpu")
    engine = Engine(model, options)
    paged = cast(PagedModel, engine._part.paged)
    for linear in (one.layer for block in paged.blocks for one in block.linears):
        assert isinstance(linear, PackedLinear)
        linear.for_cpu = cast(CpuWeight, _LargeProduct(ballast, _small_product(linear, dtype, form is None)))
    cast(PackedLinear, paged.model.lm_head).for_cpu = cast(CpuWeight, head)
    return _Measured(engine, len(paged.blocks[0].linears))


def _large_multiply(multiply: Multiply, ballast: Ballast, share: float) -> Multiply:
    """A recurrent layer's product, then a share of the ballast."""

    def product(rows: Tensor, weight: Tensor, added: Tensor) -> Tensor:
        ballast.begin()
        out = multiply(rows, weight, added)
        ballast.read(share)
        return out

    return product


def _small_product(linear: PackedLinear, dtype: torch.dtype, is_plain: bool) -> Callable[[Tensor], Tensor]:
    """The linear's product with the decoded weight, or its own: with codes where the CPU has such a product."""
    if is_plain:
        weight = linear.format.dequantise(linear.parts, dtype)
        return lambda hidden: F.linear(hidden, weight)
    if linear.for_cpu is not None:
        return linear.for_cpu.product
    return lambda hidden: linear.format.product(hidden, linear.parts)


def _config(kind: LayerKind, vocab: int) -> DecoderConfig | GPT2Config:
    if kind == "gpt2":
        return GPT2Config(vocab_size=vocab, n_positions=256, n_embd=HIDDEN, n_layer=NUM_LAYERS, n_head=4)
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )


def _times(measured: _Measured, ballast: Ballast, read_bytes: int) -> tuple[float, float, float]:
    """Seconds of a layer, of a step outside of its layers, and of the first layer, where each layer but a first one
    with a table reads so many bytes of ballast.
    """
    ballast.set_bytes(0)
    _begin(measured.engine)
    ballast.set_bytes(measured.product_bytes(read_bytes))
    found, begin = list[tuple[float, float, float]](), clock()
    while len(found) < LEAST_STEPS or (len(found) < MOST_STEPS and clock() - begin < LEAST_SECONDS):
        found.append(_step(measured, ballast))
    measured.engine.cancel("one")
    layer, step, first = (median(column) for column in zip(*found[2:], strict=True))
    return layer, step, first


def _begin(engine: Engine) -> None:
    """Give an engine its one request."""
    engine.add(Request("one", tuple(range(PROMPT)), MOST_STEPS + 1, Sampling(temperature=0)))
    engine.step()


def _step(measured: _Measured, ballast: Ballast) -> tuple[float, float, float]:
    """A layer is from its first product to that of the next layer."""
    ballast.clear()
    begin = clock()
    measured.engine.step()
    whole = clock() - begin - sum(ballast.seconds)
    starts, skipped = measured.starts, int(measured.has_table)

    def seconds(start: int, stop: int) -> float:
        return ballast.begins[stop] - ballast.begins[start] - sum(ballast.seconds[start:stop])

    first, layer = seconds(starts[0], starts[1]), seconds(starts[skipped], starts[-1]) / (NUM_LAYERS - 1 - skipped)
    return layer, whole - (NUM_LAYERS - 1) * layer - (first if measured.has_table else layer), first

"""Measures what a decode on this CPU does beside reading weights: small operations of a layer, and of a step.

Products read many bytes, which push the code and data of small operations out of the caches, so these take longer the
more bytes a layer reads. The engine itself decodes with a small model here. After each of its products, a *ballast* of
other memory is read as a large weight would be; the time of that is taken off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import thread_time as clock
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.architectures import DecoderConfig, GPT2Config
from weft.architectures.recurrent import RecurrentConfig
from weft.cluster.decode_rates import LayerKind, LayerTimes
from weft.models import build
from weft.models.recurrent import RecurrentModel
from weft.serve.engine import Engine, EngineOptions
from weft.serve.measurement.ballast import Ballast
from weft.serve.measurement.measure_products import DTYPES, START_BYTES
from weft.serve.model.paged_model import PagedModel
from weft.serve.model.recurrent import FusedGRU, FusedLSTM, RecurrentRows, State
from weft.serve.scheduling.request import Request, Sampling
from weft.serve.weights.cpu_product import CpuWeight
from weft.serve.weights.packed_linear import PackedLinear, pack_head, pack_model
from weft.serve.weights.weight_formats import FORMATS, AfterProduct

NUM_LAYERS, HIDDEN, VOCAB, PROMPT = 4, 64, 1024, 16
PASSES, LEAST_STEPS, MOST_STEPS, LEAST_SECONDS = 3, 7, 21, 0.03
LARGE_VOCAB = 1 << 16
READ_BYTES = tuple(1 << power for power in (18, 21, 23, 25, 26))  # of a layer; the first are its own small weights
KINDS: tuple[tuple[LayerKind, str], ...] = (
    *(("decoder", name) for name in DTYPES),
    *(("gpt2", name) for name in DTYPES),
    ("lstm", "float32"),
    ("gru", "float32"),
)


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
    """The head of a recurrent model: logits without a product, then ballast."""

    def __init__(self, ballast: Ballast, logits: Tensor) -> None:
        super().__init__()
        self._ballast, self._logits = ballast, logits

    def forward(self, hidden: Tensor) -> Tensor:
        self._ballast.begin()
        self._ballast.read()
        return self._logits[: len(hidden)]


class _LargeLayer:
    """A recurrent layer before which ballast is read."""

    def __init__(self, layer: FusedLSTM | FusedGRU, ballast: Ballast) -> None:
        self._layer, self._ballast = layer, ballast

    def inputs(self, rows: Tensor) -> Tensor:
        return self._layer.inputs(rows)

    def step(self, rows: Tensor, state: State) -> State:
        self._read()
        return self._layer.step(rows, state)

    def step_hoisted(self, inputs: Tensor, state: State) -> State:
        self._read()
        return self._layer.step_hoisted(inputs, state)

    def _read(self) -> None:
        self._ballast.begin()
        self._ballast.read()


def measured_layers(tell: Callable[[], None]) -> list[LayerTimes]:
    """The times of each kind of layer and dtype that is measured: the fastest of PASSES passes. Calls `tell` after each
    kind of each pass.
    """
    ballast = Ballast(READ_BYTES[-1])
    engines = [_engine(kind, DTYPES[dtype], VOCAB, ballast) for kind, dtype in KINDS]
    passes = list[list[list[tuple[float, float]]]]()
    for _ in range(PASSES):
        passes.append([])
        for engine, number in engines:
            passes[-1].append([_times(engine, ballast, number, size) for size in (0, *READ_BYTES[1:])])
            tell()
    times = list[LayerTimes]()
    for (kind, dtype), found in zip(KINDS, zip(*passes, strict=True), strict=True):
        layers, steps = (
            tuple(min(one[index] for one in point) for point in zip(*found, strict=True)) for index in range(2)
        )
        times.append(LayerTimes(kind, dtype, READ_BYTES, layers, steps))
    return times


def vocabulary_seconds() -> float:
    """Seconds to choose a token, for each token of the vocabulary."""
    ballast = Ballast(READ_BYTES[-1])
    few, many = (
        _times(_engine("decoder", torch.float32, size, ballast)[0], ballast, 4, READ_BYTES[-2])[1]
        for size in (VOCAB, LARGE_VOCAB)
    )
    return max(many - few, 1e-9) / (LARGE_VOCAB - VOCAB)


def product_starts(name: str) -> tuple[float, ...]:
    """By which products of a format start later than plain ones in the layers of an engine, for each of START_BYTES.
    An engine with either kind of products takes turns with the other.
    """
    ballast = Ballast(READ_BYTES[-1])
    plain, own = (_engine("decoder", torch.float32, VOCAB, ballast, form) for form in (None, name))
    found = []
    for read_bytes in START_BYTES:
        ballast.set_bytes(read_bytes)
        later = []
        for engine, _ in (plain, own):
            _begin(engine)
        for _ in range(MOST_STEPS // 2):
            first, second = (_step(engine, ballast)[0] for engine, _ in (plain, own))
            later.append((second - first) / own[1])
        for engine, _ in (plain, own):
            engine.cancel("one")
        found.append(max(median(later[2:]), 1e-9))
    return tuple(found)


def _engine(
    kind: LayerKind, dtype: torch.dtype, vocab: int, ballast: Ballast, form: str | None = None
) -> tuple[Engine, int]:
    """An engine with a small model whose products read ballast, and how many of them a layer has. Products are plain
    ones, or those of a format.
    """
    logits = torch.arange(vocab, dtype=torch.float32).to(dtype).repeat(2, 1)
    options = EngineOptions(max_running=1, num_blocks=32, prefix_cache=False)
    if kind in ("lstm", "gru"):
        config = RecurrentConfig(kind, VOCAB, HIDDEN, NUM_LAYERS)  # type: ignore[arg-type]
        engine = Engine(RecurrentModel(config).to(dtype), options)
        rows = cast(RecurrentRows, engine._part.paged)
        rows.layers = [_LargeLayer(layer, ballast) for layer in rows.layers]  # type: ignore[misc]
        rows.model.lm_head = _LargeHead(ballast, logits)  # type: ignore[assignment]
        return engine, 1
    model = build(_config(kind, vocab)).to(dtype)
    pack_model(model, FORMATS[form or "int8"])
    pack_head(model, "int8", "cpu")
    engine = Engine(model, options)
    paged = cast(PagedModel, engine._part.paged)
    for linear in (one for block in paged.blocks for one in block.linears):
        assert isinstance(linear, PackedLinear)
        linear.for_cpu = cast(CpuWeight, _LargeProduct(ballast, _small_product(linear, dtype, form is None)))
    head = _LargeProduct(ballast, lambda hidden: logits[: len(hidden)])
    cast(PackedLinear, paged.model.lm_head).for_cpu = cast(CpuWeight, head)
    return engine, len(paged.blocks[0].linears)


def _small_product(linear: PackedLinear, dtype: torch.dtype, is_plain: bool) -> Callable[[Tensor], Tensor]:
    """The linear's product with the decoded weight, or its own: with codes where the CPU has such a product."""
    if is_plain:
        weight = linear.format.decode(linear.parts, dtype)
        return lambda hidden: F.linear(hidden, weight)
    if linear.for_cpu is not None:
        return linear.for_cpu.product
    return lambda hidden: linear.format.product(hidden, linear.parts, AfterProduct())


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


def _times(engine: Engine, ballast: Ballast, num_products: int, read_bytes: int) -> tuple[float, float]:
    """Seconds of a layer and of a step outside of its layers, where each layer reads so many bytes of ballast."""
    ballast.set_bytes(read_bytes // num_products)
    _begin(engine)
    found, begin = list[tuple[float, float]](), clock()
    while len(found) < LEAST_STEPS or (len(found) < MOST_STEPS and clock() - begin < LEAST_SECONDS):
        found.append(_step(engine, ballast))
    engine.cancel("one")
    layers, steps = zip(*found[2:], strict=True)
    return median(cast(Sequence[float], layers)), median(cast(Sequence[float], steps))


def _begin(engine: Engine) -> None:
    """Give an engine its one request."""
    engine.add(Request("one", tuple(range(PROMPT)), MOST_STEPS + 1, Sampling(temperature=0)))
    engine.step()


def _step(engine: Engine, ballast: Ballast) -> tuple[float, float]:
    ballast.clear()
    begin = clock()
    engine.step()
    whole = clock() - begin
    in_layers = ballast.begins[-1] - ballast.begins[0]  # the last product is the head's
    layer = (in_layers - sum(ballast.seconds[:-1])) / NUM_LAYERS
    return layer, whole - in_layers - ballast.seconds[-1]

"""Predicts decodes of one request on a CPU, from what was measured of that CPU (`cluster/decode_rates.py`).

A step is: each layer's products with weights, all else in the layers, attention over what the cache holds, the head or
a graph search in its place, and all else of the step. The model's shape says how many weights each product has and how
many bytes a layer and a step read; nothing is fitted to a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.architectures import DecoderConfig, LanguageConfig, RecurrentConfig
from weft.cluster.decode_rates import DecodeRates, LayerKind
from weft.errors import ConfigError, PlanError
from weft.serve.head.graph_head import GraphHead
from weft.serve.model.recurrent import TABLE_BYTES
from weft.serve.parallel.rank_part import refuse_model
from weft.serve.parallel.traffic import ServedSizes
from weft.serve.refusals import ServingCase, kind_of, refuse
from weft.serve.weights.cpu_products import GROUPS, DynamicWeight, GroupWeight
from weft.serve.weights.weight_formats import FORMATS, HEAD_FORMATS, Grouped, RowFp8, weight_bytes

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
Shape = tuple[int, int]  # outputs and inputs of a weight


@dataclass(frozen=True)
class CpuDecode:
    """A decode of one request: seconds by cause, bytes that it reads, and the seconds that these take at least."""

    seconds_by_cause: Mapping[str, float]
    read_bytes: int
    floor_seconds: float

    @property
    def seconds(self) -> float:
        return sum(self.seconds_by_cause.values())

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.seconds


@dataclass(frozen=True)
class _Layers:
    """The weights of each layer of a model, the kind of the layers, and bytes of keys and values of a token in each.
    The first of a recurrent model may have a table in place of its products with inputs.
    """

    kind: LayerKind
    shapes: tuple[tuple[Shape, ...], ...]
    head: Shape
    cache_bytes: int = 0
    window: int | None = None  # of the newest tokens, to which a token attends
    num_queries: int = 1  # that share a key head
    num_units: int = 0  # of the state of a recurrent layer
    has_table: bool = False


def predict_decode(
    config: LanguageConfig,
    rates: DecodeRates,
    dtype: str,
    length: int,
    weights: str | None = None,
    head: str | GraphHead | None = None,
) -> CpuDecode:
    """Predict the decode of a request with `length` tokens. `weights` and `head` are what `weft serve` is given.

    Raises ConfigError for what is not priced.
    """
    _refuse_unpriced(config, weights, head)
    model, kept = _layers(config, dtype), weights or dtype
    for _, inputs in model.shapes[0]:
        _refuse_small_groups(kept, inputs)
    _refuse_small_groups(head if isinstance(head, str) else dtype, model.head[1])
    head_kept = head if isinstance(head, str) else dtype
    graph = head if isinstance(head, GraphHead) and head.pays_for(1) else None
    by_layer = [sum(kept_bytes(kept, *shape) for shape in shapes) for shapes in model.shapes]
    row_bytes = kept_bytes(head_kept, 1, model.head[1])
    head_bytes = round(graph.num_scored * row_bytes + 8 * graph.num_edges) if graph else model.head[0] * row_bytes
    seen = length if model.window is None else min(length, model.window)
    cached = model.cache_bytes * seen * len(model.shapes)
    read = sum(by_layer) + head_bytes + cached
    times = rates.layer(model.kind, dtype)
    products = sum(_product(rates, kept, shape, read) for shapes in model.shapes for shape in shapes)
    layer_bytes = max(1, by_layer[0] * (2 if model.has_table else 1))
    small = times.layer(layer_bytes, model.num_units, model.has_table)
    small += (len(by_layer) - 1) * times.layer(layer_bytes, model.num_units)
    attention = 0.0
    if model.cache_bytes:
        each = rates.attention_seconds(dtype, model.num_queries, model.cache_bytes * seen)
        attention = each * len(by_layer)
    if graph is None:
        last = {"the head": _product(rates, head_kept, model.head, read)}
    else:
        last = {"the search for likely tokens": _search_seconds(rates, graph, row_bytes)}
    step = times.step(read) + rates.vocabulary_seconds * model.head[0]
    causes = {
        "products of layers": products,
        "small operations of layers": small,
        "attention over the cache": attention,
        **last,
        "the rest of the step": step,
    }
    return CpuDecode(causes, read, read / _best_rate(rates, read))


def kept_bytes(kept: str, outputs: int, inputs: int) -> int:
    """Bytes of a weight of a dtype or format."""
    return outputs * inputs * ITEM_BYTES[kept] if kept in ITEM_BYTES else weight_bytes(FORMATS[kept], outputs, inputs)


def _refuse_unpriced(config: LanguageConfig, weights: str | None, head: str | GraphHead | None) -> None:
    """Raise ConfigError for a model or option that has no price on a CPU."""
    if weights is not None and weights not in FORMATS:
        raise ConfigError(f"--weights {weights} is unknown; give one of {', '.join(FORMATS)}")
    if isinstance(head, str) and head not in HEAD_FORMATS:
        raise ConfigError(f"--head {head} is unknown; give graph=FILE or one of {', '.join(HEAD_FORMATS)}")
    given = {name: value for name, value in {"weights": weights, "head": head}.items() if value is not None}
    refuse(ServingCase(given, model=kind_of(config)))
    if not isinstance(config, RecurrentConfig):
        refuse_model(config)
        if any(ServedSizes.of(config).expert_layers):
            raise ConfigError("models with experts are not priced on a CPU; plan for GPUs")
    if isinstance(head, GraphHead):
        if head.num_tokens > config.vocab_size:
            raise ConfigError(
                f"the graph of --head has {head.num_tokens} tokens and the model {config.vocab_size}; run weft index "
                f"on this model"
            )
        if not head.num_rounds:
            raise ConfigError("the file of --head does not say how many edges a search follows; run weft index again")


def _refuse_small_groups(kept: str, inputs: int) -> None:
    """Raise ConfigError if a CPU decodes weights with so many inputs, for which nothing was measured."""
    form = FORMATS.get(kept)
    if isinstance(form, Grouped) and form.size_of_group(inputs) not in GROUPS:
        raise ConfigError(
            f"{kept} keeps weights with {inputs} inputs in groups of {form.size_of_group(inputs)}, which a CPU decodes "
            f"for each product; this is slow and not priced"
        )


def refuse_size(
    config: LanguageConfig,
    dtype: str,
    host_memory_bytes: int,
    length: int,
    weights: str | None = None,
    head: str | GraphHead | None = None,
) -> None:
    """Raise PlanError if the weights and the cache of a request with `length` tokens do not fit the machine."""
    held = held_bytes(config, dtype, length, weights, head)
    if held > host_memory_bytes:
        raise PlanError(
            f"{held / 1e9:.1f} GB of weights and cache do not fit the machine's {host_memory_bytes / 1e9:.1f} GB; take "
            f"a smaller model, or --weights int4"
        )


def held_bytes(
    config: LanguageConfig, dtype: str, length: int, weights: str | None = None, head: str | GraphHead | None = None
) -> int:
    """Bytes of weights and cache that a server holds. Weights in fewer bits are kept a second time
    (`serve/weights/cpu_products.py`); a graph search computes logits of the whole head's rows; a head in fewer bits
    leaves the embedding that it was tied to.
    """
    model, head_kept = _layers(config, dtype), head if isinstance(head, str) else dtype
    layers = sum(_twice(weights or dtype, shape) for shapes in model.shapes for shape in shapes)
    is_one = config.tie_word_embeddings and head_kept == dtype
    embedding = 0 if is_one else kept_bytes(dtype, *model.head)
    return layers + _twice(head_kept, model.head) + embedding + model.cache_bytes * length * len(model.shapes)


def _twice(kept: str, shape: Shape) -> int:
    """Bytes of a weight, and of the same weight in the order that a CPU's products with codes take: in the larger of
    such orders, as the file of a machine does not say which one it has.
    """
    own, form = kept_bytes(kept, *shape), FORMATS.get(kept)
    if isinstance(form, Grouped):
        group = form.size_of_group(shape[1])
        return own + max(kind.num_bytes(*shape, group, form.bits) for kind in (GroupWeight, DynamicWeight))
    return own * (1 if form is None or isinstance(form, RowFp8) else 2)


def _layers(config: LanguageConfig, dtype: str) -> _Layers:
    if isinstance(config, RecurrentConfig):
        return _recurrent_layers(config, dtype)
    sizes = ServedSizes.of(config)
    shapes: tuple[Shape, ...] = (
        (sizes.projected(1), sizes.hidden),
        (sizes.hidden, sizes.num_heads * sizes.head_dim),
        ((1 + sizes.is_gated) * sizes.inner, sizes.hidden),
        (sizes.hidden, sizes.inner),
    )
    cached = 2 * sizes.num_key_heads * sizes.head_dim * ITEM_BYTES[dtype]
    kind: LayerKind = "decoder" if isinstance(config, DecoderConfig) else "gpt2"
    queries = sizes.num_heads // sizes.num_key_heads
    return _Layers(kind, (shapes,) * sizes.num_layers, (sizes.vocab, sizes.hidden), cached, sizes.window, queries)


def _recurrent_layers(config: RecurrentConfig, dtype: str) -> _Layers:
    """With a table of the first layer's products with inputs where it is small enough (`serve/model/recurrent.py`)."""
    size, is_lstm = config.hidden_size, config.architecture == "lstm"
    gates = config.num_gates
    whole: tuple[Shape, ...] = ((gates * size, 2 * size),) if is_lstm else ((gates * size, size),) * 2
    has_table = gates * size * config.vocab_size * ITEM_BYTES[dtype] <= TABLE_BYTES
    first: tuple[Shape, ...] = ((gates * size, size),) if has_table else whole
    shapes = (first, *(whole,) * (config.num_hidden_layers - 1))
    head = (config.vocab_size, size)
    return _Layers(config.architecture, shapes, head, num_units=size, has_table=has_table)


def _product(rates: DecodeRates, kept: str, shape: Shape, read: float) -> float:
    """Seconds of a product beyond the start of a plain one, which is among small operations."""
    own = rates.product(kept)
    return own.start(kept_bytes(kept, *shape)) + own.seconds(*shape, read)


def _search_seconds(rates: DecodeRates, graph: GraphHead, row_bytes: int) -> float:
    return rates.search.seconds(graph.num_rounds, graph.num_edges, graph.num_scored, row_bytes)


def _best_rate(rates: DecodeRates, read: float) -> float:
    """Bytes a second that plain products read of so many."""
    plain = rates.product("float32")
    return max(ITEM_BYTES["float32"] / plain.seconds(1, one, read) * one for one in plain.inputs)

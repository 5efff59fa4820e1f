"""What a model costs on a CPU: the weights that a decode of one request reads, and the bytes that a server holds.

Nothing here has a time: `planner/serving_cpu.py` multiplies these with the rates of a measured CPU.
"""

from __future__ import annotations

from typing import Literal

from weft.architectures import DecoderConfig, LanguageConfig, RecurrentConfig
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


class CpuCosts:
    """The costs of one model that computes in `dtype`, with what `weft serve --weights` and `--head` are given.

    `shapes` are the weights of each layer. The first layer of a recurrent model may have a table in place of its
    products with inputs (`has_table`). `num_queries` share a key head; `num_units` are of a recurrent layer's state.
    """

    def __init__(
        self, config: LanguageConfig, dtype: str, weights: str | None = None, head: str | GraphHead | None = None
    ) -> None:
        """Raises ConfigError for a model or option that is not served on a CPU, or has no price there."""
        _refuse_unpriced(config, weights, head)
        self.dtype, self.weights = dtype, weights or dtype
        self.head_weights = head if isinstance(head, str) else dtype
        self._ties_head = config.tie_word_embeddings and self.head_weights == dtype
        self.kind: Literal["decoder", "gpt2", "lstm", "gru"] = "decoder"
        self._token_bytes, self._window, self.num_queries, self.num_units, self.has_table = 0, 1 << 62, 1, 0, False
        self.shapes: tuple[tuple[Shape, ...], ...]
        if isinstance(config, RecurrentConfig):
            self._set_recurrent(config)
        else:
            self._set_attention(ServedSizes.of(config))
            self.kind = "decoder" if isinstance(config, DecoderConfig) else "gpt2"
        for _, inputs in self.shapes[0]:
            _refuse_small_groups(self.weights, inputs)
        _refuse_small_groups(self.head_weights, self.head_shape[1])
        self.graph = head if isinstance(head, GraphHead) and head.pays_for(1) else None  # that is searched

    def _set_attention(self, sizes: ServedSizes) -> None:
        shapes: tuple[Shape, ...] = (
            (sizes.projected(1), sizes.hidden),
            (sizes.hidden, sizes.num_heads * sizes.head_dim),
            ((1 + sizes.is_gated) * sizes.inner, sizes.hidden),
            (sizes.hidden, sizes.inner),
        )
        self.shapes, self.head_shape = (shapes,) * sizes.num_layers, (sizes.vocab, sizes.hidden)
        self._token_bytes = 2 * sizes.num_key_heads * sizes.head_dim * ITEM_BYTES[self.dtype]
        self._window = self._window if sizes.window is None else sizes.window
        self.num_queries = sizes.num_heads // sizes.num_key_heads

    def _set_recurrent(self, config: RecurrentConfig) -> None:
        """An LSTM multiplies inputs and state by one weight, a GRU each by its own."""
        size, gates = config.hidden_size, config.num_gates * config.hidden_size
        whole: tuple[Shape, ...] = ((gates, 2 * size),) if config.architecture == "lstm" else ((gates, size),) * 2
        self.has_table = gates * config.vocab_size * ITEM_BYTES[self.dtype] <= TABLE_BYTES
        first: tuple[Shape, ...] = ((gates, size),) if self.has_table else whole
        self.shapes = (first, *(whole,) * (config.num_hidden_layers - 1))
        self.head_shape, self.kind, self.num_units = (config.vocab_size, size), config.architecture, size

    # --- what a decode reads

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes of each layer's weights."""
        return [sum(self.weight_bytes(shape) for shape in shapes) for shapes in self.shapes]

    def weight_bytes(self, shape: Shape) -> int:
        """Return the bytes of a layer's weight."""
        return kept_bytes(self.weights, *shape)

    @property
    def head_bytes(self) -> int:
        """Bytes of the head's weight."""
        return kept_bytes(self.head_weights, *self.head_shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the head."""
        return kept_bytes(self.head_weights, 1, self.head_shape[1])

    def cached_bytes(self, length: int) -> int:
        """Return the bytes of keys and values that a layer reads for a request with so many tokens."""
        return self._token_bytes * min(length, self._window)

    def read_bytes(self, length: int) -> int:
        """Return all that a decode reads."""
        graph, head_bytes = self.graph, self.head_shape[0] * self.row_bytes
        if graph is not None:
            head_bytes = round(graph.num_scored * self.row_bytes + 8 * graph.num_edges)
        return sum(self.layer_bytes) + head_bytes + self.cached_bytes(length) * len(self.shapes)

    # --- what a server holds

    def held_bytes(self, length: int) -> int:
        """Return the bytes of weights and of the cache of one request. Weights in fewer bits are kept a second time
        (`serve/weights/cpu_products.py`); a graph search computes logits of the whole head's rows; a head in fewer bits
        leaves the embedding that it was tied to.
        """
        layers = sum(_held_twice(self.weights, shape) for shapes in self.shapes for shape in shapes)
        embedding = 0 if self._ties_head else kept_bytes(self.dtype, *self.head_shape)
        cache = self._token_bytes * length * len(self.shapes)
        return layers + _held_twice(self.head_weights, self.head_shape) + embedding + cache

    def refuse_size(self, host_memory_bytes: int, length: int) -> None:
        """Raise PlanError if the weights and the cache of a request with `length` tokens do not fit the machine."""
        held = self.held_bytes(length)
        if held > host_memory_bytes:
            raise PlanError(
                f"{held / 1e9:.1f} GB of weights and cache do not fit the machine's {host_memory_bytes / 1e9:.1f} GB; "
                f"take a smaller model, or --weights int4"
            )


def kept_bytes(kept: str, outputs: int, inputs: int) -> int:
    """Return the bytes of a weight of a dtype or format."""
    return outputs * inputs * ITEM_BYTES[kept] if kept in ITEM_BYTES else weight_bytes(FORMATS[kept], outputs, inputs)


def _held_twice(kept: str, shape: Shape) -> int:
    """Return the bytes of a weight, and of its copy in the order that a CPU's products with codes read. Of the two
    orders that there are the larger one counts, because a machine's file does not say which one its CPU takes.
    """
    own, form = kept_bytes(kept, *shape), FORMATS.get(kept)
    if isinstance(form, Grouped):
        group = form.size_of_group(shape[1])
        return own + max(kind.num_bytes(*shape, group, form.bits) for kind in (GroupWeight, DynamicWeight))
    return own * (1 if form is None or isinstance(form, RowFp8) else 2)


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
    """Raise ConfigError if a CPU dequantises weights with so many inputs, for which nothing was measured."""
    form = FORMATS.get(kept)
    if isinstance(form, Grouped) and form.size_of_group(inputs) not in GROUPS:
        raise ConfigError(
            f"{kept} keeps weights with {inputs} inputs in groups of {form.size_of_group(inputs)}, which a CPU decodes "
            f"for each product; this is slow and not priced"
        )

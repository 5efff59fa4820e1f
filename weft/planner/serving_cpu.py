"""Predicts decodes of one request on a CPU, by the rates that were measured there (`cluster/decode_rates.py`).

A decode is the sum of each layer's products with weights, everything else in the layers, attention over the cache, the
head or a graph search in its place, and everything else of the step. `serve/cpu_costs.py` says how many weights each
product has and how many bytes a layer and a step read. No rate is fitted to a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.cluster.decode_rates import DecodeRates
from weft.serve.cpu_costs import CpuCosts


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


def predict_decode(costs: CpuCosts, rates: DecodeRates, length: int) -> CpuDecode:
    """Predict the decode of a request with `length` tokens. Raises ConfigError for what was not measured."""
    layer_bytes, num_layers, read = costs.layer_bytes, len(costs.shapes), costs.read_bytes(length)
    times = rates.layer(costs.kind, costs.dtype)
    # By what each layer but a first one with a table reads: that one reads half.
    usual_bytes = max(1, layer_bytes[0] * (2 if costs.has_table else 1))
    small = times.layer(usual_bytes, costs.num_units, costs.has_table)
    small += (num_layers - 1) * times.layer(usual_bytes, costs.num_units)
    attention = 0.0
    if cached := costs.cached_bytes(length):
        attention = num_layers * rates.attention_seconds(costs.dtype, costs.num_queries, cached)
    if costs.graph is None:
        last = {"the head": _product_seconds(rates, costs.head_weights, costs.head_shape, costs.head_bytes, read)}
    else:
        graph = costs.graph
        seconds = rates.search.seconds(graph.num_rounds, graph.num_edges, graph.num_scored, costs.row_bytes)
        last = {"the search for likely tokens": seconds}
    products = sum(
        _product_seconds(rates, costs.weights, shape, costs.weight_bytes(shape), read)
        for shapes in costs.shapes
        for shape in shapes
    )
    causes = {
        "products of layers": products,
        "small operations of layers": small,
        "attention over the cache": attention,
        **last,
        "the rest of the step": times.step(read) + rates.vocabulary_seconds * costs.head_shape[0],
    }
    return CpuDecode(causes, read, read / _best_rate(rates, read))


def _product_seconds(rates: DecodeRates, kept: str, shape: tuple[int, int], num_bytes: int, read: float) -> float:
    """Return the seconds of one product with a weight of `num_bytes`, in a step that reads `read` bytes. The start of a
    plain product is among the small operations of a layer; a product with quantised weights starts later than that.
    """
    own = rates.product(kept)
    return own.start(num_bytes) + own.seconds(*shape, read)


def _best_rate(rates: DecodeRates, read: float) -> float:
    """Return the highest rate, in bytes a second, of a float32 product in a step that reads `read` bytes."""
    plain = rates.product("float32")
    return max(4 / plain.seconds(1, one, read) * one for one in plain.inputs)

"""`weft plan --serve` on a CPU: decodes by hand on a made-up CPU, what more tokens and fewer bits change, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_rates_for_tests import (
    ATTENTION_NANOSECONDS,
    FIRST_SECONDS,
    LAYER_SECONDS,
    SEARCH,
    START,
    STEP_SECONDS,
    UNIT_SECONDS,
    VOCABULARY_SECONDS,
    WEIGHTS_PER_SECOND,
    made_up_rates,
)

from weft.architectures import GPT2Config
from weft.architectures.language import RecurrentConfig
from weft.cluster.decode_rates import AttentionTimes, DecodeRates, LayerTimes, ProductRates
from weft.errors import ConfigError, PlanError
from weft.models import DecoderConfig
from weft.planner import serving_cpu
from weft.planner.serving_cpu import CpuDecode
from weft.serve.cpu_costs import CpuCosts, kept_bytes
from weft.serve.head.graph_head import GraphHead, VocabularyGraph
from weft.serve.model.recurrent import TABLE_BYTES
from weft.serve.weights.weight_formats import FORMATS, weight_bytes

LAYERS, HIDDEN, INNER, VOCAB = 3, 256, 512, 1000
LLAMA = DecoderConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    num_key_value_heads=2,
)
SHAPES = (((8 + 4) * 32, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
NUM_WEIGHTS = sum(outputs * inputs for outputs, inputs in SHAPES)
GRAPH = GraphHead(
    VocabularyGraph(torch.zeros(VOCAB, 4, dtype=torch.long), torch.zeros(1, dtype=torch.long)),
    "",
    4,
    8,
    50.0,
    3.0,
    80.0,
)


def predict_decode(
    config: Any, rates: DecodeRates, dtype: str, length: int, weights: str | None = None, head: Any = None
) -> CpuDecode:
    return serving_cpu.predict_decode(CpuCosts(config, dtype, weights, head), rates, length)


def held_bytes(config: Any, dtype: str, length: int, *given: Any) -> int:
    return CpuCosts(config, dtype, *given).held_bytes(length)


def test_a_decode_of_a_llama_is_the_sum_of_its_parts() -> None:
    found = predict_decode(LLAMA, made_up_rates(), "float32", 100)
    cache_bytes = 2 * 2 * 32 * 4 * 100  # keys and values of two heads
    assert found.seconds_by_cause == pytest.approx(
        {
            "products of layers": LAYERS * NUM_WEIGHTS / WEIGHTS_PER_SECOND["float32"],
            "small operations of layers": LAYERS * LAYER_SECONDS["decoder"],
            "attention over the cache": LAYERS * cache_bytes * ATTENTION_NANOSECONDS / 1e9,
            "the head": VOCAB * HIDDEN / WEIGHTS_PER_SECOND["float32"],
            "the rest of the step": STEP_SECONDS + VOCAB * VOCABULARY_SECONDS,
        }
    )
    assert found.read_bytes == 4 * (LAYERS * NUM_WEIGHTS + VOCAB * HIDDEN) + LAYERS * cache_bytes
    assert found.floor_seconds == pytest.approx(found.read_bytes / (4 * WEIGHTS_PER_SECOND["float32"]))
    assert found.tokens_per_second == pytest.approx(1 / found.seconds)
    longer = predict_decode(LLAMA, made_up_rates(), "float32", 1000)
    assert longer.seconds - found.seconds == pytest.approx(9 * LAYERS * cache_bytes * ATTENTION_NANOSECONDS / 1e9)
    half = predict_decode(LLAMA, made_up_rates(), "bfloat16", 100)
    assert half.read_bytes == found.read_bytes // 2
    assert half.seconds_by_cause["the head"] == pytest.approx(found.seconds_by_cause["the head"] / 2)


def test_every_format_has_its_own_rate_and_start_and_the_head_another() -> None:
    rates, plain = made_up_rates(), predict_decode(LLAMA, made_up_rates(), "float32", 100).seconds_by_cause
    for name, form in FORMATS.items():
        found = predict_decode(LLAMA, rates, "float32", 100, name)
        rate = WEIGHTS_PER_SECOND.get(name, 4e9)
        assert found.seconds_by_cause["products of layers"] == pytest.approx(
            LAYERS * (len(SHAPES) * START + NUM_WEIGHTS / rate)
        )
        assert found.seconds_by_cause["the head"] == plain["the head"]
        stored = LAYERS * sum(weight_bytes(form, *shape) for shape in SHAPES) + 4 * VOCAB * HIDDEN
        assert found.read_bytes == stored + LAYERS * 2 * 2 * 32 * 4 * 100
    both = predict_decode(LLAMA, rates, "float32", 100, "int8", "int4").seconds_by_cause
    assert both["the head"] == pytest.approx(START + VOCAB * HIDDEN / WEIGHTS_PER_SECOND["int4"])


def test_what_a_step_reads_decides_how_fast_it_reads() -> None:
    """A small model stays in the cache; a large one of the same shape of layers does not."""
    rates = made_up_rates()
    fast_and_slow = ProductRates("float32", (256,), (10**6, 10**8), ((4e9, 1e9),))
    rates = replace(rates, products=(fast_and_slow, *rates.products[1:]))
    small = predict_decode(replace(LLAMA, num_hidden_layers=1, vocab_size=16), rates, "float32", 1)
    large = predict_decode(replace(LLAMA, num_hidden_layers=40, vocab_size=10**5), rates, "float32", 1)
    each = [one.seconds_by_cause["products of layers"] for one in (small, large)]
    assert each[1] / 40 == pytest.approx(4 * each[0], rel=0.5)
    assert each[1] / 40 > 2.5 * each[0]


def test_a_search_in_the_graph_takes_the_place_of_the_head_where_it_pays() -> None:
    rates = made_up_rates()
    found = predict_decode(LLAMA, rates, "float32", 100, head=GRAPH)
    expected = 3 * SEARCH.round_seconds + 80 * SEARCH.edge_seconds
    expected += 50 * (SEARCH.logit_seconds + SEARCH.byte_seconds * 4 * HIDDEN)
    assert found.seconds_by_cause["the search for likely tokens"] == pytest.approx(expected)
    assert "the head" not in found.seconds_by_cause
    dense = predict_decode(LLAMA, rates, "float32", 100)
    assert dense.read_bytes - found.read_bytes == (VOCAB - 50) * 4 * HIDDEN - 80 * 8
    wide = replace(GRAPH, num_scored=VOCAB / 2)  # weft serve uses the dense head
    assert predict_decode(LLAMA, rates, "float32", 100, head=wide) == dense
    with pytest.raises(ConfigError, match="does not say how many edges a search follows; run weft index again"):
        predict_decode(LLAMA, rates, "float32", 100, head=replace(GRAPH, num_rounds=0.0))
    padded = replace(LLAMA, vocab_size=VOCAB + 24)  # rows beyond the tokenizer are in no graph
    assert "the search for likely tokens" in predict_decode(padded, rates, "float32", 100, head=GRAPH).seconds_by_cause
    with pytest.raises(ConfigError, match="has 1000 tokens and the model 999"):
        predict_decode(replace(LLAMA, vocab_size=999), rates, "float32", 100, head=GRAPH)


def test_recurrent_layers_read_the_weights_of_their_gates_and_the_first_a_table() -> None:
    rates, size = made_up_rates(), 128
    for kind, gates in (("lstm", 4), ("gru", 3)):
        config = RecurrentConfig(kind, VOCAB, size, 2)  # type: ignore[arg-type]
        found = predict_decode(config, rates, "float32", 100)
        whole = gates * size * 2 * size
        assert found.read_bytes == 4 * (whole // 2 + whole + VOCAB * size)
        assert found.seconds_by_cause["products of layers"] == pytest.approx((whole * 3 / 2) / 1e9)
        units = size * UNIT_SECONDS[kind]
        assert found.seconds_by_cause["small operations of layers"] == pytest.approx(
            FIRST_SECONDS[kind] + LAYER_SECONDS[kind] + 2 * units
        )
        assert found.seconds_by_cause["attention over the cache"] == 0
        large = predict_decode(replace(config, vocab_size=10**6), rates, "float32", 100)  # no room for a table
        assert large.read_bytes == 4 * (2 * whole + 10**6 * size)
        assert large.seconds_by_cause["small operations of layers"] == pytest.approx(
            2 * LAYER_SECONDS[kind] + 2 * units
        )
    for given in (("int8", None), (None, "int8")):
        with pytest.raises(ConfigError, match="a recurrent model is served on one rank, with its weights as they are"):
            predict_decode(RecurrentConfig(), rates, "float32", 100, *given)
    graph = predict_decode(RecurrentConfig("gru", VOCAB, size), rates, "float32", 100, head=GRAPH)
    assert "the search for likely tokens" in graph.seconds_by_cause


def test_small_operations_are_looked_up_by_the_bytes_of_a_whole_layer() -> None:
    """A first layer with a table reads half of one, and its time is listed by what the others read."""
    size, whole = 128, 4 * 4 * 128 * 256
    times = LayerTimes("lstm", "float32", (whole // 2, whole), (1.0, 10.0), (1, 10**12), (2.0, 20.0), (3.0, 30.0))
    rates = replace(made_up_rates(), layers=(times,))
    for num_layers in (1, 2, 5):
        config = RecurrentConfig("lstm", 16, size, num_layers)
        found = predict_decode(config, rates, "float32", 100).seconds_by_cause
        assert found["small operations of layers"] == pytest.approx(30 + (num_layers - 1) * 10)
        read = (num_layers - 0.5) * whole + 4 * 16 * size  # decides about the rest of the step, with the head's bytes
        assert found["the rest of the step"] == pytest.approx(times.step(read), rel=1e-6)


def test_every_figure_is_looked_up_for_its_dtype_inputs_bytes_and_queries() -> None:
    """On a CPU whose figures all differ."""
    two, starts = (1000, 10**9), ((1000, 10**9), (1e-6, 1e-3))
    products = [
        ProductRates("float32", (64, 4096), two, ((4e9, 1e9), (8e9, 2e9))),
        ProductRates("bfloat16", (64, 4096), two, ((5e9, 2e9), (9e9, 3e9))),
        ProductRates("int4", (64, 4096), two, ((6e9, 3e9), (7e9, 4e9)), *starts),  # type: ignore[arg-type]
    ]
    layers = [
        LayerTimes("decoder", dtype, two, (scale, 2 * scale), two, (3 * scale, 4 * scale))
        for dtype, scale in (("float32", 1e-3), ("bfloat16", 5e-3))
    ]
    attention = [
        AttentionTimes(dtype, number, two, (1e-6 * scale * number, 1e-3 * scale * number))
        for dtype, scale in (("float32", 1), ("bfloat16", 3))
        for number in (1, 4)
    ]
    rates = replace(made_up_rates(), products=tuple(products), layers=tuple(layers), attention=tuple(attention))
    for dtype, weights, item in (("float32", None, 4), ("bfloat16", None, 2), ("float32", "int4", 4)):
        found = predict_decode(LLAMA, rates, dtype, 100, weights)
        own = rates.product(weights or dtype)
        kept = [kept_bytes(weights or dtype, *shape) for shape in SHAPES]
        cached = 2 * 2 * 32 * item * 100
        read = LAYERS * (sum(kept) + cached) + VOCAB * HIDDEN * item
        assert found.read_bytes == read
        each = [
            own.start(size) + own.seconds(*shape, read_bytes=read) for size, shape in zip(kept, SHAPES, strict=True)
        ]
        times = rates.layer("decoder", dtype)
        assert found.seconds_by_cause == pytest.approx(
            {
                "products of layers": LAYERS * sum(each),
                "small operations of layers": LAYERS * times.layer(sum(kept)),
                "attention over the cache": LAYERS * rates.attention_seconds(dtype, 4, cached),
                "the head": rates.product(dtype).seconds(VOCAB, HIDDEN, read),
                "the rest of the step": times.step(read) + VOCAB * VOCABULARY_SECONDS,
            }
        )
        best = 4 / rates.product("float32").seconds(1, 4096, read) * 4096  # of long rows, which are read faster
        assert found.floor_seconds == pytest.approx(read / best)


@pytest.mark.parametrize(("kind", "gates"), [("lstm", 4), ("gru", 3)])
def test_a_table_is_priced_where_the_server_makes_one(kind: str, gates: int) -> None:
    size, dtype_bytes = 128, 4
    most = TABLE_BYTES // (gates * size * dtype_bytes)
    for vocab, shares in ((most, 1.5), (most + 1, 2.0)):
        found = predict_decode(RecurrentConfig(kind, vocab, size, 2), made_up_rates(), "float32", 1)  # type: ignore[arg-type]
        assert found.read_bytes == 4 * (shares * gates * size * 2 * size + vocab * size)


def test_an_lstm_has_one_product_with_inputs_and_state_and_a_gru_two() -> None:
    """Long rows are read faster than short ones here, so one product differs from two."""
    own = ProductRates("float32", (64, 4096), (1, 10**9), ((1e9, 1e9), (64e9, 64e9)))
    rates, size = replace(made_up_rates(), products=(own,)), 128
    for kind, shapes in (("lstm", [(4 * size, size), (4 * size, 2 * size)]), ("gru", [(3 * size, size)] * 3)):
        found = predict_decode(RecurrentConfig(kind, VOCAB, size, 2), rates, "float32", 1)  # type: ignore[arg-type]
        assert found.seconds_by_cause["products of layers"] == pytest.approx(
            sum(own.seconds(*shape, read_bytes=1) for shape in shapes)
        )


def test_a_gpt2_has_four_products_and_layers_of_its_own() -> None:
    config = GPT2Config(vocab_size=VOCAB, n_embd=HIDDEN, n_layer=2, n_head=4)
    found = predict_decode(config, made_up_rates(), "float32", 10).seconds_by_cause
    assert found["products of layers"] == pytest.approx(2 * 12 * HIDDEN**2 / 1e9)
    assert found["small operations of layers"] == pytest.approx(2 * LAYER_SECONDS["gpt2"])


def test_what_has_no_price_and_what_does_not_fit_is_refused() -> None:
    rates = made_up_rates()
    for given, match in (
        (("float32", 10, "int3"), "--weights int3 is unknown"),
        (("float32", 10, None, "fp8"), "--head fp8 is unknown"),
    ):
        with pytest.raises(ConfigError, match=match):
            predict_decode(LLAMA, rates, *given)  # type: ignore[arg-type]
    experts = replace(LLAMA, architecture="mixtral", num_experts=4, num_experts_per_tok=2)
    with pytest.raises(ConfigError, match="models with experts are not priced on a CPU"):
        predict_decode(experts, rates, "float32", 10)
    odd = replace(LLAMA, hidden_size=240, head_dim=32, num_attention_heads=8)
    for given in (("int4", None), (None, "int4")):
        with pytest.raises(
            ConfigError, match="int4 keeps weights with 240 inputs in groups of 16, which a CPU decodes"
        ):
            predict_decode(odd, rates, "float32", 10, *given)
    CpuCosts(LLAMA, "float32").refuse_size(held_bytes(LLAMA, "float32", 10), 10)
    with pytest.raises(PlanError, match=r"of weights and cache do not fit the machine's 0\.0 GB; take a smaller model"):
        CpuCosts(LLAMA, "float32").refuse_size(10**6, 10)


def test_codes_are_held_twice_and_the_head_stays_beside_a_graph() -> None:
    tied = replace(LLAMA, tie_word_embeddings=True)
    head = LLAMA.vocab_size * LLAMA.hidden_size
    plain = held_bytes(tied, "float32", 0)
    assert held_bytes(replace(tied, tie_word_embeddings=False), "float32", 0) == plain + 4 * head
    layers = (plain - 4 * head) // 4
    row_sums = 8 * LAYERS * sum(outputs for outputs, _ in SHAPES)  # of each 4 bits of a weight, in ARM's order
    assert held_bytes(tied, "float32", 0, "fp16") == 2 * 2 * layers + 4 * head
    assert held_bytes(tied, "float32", 0, "int4") == (4.5 + 4.75) / 8 * layers + row_sums + 4 * head
    assert held_bytes(tied, "float32", 0, "int8") == (8.25 + 8.5) / 8 * layers + 2 * row_sums + 4 * head
    assert held_bytes(tied, "float32", 0, "fp8") < 2 * layers + 4 * head
    assert held_bytes(tied, "float32", 0, None, "fp16") == plain + 2 * 2 * head
    assert held_bytes(tied, "float32", 0, None, GRAPH) == plain
    assert held_bytes(tied, "float32", 10) == plain + LAYERS * 2 * 2 * 32 * 4 * 10


def test_tokens_outside_of_a_sliding_window_are_not_read() -> None:
    near = replace(LLAMA, architecture="mistral", sliding_window=50)
    rates = made_up_rates()
    found = predict_decode(near, rates, "float32", 100)
    assert found == predict_decode(near, rates, "float32", 50) == predict_decode(LLAMA, rates, "float32", 50)
    assert found.read_bytes < predict_decode(LLAMA, rates, "float32", 100).read_bytes

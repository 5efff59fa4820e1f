"""Measuring decodes on a CPU: every format is timed through the engine's own products, ballast is left out of times,
and fits recover the parts of a search. No time is asserted.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from weft.cluster.decode_rates import LayerKind
from weft.serve.measurement import ballast, measure_decode, measure_layers, measure_products, measure_search
from weft.serve.measurement.ballast import Ballast
from weft.serve.weights.packed_linear import PackedLinear
from weft.serve.weights.weight_formats import FORMATS


@pytest.fixture
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as little as there is."""
    for module, name, value in (
        (measure_products, "INPUTS", (64, 128)),
        (measure_products, "READ_BYTES", (1 << 15, 1 << 16)),
        (measure_products, "TOKENS", (32,)),
        (measure_products, "LEAST_SECONDS", 0.0),
        (measure_products, "LEAST_CALLS", 1),
        (measure_layers, "READ_BYTES", (1 << 15, 1 << 16)),
        (measure_layers, "START_BYTES", (1 << 12,)),
        (measure_products, "START_BYTES", (1 << 12,)),
        (ballast, "RING_BYTES", 1 << 16),
        (measure_layers, "LEAST_STEPS", 3),
        (measure_layers, "LEAST_SECONDS", 0.0),
        (measure_layers, "LARGE_VOCAB", 2048),
        (measure_decode, "SPREAD_READ_BYTES", 1 << 15),
        (measure_search, "NUM_TOKENS", 256),
        (measure_search, "NUM_ENTRIES", 8),
        (measure_search, "GRAPHS", ((4, 128), (4, 4))),
        (measure_search, "WIDTHS", (8, 16)),
        (measure_search, "BEAMS", (64, 128)),
        (measure_search, "NUM_SEARCHES", 1),
    ):
        monkeypatch.setattr(module, name, value)


def test_all_formats_kinds_of_layers_and_searches_are_measured(
    few_points: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedLinear, "arrange_for_cpu", lambda self, dtype: None)  # it measures for seconds
    told = list[tuple[int, int]]()
    rates = measure_decode.measure_decode(lambda done, total: told.append((done, total)))
    assert [one.weights for one in rates.products] == ["float32", "bfloat16", *FORMATS]
    assert [(one.kind, one.dtype) for one in rates.layers] == list(measure_layers.KINDS)
    assert {(one.dtype, one.num_queries) for one in rates.attention} == {
        (dtype, number) for dtype in ("float32", "bfloat16") for number in (1, 4)
    }
    assert rates.threads == torch.get_num_threads()
    assert 1 < rates.memory_spread < 1000
    assert told == [(number, len(told)) for number in range(1, len(told) + 1)]  # the bar ends full
    assert rates.products[0].inputs == (64, 128)
    assert rates.layers[0].read_bytes == (1 << 15, 1 << 16)


def test_products_are_timed_after_the_same_memory_as_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    places, read = list[int](), Ballast.read
    monkeypatch.setattr(Ballast, "read", lambda self, share=1.0: places.append(self._place) or read(self, share))
    timings = measure_products.Timings()
    timings.add(lambda: None, 1 << 14)
    timings.seconds(lambda: None)
    assert len(places) >= measure_products.PASSES * measure_products.LEAST_CALLS
    assert set(places) == {0}


def test_measured_weights_are_as_large_as_those_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny numbers of fp16 are decoded slower on some CPUs."""
    seen = list[torch.Tensor]()
    layer = measure_products._layer
    monkeypatch.setattr(measure_products, "_layer", lambda name, weight: seen.append(weight) or layer(name, weight))
    for inputs in measure_products.INPUTS:
        measure_products._product("float32", 16, inputs)
        assert float((seen[-1].abs() < torch.finfo(torch.float16).smallest_normal).float().mean()) < 0.01


def test_a_product_is_that_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every format goes through PackedLinear.multiply, arranged for this CPU as the engine arranges it."""
    seen = list[tuple[object, bool]]()
    plain = PackedLinear.multiply

    def watched(self: PackedLinear, *given: Any) -> torch.Tensor:
        seen.append((self.format, self.for_cpu is not None))
        return plain(self, *given)

    monkeypatch.setattr(PackedLinear, "multiply", watched)
    arranged = list[str]()
    monkeypatch.setattr(PackedLinear, "arrange_for_cpu", lambda self, dtype: arranged.append(str(dtype)))
    for name, form in FORMATS.items():
        out = measure_products._product(name, 64, 64)()
        assert out.shape == (1, 64)
        assert seen.pop()[0] is form
    assert arranged == ["torch.float32"] * len(FORMATS)
    assert measure_products._product("bfloat16", 64, 32)().dtype == torch.bfloat16
    assert not seen


def test_ballast_reads_as_many_bytes_as_asked_and_its_time_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, rows = Ballast(1 << 16), list[int]()
    monkeypatch.setattr(torch, "mv", lambda matrix, row: rows.append(len(matrix)))
    memory.set_bytes(5 * 4096)
    for _ in range(4):
        memory.read()
    assert sum(rows) == 4 * 5  # rows of 4 kB, in pieces where the memory ends
    assert max(rows) == 5
    assert len(memory.seconds) == 4
    memory.read(0.4)
    assert rows[-1] == 2  # a share of them
    memory.clear()
    assert memory.seconds == memory.begins == []


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("decoder", (4.0, 1.0, 4.0)),  # four products of a layer, and the head
        ("gpt2", (4.0, 1.0, 4.0)),
        ("lstm", (1.0, 1.0, 1.0)),
        ("gru", (2.0, 1.0, 1.0)),  # the first layer has a table in place of one of them
    ],
)
def test_a_slow_ballast_does_not_lengthen_layers_or_steps(
    kind: LayerKind, expected: tuple[float, ...], few_points: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that only ballast and products move, layers and steps take what products take."""
    now, rows = [0.0], list[int]()
    for module in (ballast, measure_layers):
        monkeypatch.setattr(module, "clock", lambda: now[0])
    memory = Ballast(1 << 16)
    read = memory.read

    def slow_mv(matrix: torch.Tensor, row: torch.Tensor) -> None:
        now[0] += 1000.0
        rows.append(len(matrix))

    def slow_read(share: float = 1.0) -> None:
        read(share)
        now[0] += 1.0  # after a product and its ballast

    monkeypatch.setattr(torch, "mv", slow_mv)
    monkeypatch.setattr(memory, "read", slow_read)
    measured = measure_layers._engine(kind, torch.float32, measure_layers.VOCAB, memory)
    assert measure_layers._times(measured, memory, 1 << 16) == expected
    # Rows of 4 kB: a layer reads 16 and the head as much as a product; of recurrent ones, the first layer reads half.
    in_step = 4 * 16 + 4 if kind in ("decoder", "gpt2") else 3 * 16 + 8 + 16
    assert sum(rows) == measure_layers.LEAST_STEPS * in_step
    assert measured.step_bytes(1 << 16) == 4096 * in_step


def test_the_head_and_every_layer_have_the_start_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small product is made where a large model has a large one."""
    sizes, linear = list[int](), torch.nn.functional.linear
    memory = Ballast(1 << 16)
    for kind in ("decoder", "lstm", "gru"):
        measured = measure_layers._engine(kind, torch.float32, measure_layers.VOCAB, memory)
        measure_layers._begin(measured.engine)
        with monkeypatch.context() as patch:
            patch.setattr(
                F, "linear", lambda hidden, weight, bias=None: sizes.append(1) or linear(hidden, weight, bias)
            )
            measured.engine.step()
        assert len(sizes) == (4 * 4 + 1 if kind == "decoder" else 1)  # recurrent layers call another function
        sizes.clear()


def test_wider_recurrent_layers_take_longer_by_their_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a unit follows from two widths; what was measured at the narrow one is left without its units."""
    widths = list[int]()

    def seconds(self: measure_products.Timings, tell: object) -> list[float]:
        widths.extend(call()[0].shape[1] for call, _ in self._calls)  # type: ignore[index]
        return [3.0 + 0.5 * one for one in widths[-2:]]

    monkeypatch.setattr(measure_products.Timings, "seconds", seconds)
    for kind in ("lstm", "gru"):
        assert measure_layers.unit_seconds(kind, torch.float32) == pytest.approx(0.5)  # type: ignore[arg-type]
    assert widths == [measure_layers.HIDDEN, measure_layers.WIDE] * 2
    monkeypatch.setattr(measure_layers, "KINDS", (("decoder", "float32"), ("gru", "float32")))
    monkeypatch.setattr(measure_layers, "READ_BYTES", (1 << 15,))
    slower = iter([-1.0, -1.0, 0.0, 0.0, 2.0, 2.0])  # in the third pass, and faster in the first
    monkeypatch.setattr(
        measure_layers,
        "_times",
        lambda measured, memory, size: tuple(one + late for late in [next(slower)] for one in (100.0, 7.0, 90.0)),
    )
    decoder, gru = measure_layers.measured_layers(lambda: None)
    assert (decoder.layer_seconds, decoder.step_seconds, decoder.first_seconds) == ((100.0,), (7.0,), ())
    assert (decoder.step_bytes, gru.step_bytes) == (((1 << 15) * 17 // 4,), ((1 << 15) * 9 // 2,))
    units = 0.5 * measure_layers.HIDDEN
    assert (gru.layer_seconds, gru.step_seconds, gru.first_seconds) == ((100 - units,), (7.0,), (90 - units,))
    assert (decoder.unit_seconds, gru.unit_seconds) == (0.0, pytest.approx(0.5))


def test_starts_are_for_each_product_and_choices_for_each_token(
    few_points: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedLinear, "arrange_for_cpu", lambda self, dtype: None)
    layers = iter([1.0, 9.0] * 100)  # of the plain engine and that of the format, which have four products
    monkeypatch.setattr(measure_layers, "_step", lambda measured, memory: (next(layers), 0.0, 0.0))
    assert measure_layers.product_starts("int8") == (2.0,)
    steps = iter([3.0, 3.0 + 5.0 * (measure_layers.LARGE_VOCAB - measure_layers.VOCAB)])
    monkeypatch.setattr(measure_layers, "_times", lambda measured, memory, size: (0.0, next(steps), 0.0))
    assert measure_layers.vocabulary_seconds() == pytest.approx(5.0)


def test_the_median_pass_counts_and_starts_are_taken_off(few_points: None, monkeypatch: pytest.MonkeyPatch) -> None:
    timings = measure_products.Timings()
    timings.add(lambda: None, 0)
    passes = iter([[5.0], [3.0], [4.0]])
    monkeypatch.setattr(timings, "_times", lambda call: next(passes))
    assert timings.seconds(lambda: None) == [4.0]
    numbers = [0, 0, 600, 600, 800, 800]  # after those of the small product, two rows for two sizes of memory
    rates = measure_products._rates(numbers, [1.0, 2.0, 4.0, 5.0, 5.0, 6.0])
    assert rates == ((200.0, 200.0), (200.0, 200.0))
    monkeypatch.setattr(measure_products.Timings, "seconds", lambda self, tell: [2.0, 7.0] * (len(self._calls) // 2))
    for found in measure_products.measured_attention(lambda: None):
        assert found.seconds == (5.0,)  # beyond that over few tokens
        item = 4 if found.dtype == "float32" else 2
        assert found.cache_bytes == (2 * 32 * measure_products.KEY_HEADS * measure_products.HEAD_DIM * item,)


def test_a_weight_and_the_memory_before_it_are_as_large_as_what_a_step_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_products, "READ_BYTES", (1 << 16, 1 << 18))
    monkeypatch.setattr(measure_products, "INPUTS", (64, 128))
    monkeypatch.setattr(measure_products, "MOST_WEIGHTS", 1 << 14)
    timings = measure_products.Timings()
    numbers = measure_products._add_products("float32", timings)
    assert numbers == [0, 0, 1 << 13, 1 << 14, 1 << 13, 1 << 14]  # at most half of what is read, and MOST_WEIGHTS
    small, large = timings._calls[:2], timings._calls[2:]
    assert [read_bytes for _, read_bytes in small] == [1 << 16, 1 << 18]
    assert [4 * number + read for number, (_, read) in zip(numbers[2:], large, strict=True)] == [1 << 16, 1 << 18] * 2


def test_the_parts_of_a_search_are_recovered_from_its_times() -> None:
    counts = np.random.default_rng(0).uniform(1, 100, (12, 4))
    for times in ([1.0, 2.0, 3.0, 4.0], [1.0, 0.0, 3.0, 4.0]):
        assert measure_search._least_squares(counts, counts @ np.array(times)) == pytest.approx(times, abs=1e-9)
    seconds = counts @ np.array([1.0, -0.05, 3.0, 4.0])
    found = measure_search._least_squares(counts, seconds)
    assert found[1] == 0
    assert min(found) >= 0


def test_clocks_count_this_thread_alone() -> None:
    assert measure_products.clock is measure_layers.clock is measure_search.clock is ballast.clock is time.thread_time

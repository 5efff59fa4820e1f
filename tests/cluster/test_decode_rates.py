"""What was measured of decodes on a CPU: figures between measured points, sums of a search, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from decode_rates_for_tests import made_up_rates, products, write_machine

from weft.cluster.decode_rates import AttentionTimes, LayerTimes, ProductRates, SearchTimes, interpolated
from weft.cluster.hardware import load
from weft.errors import ConfigError


def test_figures_are_interpolated_on_logarithmic_scales_and_end_where_measurements_do() -> None:
    places, figures = (1, 100, 1000), (2.0, 8.0, 1.0)
    assert [interpolated(places, figures, place) for place in (0.1, 1, 100, 1000, 1e9)] == [2, 2, 8, 1, 1]
    assert interpolated(places, figures, 10) == pytest.approx(4)  # half way from 1 to 100, and from 2 to 8
    assert interpolated((5,), (3.0,), 7) == 3


def test_products_are_faster_where_a_cache_holds_the_weights_and_where_rows_are_long() -> None:
    start = ((1, 1_000_000), (1e-6, 4e-6))
    rates = ProductRates("int4", (100, 10_000), (1000, 1_000_000), ((4e9, 1e9), (8e9, 2e9)), *start)
    assert rates.seconds(50, 100, 1000) == pytest.approx(50 * 100 / 4e9)
    assert rates.seconds(50, 100, 1_000_000) == pytest.approx(50 * 100 / 1e9)
    assert rates.seconds(50, 10_000, 10) == pytest.approx(50 * 10_000 / 8e9)
    between = 50 * 1000 / (2e9 * 2**0.5)  # half way in both: rates 2e9 and 4e9
    assert rates.seconds(50, 1000, 31_622.7766) == pytest.approx(between)
    assert [rates.start(read) for read in (1, 1000, 1_000_000)] == pytest.approx([1e-6, 2e-6, 4e-6])
    assert products("float32").start(1000) == 0


def test_layers_take_longer_the_more_they_read_and_with_each_unit_and_a_first_one_has_its_own_time() -> None:
    times = LayerTimes("gru", "float32", (1, 10_000), (1.0, 4.0), (10, 10**5), (5.0, 20.0), (0.5, 2.0), 0.25)
    assert [times.layer(read) for read in (1, 100, 10_000)] == pytest.approx([1, 2, 4])
    assert [times.layer(read, 8) for read in (1, 100, 10_000)] == pytest.approx([3, 4, 6])
    assert [times.layer(read, 8, has_table=True) for read in (1, 100, 10_000)] == pytest.approx([2.5, 3, 4])
    assert [times.step(read) for read in (10, 1000, 10**5)] == pytest.approx([5, 10, 20])
    old = replace(times, first_seconds=())  # of a file from before there were such
    assert old.layer(100, has_table=True) == old.layer(100)


def test_attention_grows_with_the_cache_in_proportion_beyond_what_was_measured() -> None:
    times = AttentionTimes("float32", 1, (1000, 4000), (1e-6, 2e-6))
    assert [times.of(size) for size in (0, 500, 1000, 2000, 4000, 8000)] == pytest.approx(
        [0, 0.5e-6, 1e-6, 1e-6 * 2**0.5, 2e-6, 4e-6]
    )
    rates = replace(made_up_rates(), attention=(times, AttentionTimes("float32", 4, (1000, 4000), (4e-6, 8e-6))))
    seconds = [rates.attention_seconds("float32", number, 1000) for number in (1, 2, 4, 16)]
    assert seconds == pytest.approx([1e-6, 2e-6, 4e-6, 4e-6])
    with pytest.raises(ConfigError, match="attention in bfloat16 is not in the cluster file; measure it: weft bench"):
        rates.attention_seconds("bfloat16", 1, 1000)


def test_a_search_is_the_sum_of_its_parts() -> None:
    times = SearchTimes(1.0, 2.0, 3.0, 4.0)
    assert times.seconds(10, 100, 1000, 5) == 10 + 200 + 1000 * (3 + 20)


def test_tables_that_make_no_sense_and_figures_that_are_missing_are_refused() -> None:
    with pytest.raises(ConfigError, match="give a positive figure for each"):
        LayerTimes("decoder", "float32", (1, 2), (1.0,), (1, 2), (1.0, 1.0))
    with pytest.raises(ConfigError, match="give positive numbers that grow"):
        LayerTimes("decoder", "float32", (2, 2), (1.0, 1.0), (1, 2), (1.0, 1.0))
    with pytest.raises(ConfigError, match="a step of decoder has"):
        LayerTimes("decoder", "float32", (1, 2), (1.0, 1.0), (1, 2), (1.0,))
    with pytest.raises(ConfigError, match="give a positive figure for each"):
        LayerTimes("gru", "float32", (1, 2), (1.0, 1.0), (1, 2), (1.0, 1.0), (1.0,))
    for unit in (-1e-9, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"a layer of gru has unit_seconds = .*; give 0 or more"):
            LayerTimes("gru", "float32", (1, 2), (1.0, 1.0), (1, 2), (1.0, 1.0), unit_seconds=unit)
    with pytest.raises(ConfigError, match="products with int4 has"):
        replace(products("int4"), weights_per_second=((1.0, 0.0), (1.0, 1.0)))
    with pytest.raises(ConfigError, match="products with int4 has"):
        replace(products("int4"), weights_per_second=((1.0, float("inf")), (1.0, 1.0)))
    with pytest.raises(ConfigError, match="inputs of products with int4 has"):
        replace(products("int4"), weights_per_second=((1.0, 1.0),))
    with pytest.raises(ConfigError, match="the start of products with int4 has"):
        replace(products("int4"), start_seconds=(1e-6,))
    with pytest.raises(ConfigError, match="a time below 0"):
        SearchTimes(-1.0, 0.0, 0.0, 0.0)
    with pytest.raises(ConfigError, match="attention has num_queries = 0; give 1 or more"):
        AttentionTimes("float32", 0, (1000,), (1e-6,))
    rates = made_up_rates()
    with pytest.raises(ConfigError, match="threads = 0 measured nothing; give 1 or more"):
        replace(rates, threads=0)
    for seconds in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match=r"vocabulary_seconds = .* is no time; give 0 or more"):
            replace(rates, vocabulary_seconds=seconds)
    for spread in (0.9, float("inf")):
        with pytest.raises(ConfigError, match=r"memory_spread = .* is no ratio of quartiles; give 1 or more"):
            replace(rates, memory_spread=spread)
    assert rates.doubt is None
    assert "differed by a factor of 1.50" in str(replace(rates, memory_spread=1.5).doubt)
    with pytest.raises(ConfigError, match="products with int3 weights are not in the cluster file, which has float32"):
        rates.product("int3")
    with pytest.raises(ConfigError, match="layers of decoder in float16 are not in the cluster file"):
        rates.layer("decoder", "float16")


def test_the_cluster_file_gives_back_what_was_measured(tmp_path: Path) -> None:
    rates = replace(made_up_rates(), memory_spread=1.25)
    assert load(str(write_machine(tmp_path / "with.toml", rates))).decode == rates
    assert load(str(write_machine(tmp_path / "without.toml", None))).decode is None
    text = (tmp_path / "with.toml").read_text()
    (tmp_path / "bad.toml").write_text(text.replace("layer_seconds = [0.001, 0.001]", "layer_seconds = [0.001]"))
    with pytest.raises(ConfigError, match="a layer of decoder has"):
        load(str(tmp_path / "bad.toml"))
    (tmp_path / "unknown.toml").write_text(text.replace("threads = 1", "thread = 1"))
    with pytest.raises(ConfigError, match="thread"):
        load(str(tmp_path / "unknown.toml"))

"""Learning rates: known values at known steps, and what holds for every schedule."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.run_tables import TrainConfig
from weft.train.parts import learning_rate


def rates(schedule: Any, steps: int, warmup: int = 0, decay: int | None = None, final: float = 0.1) -> list[float]:
    """The rates of a run whose peak is 2."""
    config = TrainConfig(steps, 1, schedule=schedule, warmup_steps=warmup, decay_steps=decay, final_learning_rate=final)
    return [learning_rate(config, step, 2.0) for step in range(steps)]


def test_warmup_rises_in_even_steps_to_the_peak() -> None:
    for schedule in ("cosine", "wsd", "constant"):
        assert rates(schedule, 20, warmup=4)[:4] == [0.5, 1.0, 1.5, 2.0]


def test_constant_holds() -> None:
    assert rates("constant", 6, warmup=2) == [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]


def test_cosine_is_at_the_peak_first_and_half_way_in_the_middle() -> None:
    curve = rates("cosine", 14, warmup=4)  # ten steps of cosine, which begin at step 4
    assert curve[4] == 2.0
    assert curve[9] == pytest.approx((2.0 + 0.2) / 2)
    expected = [0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * step / 10)) for step in range(10)]
    assert curve[4:] == pytest.approx(expected)


def test_wsd_holds_and_then_falls_in_a_line_to_the_final_fraction() -> None:
    assert rates("wsd", 10, warmup=2, decay=4) == pytest.approx([1, 2, 2, 2, 2, 2, 1.55, 1.1, 0.65, 0.2])


def test_wsd_decays_over_a_tenth_unless_told() -> None:
    assert rates("wsd", 30) == rates("wsd", 30, decay=3)
    assert rates("wsd", 5) == rates("wsd", 5, decay=1)
    assert rates("wsd", 5, final=0.0)[-1] == 0.0


sizes = st.integers(1, 200).flatmap(
    lambda steps: st.integers(0, steps).flatmap(
        lambda warmup: st.tuples(st.just(steps), st.just(warmup), st.integers(0, steps - warmup))
    )
)


@given(sizes, st.floats(0.0, 1.0), st.sampled_from(["cosine", "wsd", "constant"]))
def test_rates_rise_once_fall_once_and_stay_in_bounds(sizes: tuple[int, int, int], final: float, schedule: str) -> None:
    steps, warmup, decay = sizes
    curve = rates(schedule, steps, warmup, decay or None if schedule == "wsd" else None, final)
    top = max(warmup - 1, 0)
    assert all(0.0 <= rate <= 2.0 + 1e-12 for rate in curve)
    assert all(a <= b + 1e-12 for a, b in pairwise(curve[: top + 1]))
    assert all(a >= b - 1e-12 for a, b in pairwise(curve[top:]))
    assert all(rate >= 2.0 * final - 1e-12 for rate in curve[warmup:])

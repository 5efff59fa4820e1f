"""The rates of this machine's CPU, by a matmul that takes as long as it is told to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import weft.measure
from weft.measure import LONG_SECONDS, SIDE, SMALL_SIDE, cpu_flops_per_second


@pytest.fixture(autouse=True)
def _measured_anew() -> Iterator[None]:
    cpu_flops_per_second.cache_clear()
    yield
    cpu_flops_per_second.cache_clear()


def test_each_dtype_has_its_own_rate() -> None:
    assert all(cpu_flops_per_second(dtype) > 0 for dtype in (torch.float32, torch.float64, torch.bfloat16))
    assert cpu_flops_per_second.cache_info().currsize == 3


@pytest.mark.parametrize(("share", "sides"), [(0.9, [SMALL_SIDE, SIDE]), (1.1, [SMALL_SIDE])])
def test_where_a_matmul_takes_long_a_small_one_is_measured(
    monkeypatch: pytest.MonkeyPatch, share: float, sides: list[int]
) -> None:
    rate, asked = 2 * SIDE**3 / (share * LONG_SECONDS), list[int]()

    def measured(side: int, dtype: torch.dtype) -> float:
        asked.append(side)
        return rate + side

    monkeypatch.setattr(weft.measure, "_matmul_rate", measured)
    threads = torch.get_num_threads()
    assert cpu_flops_per_second(torch.bfloat16) == rate + sides[-1]
    assert asked == sides
    assert torch.get_num_threads() == threads

"""The rates of this machine's CPU, by a matmul that takes as long as it is told to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import weft.cluster.cpu_rates
import weft.planner.predict
from weft.cluster.cpu_rates import LONG_SECONDS, SIDE, SMALL_SIDE, cpu_flops_per_second
from weft.cluster.hardware import local_cluster
from weft.planner.predict import predict
from weft.run_file import load_run

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"


@pytest.fixture(autouse=True)
def _measured_anew() -> Iterator[None]:
    cpu_flops_per_second.cache_clear()
    yield
    cpu_flops_per_second.cache_clear()
    torch.set_num_threads(1)


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

    monkeypatch.setattr(weft.cluster.cpu_rates, "_matmul_rate", measured)
    torch.set_num_threads(2)
    assert cpu_flops_per_second(torch.bfloat16) == rate + sides[-1]
    assert asked == sides
    assert torch.get_num_threads() == 2


def test_a_run_is_predicted_by_the_rate_of_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {torch.float32: 4e9, torch.bfloat16: 1e9}
    monkeypatch.setattr(weft.planner.predict, "cpu_flops_per_second", rates.__getitem__)
    alone = ["plan.data=1", "plan.shard=1"]
    runs = [load_run(QUICKSTART, [*alone, f'plan.precision="{name}"']) for name in ("fp32", "bf16")]
    fast, slow = (predict(run, local_cluster(1, on_cpu=True)).step_seconds for run in runs)
    assert fast is not None
    assert slow == pytest.approx(4 * fast, rel=0.01)

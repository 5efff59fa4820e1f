"""The rates of this machine's CPU, by a matmul that takes as long as it is told to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import weft.cluster.cpu_rates
from weft.cluster.cpu_rates import LONG_SECONDS, SIDE, SMALL_SIDE, cpu_flops_per_second
from weft.cluster.hardware import Cluster, MeasuredCollective, local_cluster
from weft.commands.run_planning import ask_for, planning_cluster, with_plan
from weft.planner.predict import predict, run_cluster
from weft.planner.question import parse_constraints
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


def test_a_search_and_a_prediction_on_a_cpu_are_one_answer() -> None:
    """A search printed 23.5 ms a step, a prediction that none is known, and a timeline 1.9 ms."""
    run = load_run(QUICKSTART, ["plan.data=1", "plan.shard=1", "train.device=cpu"])
    answer = ask_for(run, planning_cluster(run), parse_constraints(["data=1", "shard=1"]))
    found = predict(with_plan(run, answer), run_cluster(run))
    assert found.is_modelled
    assert found.step_seconds == pytest.approx(answer.best.seconds, rel=0.02)
    assert found.compute_seconds is not None
    assert found.compute_seconds <= found.step_seconds


def measured_cluster(seconds: float) -> Cluster:
    """Two processes whose sums and gathers take so long, whatever their size."""
    found = local_cluster(2, on_cpu=True)
    device = replace(found.node.device, peak_flops={"fp32": 1e10}, memory_bandwidth_bytes_per_second=1e9)
    operations = ("all_reduce", "all_gather", "reduce_scatter", "send")
    times = (MeasuredCollective(name, "flat", 1, 2, (1, 1 << 40), (seconds, seconds)) for name in operations)  # type: ignore[arg-type]
    return replace(found, node=replace(found.node, device=device), collectives=tuple(times))


@pytest.mark.parametrize("plan", ["plan.data=2", "plan.shard=2", "plan.tensor.x=2"])
def test_measured_collectives_are_added_to_the_compute_of_a_cpu(plan: str) -> None:
    """Whole: the cores that compute also communicate. The control is a degree that was not measured."""
    run = load_run(QUICKSTART, ["plan.data=1", "plan.shard=1", plan])
    few, more, most = (predict(run, measured_cluster(seconds)) for seconds in (1e-4, 2e-4, 4e-4))
    steps = [one.step_seconds or 0.0 for one in (few, more, most)]
    calls = (steps[1] - steps[0]) / 1e-4
    assert (steps[2] - steps[1]) / 2e-4 == pytest.approx(calls)
    assert calls == pytest.approx(round(calls), abs=1e-6)
    assert round(calls) >= 3  # one for each block of the quickstart
    axis = plan.split("=")[0].rpartition(".")[2]
    counted = sum(value.calls for key, value in few.traffic.items() if key[0] == axis)
    assert few.communication_seconds[axis] == pytest.approx(1e-4 * counted)
    other = replace(measured_cluster(1.0), collectives=(MeasuredCollective("all_reduce", "flat", 1, 4, (1,), (1.0,)),))
    assert predict(run, other).communication_seconds[axis] < 1.0

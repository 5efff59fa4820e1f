"""The step model against published tables: errors stay where they are, and breaking the physics is seen."""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import planner_accuracy
import published_tables
from planner_accuracy import PUBLISHED, Result, chain, predict, regrets, summary
from published_tables import Case, read

from weft.cluster import AxisLink, Cluster, ring_seconds
from weft.plan import Memory, Plan, Shard, Tensor
from weft.planner import micro_batch
from weft.planner.workload import Workload

CONTROL = 0.03  # by which a broken model must be worse


@cache
def cases(name: str) -> list[Case]:
    """A table's rows."""
    return read(PUBLISHED / f"{name}.csv")


def mean_error(sample: list[Case]) -> float:
    return statistics.mean(abs(predict(case).error) for case in sample)


@pytest.mark.parametrize(
    ("name", "sample", "rows", "reached"),
    [
        ("megatron_sc21_table1_a100", slice(0, 5), 10, 0.034),
        ("korthikanti_activation_recompute_a100", slice(0, 4), 8, 0.04),
        ("megatron_2020_v100_a100_tp_scaling", slice(0, 12), 12, 0.05),
        ("mosaicml_llm_foundry_mpt_throughput", slice(0, 216, 16), 216, 0.055),
        ("torchtitan_llama3", slice(0, 6), 32, 0.03),
        ("megatron_llama_fp8_h100", slice(0, 2), 3, 0.15),
        ("vtrain_a100_measured_single_node", slice(0, 720, 24), 720, 0.080),
    ],
)
def test_every_table_is_read_and_its_error_has_not_grown(name: str, sample: slice, rows: int, reached: float) -> None:
    whole = cases(name)
    assert len(whole) == rows
    assert all(case.seconds > 0 and case.plans for case in whole)
    assert mean_error(whole[sample]) < reached + 0.02


def test_the_core_table_offers_plans_for_what_it_does_not_print() -> None:
    core = cases("megatron_core_h100_weak_scaling")
    assert [len(case.plans) for case in core][:4] == [3, 3, 3, 3]  # micro-batches of 1, 2 and 4
    assert all(plan.micro_batch for case in core for plan, _ in case.plans)
    assert mean_error(core[:4]) < 0.08


def test_a_table_is_known_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("# source: none\na,b\n1,2\n")
    with pytest.raises(SystemExit, match="no known table has these columns: a, b"):
        read(path)


def test_seconds_follow_each_tables_convention() -> None:
    first = cases("megatron_sc21_table1_a100")[0]
    by_hand = 96 * 512 * 2048 * 24 * 2304**2 * (1 + 2048 / (6 * 2304) + 51200 / (16 * 24 * 2304)) / 32 / 137e12
    assert first.seconds == pytest.approx(by_hand)
    titan = cases("torchtitan_llama3")[0]
    assert titan.seconds == pytest.approx(2 * 8192 / 5762)
    assert titan.memory_gib == 82.4
    assert cases("vtrain_a100_measured_single_node")[0].seconds == pytest.approx(0.372160408)


def test_regret_by_hand() -> None:
    case = cases("vtrain_a100_measured_single_node")[0]
    plan = case.plans[0][0]

    def result(group: str, predicted: float, measured: float) -> Result:
        return Result(replace(case, group=(group,), seconds=measured), plan, predicted)

    found = regrets(
        [result("a", 1.0, 1.1), result("a", 2.0, 1.0), result("b", 1.0, 5.0), result("b", 3.0, 6.0), result("c", 1, 1)]
    )
    assert found == {("a",): pytest.approx(0.1), ("b",): 0.0}


def test_summary_by_hand() -> None:
    found = summary([0.1, -0.3, 0.2])
    assert (found["rows"], found["median"], found["worst"]) == (3, 0.2, 0.3)
    assert found["mean"] == pytest.approx(0.2)
    assert found["bias"] == pytest.approx(0.0)


def test_the_planner_chooses_well_among_measured_plans() -> None:
    sample = [case for case in cases("vtrain_a100_measured_single_node") if case.group[:2] in ((8, 16), (4, 8))]
    found = regrets(predict(case) for case in sample)
    assert len(found) >= 10
    assert statistics.median(found.values()) <= 0.05


def test_nics_that_nobody_shares_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    frontier = next(case for case in cases("axonn_headlines") if case.label.startswith("frontier"))
    fixed = Plan(data=64, shard=Shard(16), tensor=Tensor(16, 2), micro_batch=8, precision="bf16", memory=Memory("full"))
    sample = [replace(frontier, plans=((fixed, 1),))]
    before = mean_error(sample)
    assert before < 0.2
    shared = Cluster.axis_link

    def alone(self: Cluster, inner: int, degree: int) -> AxisLink:
        link = shared(self, inner, degree)
        whole = self.node.inter.bandwidth_bytes_per_second
        return link._replace(bandwidth_bytes_per_second=whole) if link.crosses_nodes else link

    monkeypatch.setattr(Cluster, "axis_link", alone)
    assert mean_error(sample) > before + CONTROL


def test_missing_latency_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = cases("megatron_2020_v100_a100_tp_scaling")[8:10]  # on 128 and 256 devices
    before = mean_error(sample)

    def without(op: str, num_bytes: float, degree: int, bandwidth: float, latency: float) -> float:
        return ring_seconds(op, num_bytes, degree, bandwidth, 0.0)

    monkeypatch.setattr(micro_batch, "ring_seconds", without)
    assert mean_error(sample) > before + CONTROL


def test_a_wrong_shape_of_the_second_matmul_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = cases("megatron_2020_v100_a100_tp_scaling")[1:8:2]
    before = mean_error(sample)

    def swapped(model: published_tables.Model) -> tuple[Workload, tuple[int, int, int]]:
        work, numel = chain(model)
        block = work.blocks[0]
        products = tuple(
            replace(one, inputs=one.outputs, outputs=one.inputs) if one.kind == "row" else one for one in block.products
        )
        return replace(work, blocks=(replace(block, products=products),) * len(work.blocks)), numel

    monkeypatch.setattr(planner_accuracy, "chain", swapped)
    assert mean_error(sample) > before + CONTROL

"""`weft plan` says whether fewer bits on links pay: on a slow link between nodes, and not inside one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from runs_for_tests import make_run, write_run_file

from weft.cluster.hardware import Link, load
from weft.planner.fewer_bytes import FewerBytes, fewer_bytes


def test_fewer_bits_pay_on_a_slow_link(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    run = make_run(run_file, "run", "plan.data=2", "plan.shard=2", "train.batch=8", "train.compile=false")
    cluster = load("h100:2x2")
    slow = replace(cluster, node=replace(cluster.node, inter=Link("slow", 1e6, 1e-5)))
    found = fewer_bytes(run, slow)
    assert found is not None
    assert found.pays
    bf16, int8, one_bit = found.saved_seconds.values()
    # Over data, which crosses nodes: all-reduce 4 n bytes, bf16 2 · 2 n, int8 2 · 1.016 n, signs 2 · n / 8.
    assert 0 < int8 < one_bit < found.added_seconds
    assert bf16 < int8
    assert "1-bit Adam (train.compressed)" in found.describe()
    assert 'plan.communication = {reduce = "int8", scatter = "int8", gather = "int8"}' in found.saved_seconds
    fast = replace(cluster, node=replace(cluster.node, inter=Link("fast", 1e15, 0.0), intra=Link("fast", 1e15, 0.0)))
    near = fewer_bytes(run, fast)
    assert near is not None
    assert not near.pays
    assert "do not pay here" in near.describe()


def test_runs_without_gradients_to_reduce_are_not_advised(tmp_path: Path) -> None:
    run_file, cluster = write_run_file(tmp_path), load("h100:1x2")
    assert fewer_bytes(make_run(run_file, "run"), cluster) is None
    given = ["plan.data=2", "plan.exact=false"]
    assert fewer_bytes(make_run(run_file, "run", *given, 'plan.communication={reduce="int8"}'), cluster) is None
    compressed = 'train.compressed={kind="1bit", freeze_step=2}'
    assert fewer_bytes(make_run(run_file, "run", *given, compressed), cluster) is None


@pytest.mark.parametrize(("saved", "pays"), [(0.03, True), (0.01, False)])
def test_a_small_share_does_not_pay(saved: float, pays: bool) -> None:
    assert FewerBytes(1.0, 0.1, {"x": saved}).pays == pays

"""`weft plan` on several nodes says whether collectives in two levels pay, and prices those that the plan uses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from runs_for_tests import make_run, write_run_file

from weft.cluster.hardware import Link, load
from weft.planner.advice import best_levels
from weft.planner.predict import predict


def test_two_levels_pay_where_latency_between_nodes_is_long(tmp_path: Path) -> None:
    run = make_run(write_run_file(tmp_path), "run", "plan.data=8", "plan.precision=bf16", "train.batch=8")
    cluster = load("h100:4x2")
    far = replace(cluster, node=replace(cluster.node, inter=Link("far", 50e9, 1e-3, num_nics=2)))
    found = best_levels(run, far)
    assert found is not None
    assert found.pays
    assert "plan.communication.between = 'fastest'" in found.describe()
    assert any("doubling" in used for used in found.algorithms.values())
    near = best_levels(run, replace(cluster, node=replace(cluster.node, inter=cluster.node.intra)))
    assert near is not None
    assert near.fastest_seconds <= near.flat_seconds
    assert best_levels(run, load("h100:1x8")) is None  # no axis crosses nodes

    fastest = replace(run.plan, hierarchical=True, communication=replace(run.plan.communication, between="fastest"))
    slow, fast = (predict(replace(run, plan=plan), far) for plan in (run.plan, fastest))
    assert slow.step_seconds is not None
    assert fast.step_seconds is not None
    assert fast.step_seconds < slow.step_seconds
    assert ("data/node", "send") in fast.traffic

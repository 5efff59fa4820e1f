"""Goodput against a direct simulation of failures, the intervals against the best one, and `weft plan --mtbf`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from commands_for_tests import caller
from hypothesis import given, settings
from hypothesis import strategies as st
from runs_for_tests import write_run_file

from weft.cluster.hardware import load
from weft.errors import ConfigError
from weft.planner.goodput import cluster_mtbf, daly_interval, failures, goodput, parse_duration, young_interval
from weft.run_file import load_run

pytestmark = pytest.mark.processes


def simulated(interval: float, stall: float, restart: float, mtbf: float, write: float, num_failures: int) -> float:
    """Live through failures at random times, one after the other: work that is kept, over the time that passes.

    A save is taken after each interval and stall, and counts `write` later. Restarts may fail too.
    """
    draw = random.Random(7)
    passed = kept = 0.0
    restarting = False
    for _ in range(num_failures):
        alive = draw.expovariate(1 / mtbf)
        passed += alive
        working = alive - (restart if restarting else 0.0)
        if working > write:
            kept += int((working - write) // (interval + stall)) * interval
        restarting = True
    return kept / passed


@pytest.mark.parametrize(
    ("interval", "stall", "restart", "mtbf", "write"),
    [
        (300.0, 10.0, 60.0, 3600.0, 0.0),
        (900.0, 30.0, 300.0, 3600.0, 0.0),
        (60.0, 1.0, 20.0, 600.0, 0.0),
        (2000.0, 100.0, 600.0, 3000.0, 0.0),
        (300.0, 2.0, 60.0, 10800.0, 120.0),
        (60.0, 1.0, 20.0, 600.0, 30.0),
    ],
)
def test_goodput_is_what_a_simulation_finds(
    interval: float, stall: float, restart: float, mtbf: float, write: float
) -> None:
    found = simulated(interval, stall, restart, mtbf, write, 400_000)
    assert goodput(interval, stall, restart, mtbf, write) == pytest.approx(found, rel=0.005)
    assert goodput(interval, stall, 0.0, mtbf) > 1.005 * found  # negative control: the restart is seen


@settings(max_examples=2 * settings.default.max_examples)
@given(stall=st.floats(0.01, 1000), mtbf=st.floats(10, 1e7), restart=st.floats(0, 1000))
def test_dalys_interval_is_near_the_best_one(stall: float, mtbf: float, restart: float) -> None:
    if stall > mtbf / 2:
        return
    chosen = goodput(daly_interval(stall, mtbf), stall, restart, mtbf)
    others = [
        goodput(daly_interval(stall, mtbf) * times, stall, restart, mtbf) for times in (0.25, 0.5, 0.8, 1.25, 2, 4)
    ]
    assert chosen >= 0.999 * max(others)
    assert 0 <= chosen < 1


def test_intervals_by_hand() -> None:
    assert young_interval(5, 1000) == pytest.approx(100)
    assert daly_interval(5, 1000) == pytest.approx(100 * (1 + 0.05 / 3 + 0.0025 / 9) - 5)
    assert daly_interval(300, 100) == 100
    assert goodput(1e6, 1, 1, 10) == 0.0


def test_failures_of_a_cluster() -> None:
    cluster = load("h100:32x8")
    found = failures(70_000_000_000, "bf16", cluster, 3 * 3600)
    disk, memory = found.ways
    assert found.state_bytes == 840_000_000_000
    assert disk.write_seconds == pytest.approx(840 / 32)
    assert disk.restart_seconds == pytest.approx(60 + 840 / 32)
    assert memory.write_seconds < disk.write_seconds
    assert 0.97 < disk.goodput < memory.goodput < 1
    assert disk.interval_seconds >= disk.write_seconds
    (alone,) = failures(10**9, "fp32", load("h100:1x8"), 86400).ways
    assert alone.name == "checkpoints on disk"
    hosted = failures(70_000_000_000, "bf16", cluster, 3 * 3600, offload=0.5)
    assert hosted.ways[0].stall_seconds == pytest.approx(840 / 32)  # it waits for its saves
    assert hosted.ways[0].goodput < disk.goodput
    assert (hosted.ways[1], hosted.best) == (memory, memory)
    rare, often = (failures(10**9, "bf16", cluster, mtbf).ways[0].goodput for mtbf in (86400.0, 600.0))
    assert often < rare


def test_times_between_failures() -> None:
    assert parse_duration("1.5h", "--mtbf") == 5400
    assert cluster_mtbf("1y", None, 365) == 86400
    assert cluster_mtbf(None, "3h", 100) == 10800
    assert cluster_mtbf(None, None, 100) is None
    for text in ("3", "h", "-1h", "0s", "3 h", "1e9h", "nan"):
        with pytest.raises(ConfigError, match=r"is no time; give a number above 0 and s, m, h, d or y"):
            parse_duration(text, "--mtbf")
    with pytest.raises(ConfigError, match="give one"):
        cluster_mtbf("3h", "3h", 2)


def test_weft_plan_says_what_failures_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    weft = caller(monkeypatch, capfd)
    run_file = write_run_file(tmp_path)
    given = ("plan", run_file, "plan.data=16", "cluster=h100:2x8")
    found = weft(*given, "--mtbf", "2d", "--json").json["failures"]
    assert found["mtbf_seconds"] == 2 * 86400 / 16
    assert [way["name"] for way in found["ways"]] == [
        "checkpoints on disk",
        "copies in memory, one node lost at a time",
    ]
    text = weft(*given, "--mtbf-cluster", "3h").out
    assert "one failure in 3 h; the state has" in text
    assert "assumed: 1 GB/s of storage a node" in text
    assert "goodput 99." in text
    assert "failures" not in weft(*given, "--json").json
    searched = weft("plan", run_file, "cluster=h100:2x8", "--mtbf-cluster", "3h", "--search", "--json").json
    num_ranks = searched["plans"][0]["num_devices"]
    assert searched["failures"]["mtbf_seconds"] == 3 * 3600 * 16 / num_ranks  # of the devices that the plan has
    written = tmp_path / "written.toml"
    two_nodes = ("plan", run_file, "cluster=h100:2x8", "--where", "data=16")
    assert weft(*two_nodes, "--mtbf", "2d", "--write", written).status == 0
    saves = load_run(written).checkpoint
    assert (saves.every, saves.memory_every is not None) == (3, True)  # the run file has an interval of its own
    refused = weft(*given, "--mtbf", "soon")
    assert refused.status == 2
    assert "--mtbf soon is no time" in refused.err

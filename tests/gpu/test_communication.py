"""Ranks that share a GPU: their communication recorded by CUDA events, benchmarked and checked, 1-bit Adam, sums over
symmetric memory, and weights in host memory that replicas gather.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from gpu_for_tests import losses, succeeded, weft, write_run

from weft.bench.operations import OPERATIONS
from weft.cluster.small_choice import STRATEGIES
from weft.launch.fork_server import ForkServer
from weft.recording.rank_file import read_recording

SHARED = ["train.share_gpus=true", "train.device=cuda"]


def test_exposed_time_comes_from_cuda_events(tmp_path: Path) -> None:
    run = write_run(tmp_path, more="\n[plan]\nshard = 2\n")
    succeeded(weft("train", run, "--profile", "4:8", *SHARED))
    found = succeeded(weft("profile", tmp_path / "text", "--json")).json
    assert (found["device"], found["num_ranks"], found["first_step"], found["last_step"]) == ("cuda", 2, 5, 8)
    rows = {(row["axis"], row["operation"]): row for row in found["operations"]}
    gathered = rows["shard", "all_gather"]
    assert 0 < gathered["exposed_seconds"] < found["step_seconds"]
    assert 0 < found["exposed_share"] < 1
    calls = read_recording(tmp_path / "text")[0].calls
    assert all(call.start <= call.wait_start <= call.end for call in calls)
    assert "CUDA events" in (tmp_path / "text" / "profile" / "page.html").read_text()


def test_links_between_ranks_of_a_gpu_are_measured_and_their_contents_checked() -> None:
    given = ["--ranks", "2", "--sizes", "64K:64K", "--seconds", "0", "--json"]
    for more in (["--device", "cuda"], ["--pinned"]):
        found = succeeded(weft("bench", "links", *given, *more)).json
        assert {row["operation"] for row in found["rows"]} == set(OPERATIONS)
        assert all(row["timing"]["median"] > 0 for row in found["rows"])


def test_copies_between_host_and_gpu() -> None:
    found = succeeded(weft("bench", "host-link", "--seconds", "0.1", "--json")).json
    assert len(found) == 4
    assert min(found.values()) > 1e8


def test_one_bit_adam_learns(tmp_path: Path) -> None:
    run = write_run(tmp_path, more="\n[plan]\ndata = 2\nexact = false\n")
    succeeded(weft("train", run, *SHARED, 'train.compressed={kind="1bit", freeze_step=3}'))
    found = losses(tmp_path / "text")
    assert all(math.isfinite(loss) for loss in found.values())
    assert found[max(found)] < found[min(found)]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sums_over_symmetric_memory(num_ranks: int, fork_server: ForkServer, record_property: Any) -> None:
    """They have the bits of sums in the order of ranks, one after the other and in a CUDA graph."""
    for found in fork_server.call("symmetric_sums", num_ranks=num_ranks):
        assert found.get("reason") is None
        assert found["wrong"] == []
        assert found["in a row"] == 0
        assert found["graph"]
        assert found["counted"] == {"x all_reduce": {"256": 1}}
        assert set(found["table"]) <= set(STRATEGIES)
        record_property("microseconds", found["microseconds"])


def test_ranks_serve_with_sums_over_symmetric_memory(fork_server: ForkServer) -> None:
    ways = [[0, "one_shot"], [0, "symmetric_one_shot"], [0, "symmetric_two_shot"]]
    found = fork_server.call("served_on_ranks", table={"tensor": {"x": 2}}, ways=ways)[0]
    assert [said for _, _, said in found] == [[], [], []]
    assert found[0][0]["tokens"] == found[1][0]["tokens"] == found[2][0]["tokens"]
    assert found[0][0]["embedding"] == found[1][0]["embedding"] == found[2][0]["embedding"]


@pytest.mark.parametrize("table", [{"tensor": {"x": 2}}, {"pipe": 2}], ids=str)
def test_ranks_choose_tokens_as_one_does_on_a_cpu(table: dict[str, Any], fork_server: ForkServer) -> None:
    way = {"ways": [[0, "library"]], "cache": "loki"}
    ((here, _, _),) = fork_server.call("served_on_ranks", table=table, **way)[0]
    ((there, _, _),) = fork_server.call("served_on_ranks", table={}, device="cpu", **way)[0]
    assert here["tokens"] == there["tokens"]
    ((dense, _, _),) = fork_server.call("served_on_ranks", table={}, device="cpu", ways=way["ways"])[0]
    assert here["tokens"] != dense["tokens"]  # the control: they choose


@pytest.mark.parametrize("table", [{"data": 2}, {"tensor": {"x": 2}}, {"pipe": 2}], ids=str)
def test_ranks_serve_weights_in_host_memory(table: dict[str, Any], fork_server: ForkServer) -> None:
    results = fork_server.call("served_on_ranks", table=table, ways=[[0, "library"], [1, "library"]])
    (plain, none, _), (streamed, gathers, _) = results[0]
    assert streamed == plain
    assert none is None
    if "data" not in table:
        assert gathers is None
        return
    assert gathers == results[1][1][1]
    (calls,) = gathers.values()
    assert calls % 5 == 2  # five blocks a step, and the first two when the engine is made

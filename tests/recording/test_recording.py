"""The recorder: sums equal the ledger, a late rank is named, clocks are aligned, and a trained run has a page."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands_for_tests import Weft, caller
from runs_for_tests import make_run, train_on_ranks, write_run_file

from weft.checkpoint import steps
from weft.comm import Axis, Ledger, all_gather, all_reduce, broadcast, exchange, reduce_scatter, shift
from weft.comm.clocks import clock_offset, offset_of
from weft.comm.recorder import CommunicationCall, HostTimer, Recorder
from weft.errors import ConfigError
from weft.launch.local_ranks import run_local
from weft.recording.curves import MAX_POINTS, run_page
from weft.recording.live import live_server
from weft.recording.page import profile_page
from weft.recording.rank_file import (
    MeasuredLink,
    NicTraffic,
    RankRecording,
    read_counters,
    read_recording,
    recorded_traffic,
    since,
    write_rank,
)
from weft.recording.summary import matrix_bytes, summarise

SKEW_SECONDS = 3.0


def make_call(operation: str, start: float, end: float, **other: Any) -> CommunicationCall:
    given = {"axis": "data", "num_bytes": 80, "ranks": (0, 1), "peer": None, "number": 1} | other
    return CommunicationCall(
        1, "forward", "block 0", given["axis"], operation, given["num_bytes"], given["ranks"], given["peer"],
        given["number"], start, start, end, end - start,
    )  # fmt: skip


def make_rank(rank: int, calls: list[CommunicationCall], offset: float = 0.0, num_ranks: int = 2) -> RankRecording:
    links = {"data": MeasuredLink(2, 80.0, 0.5)}
    return RankRecording(rank, num_ranks, "cpu", "data 2", 1, 1, offset, links, calls, [])


def test_the_rank_that_comes_last_is_named_on_one_clock(tmp_path: Path) -> None:
    """Rank 1's clock is three seconds ahead; it calls 0.25 s after rank 0, and the collective takes 2 s from there."""
    write_rank(tmp_path, make_rank(0, [make_call("all_reduce", 10.0, 12.25)]))
    write_rank(tmp_path, make_rank(1, [make_call("all_reduce", 13.25, 15.5)], offset=3.0))
    found = summarise(read_recording(tmp_path))
    (row,) = found.operations
    assert (row.axis, row.operation, row.late_rank, row.spread_seconds) == ("data", "all_reduce", 1, 0.25)
    assert (row.seconds, row.predicted_seconds) == (2.0, 2 * 0.5 + 2 * 0.5 * 80 / 80)
    assert row.exposed_by_rank == [2.25, 2.25]
    assert [late.rank for late in found.late_ranks] == [1]


def test_a_late_sender_is_named_and_an_early_receiver_is_not() -> None:
    sent = make_call("send", 1.0, 1.1, peer=1)
    received = make_call("receive", 0.2, 1.2, peer=0)
    found = summarise([make_rank(0, [sent]), make_rank(1, [received])])
    assert [(late.rank, late.late_seconds) for late in found.late_ranks] == [(0, 0.8)]
    assert found.matrix_bytes == [[0, 80], [0, 0]]


def test_rows_of_the_matrix_are_what_rings_send() -> None:
    operations = {"all_reduce": 2 * 3 / 4, "all_gather": 3 / 4, "reduce_scatter": 3 / 4}
    for operation, share in operations.items():
        calls = [make_call(operation, 0, 1, ranks=(0, 1, 2, 3))]
        matrix = matrix_bytes([make_rank(rank, calls, num_ranks=4) for rank in range(4)])
        assert [sum(row) for row in matrix] == [share * 80] * 4
        assert matrix[3][0] == share * 80
    calls = [make_call("all_to_all", 0, 1, ranks=(0, 1, 2, 3))]
    assert matrix_bytes([make_rank(rank, calls, num_ranks=4) for rank in range(4)])[2] == [20, 20, 0, 20]


def test_the_fastest_round_tells_the_offset() -> None:
    assert offset_of([(0.0, 5.9, 1.0), (2.0, 7.05, 2.1), (3.0, 8.9, 5.0)]) == pytest.approx(5.0)


def test_interfaces_are_counted_where_they_can_be_read(tmp_path: Path) -> None:
    assert read_counters(tmp_path) == {}
    (tmp_path / "proc/net").mkdir(parents=True)
    heads = "Inter-|   Receive\n face |bytes\n"
    (tmp_path / "proc/net/dev").write_text(f"{heads}  eth0: 100 1 0 2 0 0 0 0 900 1 3 0 0 0 0 0\n")
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters"
    port.mkdir(parents=True)
    for name, value in (("port_xmit_data", 10), ("port_rcv_data", 20), ("symbol_error", 7)):
        (port / name).write_text(f"{value}\n")
    before = read_counters(tmp_path)
    assert before == {"eth0": NicTraffic(900, 100, 5), "mlx5_0 port 1": NicTraffic(40, 80, 7)}
    (port / "port_xmit_data").write_text("12\n")
    found = since(before, read_counters(tmp_path))
    assert found == {"mlx5_0 port 1": NicTraffic(8, 0, 0)}  # eth0 was silent
    one = replace(make_rank(0, [make_call("all_reduce", 0, 1, ranks=(0,))], num_ranks=1), host="a", nics=found)
    write_rank(tmp_path, one)
    (back,) = read_recording(tmp_path)
    assert back.nics == found
    page = profile_page("run", [back], summarise([back]))
    assert "mlx5_0 port 1" in page


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--profile 10:20"):
        read_recording(tmp_path)
    write_rank(tmp_path, make_rank(1, []))
    with pytest.raises(Exception, match="1 of 2 ranks; missing: rank 0"):
        read_recording(tmp_path)
    for broken in ('{"format": 1}', "[" * 100_000):
        (tmp_path / "rank-00000.jsonl").write_text(broken + "\n")
        with pytest.raises(Exception, match=r"rank-00000.jsonl is not a recording"):
            read_recording(tmp_path)


@pytest.mark.processes
def test_sums_equal_the_ledger_and_a_late_halo_is_named(tmp_path: Path) -> None:
    """Rank 1 sleeps before its halo, and its clock is three seconds ahead."""

    def rank(index: int) -> None:
        def clock() -> float:
            return time.perf_counter() + SKEW_SECONDS * index

        ledger = Ledger()
        axis = Axis("rows", 2, index, dist.group.WORLD, ledger)
        all_reduce(torch.ones(3), axis).wait()  # before the recording
        before = ledger.entries()
        recorder = ledger.recorder = Recorder(timer=HostTimer(clock))
        recorder.step = 1
        part, whole = torch.ones(4), torch.ones(8)
        for _ in range(3):
            all_reduce(torch.ones(5, dtype=torch.float64), axis).wait()
            gathered, summed = all_gather(whole, part, axis), reduce_scatter(part.clone(), whole.clone(), axis)
            gathered.wait()
            summed.wait()
        broadcast(torch.ones(7), axis).wait()
        shift([torch.ones(2), torch.ones(6)], [torch.ones(2), torch.ones(6)], axis).wait()
        time.sleep(0.05 * index)
        exchange([(1 - index, torch.ones(9))], [(1 - index, torch.ones(9))], axis).wait()
        recorder.finish()
        ledger.recorder = None
        counted = {key: (t.calls, t.num_bytes) for key, t in ledger.entries().items()}
        counted["rows", "all_reduce"] = tuple(
            a - b for a, b in zip(counted["rows", "all_reduce"], (before["rows", "all_reduce"].calls, 12), strict=True)
        )  # type: ignore[assignment]
        assert {k: (t.calls, t.num_bytes) for k, t in recorded_traffic(recorder.calls).items()} == counted
        offset = clock_offset(axis, clock)
        write_rank(tmp_path, replace(make_rank(index, recorder.calls, offset), plan="rows 2"))

    run_local(rank, 2)
    ranks = read_recording(tmp_path)
    assert abs(ranks[1].clock_offset_seconds - SKEW_SECONDS) < 0.5
    found = summarise(ranks)
    worst = found.longest[0]
    assert (worst.late_rank, worst.axis, worst.operation, worst.num_bytes) == (1, "rows", "send", 36)
    assert worst.waited_seconds > 0.04
    assert found.late_ranks[0].rank == 1


@pytest.fixture
def weft(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Weft:
    return caller(monkeypatch, capfd, columns=160)


@pytest.mark.processes
def test_a_run_is_recorded_and_shown(tmp_path: Path, weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(folder: Path, found: RankRecording) -> None:
        with open(tmp_path / f"writes-{found.rank}", "a") as file:
            file.write(f"{found.last_step} ")
        write_rank(folder, found)

    monkeypatch.setattr("weft.train.recording.write_rank", noted)  # forked ranks have it, too
    run = make_run(
        write_run_file(tmp_path), "run", "plan.shard=2", "train.steps=4", "train.profile=1:3", "checkpoint.every=100"
    )
    assert train_on_ranks(run)["finished"]
    # After one recorded step, for the live page, and at the end.
    assert [(tmp_path / f"writes-{rank}").read_text() for rank in range(2)] == ["2 3 "] * 2
    left = weft("profile", run.folder, "--json")
    found = left.json
    assert (found["first_step"], found["last_step"], found["num_ranks"]) == (2, 3, 2)
    rows = {(row["axis"], row["operation"]): row for row in found["operations"]}
    gathered = rows["shard", "all_gather"]
    assert gathered["exposed_seconds"] > 0
    assert gathered["predicted_seconds"] > 0
    assert {"loading data", "forward and backward", "the update"} <= set(found["phase_seconds"])
    ranks = read_recording(run.folder)
    blocks = {call.block for call in ranks[0].calls if call.axis == "shard"}
    assert any(block.startswith("backward of block") for block in blocks), blocks
    assert all({call.step for call in rank.calls} == {2, 3} for rank in ranks)
    trace = json.loads((run.folder / "profile" / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "b" for event in trace) == sum(len(rank.calls) for rank in ranks)
    page = (run.folder / "profile" / "page.html").read_text()
    assert "all_gather" in page
    for outside in ("http://", "https://", "src=", "<script", "@import"):
        assert outside not in page
    shown = weft("profile", run.folder)
    assert shown.status == 0
    assert "all_gather" in shown.out
    with pytest.raises(ConfigError, match=r"train\.profile = '3:2' is not FIRST:LAST"):
        make_run(tmp_path / "tiny.toml", "run", "train.profile=3:2")


@pytest.mark.processes
def test_a_recording_or_a_picture_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    given = ["plan.pipe=2", "plan.micro_batch=8", "train.steps=3", "train.profile=1:2"]
    run = make_run(write_run_file(tmp_path), "run", *given, f"train.timeline={tmp_path / 'last.txt'}")
    run.folder.mkdir()
    (run.folder / "profile").touch()  # a file in the place of the folder
    (tmp_path / "last.txt").mkdir()
    assert train_on_ranks(run)["finished"]
    assert steps(run.folder / "checkpoints") == [3]


def test_the_live_page_is_served_on_loopback_only(tmp_path: Path) -> None:
    with live_server(tmp_path, 0) as server:
        address, port = server.server_address[:2]
        assert address == "127.0.0.1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            status, page = ask(port, "/", "localhost")
            assert status == 200
            assert "Nothing to show yet" in page
            for rank, steps in ((0, 3), (1, 2)):  # rank 1 has not written its third step yet
                calls = [make_call("all_reduce", 10.0 * step, 10.0 * step + 1, number=step) for step in range(steps)]
                calls = [replace(call, step=step) for step, call in enumerate(calls, 1)]
                write_rank(tmp_path, replace(make_rank(rank, calls), last_step=steps))
            status, page = ask(port, "/", "127.0.0.1")
            assert status == 200
            assert 'http-equiv="refresh"' in page
            assert "all_reduce" in page
            assert "Steps 1 to 2" in page
            assert ask(port, "/etc/passwd", "localhost")[0] == 404
            assert ask(port, "/", "elsewhere.example")[0] == 403
            with pytest.raises(ConfigError, match="choose another, or 0"):
                live_server(tmp_path, port)
        finally:
            server.shutdown()


def ask(port: int, path: str, host: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={"Host": f"{host}:{port}"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


# --- the page of a run: its curves, long runs, values that are not finite, and a run without steps


def events(count: int) -> list[dict[str, object]]:
    steps: list[dict[str, object]] = [
        {"kind": "step", "step": n, "loss": 4.0 / n, "tokens_per_second": 1000.0 + n % 7} for n in range(1, count + 1)
    ]
    return [*steps, {"kind": "evaluation", "step": count, "loss": 1.25, "accuracy": 0.5}]


def test_the_page_has_the_losses_and_the_speed_and_loads_nothing() -> None:
    page = run_page("a <run>", events(40))
    assert "a &lt;run&gt;" in page
    for words in ("training loss", "held-out loss", "tokens per second", "1.2500", "0.1000"):
        assert words in page
    curves = re.findall(r'<polyline [^>]*points="([^"]*)"', page)
    assert [len(one.split()) for one in curves] == [40, 1, 40]
    heights = [float(point.split(",")[1]) for point in curves[0].split()]
    assert heights == sorted(heights)  # the loss falls
    for outside in ("http://", "https://", "src=", "<script", "@import"):
        assert outside not in page


def test_long_runs_and_broken_numbers_are_drawn() -> None:
    long = run_page("long", events(10 * MAX_POINTS + 3))
    assert all(len(one.split()) <= MAX_POINTS for one in re.findall(r'points="([^"]*)"', long))
    broken = [{"kind": "step", "step": 3, "loss": float("nan"), "images_per_second": 2.0}]
    page = run_page("broken", broken)
    assert "nan" not in page.lower().replace("nan</h1>", "")
    assert "images per second" in page
    assert "<polyline" not in run_page("empty", [])


def test_the_command_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    weft: Weft = caller(monkeypatch, capfd)
    assert "has no metrics.jsonl; give the folder of a run" in weft("report", tmp_path).err
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "loss": 2.5, "tokens_per_second": 9.0}\n')
    assert weft("report", tmp_path, "--json").json["page"] == str(tmp_path / "report.html")
    assert "2.5000" in (tmp_path / "report.html").read_text()

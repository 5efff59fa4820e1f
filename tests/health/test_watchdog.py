"""Deadlines, and the words about a hang, from pages alone."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, Store
from waiting_for_tests import wait_until

from weft.health import rank_status as status
from weft.health import watchdog
from weft.health.rank_status import FOLDER_VARIABLE, SAVING, WAITING, Status, StatusPage, page_path, read_page
from weft.health.watchdog import Deadline, Watchdog, describe_hang, overdue_seconds
from weft.launch.environment import RankInfo
from weft.resilience import peer_watch as lookout
from weft.resilience import shared_memory
from weft.resilience.peer_watch import Lookout, _decode, _encode, _StoreClient

pytestmark = pytest.mark.processes

NOW = 1000.0


class Clock:
    """Stands for the module `time`: it is when the test says."""

    def __init__(self) -> None:
        self.now = NOW

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (status, watchdog, lookout):
        monkeypatch.setattr(module, "time", clock)
    return clock


def page(doing: str, ago: float = 90, calls: int = 40, peers: tuple[int, ...] = (), **more: Any) -> StatusPage:
    return StatusPage(17, calls, 1.0, 0.5, NOW - ago, doing, peers=peers, **more)


def test_ranks_that_wait_for_each_other_in_different_blocks_are_named(clock: Clock) -> None:
    pages = {
        0: page(f"{WAITING}all_gather over shard (#40, forward of block 2)", peers=(1,)),
        1: page(f"{WAITING}all_gather over shard (#40, forward of block 3)", peers=(0,)),
    }
    said = describe_hang(pages, {}, 90)
    assert "rank 0 waits in all_gather over shard (#40, forward of block 2) and rank 1 in all_gather" in said
    assert "must call the same blocks in the same order" in said
    pages[1] = page(f"{WAITING}all_gather over shard (#41, forward of block 3)", calls=41, peers=(0,))
    said = describe_hang(pages, {}, 90)
    assert "rank 0 did not enter all_gather over shard (#41" in said  # it is behind
    assert "different ways" not in said


def test_the_deadline_is_predicted_then_measured_and_never_below_the_floor() -> None:
    deadline = Deadline(60, 45.0)
    assert deadline.seconds == 450  # ten predicted steps
    assert Deadline(60, 1.0).seconds == Deadline(60).seconds == 300  # five floors for the first step
    for step, seconds in enumerate([100.0, 7.0, 8.0], 1):
        deadline.measure(StatusPage(step, 0, seconds, 0, 0, ""))
        deadline.measure(StatusPage(step, 0, 1e6, 0, 0, ""))  # the same step, once more
    assert deadline.seconds == 80
    for step in range(4, 30):
        deadline.measure(StatusPage(step, 0, 0.1, 0, 0, ""))
    assert deadline.seconds == 60


@pytest.mark.usefixtures("clock")
def test_a_hang_is_told_in_the_words_of_the_paragraph() -> None:
    call = WAITING + "all_reduce over data (#41, backward of block model.layers.7)"
    pages = {rank: page(call, 91, 44, (5,)) for rank in range(5)}
    pages[5] = page("loading data", 92, place="host b, pipe stage 2")
    assert describe_hang(pages, {}, 91.2) == (
        "no sign of life for 91 s: rank 5 (host b, pipe stage 2) did not enter all_reduce over data (#41, backward of "
        "block model.layers.7); last seen in loading data of step 18 (after 40 collectives), 92 s ago "
        "(ranks 0, 1, 2, 3, 4 are waiting in all_reduce over data (#41, backward of block model.layers.7))"
    )


@pytest.mark.usefixtures("clock")
def test_what_waits_for_the_rank_itself_is_what_it_missed() -> None:
    """Ranks that wait for those who wait came first, and are more."""
    pages = {
        0: page(WAITING + "all_reduce over data (#39)", 99, 39, (1,)),
        1: page(WAITING + "all_gather over shard (#41)", 91, 41, (3,)),
        2: page(WAITING + "all_reduce over data (#39)", 99, 39, (1,)),
        3: page("the update", inside="forward of block 3"),
    }
    assert "rank 3 did not enter all_gather over shard (#41); last seen in forward of block 3" in describe_hang(
        pages, {}, 99
    )
    pages[3] = page("the update", calls=41)
    assert "rank 3 has entered all_gather over shard (#41) and does not serve it" in describe_hang(pages, {}, 99)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("doing", "told"),
    [
        (
            "recv_forward of micro-batch 3 at stage 2, edge 0, peer rank 1 over pipe",
            "send the forward of micro-batch 3 to",
        ),
        ("send_backward of micro-batch 3 at stage 2, edge 0, peer rank 1 over pipe", "receive the backward of micro-"),
    ],
)
@pytest.mark.usefixtures("clock")
def test_messages_are_told_from_the_side_that_hangs(doing: str, told: str) -> None:
    pages = {0: page("loading data"), 1: page(WAITING + doing, peers=(0,))}
    assert f"rank 0 did not {told}" in describe_hang(pages, {}, 99)


@pytest.mark.usefixtures("clock")
def test_hosts_that_do_not_answer_and_links_that_are_down() -> None:
    call = WAITING + "all_reduce over data (#41)"
    words = describe_hang({0: page(call), 1: page(call)}, {2: "host b", 3: "host b"}, 90)
    assert "ranks 2, 3 (host b) do not answer: that host, or the link to it, may be down (ranks 0, 1 are" in words
    words = describe_hang({0: page(call), 1: page(call)}, {}, 90)
    assert "every rank waits for another, and none is behind: a link between them may be down" in words
    words = describe_hang({0: page(call), 1: page(call, calls=39)}, {}, 90)
    assert "90 s: rank 1 did not enter all_reduce over data (#41); last seen in all_reduce over data (#41) of" in words


@pytest.mark.usefixtures("clock")
def test_only_waits_and_common_silence_are_overdue_and_files_take_their_time() -> None:
    busy, waits = page("the update", 2), page(WAITING + "all_reduce over data (#41)", 90)
    assert overdue_seconds([busy, page("the update", 50)]) == 2
    assert overdue_seconds([busy, waits]) == 90
    assert overdue_seconds([page(SAVING, 1000), waits]) == 0


class Ranks:
    """Two ranks that only have pages, and the watch over them."""

    def __init__(self, folder: Path, clock: Clock, floor_seconds: float) -> None:
        self.clock, self._watchdog = clock, Watchdog(folder, 2, Deadline(floor_seconds))
        self.pages = [Status({FOLDER_VARIABLE: str(folder)}, rank) for rank in range(2)]

    def begin(self, step: int) -> None:
        for one in self.pages:
            one.step_begins(step)
            one.phase("forward and backward")

    def after(self, seconds: float) -> tuple[str | None, str | None]:
        self.clock.now += seconds
        return self._watchdog.check()


def test_work_that_takes_its_time_is_no_hang(tmp_path: Path, clock: Clock) -> None:
    """Ten steps' time may pass, five floors' in the first step, and a save may take as long as it likes."""
    ranks = Ranks(tmp_path, clock, 60)
    ranks.begin(0)
    assert ranks.after(299) == (None, None)
    for step in range(1, 5):
        ranks.begin(step)
        assert ranks.after(20) == (None, None)
    assert ranks.after(179) == (None, None)  # ten steps of 20 s
    ranks.pages[0].phase(SAVING)
    assert ranks.after(10_000) == ranks.after(10_000) == (None, None)
    ranks.begin(5)
    assert ranks.after(200) == (None, None)
    hang, slow = ranks.after(0.1)
    assert hang is not None
    assert "no sign of life for 200 s: rank 0 does not get on; last seen in forward and backward of step 6" in hang
    assert slow is None


def test_ranks_that_were_all_stopped_for_a_while_do_not_hang(tmp_path: Path, clock: Clock) -> None:
    """As on a machine that sleeps, or has no time for any of them: who looks a second time sees them at work."""
    ranks = Ranks(tmp_path, clock, 60)
    ranks.begin(0)
    for _ in range(3):
        assert ranks.after(1000) == (None, None)
        for one in ranks.pages:
            one.enters("forward of block 3")
        assert ranks.after(0.1) == (None, None)
    ranks.pages[0].wait_begins("all_reduce over data (#1)", [1])
    assert ranks.after(1000) == (None, None)
    ranks.pages[1].enters("forward of block 3")  # whoever is awaited may be at work: the wait is overdue all the same
    hang, _ = ranks.after(0.1)
    assert hang is not None
    assert "rank 1 did not enter all_reduce over data (#1); last seen in forward of block 3 of step 1" in hang


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("own", "waits"), [(0.05, 0.25), (0.01, 0.05)])
def test_a_straggler_is_named_once_after_ten_steps(tmp_path: Path, clock: Clock, own: float, waits: float) -> None:
    """Rank 0 computes so long in each step, and then waits for rank 1. Short steps differ because a machine is busy."""
    ranks, told = Ranks(tmp_path, clock, 60), []
    ranks.begin(0)
    for step in range(1, 25):
        clock.now += own
        ranks.pages[0].wait_begins("all_reduce over data (#1)")
        clock.now += waits
        ranks.pages[0].wait_ends()
        for one in ranks.pages:
            one.step_ends()
        ranks.begin(step)
        hang, slow = ranks.after(0)
        assert hang is None
        told += [(step, slow)] if slow is not None else []
    words = "rank 1 is slow: it computes 0.30 s a step or more, the median rank 0.05 s (last 10 steps); the others wait"
    assert told == ([(10, words + " for it")] if own == 0.05 else [])


def test_whoever_looks_while_a_page_is_written_sees_a_rank_that_did_something(tmp_path: Path) -> None:
    """What is read may be half old and half new, but never nothing: that would be a hang since the machine started."""
    writer = os.fork()
    if writer == 0:
        rank = Status({FOLDER_VARIABLE: str(tmp_path)}, 3)
        while True:
            rank.step_begins(7)
            rank.wait_begins("all_reduce over data (#1)", [0, 2])
    try:
        while (first := read_page(tmp_path, 3)) is None or not first.peers:
            assert os.waitpid(writer, os.WNOHANG) == (0, 0)
        for _ in range(5000):
            seen = read_page(tmp_path, 3)
            assert seen is not None
            assert (seen.step, seen.doing, seen.peers) == (7, WAITING + "all_reduce over data (#1)", (0, 2))
            assert seen.at > 0
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)


def test_a_page_says_all_and_cuts_what_is_too_long(tmp_path: Path) -> None:
    rank = Status({FOLDER_VARIABLE: str(tmp_path)}, 3)
    assert read_page(tmp_path, 3) is None
    page_path(tmp_path, 3).write_bytes(bytes(page_path(tmp_path, 3).stat().st_size))  # as before the first word
    assert read_page(tmp_path, 3) is None
    rank.place = "host b"
    rank.step_begins(4)
    rank.phase("forward and backward")
    rank.enters("forward of block " + "x" * 500)
    seen = read_page(tmp_path, 3)
    assert seen == rank.page()
    assert seen is not None
    assert (seen.doing, seen.place, seen.peers, len(seen.inside)) == ("forward and backward", "host b", (), 144)
    rank.wait_begins("all_reduce over data (#1)", [0, 2])
    seen = read_page(tmp_path, 3)
    assert seen is not None
    assert seen.is_waiting
    assert seen.peers == (0, 2)
    rank.phase("the update")
    assert rank.inside == ""


def test_what_ranks_say_survives_the_way_though_clocks_differ(clock: Clock) -> None:
    pages = {3: page(WAITING + "all_reduce over data (#41)", 90, peers=(1, 2), place="host b")}
    said = _encode(pages, True)
    clock.now += 5000  # on the host that hears it
    back, is_overdue = _decode(said)
    assert is_overdue
    assert back[3].at == clock.now - 90
    assert (back[3].peers, back[3].doing, back[3].place) == ((1, 2), pages[3].doing, "host b")


class Deaf(HashStore):
    """A store behind a cut link."""

    def check(self, keys: list[str]) -> bool:
        threading.Event().wait()
        return False


def test_a_store_that_never_answers_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookout, "_STORE_SECONDS", 0.1)
    client = _StoreClient(Deaf())
    assert not client.has("call/0")
    asking = client._asking
    assert not client.has("call/0")  # and the question is not asked again
    assert client.set_once("call/0", "now") is None
    assert client._asking is asking


def test_a_rank_that_saves_calls_a_hang_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 waits for rank 0, whose storage is slow: it asks, is told, and goes on waiting."""
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    store: Store = HashStore()
    store.set_timeout(timedelta(seconds=60))
    pages = [Status({}, rank) for rank in range(2)]
    for one in pages:
        one.step_begins(3)
    pages[0].phase(SAVING)
    pages[1].wait_begins("all_reduce over data (#9)", [0])
    lookouts = [
        Lookout(one, RankInfo(rank, 2, rank, 2, 1, "torchrun"), store, Deadline(0.1), tmp_path / "run")
        for rank, one in enumerate(pages)
    ]
    wait_until(lambda: store.check(["verdict/0"]), "the verdict")
    assert store.get("verdict/0") == b""
    pages[1].wait_ends()
    for one in lookouts:
        with one:
            pass
    assert not list(tmp_path.glob("weft-*"))

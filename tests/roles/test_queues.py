"""The queues between roles, with both ends in threads of one process: depth, bytes, order, loss and return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # as documented

from weft.checkpoint import Piece, Region
from weft.comm import Axis, Ledger, Traffic
from weft.errors import LaunchError, LostRankError
from weft.roles import links
from weft.roles.batch_queue import BatchLayout, BatchQueue, serve_batches, serve_trainers
from weft.roles.links import RoleLink, TrainingEndedError, announce, digest, meet_trainers
from weft.roles.snapshots import SnapshotSender, describe, in_order, serve_snapshots, whole_tensors

TIMEOUT = timedelta(seconds=60)
OWN = digest({"train.seed": "0"})


def make(number: int) -> list[Any]:
    """Two micro-batches of odd sizes, so that tensors begin at bytes that no dtype likes."""
    generator = torch.Generator().manual_seed(number)
    return [
        (torch.randint(0, 99, (3, 5), generator=generator, dtype=torch.uint8), torch.randn(3, generator=generator))
        for _ in range(2)
    ]


class Loader:
    """A loader in a thread. `counts` has how many batches it began."""

    def __init__(self, store: Any, number: int, make: Callable[[int], list[Any]] = make, num_batches: int = 99) -> None:
        self.ledger, self.began, self._make, self._left = Ledger(), list[int](), make, num_batches
        self._arguments = (store, "loader", number, 1, OWN, self.ledger, TIMEOUT)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        (channel,) = meet_trainers(*self._arguments)
        try:
            serve_batches(channel, self._made)
        except ZeroDivisionError:
            channel._group = None  # type: ignore[assignment]  # closes the connection, as a process that dies does

    def _made(self, number: int) -> list[Any]:
        self.began.append(number)
        self._left -= 1
        if self._left < 0:
            raise ZeroDivisionError
        return self._make(number)


def open_queue(store: Any, count: int, depth: int = 2, say: Any = lambda text: None) -> tuple[BatchQueue, Ledger]:
    ledger = Ledger()
    links = [RoleLink(store, "loader", number, 0, ledger, TIMEOUT) for number in range(count)]
    for link in links:
        link.connect(OWN)
    return BatchQueue(links, OWN, (0, 1), depth, make, BatchLayout.of(make(0)), TIMEOUT, say), ledger


def take_steps(queue: BatchQueue, steps: list[int], last: int) -> list[list[Any]]:
    return [queue.take(list(range(step, min(step + queue.depth + 1, last)))) for step in steps]


def assert_batches(found: list[list[Any]], numbers: list[int]) -> None:
    expected = [tensor for number in numbers for batch in make(number) for tensor in batch]
    tensors = [tensor for batches in found for batch in batches for tensor in batch]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tensors, expected, strict=True))


@pytest.mark.parametrize(("count", "depth"), [(1, 1), (1, 2), (2, 2), (3, 4)])
def test_batches_come_in_order_and_their_bytes_are_counted(count: int, depth: int) -> None:
    store = HashStore()
    loaders = [Loader(store, number) for number in range(count)]
    queue, ledger = open_queue(store, count, depth)
    assert_batches(take_steps(queue, list(range(9)), 9), list(range(9)))
    queue.close()
    for loader in loaders:
        loader.thread.join(60)
        assert not loader.thread.is_alive()
    sent = [loader.ledger.entries()["loader", "send"] for loader in loaders]
    size = BatchLayout.of(make(0)).num_bytes
    assert sum((one for one in sent), Traffic()) == Traffic(9, 9 * size)
    assert ledger.entries()["loader", "send"] == Traffic(9 + count, 8 * (9 + count))  # requests, and the ends
    assert sorted(number for loader in loaders for number in loader.began) == list(range(9))
    assert max(len(loader.began) for loader in loaders) - min(len(loader.began) for loader in loaders) <= 1


def test_what_a_lost_loader_was_asked_for_is_asked_of_others_at_once() -> None:
    store = HashStore()
    loaders = [Loader(store, 0, num_batches=0), Loader(store, 1)]
    queue, _ = open_queue(store, 2, depth=3)  # loader 0 is asked for batches 0 and 2
    assert_batches([queue.take([0, 1, 2, 3])], [0])
    assert loaders[1].began[:3] == [1, 2, 0]
    assert_batches(take_steps(queue, [1, 2, 3], 4), [1, 2, 3])
    queue.close()


def test_a_training_rank_is_served_before_others_come() -> None:
    """After a loader's return a rank may come late: it is in a collective that waits for one that the loader serves."""
    store, began, said = HashStore(), list[int](), list[str]()

    def noted(number: int) -> list[Any]:
        began.append(number)
        return make(number)

    def load() -> None:
        serve_trainers(announce(store, "loader", 0, OWN, Ledger(), TIMEOUT), [noted, noted])

    loader = threading.Thread(target=load, daemon=True)
    loader.start()
    layout, soon = BatchLayout.of(make(0)), timedelta(seconds=15)
    for trainer in (1, 0):
        link = RoleLink(store, "loader", 0, trainer, Ledger(), TIMEOUT)
        link.connect(OWN)
        queue = BatchQueue([link], OWN, (trainer, 2), 1, make, layout, soon, said.append)
        assert_batches([queue.take([0])], [0])
        queue.close()
    loader.join(60)
    assert (began, said, loader.is_alive()) == ([0, 0], [], False)


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_than_depth_batches_are_made_ahead(depth: int) -> None:
    store = HashStore()
    loader = Loader(store, 0)
    queue, _ = open_queue(store, 1, depth)
    for step in range(6):
        take_steps(queue, [step], 99)
        while len(loader.began) < step + 1 + depth:  # it may make so many, and does
            pass
        assert len(loader.began) == step + 1 + depth


def test_a_run_that_goes_back_gets_its_batches_again() -> None:
    store = HashStore()
    Loader(store, 0)
    queue, _ = open_queue(store, 1)
    assert_batches(take_steps(queue, [0, 1, 2, 1, 2, 3], 4), [0, 1, 2, 1, 2, 3])


def test_batches_of_a_lost_loader_are_asked_of_the_others_and_it_may_come_back() -> None:
    store, words = HashStore(), list[str]()
    lost, other = Loader(store, 0, num_batches=2), Loader(store, 1)
    queue, _ = open_queue(store, 2, say=words.append)
    assert_batches(take_steps(queue, list(range(8)), 20), list(range(8)))
    reason, _, what_now = words[0].rpartition("; ")
    assert reason.startswith("lost the connection to loader 0: Connection closed by peer")
    assert len(reason) < 100
    assert what_now == "1 other loader loads its batches, and none is lost"
    lost.thread.join(60)
    back = Loader(store, 0)
    while queue._links[0].newer_start() is None:
        pass
    assert_batches(take_steps(queue, list(range(8, 20)), 20), list(range(8, 20)))
    assert words[1:] == ["loader 0 is back"]
    assert back.began
    assert other.began


def test_a_rank_without_loaders_makes_its_batches_itself() -> None:
    store, words = HashStore(), list[str]()
    Loader(store, 0, num_batches=3)
    queue, _ = open_queue(store, 1, say=words.append)
    assert_batches(take_steps(queue, list(range(8)), 8), list(range(8)))
    assert "training ranks load its batches" in words[0]


def test_a_batch_of_another_layout_is_a_defect_of_the_loader() -> None:
    with pytest.raises(AssertionError, match="one layout"):
        BatchLayout.of(make(0)).pack(make(0)[:1])


def test_a_loader_with_another_run_is_refused() -> None:
    store = HashStore()
    store.set("role/loader/0/start/1", OWN)
    link = RoleLink(store, "loader", 0, 0, Ledger(), TIMEOUT)
    with pytest.raises(LaunchError, match="loader 0 has read another run file or other data than training rank 0"):
        link.connect(digest({"train.seed": "1"}))


def test_a_rank_that_never_comes_is_lost() -> None:
    link = RoleLink(HashStore(), "loader", 0, 0, Ledger(), timedelta(seconds=1))
    with pytest.raises(LostRankError, match="loader 0 did not come within 1 s"):
        link.connect(OWN)


class Polls(HashStore):
    """A store that says when somebody has looked for keys a few times in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.num_polls, self.are_many = 0, threading.Event()

    def clone(self) -> Polls:
        return self

    def check(self, keys: list[str]) -> bool:
        found = super().check(keys)
        self.num_polls += not found
        if self.num_polls > 4:
            self.are_many.set()
        return bool(found)


def test_a_rank_waits_for_training_ranks_as_long_as_training_lasts() -> None:
    """A validator that starts again is met at the next evaluation only, which may be later than any time-out."""
    made, ended = list[str](), list[str]()
    store = Polls()

    def run(role: str) -> None:
        try:
            announce(store, role, 0, OWN, Ledger(), timedelta(0))(0)
        except TrainingEndedError as error:
            ended.append(str(error))

    def channel(own: Any, key: str, *rest: Any) -> None:
        made.append(key)

    with patch.object(links, "PairChannel", channel):
        threads = [threading.Thread(target=run, args=(role,)) for role in ("validator", "loader")]
        for thread in threads:
            thread.start()
        assert store.are_many.wait(60)
        assert made == []
        RoleLink(store, "validator", 0, 0, Ledger(), TIMEOUT).connect(OWN)
        threads[0].join(60)
        assert made == ["role/validator/0/start/1/0"] * 2
        links.end_roles(store)
        threads[1].join(60)
    assert ended == ["training has ended"]
    serve_trainers(announce(store, "loader", 0, OWN, Ledger(), TIMEOUT), [make, make])  # which come no more


def test_a_training_rank_waits_a_third_of_the_time_out_for_a_rank_that_starts_again() -> None:
    """Meanwhile, other training ranks wait for it in a collective with the time-out."""
    store, timeouts = HashStore(), list[timedelta]()
    for start in (1, 2):
        store.set(f"role/loader/0/start/{start}", OWN)
    with patch.object(links, "PairChannel", lambda *given: timeouts.append(given[-1])):
        for timeout in (timedelta(minutes=10), timedelta(seconds=3)):
            for start in (1, 2):
                RoleLink(store, "loader", 0, 0, Ledger(), timeout).connect(OWN, start)
    assert [one.total_seconds() for one in timeouts] == [600, 30, 3, 1]


# --- snapshots


def pieces_of(value: float) -> list[Piece]:
    """A matrix in two pieces that interleave, and a buffer of another dtype."""
    columns = [((0, 3),), ((0, 2),)], [((0, 3),), ((2, 4),)]
    found = [
        Piece("w", "parameter", Region.block((3, 4), tuple(intervals)), torch.full((6,), value + index))
        for index, intervals in enumerate(columns)
    ]
    return [*found, Piece("count", "buffer", Region.whole(()), torch.tensor(7, dtype=torch.int64))]


def test_pieces_make_whole_tensors() -> None:
    found = whole_tensors(pieces_of(1.0))
    assert found["w", "parameter"].tolist() == [[1.0, 1.0, 2.0, 2.0]] * 3
    assert found["count", "buffer"].item() == 7
    assert [piece.name for piece in in_order(pieces_of(0.0))] == ["count", "w", "w"]
    assert "float32" in describe(pieces_of(0.0))


def test_a_snapshot_is_that_of_its_step_and_a_busy_validator_is_skipped() -> None:
    store, ledger, weights = HashStore(), Ledger(), [1.0]
    begun, may_go_on = threading.Event(), threading.Event()

    def measure(step: int, tensors: dict[tuple[str, str], torch.Tensor]) -> list[float]:
        begun.set()
        assert may_go_on.wait(60)
        return [float(step), float(tensors["w", "parameter"].sum())]

    def serve() -> None:
        serve_snapshots(meet_trainers(store, "validator", 0, 1, OWN, Ledger(), TIMEOUT), store, measure)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    link = RoleLink(store, "validator", 0, 0, ledger, TIMEOUT)
    link.connect(OWN)
    world = Axis("world", 1, 0, None, ledger)
    sender = SnapshotSender([link], OWN, lambda: pieces_of(weights[0]), 2, world, store)
    assert sender.offer(4)
    weights[0] = 100.0  # training goes on; the snapshot stays what it was
    assert begun.wait(60)
    assert not sender.offer(8)
    assert sender.results() == []
    may_go_on.set()
    assert [(one.step, one.measures) for one in sender.results(60)] == [(4, [4.0, 18.0])]
    assert sender.offer(12)
    assert [(one.step, one.measures) for one in sender.results(60)] == [(12, [12.0, 1206.0])]
    sender.close(TIMEOUT)
    thread.join(60)
    assert not thread.is_alive()
    model_bytes = 12 * 4 + 8
    assert ledger.entries()["validator", "send"] == Traffic(5, 2 * model_bytes + 3 * 8, {model_bytes: 2, 8: 3})


def test_a_validator_that_does_not_answer_is_lost() -> None:
    store, ledger, is_over = HashStore(), Ledger(), threading.Event()

    def measure(step: int, tensors: dict[tuple[str, str], torch.Tensor]) -> list[float]:
        is_over.wait(60)
        return [0.0]

    def serve() -> None:
        serve_snapshots(meet_trainers(store, "validator", 0, 1, OWN, Ledger(), TIMEOUT), store, measure)

    threading.Thread(target=serve, daemon=True).start()
    link = RoleLink(store, "validator", 0, 0, ledger, TIMEOUT)
    link.connect(OWN)
    sender = SnapshotSender([link], OWN, lambda: pieces_of(1.0), 1, Axis("world", 1, 0, None, ledger), store)
    assert sender.offer(4)
    assert [(one.step, one.measures) for one in sender.results(0.2)] == [(4, None)]
    assert not sender.has_validators
    assert not sender.offer(8)
    assert sender.results(0.2) == []
    sender.close(TIMEOUT)
    is_over.set()


def test_a_snapshot_does_not_wait_for_the_one_that_a_killed_validator_did_not_take() -> None:
    """The first validator connects, and takes nothing: its message stays on its way after the second has come."""
    store, ledger = HashStore(), Ledger()
    link = RoleLink(store, "validator", 0, 0, ledger, TIMEOUT)

    def first() -> None:
        held.append(meet_trainers(store, "validator", 0, 1, OWN, Ledger(), TIMEOUT))

    def second() -> None:
        channels = meet_trainers(store, "validator", 0, 1, OWN, Ledger(), TIMEOUT)
        serve_snapshots(channels, store, lambda step, tensors: [float(step)])

    held: list[Any] = []
    threading.Thread(target=first, daemon=True).start()
    link.connect(OWN)
    sender = SnapshotSender([link], OWN, lambda: pieces_of(1.0), 1, Axis("world", 1, 0, None, ledger), store)
    assert sender.offer(4)
    assert [one.measures for one in sender.results(0.2)] == [None]
    threading.Thread(target=second, daemon=True).start()
    while link.newer_start() is None:
        pass
    offered = threading.Thread(target=sender.offer, args=(8,), daemon=True)
    offered.start()
    offered.join(60)
    assert not offered.is_alive()
    assert [(one.step, one.measures) for one in sender.results(60)] == [(8, [8.0])]
    sender.close(timedelta(seconds=1))

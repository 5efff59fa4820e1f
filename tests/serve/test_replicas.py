"""A front and a replica in one process: which requests the replica holds, and that ranks without work hear so."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from serve_for_tests import LIMIT_SECONDS, RepeatingEngine

from weft.serve import replicas
from weft.serve.replicas import FRONT, ReplicaFront, serve_replica
from weft.serve.scheduling.request import Request, RequestError
from weft.serve.worker import IDLE_SECONDS

MAX_REQUESTS, LONG = 2, 1 << 20


class HeldEngine(RepeatingEngine):
    """Takes no more requests than it has places, and counts how often it hears that there is nothing to do."""

    reads_together, num_slots = False, 64

    def __init__(self) -> None:
        super().__init__()
        self.num_idle = 0

    def check(self, request: Request) -> None: ...

    def add(self, request: Request) -> None:
        if len(self.held) >= MAX_REQUESTS:
            raise RequestError("queue_full", "no place is left")
        super().add(request)

    def idle(self) -> None:
        self.num_idle += 1

    def close(self) -> None: ...


class Clock:
    """Time passes when it is told to."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


Two = tuple[ReplicaFront, HeldEngine, HeldEngine, Clock]


@contextmanager
def two_replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    """A front, its own engine, the engine of the replica behind it, in a thread, and the front's clock."""
    boxes = [Queue[Any](), Queue[Any]()]  # what each of them is sent

    def send(value: dict[str, Any], axis: Any, peer: int) -> None:
        boxes[peer].put(json.dumps(value))

    def receive(axis: Any, peer: int) -> Any:
        found = boxes[axis.index].get(timeout=LIMIT_SECONDS)
        if isinstance(found, Exception):
            raise found
        return json.loads(found)

    monkeypatch.setattr(replicas, "_send", send)
    monkeypatch.setattr(replicas, "_receive", receive)
    own, other, clock = HeldEngine(), HeldEngine(), Clock()

    def run() -> None:
        try:
            serve_replica(other, SimpleNamespace(degree=2, index=1))  # type: ignore[arg-type]
        except Exception as error:  # the rank would die
            boxes[FRONT].put(error)

    thread = threading.Thread(target=run)
    thread.start()
    front = ReplicaFront(own, SimpleNamespace(degree=2, index=FRONT), MAX_REQUESTS, clock)  # type: ignore[arg-type]
    try:
        yield front, own, other, clock
    finally:
        front.close()
        thread.join(LIMIT_SECONDS)
    assert not thread.is_alive()


def ask(front: ReplicaFront, *names: str, max_tokens: int = LONG) -> None:
    for name in names:
        front.add(Request(name, (1, 2, 3), max_tokens))


def test_a_replica_without_requests_hears_so_while_the_front_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks wait for the front for a limited time."""
    with two_replicas(monkeypatch) as (front, own, other, clock):
        ask(front, "a")
        for _ in range(3):
            front.step()
        assert other.num_idle == 0
        clock.seconds += IDLE_SECONDS
        for _ in range(3):
            assert [one.request for one in front.step()] == ["a"]
        assert other.num_idle == 1
        clock.seconds += 2 * IDLE_SECONDS
        front.step()
        assert (other.num_idle, own.num_idle) == (2, 0)


def test_ranks_of_a_front_without_requests_hear_so_while_a_replica_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_replicas(monkeypatch) as (front, own, other, clock):
        ask(front, "a", max_tokens=1)
        ask(front, "b")
        assert {one.request for one in front.step()} == {"a", "b"}
        assert list(other.held) == ["b"]
        assert not own.has_work()
        for _ in range(3):
            clock.seconds += IDLE_SECONDS
            assert [one.request for one in front.step()] == ["b"]
        assert (other.num_idle, own.num_idle) == (0, 3)


def test_a_request_takes_the_place_of_one_cancelled_before_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_replicas(monkeypatch) as (front, own, other, _):
        ask(front, "a", "b", "c", "d")
        front.step()
        assert [list(own.held), list(other.held)] == [["a", "c"], ["b", "d"]]
        front.cancel("b")
        ask(front, "e")
        assert {one.request for one in front.step()} == {"a", "c", "d", "e"}
        front.cancel("d")
        ask(front, "d")  # the same name again
        assert {one.request for one in front.step()} == {"a", "c", "d", "e"}
        assert sorted(other.held) == ["d", "e"]


def test_requests_cancelled_before_a_step_do_not_reach_their_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_replicas(monkeypatch) as (front, _, other, _):
        ask(front, "a", "b")
        front.cancel("a")
        front.cancel("b")
        assert not front.has_work()  # nobody has to be told
        ask(front, "a", "b")
        front.cancel("b")
        ask(front, "c")
        front.step()
        assert list(other.held) == ["c"]
        assert [one.name for one in other.requests] == ["c"]
        front.cancel("c")
        assert {one.request for one in front.step()} == {"a"}
        assert other.cancelled == ["c"]

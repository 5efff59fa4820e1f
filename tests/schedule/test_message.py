"""The message-driven order: whatever arrives when, the same numbers; within its cap; and once more on demand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from sleeping_for_tests import OBJECTIVE, Chain, Trainer, micro_batches, run_ranks

from weft.launch.local_ranks import LocalError
from weft.pipeline.stage import StagePass
from weft.plan import Pipe
from weft.schedule import Action

pytestmark = pytest.mark.processes

LATE_SECONDS = 0.02
RANKS = 3


def chain(seed: int | None) -> Chain:
    """Blocks that are late at random; None is in time."""
    return Chain(RANKS, late_seconds=0.0 if seed is None else LATE_SECONDS, seed=seed or 0)


class Watched(dict[int, StagePass]):
    """Remembers how many it held at most; and says, by a file, when it holds `full`."""

    def __init__(self, full: int, says: Path | None) -> None:
        super().__init__()
        self.most, self._full, self._says = 0, full, says

    def __setitem__(self, key: int, value: StagePass) -> None:
        super().__setitem__(key, value)
        self.most = max(self.most, len(self))
        if self._says is not None and len(self) == self._full:
            self._says.touch()


def test_delays_change_no_bit() -> None:
    def rank(index: int) -> dict[str, Any]:
        gradients, orders = {}, {}
        for name, pipe, seed in (
            ("1f1b", Pipe(RANKS), None),
            ("in time", Pipe(RANKS, "message"), None),
            ("late", Pipe(RANKS, "message"), 100 * index),
            ("otherwise late", Pipe(RANKS, "message", in_flight=2), 100 * index + 50),
            ("one at a time", Pipe(RANKS, "message", in_flight=1), None),
        ):
            trainer = Trainer(pipe, chain(seed))
            for step in range(2):
                trainer.step(micro_batches(6, step))
            gradients[name] = trainer.gradients
            orders[name] = [tuple(action) for action in trainer.model.order]
        return {"gradients": gradients, "orders": orders}

    answers = run_ranks(rank, RANKS)
    for answer in answers:
        expected = answer["gradients"]["1f1b"]
        assert len(expected) == 2
        assert any(value != 0 for value in expected[0])
        assert expected[0] != expected[1]
        for name, found in answer["gradients"].items():
            assert found == expected, name
    # Orders are of their own: with one in flight a rank that has all inputs waits for each to come back.
    assert answers[0]["orders"]["one at a time"] != answers[0]["orders"]["late"]


@pytest.mark.parametrize("in_flight", [1, 2, None])
def test_cap(in_flight: int | None, tmp_path: Path) -> None:
    cap = in_flight or RANKS

    def rank(index: int) -> int:
        trainer = Trainer(Pipe(RANKS, "message", in_flight=in_flight), chain(seed=100 * index))
        trainer.step(micro_batches(6))  # all are connected now
        (stage,) = trainer.model.parts.values()
        stage.live = watched = Watched(cap, tmp_path / "full" if index == 0 else None)
        deadline = time.monotonic() + 50
        while index and not (tmp_path / "full").exists():
            assert time.monotonic() < deadline, "only the cap may keep the first rank back, which has all inputs"
            time.sleep(0.001)
        trainer.step(micro_batches(6))
        assert not watched
        return watched.most

    most = run_ranks(rank, RANKS)
    assert max(most) <= cap
    assert most[0] == cap


def test_replay() -> None:
    def rank(index: int) -> dict[str, Any]:
        first = Trainer(Pipe(RANKS, "message"), chain(seed=100 * index))
        orders = []
        for step in range(2):
            first.step(micro_batches(6, step))
            orders.append(first.model.order)
        # In time, the second would come to an order of its own.
        second = Trainer(Pipe(RANKS, "message"), chain(seed=None))
        for step in range(2):
            second.model.replay = orders[step]
            second.step(micro_batches(6, step))
            assert second.model.order == orders[step]
        return {"first": first.weights, "second": second.weights, "start": Trainer(Pipe(RANKS), chain(None)).weights}

    for answer in run_ranks(rank, RANKS):
        assert answer["first"] == answer["second"]
        assert answer["first"] != answer["start"]


def actions(stage: int, *names: str) -> list[Action]:
    """`f0 b0` as actions."""
    kinds = {"f": "forward", "b": "backward"}
    return [Action(kinds[name[0]], stage, int(name[1:])) for name in names]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["b0", "f0", "f1", "b1"], "comes to the backward of micro-batch 0 at stage 0, which cannot run yet"),
        (["f1", "f0", "b0", "b1"], "comes to the forward of micro-batch 1 at stage 0, which cannot run yet"),
        (["f0", "f1", "b0", "b1"], "comes to the forward of micro-batch 1 at stage 0, which cannot run yet"),  # the cap
        (["f0", "b0"], "has 2 actions, which are not the 4 of stage 0 in a step of 2 micro-batches; replay the order"),
        (["f0", "b0", "f1", "f1"], "has 4 actions, which are not the 4 of stage 0"),
    ],
)
def test_an_order_that_cannot_run(names: list[str], message: str) -> None:
    def rank(index: int) -> None:
        trainer = Trainer(Pipe(2, "message", in_flight=1), Chain(2))
        if index == 0:
            trainer.model.replay = actions(0, *names)
        trainer.step(micro_batches(2))

    with pytest.raises(LocalError, match=f"rank 0 failed: PlanError: the replayed order {message}"):
        run_ranks(rank, 2)


def test_one_micro_batch() -> None:
    def rank(index: int) -> dict[str, Any]:
        found = {}
        for name in ("message", "1f1b"):
            trainer = Trainer(Pipe(RANKS, name), chain(seed=None))
            result = trainer.step(micro_batches(1))
            found[name] = [trainer.gradients, result.loss.item(), result.grad_norm.item()]
        found["order"] = [tuple(action) for action in trainer.model.order]
        return found

    for index, answer in enumerate(run_ranks(rank, RANKS)):
        assert answer["message"] == answer["1f1b"]
        assert answer["order"] == [["forward", index, 0, 0], ["backward", index, 0, 0]]


def test_evaluation() -> None:
    batches = micro_batches(5)
    whole = chain(seed=None)
    with torch.no_grad():
        expected = sum(OBJECTIVE.total(whole, batch).item() for batch in batches) / 10

    def rank(index: int) -> dict[str, Any]:
        trainer = Trainer(Pipe(RANKS, "message"), chain(seed=100 * index))
        before = trainer.weights
        loss = trainer.evaluate(batches)
        (stage,) = trainer.model.parts.values()
        assert not stage.live
        assert all(piece.grad is None for piece in trainer.pieces)
        same = trainer.weights == before
        trainer.step(batches)
        return {"loss": loss, "same": same, "trained": trainer.weights != before}

    for answer in run_ranks(rank, RANKS):
        assert answer["loss"] == pytest.approx(expected, rel=1e-6)
        assert answer["same"]
        assert answer["trained"]

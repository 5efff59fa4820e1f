"""What a pipeline says it did and when: its spans follow the schedule, one after another, and leave nothing out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from sleeping_for_tests import Chain, Trainer, micro_batches, run_ranks

from weft.plan import Pipe
from weft.schedule import Action, make_schedule

pytestmark = pytest.mark.processes

SECONDS = 0.002  # that every block sleeps at least, each way

PIPES = [
    Pipe(2, "gpipe"),
    Pipe(4, "1f1b"),
    Pipe(2, "interleaved", chunks=2),
    Pipe(2, "zero-bubble"),
    Pipe(4, "gems"),
    Pipe(2, "bidirectional"),
    Pipe(4, "message"),
]


def spans_of(pipe: Pipe, num_micro_batches: int) -> list[dict[str, Any]]:
    """On each rank, (start, end, [kind, stage, micro-batch, replica] or None for a wait): of a step, an evaluation."""

    def rank(index: int) -> dict[str, Any]:
        trainer = Trainer(pipe, Chain(4, SECONDS, SECONDS, seed=index))
        batches = micro_batches(num_micro_batches)
        found = {}
        for name, run in (("step", trainer.step), ("evaluation", trainer.evaluate)):
            run(batches)
            found[name] = [
                (start, end, list(action) if isinstance(action, Action) else None)
                for start, end, action in trainer.model.spans
            ]
        return found

    return run_ranks(rank, pipe.degree)


@pytest.mark.parametrize("pipe", PIPES, ids=lambda pipe: pipe.schedule)
def test_spans(pipe: Pipe) -> None:
    schedule = make_schedule(pipe.schedule, pipe.degree, 4, **pipe.options)
    for index, found in enumerate(spans_of(pipe, 4)):
        listed = list(schedule.compute(index))
        done = [Action(*action) for _, _, action in found["step"] if action]
        if pipe.schedule == "message":  # in an order of its own, but each kind's in that of micro-batches
            assert [a for a in done if a.kind == "forward"] == [a for a in listed if a.kind == "forward"]
            assert [a for a in done if a.kind == "backward"] == [a for a in listed if a.kind == "backward"]
        else:
            assert done == listed
        assert found["evaluation"] == found["step"]  # it leaves what the last training step did
        for spans in found.values():
            assert spans[0][0] == 0
            for (_, end, _), (start, _, _) in pairwise(spans):
                assert start == end  # nothing overlaps, nothing is left out
        for start, end, action in found["step"]:
            least = SECONDS if action and action[0] != "weight" else 0
            assert end - start >= least  # a block's sleep falls into its own span


def test_the_first_step_of_each_kind_goes_through_host_memory() -> None:
    """Kernels are launched for the first time in it, which waits for receives that run on a GPU."""

    def rank(index: int) -> list[bool]:
        trainer = Trainer(Pipe(2, "gpipe"), Chain(2, 0.0, 0.0, seed=index))
        found = []
        for run, count in ((trainer.step, 2), (trainer.step, 2), (trainer.evaluate, 2), (trainer.step, 4)):
            run(micro_batches(count))
            found.append(trainer.model._transport.uses_host)
        return found

    assert run_ranks(rank, 2) == [[True, False, True, True]] * 2

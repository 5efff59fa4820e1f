"""The engine's scheduler without a model: stretches of equal steps are summed up as if each were run."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest

from weft.serve.scheduling.scheduler_run import RequestArrival, RunTimes, SchedulerRun, StepPrice, StepShape

SIZES = {"token_budget": 64, "max_running": 8}


def prices(shape: StepShape, stage: int) -> StepPrice:
    """As those of a model: piecewise linear in the tokens of the cache, of which a window of 90 counts."""
    cached = sum(min(length + shape.shift, 90) for length in shape.decodes)
    computed = sum(number for number, _ in shape.prompts) + len(shape.decodes)
    device = 1e-3 + 1e-5 * cached + 1e-4 * computed
    wait = max(0.0, (3 + stage) * 1e-3 - device)
    return StepPrice(device + wait, max(1e-4 * computed, 1e-5 * cached), (device, wait))


def run(arrivals: list[RequestArrival], num_blocks: int, num_stages: int, has_stretches: bool) -> RunTimes | None:
    return SchedulerRun(
        arrivals, prices, num_blocks, 4, **SIZES, num_stages=num_stages, has_stretches=has_stretches
    ).run()


def flat(times: RunTimes | None) -> list[float]:
    assert times is not None
    return [one for value in astuple(times) for one in (value if isinstance(value, list) else [value])]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_stretches_take_as_long_as_their_steps(num_stages: int) -> None:
    rng, num_preempting = random.Random(num_stages), 0
    for case in range(12):
        shared = rng.choice([0, 0, 12])
        arrivals = [
            RequestArrival(shared + rng.randint(1, 90), rng.randint(1, 160), rng.choice([0.0, rng.random()]), shared)
            for _ in range(rng.randint(1, 24))
        ]
        num_blocks = rng.choice([70, 200, 2000])  # with few, requests are sent back and wait for blocks
        fast, slow = (run(arrivals, num_blocks, num_stages, given) for given in (True, False))
        num_preempting += num_blocks == 70
        assert flat(fast) == pytest.approx(flat(slow), rel=1e-9), case
    assert num_preempting


def test_few_steps_of_many_are_priced() -> None:
    asked = list[StepShape]()

    def counted(shape: StepShape, stage: int) -> StepPrice:
        asked.append(shape)
        return prices(shape, stage)

    times = SchedulerRun([RequestArrival(10, 5000)], counted, 2000, 4, **SIZES).run()
    assert times is not None
    assert times.num_steps == 5000
    assert len(asked) < 100


def test_a_request_waits_for_its_time_and_finds_what_all_prompts_share() -> None:
    alone = run([RequestArrival(60, 4)], 100, 1, True)
    later = run([RequestArrival(60, 4), RequestArrival(60, 4, 50.0)], 100, 1, True)
    shared = run([RequestArrival(60, 4, 0.0, 40), RequestArrival(60, 4, 50.0, 40)], 100, 1, True)
    assert alone is not None
    assert later is not None
    assert shared is not None
    assert later.first[1] - 50 == pytest.approx(alone.first[0])
    assert later.seconds == later.last[1] == pytest.approx(50 + alone.seconds)
    assert shared.first[1] - 50 < 0.7 * alone.first[0]
    assert shared.first[0] == alone.first[0]


def test_a_request_that_no_cache_holds_ends_the_run() -> None:
    assert run([RequestArrival(60, 4)], 10, 1, True) is None

"""What a stage frees early: peaks of real steps, and of steps that free late, are those predicted for each."""

from __future__ import annotations

import pytest
from freeing_for_tests import LATE, SMALL, SMALLER, peaks

pytestmark = pytest.mark.processes

MESSAGE = SMALL.message_bytes


@pytest.mark.parametrize("name", LATE)
@pytest.mark.sampled(3)
def test_what_is_freed_early_saves_what_is_predicted(name: str) -> None:
    plan, slack = LATE[name].plan, LATE[name].slack
    measured, predicted = peaks(plan)
    assert measured == pytest.approx(predicted, abs=0.01 * MESSAGE)
    late, expected = peaks(plan, late=name)
    assert late == pytest.approx(expected, abs=slack * MESSAGE)
    saved = [after - before for after, before in zip(late, measured, strict=True)]
    assert max(saved) > 0.9 * MESSAGE
    assert late != pytest.approx(predicted, abs=max(slack, 0.9) * MESSAGE)  # the law can tell the two apart


@pytest.mark.soak
@pytest.mark.parametrize("name", SMALLER)
def test_a_smaller_plan_saves_what_is_predicted(name: str) -> None:
    large, small = (tuple(map(max, peaks(plan))) for plan in SMALLER[name])  # of the fullest rank
    for measured, predicted in (large, small):
        assert measured == pytest.approx(predicted, rel=0.02)
    assert large[0] - small[0] == pytest.approx(large[1] - small[1], abs=0.02 * large[0])
    assert small[0] < 0.9 * large[0]

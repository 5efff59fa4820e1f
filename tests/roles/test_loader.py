"""Loaders: the same bits with any number of them, nothing lost or repeated when one dies, never more than `depth`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from roles_for_tests import assert_bit_equal, batches_made, batches_used, last_state, said, train_with_roles

from weft.run_file import Run
from weft.train.batches import prepare_data

pytestmark = pytest.mark.processes
PLAN = "plan.data=2"  # ranks 0 and 1 train, the others load


def test_the_runs_are_two_epochs_long(plain: Run) -> None:
    assert 12 * plain.split.batch >= 2 * len(prepare_data(plain).train)


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.soak), 2, 3])
def test_training_is_bit_equal_with_any_number_of_loaders(run_file: Path, plain: Run, count: int) -> None:
    run = train_with_roles(run_file, f"loaders-{count}", PLAN, f"roles.loader={count}", "roles.depth=1")
    assert_bit_equal(run, plain)
    made = Counter((step, index) for rank, step, index in batches_made(run) if rank > 1)
    assert made == Counter((step, index) for step in range(12) for index in range(2))
    assert {rank for rank, step, _ in batches_made(run) if step > 0} == set(range(2, 2 + count))


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_killed_loader_loses_no_sample_and_comes_back(run_file: Path, plain: Run, count: int) -> None:
    kill = {"rank": 2, "after": 5}
    options = [PLAN, f"roles.loader={count}"]
    run = train_with_roles(run_file, f"killed-{count}", *options, kill=kill, waits_for_return=True)
    assert_bit_equal(run, plain)
    assert batches_used(run) == batches_used(plain)
    assert "lost the connection to loader 0" in said(run)
    assert "loader 0 is back" in said(run)
    assert max(step for rank, step, _ in batches_made(run) if rank == 2) > 8


def test_numbers_that_depend_on_the_loader_are_found(run_file: Path, plain: Run) -> None:
    """A control: a loader that draws by its own rank changes the result, and the comparison sees it."""
    run = train_with_roles(run_file, "keyed", PLAN, "roles.loader=1", keyed_by_rank=True)
    with pytest.raises(AssertionError):
        assert_bit_equal(run, plain)
    assert last_state(run).keys() == last_state(plain).keys()

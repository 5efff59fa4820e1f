"""Loaders: the same bits with any number of them, nothing lost or repeated when one dies, never more than `depth`."""

from __future__ import annotations

from pathlib import Path

import pytest
from roles_for_tests import RUN_FILE, assert_bit_equal, batches_made, said, train_with_roles
from runs_for_tests import write_run_file

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_file(tmp_path_factory.mktemp("roles"), RUN_FILE)


def test_training_is_bit_equal_with_any_number_of_loaders(run_file: Path) -> None:
    plain = train_with_roles(run_file, "plain", "plan.data=2")
    for count in (1, 2, 3):
        run = train_with_roles(run_file, f"loaders-{count}", "plan.data=2", f"roles.loader={count}")
        assert_bit_equal(run, plain)
        print(batches_made(run), said(run))

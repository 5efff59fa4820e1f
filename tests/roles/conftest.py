"""What tests of roles share: a run file, and the run that it makes without other roles."""

from __future__ import annotations

from pathlib import Path

import pytest
from roles_for_tests import train_with_roles, write_roles_run

from weft.run_file import Run


@pytest.fixture(scope="session")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_roles_run(tmp_path_factory.mktemp("roles"))


@pytest.fixture(scope="session")
def plain(run_file: Path) -> Run:
    """Two training ranks and no other."""
    return train_with_roles(run_file, "plain", "plan.data=2")

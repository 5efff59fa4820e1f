"""Exits of ranks that do not train: who starts again, and what later failures are blamed on."""

from __future__ import annotations

from pathlib import Path

from weft.errors import WeftError
from weft.health.rank_status import FOLDER_VARIABLE, Status, read_failures, record_failure
from weft.launch.role_restarts import RoleRestarts


def restarts_of(folder: Path, started: list[int]) -> tuple[RoleRestarts, dict[str, str]]:
    """Two training ranks, which have begun, and two others."""
    environ = {FOLDER_VARIABLE: str(folder)}
    for rank in range(2):
        status = Status(environ, rank)
        status.step_begins(0)
        status.phase("forward and backward")

    def start(rank: int) -> int:
        started.append(rank)
        return 100 + rank

    return RoleRestarts(folder, 2, start, limit=1, window_seconds=60.0, end_seconds=5.0), environ


def test_an_error_that_training_goes_on_without_is_not_blamed_later(tmp_path: Path) -> None:
    roles, environ = restarts_of(tmp_path, started := [])
    status = record_failure(environ, 3, WeftError("the validator has no data"))
    codes = {3: status}
    (message,) = roles.accept_losses(codes, [1, 2, 3, 4], is_stopping=False)
    assert "the validator has no data. It does not train, so training goes on without it" in message
    assert (codes, started, roles.num_lost) == ({}, [], 1)
    record_failure(environ, 0, WeftError("a training rank failed"))
    assert [one.message for one in read_failures(tmp_path, 4).values()] == ["a training rank failed"]


def test_a_killed_rank_starts_again_up_to_the_limit(tmp_path: Path) -> None:
    roles, _ = restarts_of(tmp_path, started := [])
    pids = [1, 2, 3, 4]
    (message,) = roles.accept_losses({2: -9}, pids, is_stopping=False)
    assert "so it starts again alone" in message
    assert (started, pids) == ([2], [1, 2, 102, 4])
    (message,) = roles.accept_losses({2: -9}, pids, is_stopping=False)
    assert "so training goes on without it" in message
    assert (started, roles.num_lost) == ([2], 1)

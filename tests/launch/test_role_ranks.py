"""Ranks of a job that do not train: how they are numbered, what is refused, and what follows when they exit."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.errors import LaunchError, WeftError
from weft.health.rank_status import FOLDER_VARIABLE, Status, read_failures, record_failure
from weft.launch.agent import Restarts, RoleRestarts
from weft.launch.environment import RankInfo
from weft.launch.role_ranks import TRAIN, JobRank, job_rank

COUNTS = {"validator": 1, "loader": 2}


def ranks(num_ranks: int, num_hosts: int, counts: dict[str, int] = COUNTS) -> list[JobRank]:
    per_host = num_ranks // num_hosts
    places = [RankInfo(rank, num_ranks, rank % per_host, per_host, num_hosts, "slurm") for rank in range(num_ranks)]
    return [job_rank(place, counts) for place in places]


def test_a_job_without_other_roles_is_unchanged() -> None:
    place = RankInfo(3, 8, 3, 4, 2, "slurm")
    assert job_rank(place, {"loader": 0}) == JobRank(TRAIN, 3, place, place)


@pytest.mark.parametrize(("num_ranks", "num_hosts"), [(4, 1), (9, 1), (12, 3), (8, 2), (20, 4)])
def test_every_rank_has_one_role_and_training_ranks_are_numbered_in_order(num_ranks: int, num_hosts: int) -> None:
    found = ranks(num_ranks, num_hosts)
    training = [one for one in found if one.role == TRAIN]
    assert found[0].role == TRAIN  # it prints, writes and serves the store
    assert [one.training.rank for one in training] == list(range(num_ranks - 3))
    assert {one.training.num_ranks for one in found} == {num_ranks - 3}
    others = [(one.role, one.number) for one in found if one.role != TRAIN]
    assert others == [("validator", 0), ("loader", 0), ("loader", 1)]


def test_roles_that_spread_evenly_leave_every_host_as_many_training_ranks() -> None:
    found = ranks(12, 3)
    assert [one.role for one in found] == [
        *([TRAIN] * 3),
        "validator",
        *([TRAIN] * 3),
        "loader",
        *([TRAIN] * 3),
        "loader",
    ]
    assert {(one.training.num_local_ranks, one.training.num_hosts) for one in found} == {(3, 3)}
    assert [one.training.local_rank for one in found if one.role == TRAIN] == [0, 1, 2] * 3


def test_roles_that_do_not_spread_are_the_last_ranks() -> None:
    assert [one.role for one in ranks(8, 2)][5:] == ["validator", "loader", "loader"]
    found = [one.training for one in ranks(8, 2) if one.role == TRAIN]
    assert [(one.num_local_ranks, one.num_hosts) for one in found] == [(4, 2)] * 4 + [(1, 2)]
    found = [one.training for one in ranks(8, 2, {"loader": 5}) if one.role == TRAIN]
    assert [(one.num_local_ranks, one.num_hosts) for one in found] == [(3, 1)] * 3  # the second host trains nothing


def test_a_job_without_a_training_rank_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"3 ranks started and \[roles\] takes 3 of them.*loader = 2.*none to train"):
        ranks(3, 1)


# --- exits of ranks that do not train: who starts again, and what later failures are blamed on


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

    return RoleRestarts(folder, 2, start, Restarts(limit=1, window_seconds=60.0)), environ


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

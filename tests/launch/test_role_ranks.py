"""Which ranks of a job train: numbered anew, on every launcher's hosts, and refused if none is left."""

from __future__ import annotations

import pytest

from weft.errors import LaunchError
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


def test_a_job_without_a_training_rank_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"3 ranks started and \[roles\] takes 3 of them.*loader = 2.*none to train"):
        ranks(3, 1)

"""Which ranks of a job train, and which have another role (`[roles]` of a run file).

A launcher starts the ranks of all roles alike. Training ranks are numbered anew among themselves: their world, their
mesh and their devices are those of a job without other roles. Each host has its training ranks first, then its share
of the others; if the others do not spread evenly over the hosts, they are the last ranks of the job.

    host 0: train 0, train 1, validator 0          host 1: train 2, train 3, loader 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.errors import LaunchError
from weft.launch.environment import RankInfo

TRAIN = "train"


@dataclass(frozen=True)
class JobRank:
    """The role of one process of a job, and its number among the ranks of that role.

    `job` is its place among all ranks. `training` is its place among the training ranks; for a rank that does not
    train it is that of training rank 0, from which it derives the same plan as the training ranks do.
    """

    role: str
    number: int
    job: RankInfo
    training: RankInfo

    @property
    def name(self) -> str:
        """E.g. "loader 1 (rank 5)"."""
        return f"{self.role} {self.number} (rank {self.job.rank})"


def job_rank(rank_info: RankInfo, counts: Mapping[str, int]) -> JobRank:
    """Returns the role of a rank. `counts` has the number of ranks of each role other than training, in order."""
    num_others = sum(counts.values())
    if not num_others:
        return JobRank(TRAIN, rank_info.rank, rank_info, rank_info)
    num_training = rank_info.num_ranks - num_others
    if num_training < 1:
        given = ", ".join(f"{role} = {count}" for role, count in counts.items() if count)
        raise LaunchError(
            f"{rank_info.num_ranks} rank{'s' * (rank_info.num_ranks > 1)} started and [roles] takes {num_others} of "
            f"them ({given}), which leaves none to train; start more, or name fewer roles"
        )
    training, number = _split(rank_info, num_training, num_others)
    if training is not None:
        return JobRank(TRAIN, training.rank, rank_info, training)
    first, _ = _split(replace(rank_info, rank=0, local_rank=0), num_training, num_others)
    assert first is not None, "rank 0 trains"
    for role, count in counts.items():
        if number < count:
            return JobRank(role, number, rank_info, first)
        number -= count
    raise AssertionError("every other rank has a role")


def _split(rank_info: RankInfo, num_training: int, num_others: int) -> tuple[RankInfo | None, int]:
    """Returns the rank's place among the training ranks, or None and its number among the others."""
    hosts, per_host = rank_info.num_hosts, rank_info.num_local_ranks
    host, rest = divmod(rank_info.rank - rank_info.local_rank, per_host)
    is_even = not rest and num_others % hosts == 0 and num_training % hosts == 0
    if is_even and rank_info.num_ranks == hosts * per_host:
        training_here, others_here = num_training // hosts, num_others // hosts
        if rank_info.local_rank >= training_here:
            return None, host * others_here + rank_info.local_rank - training_here
        rank = host * training_here + rank_info.local_rank
        return RankInfo(rank, num_training, rank_info.local_rank, training_here, hosts, rank_info.launcher), 0
    if rank_info.rank >= num_training:
        return None, rank_info.rank - num_training
    here = min(per_host, num_training - (rank_info.rank - rank_info.local_rank))
    used = min(num_training, -(-num_training * hosts // rank_info.num_ranks))
    return replace(rank_info, num_ranks=num_training, num_local_ranks=here, num_hosts=used), 0

"""A training rank's links to ranks of other roles, and what it uses them for: batches, and inverses of K-FAC."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # as documented

from weft.errors import LostRankError
from weft.launch.environment import join_job
from weft.launch.role_ranks import JobRank
from weft.mesh import Mesh
from weft.optim.kfac import KFAC
from weft.roles.batch_queue import BatchLayout, BatchQueue
from weft.roles.curvature import CURVATURE, CurvatureRanks
from weft.roles.links import RoleLink, digest
from weft.run_file import Run
from weft.step.batch import Batch
from weft.train.agreement import data_settings, run_settings
from weft.train.batches import TrainingData
from weft.train.state import TrainState


def job_store(run: Run, rank: JobRank) -> Store | None:
    """Returns the store of a job with several roles; None if all ranks train. Every rank calls it."""
    return join_job(rank.job, timeout_of(run)) if run.roles.num_ranks else None


def timeout_of(run: Run) -> timedelta:
    """Returns how long a rank waits for another one that should answer at once."""
    return timedelta(seconds=run.train.timeout_seconds)


def role_digest(run: Run, data: TrainingData) -> str:
    """Returns a hash of what all ranks of a run, of any role, must agree on."""
    return digest({**run_settings(run), **data_settings(run, data)})


@dataclass(frozen=True)
class RoleLinks:
    """A training rank's links, by role. `digest` is that of `role_digest`."""

    loaders: list[RoleLink]
    validators: list[RoleLink]
    curvature: list[RoleLink]  # of training rank 0 alone
    digest: str

    @staticmethod
    def connect(
        run: Run, data: TrainingData, mesh: Mesh, store: Store | None, say: Callable[[str], None]
    ) -> RoleLinks | None:
        """Connects to all ranks of other roles; None if there are none. One that is lost already is reported."""
        if store is None:
            return None

        def links(role: str, count: int) -> list[RoleLink]:
            return [RoleLink(store, role, each, mesh.rank, mesh.ledger, timeout_of(run)) for each in range(count)]

        roles = run.roles
        found = RoleLinks(
            links("loader", roles.loader),
            links("validator", roles.validator),
            links(CURVATURE, roles.curvature if mesh.is_first else 0),
            role_digest(run, data),
        )
        for link in (*found.loaders, *found.validators, *found.curvature):
            try:
                link.connect(found.digest)
            except LostRankError as error:
                say(f"{error}; training goes on without it")
        return found


def batch_queue(links: RoleLinks | None, state: TrainState) -> BatchQueue | None:
    """Returns the queue of batches of a training rank; None without loaders."""
    if links is None or not links.loaders:
        return None
    mesh, run, data = state.mesh, state.run, state.data

    def make(number: int) -> list[Batch]:
        return data.host_batches(run, number, mesh["batch"])

    turn = (mesh.rank, run.plan.num_ranks)
    layout = BatchLayout.of(make(0))
    return BatchQueue(links.loaders, links.digest, turn, run.roles.depth, make, layout, timeout_of(run), state.say)


def use_curvature_ranks(links: RoleLinks | None, state: TrainState, store: Store | None) -> None:
    """Lets curvature ranks invert the factors of K-FAC, on training rank 0 of a run that has them."""
    optimizer = state.optimizer
    if links is None or store is None or not links.curvature:
        return
    assert isinstance(optimizer, KFAC)
    assert optimizer.sub_grid is not None
    sizes, dtype = [one.layer for one in optimizer.states], optimizer.states[0].inverses[0].dtype
    optimizer.sub_grid.inverter = CurvatureRanks(
        links.curvature, links.digest, store, sizes, dtype, optimizer.options.damping, timeout_of(state.run), state.say
    )

"""What a rank that does not train runs: a loader makes batches, a validator measures snapshots, a curvature rank
inverts factors of K-FAC, until training ends.

It keeps no state: after a restart it goes on with what it is asked for. It ends with status 0 when the training ranks
end, in whatever way, because their own status says how the run went.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # as documented

from weft.comm import Ledger
from weft.launch.role_ranks import JobRank
from weft.mesh import UnconnectedMesh
from weft.roles.batch_queue import serve_trainers
from weft.roles.curvature import CURVATURE, serve_curvature
from weft.roles.links import TrainingEndedError, announce, meet_trainers
from weft.roles.snapshots import serve_snapshots
from weft.run_file import Run
from weft.step.batch import Batch
from weft.train.batches import TrainingData
from weft.train.role_links import job_store, role_digest, timeout_of
from weft.train.stop import SIGNALS
from weft.train.validator import Validator


def serve_role(run: Run, rank: JobRank, data: TrainingData, ledger: Ledger | None = None) -> None:
    """Does the work of a rank that does not train, until the training ranks end. Counts what it sends in `ledger`."""
    store = job_store(run, rank)
    assert store is not None, "a rank without training has a role"
    ledger = ledger or Ledger()
    own = role_digest(run, data)
    with suppress(TrainingEndedError):
        _serve(run, rank, data, store, own, ledger)


def _serve(run: Run, rank: JobRank, data: TrainingData, store: Store, own: str, ledger: Ledger) -> None:
    num_training = run.plan.num_ranks
    if rank.role == "validator":
        channels = meet_trainers(store, rank.role, rank.number, num_training, own, ledger, timeout_of(run))
        _ignore_signals()
        serve_snapshots(channels, store, Validator(run, data).measure)
    elif rank.role == CURVATURE:
        assert run.train.kfac is not None
        (channel,) = meet_trainers(store, rank.role, rank.number, 1, own, ledger, timeout_of(run))
        _ignore_signals()
        serve_curvature(channel, store, rank.number, run.train.kfac.damping)
    else:
        _ignore_signals()
        torch.set_num_threads(1)
        connect = announce(store, rank.role, rank.number, own, ledger, timeout_of(run))
        serve_trainers(connect, [_maker(run, data, trainer) for trainer in range(num_training)])


def _ignore_signals() -> None:
    """Ignore signals to stop: the training ranks decide when the run stops."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _maker(run: Run, data: TrainingData, trainer: int) -> Callable[[int], list[Batch]]:
    """Returns what makes the batches of a training rank, by their numbers."""
    mesh = UnconnectedMesh(run.plan, trainer)
    own = data.on_tile(mesh)
    return lambda number: own.host_batches(run, number, mesh["batch"])

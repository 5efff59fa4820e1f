"""What a rank that does not train runs: a loader makes batches, a validator measures snapshots, until training ends.

It keeps no state: after a restart it goes on with what it is asked for. It ends with status 0 when the training ranks
end, in whatever way, because their own status says how the run went.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Sequence

import torch

from weft.comm import Ledger
from weft.comm.channel import PairChannel
from weft.launch.role_ranks import JobRank
from weft.mesh import UnconnectedMesh
from weft.roles.batch_queue import serve_batches
from weft.roles.links import meet_trainers
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
    num_training, ledger = run.plan.num_ranks, ledger or Ledger()
    own = role_digest(run, data)
    channels = meet_trainers(store, rank.role, rank.number, num_training, own, ledger, timeout_of(run))
    for number in SIGNALS:  # the training ranks decide when the run stops
        signal.signal(number, signal.SIG_IGN)
    if rank.role == "validator":
        serve_snapshots(channels, store, Validator(run, data).measure)
    else:
        torch.set_num_threads(1)
        _load(run, data, channels)


def _load(run: Run, data: TrainingData, channels: Sequence[PairChannel]) -> None:
    """Serves every training rank in a thread of its own, so that a slow one holds up no other."""

    def maker(trainer: int) -> Callable[[int], list[Batch]]:
        mesh = UnconnectedMesh(run.plan, trainer)
        own = data.on_tile(mesh)
        return lambda number: own.host_batches(run, number, mesh["batch"])

    ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def serve(trainer: int, channel: PairChannel) -> None:
        try:
            serve_batches(channel, maker(trainer))
            ends.put(None)
        except BaseException as error:  # this process ends, and the training ranks meet the same error themselves
            ends.put(error)

    for trainer, channel in enumerate(channels):
        threading.Thread(target=serve, args=(trainer, channel), daemon=True).start()
    for _ in channels:
        error = ends.get()
        if error is not None:
            raise error

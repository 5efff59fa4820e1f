"""Runs a rank that does not train: a loader makes batches, a validator measures snapshots, a curvature rank inverts
factors of K-FAC, until training ends.

It keeps no state: after a restart it goes on with what it is asked for. It ends with status 0 when the training ranks
end, in whatever way, because their own status says how the run went.
"""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]  # as documented

from weft.checkpoint import Checkpoint, Piece, Region, Saver, steps
from weft.checkpoint.folder import step_name
from weft.comm import Ledger
from weft.errors import CheckpointError
from weft.launch.role_ranks import JobRank
from weft.mesh import Mesh, UnconnectedMesh
from weft.parallel.apply import parallelize
from weft.parallel.model_state import named_buffers, named_pieces, refresh
from weft.plan import Plan
from weft.roles.batch_queue import serve_trainers
from weft.roles.curvature import CURVATURE, serve_curvature
from weft.roles.links import TrainingEndedError, announce, meet_trainers
from weft.roles.snapshots import serve_snapshots
from weft.run_file import Run
from weft.saved_run import weights_fingerprint
from weft.step.batch import Batch
from weft.step.task import task_of
from weft.step.train_step import evaluate
from weft.train.batches import TrainingData
from weft.train.checkpoints import checkpoint_values
from weft.train.role_links import job_store, role_digest, timeout_of
from weft.train.run_identity import known_run_id
from weft.train.setup import build_model, keep_documents_apart
from weft.train.stop import SIGNALS


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


logger = logging.getLogger("weft")
BEST = "best"  # the folder of the best snapshot, inside that of the run
Tensors = dict[tuple[str, str], Tensor]  # by (name, kind), with kind "parameter" or "buffer"


class Validator:
    """Measures snapshots on the held-out data, by one copy of the whole model on this process.

    It computes what the run's own evaluation does on one rank: the same held-out samples in the same micro-batches.
    """

    def __init__(self, run: Run, data: TrainingData) -> None:
        alone = Plan(precision=run.plan.precision, micro_batch=run.split.micro_batch)
        self._run, self._data, self._alone = run, data, replace(run, plan=alone)
        self._mesh, self._objective = Mesh(alone), task_of(run).objective
        self._batches = data.evaluation_batches(self._alone, self._mesh["batch"], self._mesh.device)
        self._model: nn.Module | None = None
        self._best = BestSnapshot(run, data) if run.roles.keep_best else None

    def measure(self, step: int, tensors: Tensors) -> list[float]:
        """Returns the measures of a snapshot, the loss first, and keeps it if it is the best so far."""
        model = self._load(tensors)
        found: list[float] = evaluate(model, self._batches, self._mesh, self._objective).flatten().tolist()
        if self._best is not None:
            self._best.consider(step, dict(zip(self._objective.measures, found, strict=True)), tensors)
        return found

    def _load(self, tensors: Tensors) -> nn.Module:
        if self._model is None:
            self._model = parallelize(
                build_model(self._alone), self._alone.plan, self._mesh, lambda name: tensors[name, "parameter"]
            )
            keep_documents_apart(self._alone, self._model, self._mesh)
        else:
            for part, piece in named_pieces(self._model):
                whole = tensors[part.parameter.name, "parameter"].view(-1)
                piece.detach().view(-1).copy_(whole[part.start : part.stop])
        for name, buffer in named_buffers(self._model):
            buffer.copy_(tensors[name, "buffer"])
        refresh(self._model)
        return self._model


class BestSnapshot:
    """The snapshot with the lowest held-out loss so far, in the folder `best` of the run; also after a restart.

    It is a checkpoint without optimizer state, which every command that reads a run can read. It is the only one there:
    where a run has gone back, a better one may be of a lower step than the one before it, and who reads the folder
    takes the highest step.
    """

    def __init__(self, run: Run, data: TrainingData) -> None:
        self._run, self._data = run, data
        self._folder = run.folder / BEST / "checkpoints"
        self._saver = Saver(self._folder, 0, 1, os.urandom(8).hex(), tries_folder=False)
        losses = {step: _saved_loss(self._folder / step_name(step)) for step in steps(self._folder)}
        self._loss = min(losses.values(), default=math.inf)
        self._delete(step for step, loss in losses.items() if self._loss < loss < math.inf)

    def consider(self, step: int, measures: dict[str, float], tensors: Tensors) -> None:
        """Saves a snapshot if its loss is lower than that of the one that is kept. Tells if it cannot be saved."""
        loss = measures["loss"]
        if not loss < self._loss:
            return
        run, run_id = self._run, known_run_id(self._run.folder) or ""
        source = weights_fingerprint(run.source, run.tuning.adapter, run.folder)
        values = checkpoint_values(run, run_id, self._data, step, source, {})
        pieces = [
            Piece(name, kind, Region.whole(tuple(tensor.shape)), tensor) for (name, kind), tensor in tensors.items()
        ]
        # One of this step is of before the run has gone back, and would be left as it is.
        self._delete(other for other in steps(self._folder) if other == step)
        try:
            self._saver.save(step, pieces, {**values, "held_out": measures}, asynchronous=False)
        except CheckpointError as error:  # a full disk: measures matter more
            logger.warning("weft: the best snapshot was not saved: %s; the next that is better is tried", error)
            return
        self._loss = loss
        self._delete(other for other in steps(self._folder) if other != step)

    def _delete(self, unwanted: Iterable[int]) -> None:
        for step in unwanted:
            self._saver.delete(step)


def _saved_loss(path: Path) -> float:
    """The held-out loss of a snapshot; infinite if it cannot be read."""
    try:
        loss = float(Checkpoint(path).stated("held_out", dict)["loss"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        return math.inf
    return math.inf if math.isnan(loss) else loss

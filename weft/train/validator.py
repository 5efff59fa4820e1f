"""A validator's model: one copy of the whole model on this process, which takes the weights of snapshots.

It computes what the run's own evaluation does on one rank: the same held-out samples in the same micro-batches. The
best snapshot so far is kept as a checkpoint without optimizer state, which every command that reads a run can read.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from weft.checkpoint import Checkpoint, Piece, Region, Saver, steps
from weft.checkpoint.folder import step_name
from weft.errors import CheckpointError
from weft.mesh import Mesh
from weft.parallel.apply import parallelize
from weft.parallel.model_state import named_buffers, named_pieces, refresh
from weft.plan import Plan
from weft.run_file import Run
from weft.saved_run import weights_fingerprint
from weft.step.task import task_of
from weft.step.train_step import evaluate
from weft.train.batches import TrainingData
from weft.train.checkpoints import checkpoint_values
from weft.train.run_identity import known_run_id
from weft.train.setup import build_model, keep_documents_apart

logger = logging.getLogger("weft")
BEST = "best"  # the folder of the best snapshot, inside that of the run
Tensors = dict[tuple[str, str], Tensor]  # by (name, kind), with kind "parameter" or "buffer"


class Validator:
    """Measures snapshots on the held-out data."""

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

    It is the only one there: where a run has gone back, a better one may be of a lower step than the one before it, and
    who reads the folder takes the highest step.
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

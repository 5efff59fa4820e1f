"""The log-probabilities of the reference model of DPO, which is the model before its first step.

They are computed at every start of a run, before a checkpoint is read: the model then has the weights that the run
started from, so no second model is in memory, and any plan computes them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from weft.data.config import PreferenceConfig
from weft.data.order import local_indices
from weft.mesh import Mesh
from weft.models.loss import IGNORE
from weft.run_file import Run
from weft.step.batch import Batch
from weft.step.objective import Objective
from weft.step.preference import count_pairs, log_probabilities
from weft.step.train_step import evaluate
from weft.train.batches import Samples, TrainingData

CHUNK = 256  # pairs whose results the ranks exchange at once


def with_reference(run: Run, data: TrainingData, model: nn.Module, mesh: Mesh) -> TrainingData:
    """Returns the data with the reference's log-probabilities of each pair, if it has preferences."""
    if not isinstance(run.data, PreferenceConfig):
        return data
    held_out = None if data.held_out is None else _referenced(run, data.held_out, model, mesh)
    return replace(data, train=_referenced(run, data.train, model, mesh), held_out=held_out)


@dataclass(frozen=True)
class ReferencedPairs:
    """Pairs with the reference's log-probabilities [pairs, 2]."""

    pairs: Samples
    reference: Tensor

    def __len__(self) -> int:
        return len(self.pairs)

    def get(self, indices: NDArray[np.integer[Any]]) -> tuple[Tensor, ...]:
        """Returns inputs, labels and the reference's log-probabilities."""
        return (*self.pairs.get(indices), self.reference[torch.from_numpy(np.asarray(indices))])


def _referenced(run: Run, pairs: Samples, model: nn.Module, mesh: Mesh) -> ReferencedPairs:
    parts = [
        _reference(run, pairs, np.arange(begin, min(begin + CHUNK, len(pairs))), model, mesh)
        for begin in range(0, len(pairs), CHUNK)
    ]
    return ReferencedPairs(pairs, torch.cat(parts).cpu())


def _reference(run: Run, pairs: Samples, numbers: NDArray[np.int64], model: nn.Module, mesh: Mesh) -> Tensor:
    """Returns the log-probabilities of some pairs, [pairs, 2], on every rank.

    All ranks get the same number of batches: the last ones are padded with a repeated pair, whose result is dropped.
    """
    axis, micro_batch, count = mesh["batch"], run.split.micro_batch, len(numbers)
    padded = -(-count // (micro_batch * axis.degree)) * micro_batch * axis.degree
    batches: list[Batch] = []
    for chosen in local_indices(np.arange(padded), micro_batch, axis.degree, axis.index):
        inputs, labels, *_ = pairs.get(numbers[np.minimum(chosen, count - 1)])
        labels = labels.masked_fill(torch.from_numpy(chosen >= count)[:, None, None], IGNORE)
        places = torch.from_numpy(np.minimum(chosen, count))
        batches.append(tuple(tensor.to(mesh.device) for tensor in (inputs, labels, places)))

    def measure(model: nn.Module, batch: Batch) -> Tensor:
        found = log_probabilities(model, batch)
        result = found.new_zeros(count + 1, 2, dtype=torch.float64)
        return result.index_copy(0, batch[2], found.double())[:count].flatten()

    names = tuple(f"pair {number // 2}" for number in range(2 * count))
    means = evaluate(model, batches, mesh, Objective(count_pairs, measure, names, measure))
    return (means * count).view(count, 2)

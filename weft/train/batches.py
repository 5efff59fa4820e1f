"""The run's data as batches: which sequences each rank takes at each step, a function of (seed, step) and nothing else.

No layout changes the data, any layout resumes it in the middle of an epoch, and two layouts see the same loss curve.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from weft.comm import Axis
from weft.config import Run
from weft.data.order import batch_indices, local_indices
from weft.data.sources import documents
from weft.data.tokens import Sequences, token_cache
from weft.models.loss import IGNORE
from weft.train.step import Batch

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TrainingData:
    """Training and held-out sequences, and the fingerprint of the tokens that they come from."""

    train: Sequences
    held_out: Sequences | None
    fingerprint: str
    description: str

    def batches(self, run: Run, step: int, axis: Axis, device: torch.device) -> list[Batch]:
        """The micro-batches of one step for the rank at `axis.index` of `batch`."""
        split = run.split
        indices = batch_indices(step, split.batch, len(self.train), run.train.seed)
        rows = local_indices(indices, split.micro_batch, axis.degree, axis.index)
        return [_to(self.train.get(chosen), device) for chosen in rows]

    def evaluation_batches(self, run: Run, axis: Axis, device: torch.device) -> list[Batch]:
        """The first held-out sequences; the last batches repeat one with all labels ignored, so that ranks agree."""
        if self.held_out is None:
            return []
        micro_batch = run.split.micro_batch
        num = min(run.train.evaluate_sequences, len(self.held_out))
        padded = -(-num // (micro_batch * axis.degree)) * micro_batch * axis.degree
        batches = []
        for chosen in local_indices(np.arange(padded), micro_batch, axis.degree, axis.index):
            inputs, labels = self.held_out.get(np.minimum(chosen, num - 1))
            repeats = torch.from_numpy(chosen >= num)[:, None]  # [micro_batch, 1]
            batches.append(_to((inputs, labels.masked_fill(repeats, IGNORE)), device))
        return batches


def prepare_data(run: Run, progress: Progress | None = None) -> TrainingData:
    """Find the documents, build or open the token cache, and check that it holds sequences; before any rank starts."""
    source = documents(run.data.source, text_field=run.data.text_field)
    tokens = token_cache(source, run.tokenizer, run.data.held_out, Path(run.data.cache), progress)
    train, held_out = Sequences(tokens.train, run.data.sequence), None
    if run.data.held_out > 0:
        held_out = Sequences(tokens.held_out, run.data.sequence, name="held-out data")
    return TrainingData(train, held_out, tokens.fingerprint, source.description)


def _to(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cuda":
        return tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in batch)
    return batch

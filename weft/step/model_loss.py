"""The loss that a model computes itself if labels are among its arguments, as models of transformers do.

Such a loss is a mean over targets, and models differ in what they count: labels that are not -100, or those after the
first position (a model that predicts the next token shifts them itself). A step needs the sum, so that micro-batches
and ranks with different numbers of targets add up. `model_loss` finds out what a model counts: the loss of two samples
together, times their targets, must be the sum of that for each alone.

Where a plan gives each rank a part of the logits (of classes, tokens or pixels), the model is called without labels and
the loss is the cross-entropy of its part. A model whose own loss is another one is refused there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.errors import PlanError
from weft.inspection.module_modes import in_mode
from weft.inspection.nested_tensors import map_tensors
from weft.models.loss import IGNORE
from weft.models.loss_head import logits_of
from weft.parallel.tensor.vocabulary import cross_entropy, vocabulary_of
from weft.step.batch import Batch, take_samples
from weft.step.objective import Objective

LABELS = "labels"
_DECODER_INPUTS = "prepare_decoder_input_ids_from_labels"  # a method of transformers' models
_Targets = Callable[[Tensor], Tensor]


def model_loss(model: nn.Module, batch: Mapping[str, Any]) -> Objective:
    """Returns the objective of a model that returns its own mean loss, for batches that are its keyword arguments.

    Runs the model a few times on two samples of `batch`. Raises a PlanError if its loss is not a mean over labels.
    """
    labels = batch.get(LABELS)
    if not isinstance(labels, Tensor):
        raise PlanError(
            f"a batch of keyword arguments ({', '.join(map(str, batch))}) has no '{LABELS}' with which the model could "
            f"compute its loss; add them, or pass objective="
        )
    loss = _ModelLoss(_same, getattr(model, _DECODER_INPUTS, None))
    if not _first_counts(loss, model, batch):
        loss = replace(loss, targets_of=_shifted)
    pair = _two_samples(batch)
    if not _is_mean_over_targets(loss, model, pair):
        raise PlanError(
            f"the loss of {type(model).__name__} is not a mean over its labels (all that are not {IGNORE}, or all "
            f"behind the first position), so losses of parts of a batch do not add up to that of the whole; pass "
            f"objective=, with the loss summed over targets and their number"
        )
    loss = replace(loss, is_cross_entropy=_is_cross_entropy(loss, model, pair))
    return Objective(loss.count, loss.total, splits_logits=True, align=loss.align)


@dataclass(frozen=True)
class _ModelLoss:
    """A model's own loss: what it counts, how its decoder takes labels, and whether it is a plain cross-entropy."""

    targets_of: _Targets
    decoder_inputs: Callable[..., Tensor] | None  # of a decoder behind an encoder: the labels, moved by one position
    is_cross_entropy: bool = True

    def align(self, batch: Batch) -> Batch:
        """Returns (keyword arguments without labels, targets); such a pair unchanged."""
        if isinstance(batch, tuple):
            return batch
        inputs = {name: value for name, value in batch.items() if name != LABELS}
        if self.decoder_inputs is not None:
            inputs.setdefault("decoder_input_ids", self.decoder_inputs(labels=batch[LABELS]))
        return inputs, self.targets_of(batch[LABELS])

    def count(self, batch: Batch) -> Tensor:
        """Returns the number of targets."""
        targets = batch[1] if isinstance(batch, tuple) else self.targets_of(batch[LABELS])
        if targets.is_floating_point():
            return torch.tensor(targets.numel(), device=targets.device)
        return (targets != IGNORE).sum()

    def total(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the model's own loss times the number of targets; of a part of the logits their cross-entropy."""
        if vocabulary_of(model) is not None or isinstance(batch, tuple):
            return self.total_of_logits(model, batch)
        output = model(**batch)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            raise PlanError(f"{type(model).__name__} returned no loss for a batch with '{LABELS}'; pass objective=")
        total: Tensor = loss * self.count(batch)
        return total

    def total_of_logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the summed cross-entropy of this rank's logits."""
        if not self.is_cross_entropy:
            raise PlanError(
                f"the loss of {type(model).__name__} is not the cross-entropy of its logits and its '{LABELS}' alone "
                f"(it may have other terms, as of a second call of its head), and tensor.x, context and tile give each "
                f"rank a part of the logits; pass objective=, or use other axes"
            )
        inputs, targets = self.align(batch)
        return cross_entropy(logits_of(model(**inputs)), targets, vocabulary_of(model))[0]


def _same(labels: Tensor) -> Tensor:
    return labels


def _shifted(labels: Tensor) -> Tensor:
    """The target of each position is the label of the next one; the last position has none."""
    return functional.pad(labels, (0, 1), value=IGNORE)[..., 1:]


def _first_counts(loss: _ModelLoss, model: nn.Module, batch: Batch) -> bool:
    """Does the loss depend on the labels of the first position? Not if the target of a position is the next label."""
    labels = batch[LABELS]
    if labels.dim() < 2 or labels.is_floating_point():
        return True
    others = labels.clone()
    others[..., 0] = torch.where(labels[..., 0] == 0, 1, 0)
    shifted = replace(loss, targets_of=_shifted)
    given = [take_samples({**batch, LABELS: one}, slice(0, 2)) for one in (labels, others)]
    first, second = (_in_evaluation(model, partial(shifted.total, model, one)) for one in given)
    return not torch.equal(first, second)


def _two_samples(batch: Batch) -> Batch:
    """Returns the first and the last sample of a batch, with different numbers of labels."""
    labels = batch[LABELS]
    pair = map_tensors(lambda tensor: torch.stack([tensor[0], tensor[-1]]) if tensor.dim() else tensor, batch)
    if labels.dim() > 1 and not labels.is_floating_point():
        pair[LABELS] = torch.where(pair[LABELS] == IGNORE, 0, pair[LABELS])
        pair[LABELS][1, ..., : (labels.shape[-1] + 1) // 2] = IGNORE
    return pair


def _is_mean_over_targets(loss: _ModelLoss, model: nn.Module, pair: Batch) -> bool:
    """Does the model's loss add up over samples if it is multiplied by the number of targets?"""
    totals = (partial(loss.total, model, take_samples(pair, rows)) for rows in _ROWS)
    both, *alone = (_in_evaluation(model, total) for total in totals)
    return torch.allclose(both, alone[0] + alone[1], rtol=1e-6, atol=0)


def _is_cross_entropy(loss: _ModelLoss, model: nn.Module, pair: Batch) -> bool:
    """Is the model's loss the cross-entropy of the logits that it returns without labels?"""
    try:
        found = _in_evaluation(model, partial(loss.total_of_logits, model, pair))
    except Exception:  # of the model's own code: it needs labels, or returns no logits
        return False
    own = _in_evaluation(model, partial(loss.total, model, pair))
    return torch.allclose(found.double(), own.double(), rtol=1e-5, atol=0)


def _in_evaluation(model: nn.Module, total: Callable[[], Tensor]) -> Tensor:
    with in_mode(model, training=False), torch.no_grad():
        return total()


_ROWS = (slice(0, 2), slice(0, 1), slice(1, 2))

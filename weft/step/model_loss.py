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
from weft.inspection.functional_call import in_mode
from weft.inspection.nested_tensors import map_tensors
from weft.models.loss import IGNORE
from weft.models.loss_head import logits_of
from weft.parallel.tensor.vocabulary import cross_entropy, vocabulary_of
from weft.step.batch import Batch, take_samples
from weft.step.objective import CROSS_ENTROPY, Objective

LABELS = "labels"
_DECODER_INPUTS = "prepare_decoder_input_ids_from_labels"  # a method of transformers' models
_Targets = Callable[[Tensor], Tensor]
_Total = Callable[[nn.Module, Batch], Tensor]
Measure = Callable[[_Total, Batch], Tensor]  # the value of a total in an evaluation of the model
# How far two sums of losses may be apart that would be equal without rounding, by the bytes of a computed number.
_TOLERANCES = {8: 1e-6, 4: 1e-5, 2: 1e-3}  # float64 too: models of transformers compute their loss in float32


def default_objective(
    model: nn.Module, batch: Batch, dtype: torch.dtype = torch.float64, measure: Measure | None = None
) -> Objective:
    """Returns the objective for batches like `batch` where none is given, in proofs, training steps and evaluations.

    The model's own loss for keyword arguments, which the model computes in `dtype`; cross-entropy for (inputs, labels).
    A model that is split is evaluated by `measure`, which returns the same on all ranks and lets the model have whole
    logits.
    """
    if not isinstance(batch, Mapping):
        return CROSS_ENTROPY
    return _own_loss(model, batch, measure or partial(_in_evaluation, model), _TOLERANCES[max(2, dtype.itemsize)])


def model_loss(model: nn.Module, batch: Mapping[str, Any]) -> Objective:
    """Returns the objective of a model that returns its own mean loss, for batches that are its keyword arguments.

    Runs the model, which is not split, a few times on two samples of `batch`. Raises a PlanError if its loss is not a
    mean over labels.
    """
    dtypes = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    return default_objective(model, batch, min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float64))


def _own_loss(model: nn.Module, batch: Mapping[str, Any], measure: Measure, tolerance: float) -> Objective:
    labels = batch.get(LABELS)
    if not isinstance(labels, Tensor):
        raise PlanError(
            f"a batch of keyword arguments ({', '.join(map(str, batch))}) has no '{LABELS}' with which the model could "
            f"compute its loss; add them, or pass objective="
        )
    loss = _ModelLoss(lambda labels: labels, getattr(model, _DECODER_INPUTS, None))
    if not _first_counts(loss, measure, batch):
        loss = replace(loss, targets_of=_shifted)
    pair = _two_samples(batch)
    if not _is_mean_over_targets(loss, measure, pair, tolerance):
        raise PlanError(
            f"the loss of {type(model).__name__} is not a mean over its labels (all that are not {IGNORE}, or all "
            f"behind the first position), so losses of parts of a batch do not add up to that of the whole; pass "
            f"objective=, with the loss summed over targets and their number"
        )
    loss = replace(loss, is_cross_entropy=_is_cross_entropy(loss, measure, pair, tolerance))
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


def _shifted(labels: Tensor) -> Tensor:
    """The target of each position is the label of the next one; the last position has none."""
    return functional.pad(labels, (0, 1), value=IGNORE)[..., 1:]


def _first_counts(loss: _ModelLoss, measure: Measure, batch: Batch) -> bool:
    """Does the loss depend on the labels of the first position? Not if the target of a position is the next label."""
    labels = batch[LABELS]
    if labels.dim() < 2 or labels.is_floating_point():
        return True
    others = labels.clone()
    others[..., 0] = torch.where(labels[..., 0] == 0, 1, 0)
    shifted = replace(loss, targets_of=_shifted)
    given = [take_samples({**batch, LABELS: one}, slice(0, 2)) for one in (labels, others)]
    first, second = (measure(shifted.total, one) for one in given)
    return not torch.equal(first, second)


def _two_samples(batch: Batch) -> Batch:
    """Returns the first and the last sample of a batch, with different numbers of labels."""
    labels = batch[LABELS]
    pair = map_tensors(lambda tensor: torch.stack([tensor[0], tensor[-1]]) if tensor.dim() else tensor, batch)
    if labels.dim() > 1 and not labels.is_floating_point():
        pair[LABELS] = torch.where(pair[LABELS] == IGNORE, 0, pair[LABELS])
        pair[LABELS][1, ..., : (labels.shape[-1] + 1) // 2] = IGNORE
    return pair


def _is_mean_over_targets(loss: _ModelLoss, measure: Measure, pair: Batch, tolerance: float) -> bool:
    """Does the model's loss add up over samples if it is multiplied by the number of targets?"""
    both, *alone = (measure(loss.total, take_samples(pair, rows)).double() for rows in _ROWS)
    return torch.allclose(both, alone[0] + alone[1], rtol=tolerance, atol=0)


def _is_cross_entropy(loss: _ModelLoss, measure: Measure, pair: Batch, tolerance: float) -> bool:
    """Is the model's loss the cross-entropy of the logits that it returns without labels?"""

    def of_logits(model: nn.Module, batch: Batch) -> Tensor:
        try:
            return loss.total_of_logits(model, batch)
        except Exception:  # of the model's own code: it needs labels, or returns no logits
            return torch.full((), torch.nan, device=pair[LABELS].device)

    found, own = measure(of_logits, pair), measure(loss.total, pair)
    return torch.allclose(found.double(), own.double(), rtol=10 * tolerance, atol=0)


def _in_evaluation(model: nn.Module, total: _Total, batch: Batch) -> Tensor:
    with in_mode(model, training=False), torch.no_grad():
        return total(model, batch)


_ROWS = (slice(0, 2), slice(0, 1), slice(1, 2))

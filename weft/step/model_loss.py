"""The loss that a model computes itself if labels are among its arguments, as models of transformers do.

Such a loss is a mean over targets, and models differ in what they count: labels that are not -100, or those after the
first position (a model that predicts the next token shifts them itself). A step needs the sum, so that micro-batches
and ranks with different numbers of targets add up. `model_loss` finds out what a model counts: the loss of two samples
together, times their targets, must be the sum of that for each alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.errors import PlanError
from weft.inspection.nested_tensors import map_tensors
from weft.models.loss import IGNORE
from weft.models.loss_head import logits_of
from weft.parallel.tensor.vocabulary import cross_entropy, vocabulary_of
from weft.step.batch import Batch, take_samples
from weft.step.objective import Objective

LABELS = "labels"
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
    targets_of = _same if _first_counts(model, batch) else _shifted
    if not _is_mean_over(targets_of, model, batch):
        raise PlanError(
            f"the loss of {type(model).__name__} is not a mean over its labels (all that are not {IGNORE}, or all "
            f"behind the first position), so losses of parts of a batch do not add up to that of the whole; pass "
            f"objective=, with the loss summed over targets and their number"
        )
    return Objective(partial(_count, targets_of), partial(_total, targets_of), splits_logits=True)


_DECODER_INPUTS = "prepare_decoder_input_ids_from_labels"  # a method of transformers' models


def _same(labels: Tensor) -> Tensor:
    return labels


def _shifted(labels: Tensor) -> Tensor:
    """The target of each position is the label of the next one; the last position has none."""
    return functional.pad(labels, (0, 1), value=IGNORE)[..., 1:]


def _count(targets_of: _Targets, batch: Batch) -> Tensor:
    labels = batch[LABELS]
    if labels.is_floating_point():
        return torch.tensor(labels.numel(), device=labels.device)
    return (targets_of(labels) != IGNORE).sum()


def _total(targets_of: _Targets, model: nn.Module, batch: Batch) -> Tensor:
    """The model's own loss times the number of targets. If ranks hold parts of the logits, their cross-entropy."""
    vocabulary = vocabulary_of(model)
    if vocabulary is not None:
        inputs = {name: value for name, value in batch.items() if name != LABELS}
        if hasattr(model, _DECODER_INPUTS):  # a decoder behind an encoder takes the labels, moved by one position
            inputs.setdefault("decoder_input_ids", getattr(model, _DECODER_INPUTS)(labels=batch[LABELS]))
        return cross_entropy(logits_of(model(**inputs)), targets_of(batch[LABELS]), vocabulary)[0]
    output = model(**batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise PlanError(f"{type(model).__name__} returned no loss for a batch with '{LABELS}'; pass objective=")
    total: Tensor = loss * _count(targets_of, batch)
    return total


def _first_counts(model: nn.Module, batch: Batch) -> bool:
    """Does the loss depend on the labels of the first position? Not if the target of a position is the next label."""
    labels = batch[LABELS]
    if labels.dim() < 2 or labels.is_floating_point():
        return True
    others = labels.clone()
    others[..., 0] = torch.where(labels[..., 0] == 0, 1, 0)
    given = [take_samples({**batch, LABELS: one}, slice(0, 2)) for one in (labels, others)]
    first, second = (_in_evaluation(model, partial(_total, _shifted, model, one)) for one in given)
    return not torch.equal(first, second)


def _is_mean_over(targets_of: _Targets, model: nn.Module, batch: Batch) -> bool:
    """Does the model's loss add up over samples if it is multiplied by the number of these targets?"""
    labels = batch[LABELS]
    pair = map_tensors(lambda tensor: torch.stack([tensor[0], tensor[-1]]) if tensor.dim() else tensor, batch)
    if labels.dim() > 1 and not labels.is_floating_point():  # with different numbers of targets
        pair[LABELS] = torch.where(pair[LABELS] == IGNORE, 0, pair[LABELS])
        pair[LABELS][1, ..., : (labels.shape[-1] + 1) // 2] = IGNORE
    totals = (partial(_total, targets_of, model, take_samples(pair, rows)) for rows in _ROWS)
    both, *alone = (_in_evaluation(model, total) for total in totals)
    return torch.allclose(both, alone[0] + alone[1], rtol=1e-6, atol=0)


def _in_evaluation(model: nn.Module, total: Callable[[], Tensor]) -> Tensor:
    was_training = model.training
    model.eval()
    with torch.no_grad():
        found = total()
    model.train(was_training)
    return found


_ROWS = (slice(0, 2), slice(0, 1), slice(1, 2))

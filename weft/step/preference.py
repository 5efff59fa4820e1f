"""Direct preference optimization (Rafailov et al. 2023): the chosen of two answers is to become likelier.

    loss of a pair = -log sigmoid(beta · ((chosen - chosen of the reference) - (rejected - rejected of the reference)))

Each term is the log-probability of an answer: the sum over its tokens. The reference is the model before its first
step; its log-probabilities never change, so they are computed once (`train/reference.py`) and come with the batch:
(inputs [pairs, 2, sequence], labels of the same shape, reference [pairs, 2]), chosen first.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.loss import IGNORE
from weft.models.loss_head import logits_of
from weft.step.batch import Batch
from weft.step.objective import Objective


def preference(beta: float) -> Objective:
    """The objective of preferences: the mean loss of pairs and, in evaluations, the share that is ordered right."""
    measures = ("loss", "accuracy")
    return Objective(count_pairs, partial(_total, beta), measures, partial(_measure, beta), positions=_positions)


def log_probabilities(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the log-probability of each answer, [pairs, 2], in at least float32."""
    inputs, labels = batch[0], batch[1]
    logits = logits_of(model(inputs.flatten(0, 1)))  # [2 * pairs, sequence, vocab]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    valid = labels.flatten(0, 1) != IGNORE
    target = labels.flatten(0, 1).masked_fill(~valid, 0)
    picked = wide.log_softmax(-1).gather(-1, target[..., None])[..., 0]
    answers: Tensor = (picked * valid).sum(-1).unflatten(0, (-1, 2))
    return answers


def _positions(batch: Batch) -> tuple[Tensor, Tensor]:
    return batch[0].flatten(0, 1), batch[1].flatten(0, 1)


def count_pairs(batch: Batch) -> Tensor:
    """The number of pairs that have targets."""
    return _has_targets(batch).sum()


def _has_targets(batch: Batch) -> Tensor:
    valid: Tensor = (batch[1] != IGNORE).flatten(1).any(1)  # [pairs]
    return valid


def _losses(beta: float, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns the loss of each pair, [pairs], and how much more the chosen answer has gained than the rejected one."""
    found = log_probabilities(model, batch)
    gained = found - batch[2].to(found.dtype)
    margin = gained[:, 0] - gained[:, 1]
    return -F.logsigmoid(beta * margin) * _has_targets(batch), margin


def _total(beta: float, model: nn.Module, batch: Batch) -> Tensor:
    return _losses(beta, model, batch)[0].sum()


def _measure(beta: float, model: nn.Module, batch: Batch) -> Tensor:
    """[the summed loss, the number of pairs whose chosen answer has gained more]"""
    losses, margin = _losses(beta, model, batch)
    right = (margin > 0) & _has_targets(batch)
    return torch.stack([losses.sum(), right.sum().to(losses.dtype)])

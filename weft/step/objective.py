"""What a step minimises and measures, and what it sends beside the axes' own traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from weft.comm import Traffic
from weft.comm.ledger import Key
from weft.models.loss import IGNORE
from weft.models.loss_head import logits_of, loss_head_of
from weft.parallel.tensor.vocabulary import cross_entropy, num_right, vocabulary_of
from weft.plan import Plan

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Objective:
    """What is minimised: `total(model, batch)` summed over the batch's targets, of which there are `count(batch)`.

    What is measured on held-out data are the means of `measure(model, batch)` [len(measures)], the loss first; of the
    loss alone where it is None.
    """

    count: Callable[[Batch], Tensor]
    total: Callable[[nn.Module, Batch], Tensor]
    measures: tuple[str, ...] = ("loss",)
    measure: Callable[[nn.Module, Batch], Tensor] | None = None


def _token_total(model: nn.Module, batch: Batch, z_loss: float = 0.0) -> Tensor:
    head = loss_head_of(model)
    if head is None:
        return cross_entropy(logits_of(model(batch[0])), batch[1], vocabulary_of(model), z_loss)[0]
    with head.computing_loss(batch[1], z_loss):
        return logits_of(model(batch[0]))


def _count_valid(batch: Batch) -> Tensor:
    return (batch[1] != IGNORE).sum()


def _loss_and_right(model: nn.Module, batch: Batch) -> Tensor:
    logits, vocabulary = logits_of(model(batch[0])), vocabulary_of(model)
    total = cross_entropy(logits, batch[1], vocabulary)[0]
    return torch.stack([total, num_right(logits, batch[1], vocabulary).to(total.dtype)])


def _held_out_total(model: nn.Module, batch: Batch) -> Tensor:
    return _token_total(model, batch)[None]


# Cross-entropy of labels [batch, ...] under logits [batch, ..., classes]; the label -100 does not count.
CROSS_ENTROPY = Objective(count=_count_valid, total=_token_total)


CLASSIFICATION = Objective(_count_valid, _token_total, ("loss", "accuracy"), _loss_and_right)


def with_z_loss(z_loss: float) -> Objective:
    """Cross-entropy and, in training only, `z_loss` times the squared log of the softmax's denominator."""
    if not z_loss:
        return CROSS_ENTROPY
    return Objective(_count_valid, partial(_token_total, z_loss=z_loss), ("loss",), _held_out_total)


def step_traffic(plan: Plan) -> dict[Key, Traffic]:
    """What a step says beside the strategies: the count of targets, the loss, and the gradient norm."""
    traffic: dict[Key, Traffic] = {}
    num_token_ranks = plan.num_batch_ranks * plan.tile.degree * plan.context.degree
    if num_token_ranks > 1:
        traffic["tokens", "all_reduce"] = Traffic(1, 8)
    if num_token_ranks * plan.pipe.degree > 1:
        traffic["losses", "all_reduce"] = Traffic(1, 8)
    if plan.pipe.degree * plan.shard.degree * plan.tensor.x * plan.tensor.y > 1:
        # With shadows, a number for each stage: see `grad_norm`.
        traffic["state", "all_reduce"] = Traffic(1, 8 * (plan.pipe.num_stages if plan.pipe.shadow else 1))
    return traffic

"""The loss of a step, the measures of an evaluation, and the traffic of a step outside of the axes' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from weft.comm import Traffic
from weft.comm.ledger import Key
from weft.inspection.nested_tensors import tensors_in
from weft.models.loss import IGNORE
from weft.models.loss_head import logits_of, loss_head_of
from weft.models.router import forget_routing, take_router_losses
from weft.parallel.tensor.vocabulary import cross_entropy, num_right, vocabulary_of
from weft.plan import Plan
from weft.step.batch import Batch


@dataclass(frozen=True)
class Objective:
    """The loss to minimise, and the measures of an evaluation.

    `total(model, batch)` is the loss summed over the batch's targets, and `count(batch)` their number. An evaluation
    returns the means of `measure(model, batch)` [len(measures)], with the loss first; if `measure` is None, the mean
    loss. `splits_logits`: `total` gives logits that are split over x to `weft.cross_entropy` and to nothing else; any
    other use of them gathers them (`parallel/tensor/split_logits.py`), which predictions then count. `align(batch)`
    returns a batch as (inputs, targets) with a target for each result, for plans under which a rank is given parts of
    samples (context, tile); None for batches that are such pairs already. `positions(batch)` returns the tokens and
    the labels of each position [sequences, sequence], by which routers of experts know padding (`step/used_tokens.py`);
    None: all tokens count.
    """

    count: Callable[[Batch], Tensor]
    total: Callable[[nn.Module, Batch], Tensor]
    measures: tuple[str, ...] = ("loss",)
    measure: Callable[[nn.Module, Batch], Tensor] | None = None
    splits_logits: bool = False
    align: Callable[[Batch], Batch] | None = None
    positions: Callable[[Batch], tuple[Tensor, Tensor]] | None = None

    def aligned(self, batch: Batch, plan: Plan) -> Batch:
        """Returns a batch in the form of which the plan gives each rank a part."""
        is_cut = plan.context.degree * plan.tile.degree > 1
        return self.align(batch) if is_cut and self.align is not None else batch


def _token_total(model: nn.Module, batch: Batch, z_loss: float = 0.0) -> Tensor:
    """The cross-entropy summed over tokens; computed in the model's head if it has a loss head."""
    head = loss_head_of(model)
    if head is None:
        return cross_entropy(logits_of(model(batch[0])), batch[1], vocabulary_of(model), z_loss)[0]
    with head.computing_loss(batch[1], z_loss):
        return logits_of(model(batch[0]))


def counts_of(objective: Objective, batches: Sequence[Batch], used: Sequence[Tensor | None]) -> Tensor:
    """The numbers [2] of targets and of tokens in batches, float64. `used` are the tokens that count, or None."""
    targets = torch.stack([objective.count(batch) for batch in batches]).sum().double()
    masks = [one.sum() for one in used if one is not None]
    num_tokens = (
        torch.stack(masks).sum().to(targets) if masks else torch.full_like(targets, sum(map(_num_tokens, batches)))
    )
    return torch.stack([targets, num_tokens])


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _num_tokens(batch: Batch) -> int:
    """The number of tokens of a batch, targets or not: the elements of its largest tensor of integers, or of its first
    tensor if it has none.
    """
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim()]
    sizes = [one.numel() for one in tensors if one.dtype in _INTEGERS]
    return max(sizes, default=tensors[0].numel() if tensors else 1)


def training_total(objective: Objective, model: nn.Module, batch: Batch, scales: Tensor) -> Tensor:
    """The objective's total, plus the losses of the model's routers.

    `scales` [2] divide by the numbers of targets and of tokens. The result is to be multiplied by the first; the losses
    of routers in it, which are sums over tokens, are then multiplied by the second.
    """
    forget_routing(model)
    total = objective.total(model, batch)
    routers = take_router_losses(model)
    return total if routers is None else total + (routers * (scales[1] / scales[0]).to(routers)).to(total)


def _count_valid(batch: Batch) -> Tensor:
    valid: Tensor = batch[1] != IGNORE
    return valid.sum()


def _positions(batch: Batch) -> tuple[Tensor, Tensor]:
    return batch[0], batch[1]


def _loss_and_right(model: nn.Module, batch: Batch) -> Tensor:
    """[the summed loss, the number of correct predictions]"""
    logits, vocabulary = logits_of(model(batch[0])), vocabulary_of(model)
    total = cross_entropy(logits, batch[1], vocabulary)[0]
    return torch.stack([total, num_right(logits, batch[1], vocabulary).to(total.dtype)])


def _held_out_total(model: nn.Module, batch: Batch) -> Tensor:
    """The summed loss without z-loss, [1]."""
    return _token_total(model, batch)[None]


# Cross-entropy of labels [batch, ...] under logits [batch, ..., classes]; the label -100 is ignored.
CROSS_ENTROPY = Objective(count=_count_valid, total=_token_total, splits_logits=True, positions=_positions)


CLASSIFICATION = Objective(_count_valid, _token_total, ("loss", "accuracy"), _loss_and_right, splits_logits=True)


def with_z_loss(z_loss: float) -> Objective:
    """Cross-entropy plus, in training only, `z_loss` times the squared log of the softmax's denominator."""
    if not z_loss:
        return CROSS_ENTROPY
    return replace(CROSS_ENTROPY, total=partial(_token_total, z_loss=z_loss), measure=_held_out_total)


def step_traffic(plan: Plan) -> dict[Key, Traffic]:
    """Traffic of a step outside of the strategies: the numbers of targets and tokens, the loss, the gradient norm."""
    traffic: dict[Key, Traffic] = {}
    if plan.num_parts("samples", "pixels", "tokens") > 1:
        traffic["tokens", "all_reduce"] = Traffic(1, 16)
    if plan.num_parts("samples", "pixels", "tokens", "stages") > 1:
        traffic["losses", "all_reduce"] = Traffic(1, 8)
    if plan.num_parts("stages", "weights") > 1:
        # With shadows, one number for each stage: see `grad_norm`.
        traffic["state", "all_reduce"] = Traffic(1, 8 * (plan.pipe.num_stages if plan.pipe.shadow else 1))
    return traffic

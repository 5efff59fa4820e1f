"""Embedding and cross-entropy with the vocabulary split over x: no rank holds the logits of all classes.

Cross-entropy needs three numbers per target from the other ranks: the largest logit (one all-reduce), the sum of
exponentials and the target's logit (one all-reduce of both). Backward does not communicate. The loss is computed in
float32 at least.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from weft.comm import Axis, all_reduce
from weft.errors import PlanError
from weft.inspection.annotations import Annotation
from weft.inspection.first_order import first_order
from weft.inspection.nested_tensors import map_tensors
from weft.models.loss import IGNORE, is_unknown, token_loss
from weft.parallel.tensor.split_logits import HeadUse, gather_classes, mark_split, own_logits


@dataclass(frozen=True)
class Vocabulary:
    """The classes [begin, end) of this rank's logits, the number of all classes, and the axis that splits them."""

    begin: int
    end: int
    num_classes: int
    axis: Axis


_VOCABULARY = Annotation[Vocabulary]("vocabulary")
_HEAD_USE = Annotation[HeadUse]("head_use")


def vocabulary_of(model: nn.Module) -> Vocabulary | None:
    """Returns which classes this rank's logits have, if they are split over x; None if each rank has all classes."""
    return _VOCABULARY.get(model)


def set_vocabulary(model: nn.Module, vocabulary: Vocabulary) -> None:
    """Store on a model that its logits are split."""
    _VOCABULARY.set(model, vocabulary)


def mark_logits_of(model: nn.Module, head: str, vocabulary: Vocabulary) -> None:
    """Marks the logits that a model returns as split (`split_logits.py`). Its module `head` makes them."""
    use = HeadUse(model, head)
    _HEAD_USE.set(model, use)
    model.register_forward_hook(partial(_mark_logits, vocabulary, use))


@contextmanager
def whole_logits(model: nn.Module) -> Iterator[None]:
    """Gives the model's own code the logits of all classes inside of the context, which a loss of its own needs."""
    vocabulary, use = _VOCABULARY.pop(model), _HEAD_USE.get(model)
    if use is not None and vocabulary is not None:
        use.gather = partial(gather_classes, axis=vocabulary.axis, num_classes=vocabulary.num_classes)
    try:
        yield
    finally:
        if use is not None:
            use.gather = None
        if vocabulary is not None:
            set_vocabulary(model, vocabulary)


def _mark_logits(vocabulary: Vocabulary, use: HeadUse, model: nn.Module, _: Any, output: Any) -> Any:
    if use.gather is not None:
        return output
    own = vocabulary.end - vocabulary.begin
    found = {id(one): one for one in use.logits_in(model, output) if one.dim() and one.shape[-1] == own}
    split = {key: mark_split(one, vocabulary.axis, vocabulary.num_classes) for key, one in found.items()}
    return map_tensors(lambda tensor: split.get(id(tensor), tensor), output) if split else output


def cross_entropy(
    logits: Tensor, labels: Tensor, vocabulary: Vocabulary | None, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Returns the sum of the cross-entropy over valid labels, and their number.

    The logits have all classes, or with `vocabulary` this rank's classes only. The other arguments are those of
    `models.loss.token_loss`.
    """
    logits = own_logits(logits)
    if vocabulary is None or vocabulary.axis.degree == 1:
        return token_loss(logits, labels, z_loss)
    if (reason := refuse_z_loss(z_loss, vocabulary.axis.degree)) is not None:
        raise PlanError(reason)
    if logits.shape[-1] != vocabulary.end - vocabulary.begin:
        raise PlanError(
            f"the logits have {logits.shape[-1]} classes, but this rank's part of the model's last linear has "
            f"{vocabulary.end - vocabulary.begin} of {vocabulary.num_classes}: they are not its result; let the linear "
            f"that makes the logits be the last that the model registers, or use tensor.x = 1"
        )
    total: Tensor = _SplitCrossEntropy.apply(logits, labels, vocabulary)
    return total, (labels != IGNORE).sum()


def refuse_z_loss(z_loss: float, x: int) -> str | None:
    """Returns why z-loss is not possible with logits that are split over x; None if it is."""
    if not z_loss or x == 1:
        return None
    return (
        f"train.z_loss = {z_loss:g} needs whole rows of logits, and tensor.x = {x} splits them; use tensor.x = 1, or "
        f"z_loss = 0"
    )


def loss_bytes(num_targets: int, itemsize: int) -> list[int]:
    """Returns the bytes of each all-reduce over x that one cross-entropy makes."""
    return [num_targets * itemsize, 2 * num_targets * itemsize]


def num_right(logits: Tensor, labels: Tensor, vocabulary: Vocabulary | None) -> Tensor:
    """Returns the number of valid labels whose logit is the largest, among all classes also if logits are split."""
    wide, flat = own_logits(logits).detach().flatten(0, -2), labels.flatten()  # [targets, classes]
    if vocabulary is None:
        return (wide.argmax(-1) == flat).sum()
    own = (flat >= vocabulary.begin) & (flat < vocabulary.end)
    local = (flat - vocabulary.begin).clamp(0, wide.shape[1] - 1)
    target = torch.where(own, wide.gather(1, local[:, None])[:, 0], -torch.inf)
    both = torch.stack([target, wide.max(dim=-1).values])  # [2, targets]
    all_reduce(both, vocabulary.axis, "max").wait()
    return ((both[0] == both[1]) & (flat != IGNORE)).sum()


class _SplitCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocabulary: Vocabulary) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)  # [targets, local classes]
        flat = labels.flatten()
        largest = wide.max(dim=-1).values  # [targets]
        all_reduce(largest, vocabulary.axis, "max").wait()
        exponentials = (wide - largest[:, None]).exp_()
        own = (flat >= vocabulary.begin) & (flat < vocabulary.end)
        local = (flat - vocabulary.begin).clamp(0, wide.shape[1] - 1)
        target = torch.where(own, wide.gather(1, local[:, None])[:, 0] - largest, 0.0)
        sums = torch.stack([exponentials.sum(-1), target])  # [2, targets]
        all_reduce(sums, vocabulary.axis).wait()
        valid = flat != IGNORE
        sums.masked_fill_(is_unknown(flat, vocabulary.num_classes), float("nan"))  # as with whole logits
        probabilities = exponentials.div_(sums[0][:, None])
        ctx.save_for_backward(probabilities, own & valid, local, valid)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return torch.where(valid, sums[0].log() - sums[1], 0.0).sum()

    @staticmethod
    @first_order("tensor.x and tensor.y")
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        probabilities, own, local, valid = ctx.saved_tensors
        result = probabilities.clone()
        result[torch.arange(len(local), device=local.device), local] -= own.to(result.dtype)
        result *= valid[:, None] * gradients[0]
        return result.to(ctx.dtype).view(ctx.shape), None, None


def split_embedding(module: nn.Embedding, tokens: Tensor, begin: int) -> Tensor:
    """Returns the rows that this rank holds and zeros for others, to be summed over x; NaN for unknown tokens."""
    own = (tokens >= begin) & (tokens < begin + module.weight.shape[0])
    local = torch.where(own, tokens - begin, 0)
    padding = module.padding_idx
    if padding is not None:
        padding = padding - begin if begin <= padding < begin + module.weight.shape[0] else None
    rows = F.embedding(local, module.weight, padding)
    unknown = (tokens < 0) | (tokens >= module.num_embeddings)
    return (rows * own[..., None].to(rows.dtype)).masked_fill(unknown[..., None], float("nan"))

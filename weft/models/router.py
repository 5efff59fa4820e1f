"""Routers: which experts each token goes to, the routers' own losses, and where tokens went.

In training, routers have losses of their own, which a step adds to the model's (`take_router_losses`):

    router_aux_loss_coef   DeepSeek-V3's balance: experts / k times the sum over experts of the share of tokens that
                           chose the expert times its mean probability; 1 if all experts get the same
    router_z_loss_coef     the mean square of the logarithm of the softmax's denominator, as in ST-MoE

Both are means over the used tokens of each sequence (`set_used`), so they do not depend on how sequences are dealt to
ranks, micro-batches or stages.

    router_bias_update_rate   DeepSeek-V3's balance without a loss: after each step, the bias of an expert is raised by
                              the rate if fewer tokens of the whole batch than the mean chose it, and else lowered
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from weft.architectures import DecoderConfig
from weft.models.row_operations import wide_linear


class _RouterRecord:
    """What a router records in training. Copies of a router begin without it.

    `used` [batch, sequence] says which tokens of the next forwards are used and not padding (None: all of them are);
    only these count. `loss` is that of the last forward, summed over tokens. `routed` [num_experts + 3] has the number
    of tokens that chose each expert in the last forward, the number of these choices that were dropped, the sum of the
    tokens' entropies, and their number; `total` sums it over forwards, and `step` over those of a step, until biases
    are changed.
    """

    used: Tensor | None = None
    loss: Tensor | None = None
    routed: Tensor | None = None
    total: Tensor | None = None
    step: Tensor | None = None

    def used_of(self, tokens: Tensor) -> Tensor | None:
        """Returns which of a call's tokens [batch, sequence, ...] are used; None if all are. They all are, too, if the
        call has only a part of the batch's sequences, because nothing says which part.
        """
        return self.used if self.used is not None and self.used.shape == tokens.shape[:2] else None

    def __deepcopy__(self, memo: dict[int, Any]) -> _RouterRecord:
        return _RouterRecord()


class Router(nn.Module):
    """Chooses the experts of each token, in at least float32: the k largest of a softmax over all experts.

    deepseek_v3: the k largest sigmoid scores, to each of which the expert's bias is added for this choice alone, in the
    `topk_group` groups of experts whose two best have the largest sum.
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: DecoderConfig, num_experts: int) -> None:
        super().__init__()
        self.num_experts, self.num_experts_per_tok = num_experts, config.num_experts_per_tok
        self.capacity = config.capacity
        self.is_normalised = config.norm_topk_prob
        self.balance, self.z_loss = config.router_aux_loss_coef, config.router_z_loss_coef
        self.record = _RouterRecord()
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size))
        self.is_sigmoid, self.bias_rate = config.architecture == "deepseek_v3", config.router_bias_update_rate
        if self.is_sigmoid:
            self.num_groups, self.num_chosen_groups = config.n_group, config.topk_group
            self.scale = config.routed_scaling_factor
            # Not on the meta device, because no parameter's value stands for it.
            self.register_buffer("e_score_correction_bias", torch.zeros(num_experts, device="cpu"))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [batch, sequence, hidden] -> the weights of the experts and the experts, [batch * sequence, k]."""
        logits = self.logits(hidden)
        if self.is_sigmoid:
            scores = logits.sigmoid()
            experts = self._choose(scores)
            weights, probabilities = scores.gather(-1, experts), scores / scores.sum(-1, keepdim=True)
        else:
            probabilities = logits.softmax(-1)
            weights, experts = probabilities.topk(self.num_experts_per_tok)
        if self.training and torch.is_grad_enabled():
            self._note(logits, probabilities, experts)
        weights, experts = weights.flatten(0, -2), experts.flatten(0, -2)
        if self.is_normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.scale if self.is_sigmoid else weights, experts

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the score of each expert for each token."""
        return wide_linear(hidden, self.weight)

    @torch.no_grad()
    def _choose(self, scores: Tensor) -> Tensor:
        """Returns the experts [..., k] of tokens with these sigmoid scores [..., experts]."""
        biased = scores + self.e_score_correction_bias.to(scores.dtype)
        if self.num_groups > 1:
            grouped = biased.unflatten(-1, (self.num_groups, -1))
            best = grouped.topk(2).values.sum(-1).topk(self.num_chosen_groups).indices
            is_open = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
            biased = grouped.masked_fill(~is_open[..., None], -torch.inf).flatten(-2)
        return biased.topk(self.num_experts_per_tok).indices

    def _note(self, logits: Tensor, probabilities: Tensor, experts: Tensor) -> None:
        """Record the losses and the routing of a forward; logits [batch, sequence, experts]."""
        used = self.record.used_of(logits)
        used = None if used is None else used.to(logits.dtype)
        ones = torch.ones_like(experts, dtype=logits.dtype) if used is None else used[..., None].expand(experts.shape)
        counts = torch.zeros_like(logits[:, 0]).scatter_add_(1, experts.flatten(1), ones.flatten(1))  # [batch, experts]
        loss = self._loss(logits, probabilities, counts, used) if self.balance or self.z_loss else None
        with torch.no_grad():
            entropies = torch.special.entr(probabilities)
            entropy = entropies.sum() if used is None else (entropies.sum(-1) * used).sum()
            num_tokens = torch.full_like(entropy, logits.shape[0] * logits.shape[1]) if used is None else used.sum()
            dropped = torch.zeros_like(entropy)
            if self.capacity is not None:
                limit = self.capacity.tokens(logits.shape[1], self.num_experts, self.num_experts_per_tok)
                dropped = (counts - limit).clamp(min=0).sum()
            routed = torch.cat([counts.sum(0), torch.stack([dropped, entropy, num_tokens])])
        if not isinstance(routed, FakeTensor):
            self.record.loss, self.record.routed = loss, routed

    def _loss(self, logits: Tensor, probabilities: Tensor, counts: Tensor, used: Tensor | None) -> Tensor:
        """Returns the router's losses, summed over the used tokens of all sequences."""
        _, sequence, num_experts = logits.shape
        squares = logits.logsumexp(-1).square()
        total = self.z_loss * (squares if used is None else squares * used).sum()
        if self.balance and used is None:
            share = counts * (num_experts / (sequence * self.num_experts_per_tok))
            total = total + self.balance * (share * probabilities.sum(1)).sum()
        elif self.balance and used is not None:
            share = counts * num_experts / (used.sum(1, keepdim=True).clamp(min=1) * self.num_experts_per_tok)
            total = total + self.balance * (share * (probabilities * used[..., None]).sum(1)).sum()
        return total


class RouterTokens:
    """The used tokens of a block's routers, as a state that recompute restores (`memory/recompute.py`)."""

    def __init__(self, block: nn.Module) -> None:
        self._records = [router.record for router in routers_of(block).values()]

    def __bool__(self) -> bool:
        return bool(self._records)

    def get(self) -> Tensor | None:
        """Returns the current value."""
        return self._records[0].used

    def set(self, value: Tensor | None) -> None:
        """Sets the value."""
        for record in self._records:
            record.used = value


def set_used(models: Iterable[nn.Module], used: Tensor | None, in_place: bool = False) -> None:
    """Tell routers which tokens [batch, sequence] of the next forwards are used, or with None that all are.

    `in_place`: the routers keep the tensor that they have, and its values change.
    """
    for record in (router.record for model in models for router in routers_of(model).values()):
        if in_place and used is not None and record.used is not None and record.used.shape == used.shape:
            record.used.copy_(used)
        else:
            record.used = used


def take_router_losses(model: nn.Module) -> Tensor | None:
    """Returns the sum of the losses of the last forward in training, which routers then forget; None without any.

    Routers also add the routing of that forward to their totals here: not in forward, which recompute repeats.
    """
    total = None
    for router in routers_of(model).values():
        record = router.record
        if record.routed is not None:
            routed = record.routed.double()
            record.total = routed if record.total is None else record.total + routed
            if router.bias_rate:
                record.step = routed if record.step is None else record.step + routed
        if record.loss is not None:
            total = record.loss if total is None else total + record.loss.to(total)
        record.loss = record.routed = None
    return total


def forget_routing(model: nn.Module) -> None:
    """Make routers forget their last forward, which may be a recompute's. Call it before a forward that may skip blocks
    (train.layer_drop): a router that is skipped would give the losses of an earlier micro-batch again.
    """
    for router in routers_of(model).values():
        router.record.loss = router.record.routed = None


def change_biases(models: Iterable[nn.Module], total: Callable[[Tensor], None], keeps: Tensor | None = None) -> None:
    """Change the biases of routers after a step, so that experts with fewer tokens than the mean are chosen more often.

    This is DeepSeek-V3's balance without a loss. `total` sums a tensor over all ranks with different tokens, in place.
    Biases stay unchanged where `keeps` [] is true.
    """
    routers = [one for model in models for one in routers_of(model).values() if one.bias_rate]
    if not routers:
        return
    counts = torch.cat([_counts_of_step(router) for router in routers])
    total(counts)
    for router, own in zip(routers, counts.split([router.num_experts for router in routers]), strict=True):
        change = router.bias_rate * (own.mean() - own).sign()
        router.e_score_correction_bias += change if keeps is None else torch.where(keeps, 0.0, change)


def _counts_of_step(router: Router) -> Tensor:
    routed, router.record.step = router.record.step, None
    if routed is None:  # its block was skipped in all micro-batches of the step (train.layer_drop)
        return router.e_score_correction_bias.new_zeros(router.num_experts, dtype=torch.float64)
    return routed[: router.num_experts]


@contextmanager
def keeping_routed(model: nn.Module) -> Iterator[None]:
    """In this context routers count nothing: what they have recorded of earlier forwards stays as it is."""
    records = [router.record for router in routers_of(model).values()]
    before = [(record.total, record.step) for record in records]
    try:
        yield
    finally:
        for record, (total, step) in zip(records, before, strict=True):
            record.total, record.step = total, step


def take_routed(model: nn.Module) -> list[Tensor]:
    """Returns the routing [num_experts + 3] of each router (`_RouterRecord.total`) since the last call."""
    found = []
    for router in routers_of(model).values():
        if router.record.total is not None:
            found.append(router.record.total)
        router.record.total = None
    return found


def routers_of(model: nn.Module) -> dict[str, Router]:
    """Returns the routers of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}

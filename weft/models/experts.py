"""A mixture of experts in the place of an MLP: a router sends each token through a few of many MLPs.

    tokens [tokens, hidden] --router--> experts [tokens, k], weights [tokens, k]
      gathered, sorted by expert: rows [tokens * k, hidden]
        all experts at once, by grouped matmuls: down(silu(gate(row)) * up(row))
      back in the order of tokens, times the weights, summed over k: [tokens, hidden]

In training, routers have losses of their own, which a step adds to the model's (`take_router_losses`):

    router_aux_loss_coef   DeepSeek-V3's balance: experts / k times the sum over experts of the share of tokens that
                           chose the expert times its mean probability; 1 if all experts get the same
    router_z_loss_coef     the mean square of the logarithm of the softmax's denominator, as in ST-MoE

Both are means over the tokens of each sequence, so they do not depend on how sequences are dealt to ranks,
micro-batches or stages.

No token is dropped and the host waits for nothing: shapes do not depend on where tokens go. Results do not depend on
the order of additions on a device, because nothing is summed by atomic additions. Names of modules and parameters are
those of transformers' Mixtral, Qwen2-MoE and Qwen3-MoE.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from weft.architectures import DecoderConfig
from weft.models.grouped_matmul import grouped_linear


class SwiGLU(nn.Module):
    """One MLP: down(silu(gate(hidden)) * up(hidden)); `inner` is the size between."""

    def __init__(self, hidden: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class _LastLoss:
    """The loss of a router's last forward in training, summed over tokens. Copies of a router begin without one."""

    loss: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _LastLoss:
        return _LastLoss()


class Router(nn.Module):
    """Chooses the experts of each token, in at least float32: the k largest of a softmax over all experts."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.num_experts_per_tok = config.num_experts_per_tok
        self.is_normalised = config.norm_topk_prob
        self.balance, self.z_loss = config.router_aux_loss_coef, config.router_z_loss_coef
        self.last = _LastLoss()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [batch, sequence, hidden] -> the weights of the experts and the experts, [batch * sequence, k]."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logits = F.linear(hidden.to(dtype), self.weight.to(dtype))
        probabilities = logits.softmax(-1)
        weights, experts = probabilities.topk(self.num_experts_per_tok)
        if self.training and torch.is_grad_enabled() and (self.balance or self.z_loss):
            loss = self._loss(logits, probabilities, experts)
            self.last.loss = None if isinstance(loss, FakeTensor) else loss
        weights, experts = weights.flatten(0, -2), experts.flatten(0, -2)
        return weights / weights.sum(-1, keepdim=True) if self.is_normalised else weights, experts

    def _loss(self, logits: Tensor, probabilities: Tensor, experts: Tensor) -> Tensor:
        """The router's losses, summed over the tokens of all sequences; logits [batch, sequence, experts]."""
        total = self.z_loss * logits.logsumexp(-1).square().sum()
        if self.balance:
            _, sequence, num_experts = logits.shape
            ones = torch.ones_like(experts, dtype=logits.dtype).flatten(1)
            counts = torch.zeros_like(logits[:, 0]).scatter_add_(1, experts.flatten(1), ones)  # [batch, experts]
            share = counts * (num_experts / (sequence * self.num_experts_per_tok))
            total = total + self.balance * (share * probabilities.sum(1)).sum()
        return total


def take_router_losses(model: nn.Module) -> Tensor | None:
    """The sum of the losses that routers had in the last forward in training, which they forget; None without any."""
    total = None
    for module in model.modules():
        if isinstance(module, Router) and module.last.loss is not None:
            total = module.last.loss if total is None else total + module.last.loss.to(total)
            module.last.loss = None
    return total


class StackedExperts(nn.Module):
    """Many MLPs (SwiGLU) whose weights are stacked. Rows are sorted by expert; expert i's end before row `ends[i]`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        num_experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, inner))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        gate, up = grouped_linear(rows, self.gate_up_proj, ends).chunk(2, dim=-1)
        return grouped_linear(F.silu(gate) * up, self.down_proj, ends)


class SparseMLP(nn.Module):
    """A router and its experts; with `shared_expert_intermediate_size` also a shared expert, weighted per token."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = StackedExperts(config)
        inner = config.shared_expert_intermediate_size
        self.shared_expert = SwiGLU(config.hidden_size, inner) if inner else None
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False) if inner else None

    def forward(self, hidden: Tensor) -> Tensor:
        weights, experts = self.gate(hidden)
        tokens = hidden.flatten(0, -2)
        order, ends = sort_by_expert(experts, self.experts.gate_up_proj.shape[0])
        inverse = order.argsort()
        rows = _GatherRows.apply(tokens, order, inverse)
        out: Tensor = _CombineRows.apply(self.experts(rows, ends), weights, order, inverse)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out = out + self.shared_expert_gate(tokens).sigmoid() * self.shared_expert(tokens)
        return out.view_as(hidden)


def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort the pairs of tokens and experts [tokens, k] by expert, those of one expert by token.

    Returns the numbers token * k + choice of the sorted pairs, and before which of them each expert ends (int32).
    """
    ordered, order = experts.flatten().sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(num_experts, device=experts.device), right=True)
    return order, ends.to(torch.int32)


class _GatherRows(torch.autograd.Function):
    """Rows of tokens, sorted by expert. Its backward sums the gradients of a token's rows in their own order."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.num_tokens = len(tokens)
        return tokens[order // (len(order) // len(tokens))]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse].unflatten(0, (ctx.num_tokens, -1)).sum(1), None, None


class _CombineRows(torch.autograd.Function):
    """The sum of each token's rows, times their weights [tokens, k], in the dtype of the rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, inverse)
        return (rows[inverse].view(*weights.shape, -1) * weights[..., None]).sum(1).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, order, inverse = ctx.saved_tensors
        wide = gradient.to(weights.dtype)
        for_rows = wide[order // weights.shape[1]] * weights.flatten()[order][:, None]
        for_weights = (rows[inverse].view(*weights.shape, -1) * wide[:, None]).sum(-1)
        return for_rows.to(rows.dtype), for_weights, None, None

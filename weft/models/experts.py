"""A mixture of experts in the place of an MLP: a router sends each token through a few of many MLPs.

    tokens [tokens, hidden] --router--> experts [tokens, k], weights [tokens, k]
      gathered, sorted by expert: rows [tokens * k, hidden]; with a capacity, a fixed number of rows for each expert
        all experts at once, by grouped matmuls: down(silu(gate(row)) * up(row))
      back in the order of tokens, times the weights, summed over k: [tokens, hidden]

Without a capacity no token is dropped. A capacity applies in training only, and to each sequence by itself: which
tokens are dropped does not depend on how sequences are dealt to ranks, micro-batches or stages. Names of modules and
parameters are those of transformers' Mixtral, Qwen2-MoE and Qwen3-MoE, and of DeepSpeed for residual experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from weft.architectures import DecoderConfig
from weft.models.expert_rows import RowOrder, draw_priorities, fill_slots, sort_by_expert, through_experts
from weft.models.router import Router

_ALIGNED_BYTES = 16  # torch._grouped_mm takes rows of a multiple of these


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor | None) -> Tensor:
    """Multiply rows [rows, in], sorted by group, by the weight [groups, out, in] of their group.

    Group i ends before row `ends[i]` (int32); without `ends`, all groups have equally many rows. Nothing waits for the
    device, unless torch has no kernel: for float64, and for sizes that are not a multiple of 16 bytes.
    """
    right = weight.transpose(1, 2)
    if ends is None:
        return torch.bmm(rows.unflatten(0, (len(weight), -1)), right).flatten(0, 1)
    is_aligned = all(size * rows.element_size() % _ALIGNED_BYTES == 0 for size in weight.shape[1:])
    if rows.dtype == torch.float64 or not is_aligned:
        return grouped_product(rows, right, ends)
    product: Tensor = torch._grouped_mm(rows, right, offs=ends)
    return product


def grouped_product(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, **_: Any
) -> Tensor:
    """Returns torch's grouped_mm, in any dtype; the host reads `offs`.

    Rows of `left` [rows, in] up to `offs[i]` are multiplied by `right[i]` [in, out]; rows behind the last are zero.
    With `left` [in, rows] and `right` [rows, out], each group's product is one of the result [groups, in, out].
    """
    if left.dim() == 3 and right.dim() == 3:
        return left @ right
    assert offs is not None
    if isinstance(left, FakeTensor) or left.is_meta:  # only shapes count
        return left @ (right[0] if right.dim() > left.dim() else right)
    ends = [int(end) for end in offs.tolist()]
    groups = list(zip([0, *ends[:-1]], ends, strict=True))
    if right.dim() == 2:
        return torch.stack([left[..., start:end] @ right[start:end] for start, end in groups])
    products = [left[start:end] @ right[index] for index, (start, end) in enumerate(groups)]
    behind = left.new_zeros(len(left) - ends[-1], right.shape[-1])
    return torch.cat([*products, behind])


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


class StackedExperts(nn.Module):
    """Many MLPs (SwiGLU) whose weights are stacked. Rows are sorted by expert; expert i's end before row `ends[i]`.

    Without `ends`, all experts have equally many rows. `compute` computes them, as `stacked_experts`.
    """

    compute: Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor]

    def __init__(self, config: DecoderConfig, num_experts: int) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, inner))
        self.compute = stacked_experts

    def forward(self, rows: Tensor, ends: Tensor | None = None) -> Tensor:
        return self.compute(rows, ends, self.gate_up_proj, self.down_proj)


class SparseMLP(nn.Module):
    """A router and its experts, those of layer `layer`.

    With `shared_expert_intermediate_size` also a shared expert, weighted per token; with `n_shared_experts` shared
    experts as one MLP of all their widths. With `residual_experts` also a dense MLP: [a, b] =
    softmax(coefficient(token)), and the result is a · experts + b · MLP.
    `through` sends tokens through the experts, as `through_experts`.
    """

    through: Callable[[Tensor, Tensor, RowOrder, Any], Tensor]

    def __init__(self, config: DecoderConfig, layer: int = 0) -> None:
        super().__init__()
        self.capacity, self.through = config.capacity, through_experts
        self.gate = Router(config, config.num_experts_of(layer))
        self.experts = StackedExperts(config, config.num_experts_of(layer))
        inner = config.shared_expert_intermediate_size
        self.shared_expert = SwiGLU(config.hidden_size, inner) if inner else None
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False) if inner else None
        self.shared_experts = (
            SwiGLU(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)
            if config.n_shared_experts
            else None
        )
        if config.residual_experts:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
            self.coefficient = nn.Linear(config.hidden_size, 2)

    def forward(self, hidden: Tensor, keys: Tensor | None = None) -> Tensor:
        """hidden [batch, sequence, hidden] -> the same shape. `keys` [batch]: see `expert_rows.draw_priorities`."""
        weights, experts = self.gate(hidden)
        tokens = hidden.flatten(0, -2)
        out = self.through(tokens, weights, self._order(experts, hidden, keys), self.experts)
        return self.with_others(out, tokens).view_as(hidden)

    @property
    def has_others(self) -> bool:
        """Is something computed beside the experts?"""
        return self.shared_expert is not None or self.shared_experts is not None or hasattr(self, "coefficient")

    def with_others(self, out: Tensor, tokens: Tensor) -> Tensor:
        """Adds to the experts' result for tokens [tokens, hidden] what is computed beside it: shared experts, MLP."""
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out = out + self.shared_expert_gate(tokens).sigmoid() * self.shared_expert(tokens)
        if self.shared_experts is not None:
            out = out + self.shared_experts(tokens)
        if hasattr(self, "coefficient"):
            mixing = self.coefficient(tokens).softmax(-1)
            out = out * mixing[:, :1] + self.mlp(tokens) * mixing[:, 1:]
        return out

    def _order(self, experts: Tensor, hidden: Tensor, keys: Tensor | None) -> RowOrder:
        """Returns the rows of tokens [tokens, k] for their experts."""
        num_experts = self.gate.num_experts
        if self.capacity is None or not self.training:
            return sort_by_expert(experts, num_experts)
        batch, sequence, _ = hidden.shape
        limit = self.capacity.tokens(sequence, num_experts, self.gate.num_experts_per_tok)
        priorities = None
        if self.capacity.selection == "random":
            assert keys is not None, "random selection needs the keys of the sequences"
            priorities = draw_priorities(keys, sequence)
        chosen = experts.view(batch, sequence, -1)
        return fill_slots(chosen, num_experts, limit, priorities, self.gate.record.used_of(hidden))


def stacked_experts(
    rows: Tensor,
    ends: Tensor | None,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    activation: Callable[[Tensor], Tensor] = F.silu,
) -> Tensor:
    """Compute the gated MLP of its expert for each row. Rows are sorted; expert i's end before row `ends[i]`."""
    gate_up = grouped_linear(rows, gate_up_proj, ends)
    if activation is F.silu:
        gated: Tensor = _Gated.apply(gate_up)
    else:
        gate, up = gate_up.chunk(2, dim=-1)
        gated = activation(gate) * up
    return grouped_linear(gated, down_proj, ends)


class _Gated(torch.autograd.Function):
    """silu(gate) * up, of gate and up beside each other [rows, 2 * inner]."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        of_gate_up: Tensor = torch.ops.weft.gated_gradient(gradient, gate_up)
        return of_gate_up

"""A layer of experts of a served model: the norm, the router, the rows of this rank's experts, and their sum."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.comm import Axis
from weft.inspection.parameter_cut import share
from weft.models.attention import RMSNorm
from weft.models.expert_rows import sort_by_expert, through_experts
from weft.models.experts import SparseMLP
from weft.serve.model.linear import ModelAxes, served_norm, summed
from weft.serve.weights.fast_path import Place, fast_path, kernel_of
from weft.serve.weights.packed_experts import PackedExperts


class ServedExperts:
    """Adds the results of a layer of experts to the residual stream, which all ranks have.

    Each rank of `expert` computes the rows of its own experts; their sums over the axis are the results. An expert that
    all tokens use is whole on each rank: `refuse_plan` refuses to split it over x.
    """

    linears = ()

    def __init__(self, mlp: SparseMLP, norm: nn.Module, place: Place, axes: ModelAxes) -> None:
        self._mlp, self._norm, self._axes = mlp, norm, axes
        self._normed = served_norm(norm, place, axes.y)
        is_packed = axes.expert is None and isinstance(mlp.experts, PackedExperts)
        self._packed: PackedExperts | None = mlp.experts if is_packed else None  # type: ignore[assignment]
        can_route = is_packed and isinstance(norm, RMSNorm) and not mlp.gate.is_sigmoid
        num_experts = mlp.gate.num_experts if can_route else 1 << 30
        self._routes = fast_path("route", place, sizes=(num_experts, num_experts))

    def __call__(self, residual: Tensor) -> Tensor:
        mlp, axes = self._mlp, self._axes
        hidden, weights, experts = self._routed(residual)
        if self._packed is not None:
            if not mlp.has_others:
                return self._packed.of_tokens(hidden, weights, experts, residual)
            out = self._packed.of_tokens(hidden, weights, experts)
        else:
            order = sort_by_expert(experts, mlp.gate.num_experts)
            out = summed(through_experts(hidden, weights, order, self._own_experts), axes.expert)
        return residual + mlp.with_others(out, hidden)

    def _routed(self, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return norm(residual) [tokens, hidden], and what the router gives for it: weights and experts [tokens, k]."""
        if kernel_of(self._routes, len(residual)) == "kernel":
            from weft.serve.weights.expert_kernel import route_by_kernel

            return route_by_kernel(residual, self._norm, self._mlp.gate)  # type: ignore[arg-type]
        hidden = self._normed(residual)
        return hidden, *self._mlp.gate(hidden[None])

    def _own_experts(self, rows: Tensor, ends: Tensor | None) -> Tensor:
        """Return the results of this rank's experts for their rows, zeros for all others. Rows are sorted by expert."""
        assert ends is not None, "there is no capacity in serving"
        axis: Axis | None = self._axes.expert
        if axis is None:
            out: Tensor = self._mlp.experts(rows, ends)
            return out
        first, last = share(self._mlp.gate.num_experts, axis.degree, axis.index)
        begin = int(ends[first - 1]) if first else 0
        end = int(ends[last - 1])
        results = torch.zeros_like(rows)
        if end > begin:
            results[begin:end] = self._mlp.experts(rows[begin:end], ends[first:last] - begin)
        return results

"""Layers of which this rank holds a part, as training's tensor axes cut them (`parallel/tensor/cuts.py`).

    column   [out / x, in / y]: gives this rank's outputs; partial sums over the inputs are added over y
    row      [out / y, in / x]: takes what columns gave; partial sums are added over x
    norm     of features split over y: moments are added over y
    lookup   rows of a table split over x, columns over y: the rank that has a row gives it, the others zeros

Without axes these are the functions of `fused.py`. Every rank of an axis makes the same calls in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm import Axis, all_gather, all_reduce
from weft.inspection.parameter_cut import share
from weft.models.expert_rows import sort_by_expert, through_experts
from weft.models.experts import SparseMLP, SwiGLU
from weft.parallel.tensor.norm import split_norm
from weft.serve.model.fused import add_linear, gated, linear, norm_linear, normed, product, routed
from weft.serve.weights.packed_experts import PackedExperts


@dataclass(frozen=True)
class ModelAxes:
    """The axes over which ranks hold parts of each layer; None where they do not."""

    x: Axis | None = None
    y: Axis | None = None
    expert: Axis | None = None
    context: Axis | None = None  # over pages of the cache, not over weights


def summed(value: Tensor, axis: Axis | None) -> Tensor:
    """The sum of a value over an axis, in place."""
    if axis is not None:
        all_reduce(value, axis).wait()
    return value


def norm_of(hidden: Tensor, norm: nn.Module, axes: ModelAxes) -> Tensor:
    """The norm of hidden states [tokens, hidden / y]."""
    return normed(hidden, norm) if axes.y is None else split_norm(norm, axes.y, hidden)


def norm_column(hidden: Tensor, norm: nn.Module, layer: nn.Linear, axes: ModelAxes, is_gated: bool = False) -> Tensor:
    """layer(norm(hidden)), its outputs of this rank. If `is_gated`, silu(gate) * up of them."""
    if axes.y is None:
        return norm_linear(hidden, norm, layer, is_gated)
    out = column(norm_of(hidden, norm, axes), layer, axes)
    return gated(out) if is_gated else out


def column(hidden: Tensor, layer: nn.Linear, axes: ModelAxes) -> Tensor:
    """layer(hidden), its outputs of this rank."""
    if axes.y is None:
        return linear(hidden, layer)
    out = summed(product(hidden, layer), axes.y)
    return out if layer.bias is None else out + layer.bias


def add_row(residual: Tensor, hidden: Tensor, layer: nn.Linear, axes: ModelAxes) -> Tensor:
    """residual + layer(hidden), where hidden is what a column gave."""
    if axes.x is None:
        return add_linear(residual, hidden, layer)
    out = residual + summed(product(hidden, layer), axes.x)
    return out if layer.bias is None else out + layer.bias


def lookup(table: nn.Embedding, ids: Tensor, axes: ModelAxes) -> Tensor:
    """The rows of a table [tokens, hidden / y]; zeros where another rank of x has the row. Their sum is the lookup."""
    if axes.x is None:
        return F.embedding(ids, table.weight)
    begin, end = share(table.num_embeddings, axes.x.degree, axes.x.index)
    is_here = (ids >= begin) & (ids < end)
    rows = F.embedding(torch.where(is_here, ids - begin, 0), table.weight)
    return rows * is_here[:, None]


def gathered_logits(part: Tensor, vocab_size: int, axes: ModelAxes) -> Tensor:
    """The logits [rows, vocab] from this rank's part of the vocabulary. Parts are padded to the largest."""
    if axes.x is None:
        return part
    sizes = [end - begin for begin, end in (share(vocab_size, axes.x.degree, i) for i in range(axes.x.degree))]
    padded = F.pad(part, (0, sizes[0] - part.shape[1])).contiguous()
    parts = part.new_empty(axes.x.degree, *padded.shape)
    all_gather(parts.view(-1), padded.view(-1), axes.x).wait()
    return torch.cat([one[:, :size] for one, size in zip(parts, sizes, strict=True)], dim=1)


def gathered_features(part: Tensor, axes: ModelAxes) -> Tensor:
    """Hidden states [rows, hidden] from this rank's features."""
    if axes.y is None:
        return part
    parts = part.new_empty(axes.y.degree, *part.shape)
    all_gather(parts.view(-1), part.contiguous().view(-1), axes.y).wait()
    return torch.cat(list(parts), dim=1)


def add_experts(residual: Tensor, norm: nn.Module, mlp: SparseMLP, axes: ModelAxes) -> Tensor:
    """residual + the results of a layer of experts for the norm of the residual stream, which all ranks have.

    Each rank of `expert` computes the rows of its own experts; their sums over the axis are the results.
    """
    if axes.expert is None and isinstance(mlp.experts, PackedExperts):
        hidden, weights, experts = routed(residual, norm, mlp.gate)
        if not mlp.has_others:
            return mlp.experts.of_tokens(hidden, weights, experts, residual)
        out = mlp.experts.of_tokens(hidden, weights, experts)
    else:
        hidden = norm_of(residual, norm, axes)
        weights, experts = mlp.gate(hidden[None])

        def compute(rows: Tensor, ends: Tensor | None) -> Tensor:
            assert ends is not None  # there is no capacity in serving
            return _own_experts(rows, ends, mlp, axes.expert)

        order = sort_by_expert(experts, mlp.gate.num_experts)
        out = summed(through_experts(hidden, weights, order, compute), axes.expert)
    if axes.x is None:
        return residual + mlp.with_others(out, hidden)
    if mlp.shared_expert is not None and mlp.shared_expert_gate is not None:
        shared: SwiGLU = mlp.shared_expert
        inner = F.silu(product(hidden, shared.gate_proj)) * product(hidden, shared.up_proj)
        shared_out = summed(product(inner, shared.down_proj), axes.x)
        out = out + mlp.shared_expert_gate(hidden).sigmoid() * shared_out
    return residual + out


def _own_experts(rows: Tensor, ends: Tensor, mlp: SparseMLP, axis: Axis | None) -> Tensor:
    """The results of this rank's experts for their rows, zeros for all others. Rows are sorted by expert."""
    if axis is None:
        out: Tensor = mlp.experts(rows, ends)
        return out
    first, last = share(mlp.gate.num_experts, axis.degree, axis.index)
    begin = int(ends[first - 1]) if first else 0
    end = int(ends[last - 1])
    results = torch.zeros_like(rows)
    if end > begin:
        results[begin:end] = mlp.experts(rows[begin:end], ends[first:last] - begin)
    return results

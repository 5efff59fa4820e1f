"""Sends the rows of tokens to the ranks that hold their experts, and the results back.

    rows of this rank's tokens, sorted by expert ──all-to-all──▶ rows of all ranks for this rank's experts
                                                    sorted by expert, computed, back in the order of arrival
    results in the order of the rows             ◀──all-to-all── results

Here no row is dropped. Ranks first exchange the number of rows for each expert, unless experts have a capacity: then
all have equally many rows. Every rank makes the same calls whatever the routing is: experts without rows compute with
none, and their gradients are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis, all_to_all
from weft.inspection.first_order import Transposable, first_order

Compute = Callable[[Tensor, Tensor | None], Tensor]  # `StackedExperts.forward`


@torch._disable_dynamo  # type: ignore[attr-defined]  # collectives and the ledger are not part of a compiled graph
def compute_on_owners(forward: Compute, axis: Axis, num_experts: int, rows: Tensor, ends: Tensor | None) -> Tensor:
    """Returns the results of experts for rows [rows, hidden], which are sorted by expert.

    Expert i of all ranks' `num_experts` experts ends before row `ends[i]`; without `ends`, all have as many rows.
    `forward(rows, ends)` computes with this rank's experts, which are equally many on each rank.
    """
    if ends is None:
        return _compute_even(forward, axis, num_experts, rows)
    counts = ends.long().diff(prepend=ends.new_zeros(1).long())
    arriving = torch.empty_like(counts)  # [ranks * local experts]
    all_to_all(arriving, counts, axis).wait()
    by_rank = torch.stack([counts, arriving]).view(2, axis.degree, -1)
    sent, received = by_rank.sum(-1).tolist()
    num_local = by_rank.shape[-1]
    experts = torch.arange(num_local, device=rows.device).repeat(axis.degree)
    order = experts.repeat_interleave(arriving, output_size=sum(received)).argsort(stable=True)
    inverse = order.argsort()
    own = _Permute.apply(_EXCHANGE.apply(rows, axis, sent, received), order, inverse)
    results = forward(own, by_rank[1].sum(0).cumsum(0).to(torch.int32))
    return _EXCHANGE.apply(_Permute.apply(results, inverse, order), axis, received, sent)


def _compute_even(forward: Compute, axis: Axis, num_experts: int, rows: Tensor) -> Tensor:
    """Returns the results of experts that have equally many rows, of each rank's tokens."""
    parts = [len(rows) // axis.degree] * axis.degree
    arrived = _EXCHANGE.apply(rows, axis, parts, parts).unflatten(0, (axis.degree, num_experts // axis.degree, -1))
    results = forward(arrived.transpose(0, 1).flatten(0, 2), None)  # [local experts * ranks * rows, hidden]
    ordered = results.view_as(arrived.transpose(0, 1)).transpose(0, 1).flatten(0, 2)
    return _EXCHANGE.apply(ordered, axis, parts, parts)


def _exchange(rows: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    all_to_all(arrived, rows.contiguous(), axis, (received, sent)).wait()
    return arrived


# Sends so many rows to each rank and receives so many. Its backward sends gradients the other way.
_EXCHANGE = Transposable(
    _exchange, lambda gradient, axis, sent, received: _exchange(gradient, axis, received, sent), "expert"
)


class _Permute(torch.autograd.Function):
    """Rows in another order, of which `inverse` is the inverse."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    @first_order("expert")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse], None, None

"""Rows for experts: which row holds which token, gathered in and summed out.

A token that goes to k experts has k *pairs* of token and choice, numbered token * k + choice. Experts compute on rows
that are sorted by expert:

    sorted pairs    one row for each pair; experts have as many rows as tokens chose them
    slots           each expert has the same number of rows for every sequence (its capacity); pairs above it are
                    dropped, and rows without a pair are zeros

The host waits for nothing: shapes do not depend on where tokens go. Results do not depend on the order of additions on
a device, because nothing is summed by atomic additions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.models import row_operations  # noqa: F401 (defines the operations)

operations = torch.ops.weft
# splitmix64, a mixing function of 64-bit integers: its constants as signed numbers.
_STEP, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685


@dataclass(frozen=True)
class RowOrder:
    """Which row belongs to which pair.

    `sources` [rows] is the pair of each row, or the number of pairs for a row without one. `places` [pairs] is the row
    of each pair, or the number of rows for a dropped pair. Expert i's rows end before `ends[i]` (int32); None: all
    experts have equally many rows, and there may be rows without a pair and dropped pairs.
    """

    sources: Tensor
    places: Tensor
    ends: Tensor | None


def sort_by_expert(experts: Tensor, num_experts: int) -> RowOrder:
    """Sort the pairs of tokens and experts [..., k] by expert, those of one expert by token."""
    ordered, order = experts.flatten().to(torch.int16).sort(stable=True)  # fewer bits are sorted faster on GPUs
    numbers = torch.arange(num_experts, dtype=torch.int16, device=experts.device)
    ends = torch.searchsorted(ordered, numbers, right=True)
    places = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=experts.device))
    return RowOrder(order, places, ends.to(torch.int32))


def align_groups(order: RowOrder, multiple: int) -> RowOrder:
    """Returns the order with rows without a pair behind each expert's, so that experts end at a multiple.

    There are as many rows as any routing needs; those behind the last expert have no pair either.
    """
    assert order.ends is not None
    device, num_pairs = order.ends.device, len(order.sources)
    ends = order.ends.long()
    counts = ends.diff(prepend=ends.new_zeros(1))
    padded = (counts + multiple - 1) // multiple * multiple
    shifts = (padded - counts).cumsum(0) - (padded - counts)  # rows without a pair before each expert
    rows = torch.arange(num_pairs, device=device)
    moved = rows + shifts[torch.searchsorted(ends, rows, right=True)]
    num_rows = -(-num_pairs // multiple) * multiple + multiple * len(ends)
    sources = torch.full((num_rows,), num_pairs, device=device).scatter(0, moved, order.sources)
    return RowOrder(sources, moved[order.places], padded.cumsum(0).to(torch.int32))


def fill_slots(
    experts: Tensor, num_experts: int, capacity: int, priorities: Tensor | None = None, used: Tensor | None = None
) -> RowOrder:
    """Give each pair of tokens and experts [batch, sequence, k] a slot: rows [experts, batch, capacity].

    An expert takes at most `capacity` tokens of each sequence: those with the smallest `priorities` [batch, sequence],
    or the first ones. It takes none that is not `used` [batch, sequence].
    """
    batch, _, k = experts.shape
    groups = experts * batch + torch.arange(batch, device=experts.device)[:, None, None]
    if used is not None:  # a last group, without slots
        groups = groups.masked_fill(~used[..., None], num_experts * batch)
    groups = groups.flatten()
    if priorities is None:
        ordered, order = groups.sort(stable=True)
    else:
        drawn = priorities.flatten().repeat_interleave(k).argsort(stable=True)
        ordered, inner = groups[drawn].sort(stable=True)
        order = drawn[inner]
    starts = torch.searchsorted(ordered, torch.arange(num_experts * batch + 1, device=experts.device))
    position = torch.arange(len(order), device=experts.device) - starts[ordered]
    num_rows = num_experts * batch * capacity
    slot = torch.where(position < capacity, (ordered * capacity + position).clamp(max=num_rows), num_rows)
    sources = torch.full((num_rows + 1,), len(order), device=experts.device).scatter(0, slot, order)[:-1]
    return RowOrder(sources, torch.empty_like(order).scatter(0, order, slot), None)


def sequence_keys(tokens: Tensor) -> Tensor:
    """Returns a number for each sequence of tokens [batch, sequence] that depends on all of its tokens [batch].

    Random draws that follow from it are the same in every layout and in a resumed run.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device) * _STEP
    return _mixed(_mixed(tokens + positions).sum(1))


def draw_priorities(keys: Tensor, sequence: int) -> Tensor:
    """Returns a random 64-bit number for each token of sequences with these keys [batch] of a layer.

    Those of layer i are `sequence_keys` + i. The layer is no argument here: each layer would be compiled anew.
    """
    positions = torch.arange(sequence, device=keys.device) * _STEP
    return _mixed(_mixed(keys)[:, None] + positions)


def _mixed(numbers: Tensor) -> Tensor:
    """Returns splitmix64's mix of 64-bit integers. It shifts unsigned numbers, so copies of the sign are removed."""
    numbers = (numbers ^ ((numbers >> 30) & (2**34 - 1))) * _FIRST
    numbers = (numbers ^ ((numbers >> 27) & (2**37 - 1))) * _SECOND
    return numbers ^ ((numbers >> 31) & (2**33 - 1))


def through_experts(
    tokens: Tensor, weights: Tensor, order: RowOrder, compute: Callable[[Tensor, Tensor | None], Tensor]
) -> Tensor:
    """Returns for tokens [tokens, hidden] the sums of their experts' results, times the weights [tokens, k].

    `compute(rows, ends)` is as `StackedExperts`. Dropped pairs add nothing.
    """
    is_padded = order.ends is None
    rows = _TakeRows.apply(tokens, order.sources, order.places, is_padded)
    results = compute(rows, order.ends)
    out: Tensor = _CombineRows.apply(results, weights, order.sources, order.places, is_padded)
    return out


class _TakeRows(torch.autograd.Function):
    """Rows of tokens. Its backward sums the gradients of a token's rows in their own order."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, sources: Tensor, places: Tensor, is_padded: bool) -> Tensor:
        ctx.save_for_backward(places)
        ctx.k, ctx.is_padded = len(places) // len(tokens), is_padded
        rows: Tensor = operations.take_rows(tokens, sources, ctx.k, is_padded)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return operations.sum_rows(gradient, places, None, ctx.k, ctx.is_padded), None, None, None


class _CombineRows(torch.autograd.Function):
    """The sum of each token's rows, times their weights [tokens, k], in the dtype of the rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, sources: Tensor, places: Tensor, is_padded: bool) -> Tensor:
        ctx.save_for_backward(rows, weights, sources, places)
        ctx.is_padded = is_padded
        out: Tensor = operations.sum_rows(rows, places, weights, weights.shape[1], is_padded)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows, weights, sources, places = ctx.saved_tensors
        found = operations.spread_rows(gradient, rows, weights, sources, places, ctx.is_padded)
        return found[0], found[1], None, None, None

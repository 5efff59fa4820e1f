"""Causal attention over a sequence that is split over an axis, by two exact algorithms, forward and backward.

The sequence is cut into 2·p equal chunks for p ranks, and rank i holds chunks i and 2p-1-i (`zigzag`). So the queries
of every rank see the same number of keys: half of all pairs. Every rank can compute all positions; only K, V and heads
are sent.

    ring         K and V are sent around the ring of ranks, and each rank accumulates the attention of its queries to
                 them (Liu et al., Ring Attention, 2023). Any number of heads; saves O(sequence / p).
    all-to-all   every rank exchanges its part of the sequence for the whole sequence of a part of the heads, computes
                 attention as one device would, and exchanges back (Jacobs et al., DeepSpeed-Ulysses, 2023). p must
                 divide the heads.

Calls per rank, with kv = batch·kv_heads·local_sequence·head_dim elements in K, q = batch·heads·local_sequence·head_dim
in the queries, c bytes an element (w = max(c, 4) where gradients add up), r = p / gcd(kv_heads, p):

                 forward                                            backward
    ring         2(p-1) sends of kv·c                               2(p-1) sends of kv·c and 2(p-1) of kv·w
    all-to-all   one all_to_all of (q + 2·r·kv)·c, one of q·c       the same
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis, all_gather, all_to_all, shift
from weft.inspection.first_order import Transposable, first_order
from weft.parallel.context.block_attention import (
    CAUSAL,
    AttentionResult,
    GradientSums,
    Mask,
    PartialSoftmax,
    Rows,
    VisibleBlock,
    attend,
    attend_backward,
    wide_dtype,
)

Calls = list[tuple[str, int]]  # the operation and the bytes of each call


# --- which rank holds which rows


def zigzag(sequence: int, degree: int, index: int) -> Tensor:
    """Returns the positions of the rows that rank `index` holds, ascending: [sequence / degree]."""
    assert sequence % (2 * degree) == 0
    return torch.cat([torch.arange(rows.position, rows.end) for rows in _runs(sequence // degree, degree, index)])


def visible_block(local_sequence: int, degree: int, own: int, peer: int) -> VisibleBlock:
    """Returns which rows of rank `own`'s queries see which rows of rank `peer`'s keys: half of all pairs for any ranks.

    An earlier peer's second chunk lies after all queries. A later peer's two chunks lie between the two of the queries.
    """
    query_rows, key_rows = _runs(local_sequence, degree, own), _runs(local_sequence, degree, peer)
    if peer < own:
        return VisibleBlock(query_rows, key_rows[:1])
    return VisibleBlock(query_rows if peer == own else query_rows[1:], key_rows)


def gather_documents(documents: Tensor, axis: Axis) -> Tensor:
    """Gathers document ids [batch, local_sequence] of all ranks to [batch, sequence] in the sequence's order.

    It is one all_gather. The ids are the same for every layer, so one call for each batch is enough.
    """
    parts = documents.new_empty((axis.degree, *documents.shape))
    all_gather(parts, documents[None].contiguous(), axis).wait()
    return _in_order(parts.transpose(0, 1).flatten(1), axis, dim=1)


def _runs(local_sequence: int, degree: int, index: int) -> tuple[Rows, Rows]:
    """Returns the two chunks of a rank. The first lies before the second, so local order is the sequence's order."""
    assert local_sequence % 2 == 0
    chunk = local_sequence // 2
    first, second = index * chunk, (2 * degree - 1 - index) * chunk
    return Rows(0, chunk, first), Rows(chunk, local_sequence, second)


def _in_order(by_rank: Tensor, axis: Axis, dim: int) -> Tensor:
    """Reorders rows from the order of ranks to the order of the sequence."""
    return by_rank.index_select(dim, _positions(by_rank, axis, dim).argsort())


def _positions(whole: Tensor, axis: Axis, dim: int) -> Tensor:
    """Returns the positions in the sequence of the rows of all ranks, in the order of ranks."""
    ranks = range(axis.degree)
    return torch.cat([zigzag(whole.shape[dim], axis.degree, index) for index in ranks]).to(whole.device)


# --- ring


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, axis: Axis, mask: Mask = CAUSAL, scale: float | None = None
) -> Tensor:
    """Returns the attention of this rank's rows (`zigzag`) to the whole sequence. Sends of K and V overlap with it.

    query [batch, heads, local_sequence, head_dim]; key and value [batch, kv_heads, local_sequence, head_dim]; out like
    query. The document ids of `mask` are those of the whole sequence (`gather_documents`). `scale` is 1 /
    sqrt(head_dim) unless given.
    """
    sequence = query.shape[2] * axis.degree
    assert mask.documents is None or mask.documents.shape == (query.shape[0], sequence)
    if mask.sliding_window is not None and mask.sliding_window >= sequence:
        mask = Mask(None, mask.documents)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = _RingAttention.apply(query, key, value, axis, mask, scale)
    return out


def ring_traffic(
    batch: int, kv_heads: int, local_sequence: int, head_dim: int, itemsize: int, degree: int
) -> tuple[Calls, Calls]:
    """Returns the operation and bytes of each call in a rank's forward, and in its backward."""
    numel = batch * kv_heads * local_sequence * head_dim
    keys_and_values = [("send", numel * itemsize)] * 2 * (degree - 1)
    gradients = [("send", numel * max(itemsize, 4))] * 2 * (degree - 1)
    return keys_and_values, keys_and_values + gradients


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, axis: Axis, mask: Mask, scale: float) -> Tensor:
        softmax = PartialSoftmax(query)
        for peer, peer_key, peer_value in _rotate(key, value, axis):
            block = visible_block(query.shape[2], axis.degree, axis.index, peer)
            attend(softmax, query, peer_key, peer_value, block, mask, scale)
        out, logsumexp = softmax.finish()
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.axis, ctx.mask, ctx.scale = axis, mask, scale
        return out

    @staticmethod
    @first_order("context")
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logsumexp = ctx.saved_tensors
        axis: Axis = ctx.axis
        if grad_out.stride(-1) != 1 or 0 in grad_out.stride():  # expanded, as of a sum: kernels may not support it
            grad_out = grad_out.contiguous()
        result = AttentionResult(query, out, grad_out, logsumexp)
        grad_query = _zeros(query)
        home = _zeros(key), _zeros(value)
        # Gradients of a K and V that other ranks add are sent around the ring after them. The last shift returns them.
        arrived, pending = home, None
        for peer, peer_key, peer_value in _rotate(key, value, axis):
            block = visible_block(query.shape[2], axis.degree, axis.index, peer)
            sums = home if peer == axis.index else (_zeros(key), _zeros(value))
            attend_backward(GradientSums(grad_query, *sums), result, peer_key, peer_value, block, ctx.mask, ctx.scale)
            if peer == axis.index:
                continue
            if pending is not None:
                pending.wait()
                _add(sums, arrived)
            arrived = torch.empty_like(sums[0]), torch.empty_like(sums[1])
            pending = shift(arrived, sums, axis)
        if pending is not None:
            pending.wait()
            _add(home, arrived)
        return grad_query.to(query.dtype), home[0].to(key.dtype), home[1].to(value.dtype), None, None, None


def _rotate(key: Tensor, value: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields (rank, its K, its V) for this rank, the one before it, and so on. The next K and V are sent meanwhile."""
    key, value = key.contiguous(), value.contiguous()
    for step in range(axis.degree - 1):
        following = torch.empty_like(key), torch.empty_like(value)
        pending = shift(following, (key, value), axis)
        yield (axis.index - step) % axis.degree, key, value
        pending.wait()
        key, value = following
    yield (axis.index + 1) % axis.degree, key, value


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, dtype=wide_dtype(tensor.dtype), memory_format=torch.contiguous_format)


def _add(sums: tuple[Tensor, Tensor], more: tuple[Tensor, Tensor]) -> None:
    for total, part in zip(sums, more, strict=True):
        total.add_(part)


# --- all-to-all


def all_to_all_attention(
    query: Tensor, key: Tensor, value: Tensor, axis: Axis, mask: Mask = CAUSAL, scale: float | None = None
) -> Tensor:
    """Computes what `ring_attention` does, with the same arguments, by two all-to-alls."""
    degree, local_sequence = axis.degree, query.shape[2]
    assert query.shape[1] % degree == 0
    repeats = _repeats(key.shape[1], degree)
    key, value = (heads.repeat_interleave(repeats, dim=1) for heads in (key, value))
    # [batch, heads, local_sequence, head_dim] -> [ranks, batch, heads of one, local_sequence, head_dim]
    parts = [heads.unflatten(1, (degree, -1)).transpose(0, 1) for heads in (query, key, value)]
    received = _ALL_TO_ALL.apply(torch.cat(parts, dim=2), axis)
    # [ranks, batch, heads of one, local_sequence, head_dim] -> [batch, heads of one, sequence, head_dim]
    whole = _in_order(received.permute(1, 2, 0, 3, 4).flatten(2, 3), axis, dim=2)
    query, key, value = whole.split([part.shape[2] for part in parts], dim=1)
    alone = Axis(axis.name, 1, 0, None, axis.ledger)
    out = ring_attention(query, key, value, alone, mask, scale)
    by_rank = out.index_select(2, _positions(out, axis, dim=2))
    rows = by_rank.unflatten(2, (degree, local_sequence)).permute(2, 0, 1, 3, 4)
    returned = _ALL_TO_ALL.apply(rows, axis)  # [ranks, batch, heads of one, local_sequence, head_dim]
    return returned.transpose(0, 1).flatten(1, 2)


def all_to_all_traffic(
    batch: int, heads: int, kv_heads: int, local_sequence: int, head_dim: int, itemsize: int, degree: int
) -> tuple[Calls, Calls]:
    """Returns the operation and bytes of each call in a rank's forward, and in its backward."""
    if degree == 1:
        return [], []
    row_bytes = batch * local_sequence * head_dim * itemsize  # of one head
    there = ("all_to_all", (heads + 2 * kv_heads * _repeats(kv_heads, degree)) * row_bytes)
    back = ("all_to_all", heads * row_bytes)
    return [there, back], [back, there]


def _repeats(kv_heads: int, degree: int) -> int:
    """Returns how often each key head is repeated, so that every rank gets the key heads of its query heads."""
    return degree // math.gcd(kv_heads, degree)


def _exchange(sent: Tensor, axis: Axis) -> Tensor:
    received = torch.empty_like(sent, memory_format=torch.contiguous_format)
    all_to_all(received, sent.contiguous(), axis).wait()
    return received


# Sends part i of the first dim to rank i. Backward is the same operation: gradients return to the senders.
_ALL_TO_ALL = Transposable(_exchange, _exchange, "context")

"""Causal attention of some rows of a sequence to some others: one part of a softmax, to be added to other parts.

The keys of a softmax may never be on one device at the same time. Each part has a numerator, a denominator and the peak
that both are scaled by (`PartialSoftmax`). Backward needs only the result and the logsumexp of each row of the whole
softmax, so each part of the gradient is exact by itself (Dao et al., FlashAttention, 2022). Sums are in float32, or in
float64 for float64.

If only causality masks keys, parts use torch's flash kernels. Otherwise they are computed by matmuls in tiles of `TILE`
by `TILE` rows: no larger matrix of scores exists, and tiles that are fully masked are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 1024

_aten = torch.ops.aten


@dataclass(frozen=True)
class Rows:
    """Rows `start` to `stop` of a rank's tensor. They are consecutive in the sequence, beginning at `position`."""

    start: int
    stop: int
    position: int

    @property
    def end(self) -> int:
        """The position after the last row's."""
        return self.position + self.stop - self.start

    def tiles(self) -> Iterator[Rows]:
        """Yields the rows in pieces of at most `TILE`."""
        for start in range(self.start, self.stop, TILE):
            yield Rows(start, min(start + TILE, self.stop), self.position + start - self.start)


@dataclass(frozen=True)
class Mask:
    """A position sees itself and those before it, less than `sliding_window` away, with the same document id.

    `documents` holds the ids [batch, sequence] of the whole sequence, in its order.
    """

    sliding_window: int | None = None
    documents: Tensor | None = None

    def sees(self, query: Rows, key: Rows) -> bool:
        """Can any position of `query` see any of `key`? Documents are not considered."""
        near = self.sliding_window is None or query.position - (key.end - 1) < self.sliding_window
        return key.position < query.end and near

    def hidden(self, query: Rows, key: Rows, device: torch.device) -> Tensor | None:
        """Returns the mask of hidden keys, [rows, keys] or [batch, 1, 1, rows, keys]; None if no key is hidden."""
        hidden: Tensor | None = None
        window = query.end if self.sliding_window is None else self.sliding_window
        if key.end - 1 > query.position or query.end - 1 - key.position >= window:
            query_positions = torch.arange(query.position, query.end, device=device)
            distance = query_positions[:, None] - torch.arange(key.position, key.end, device=device)
            hidden = (distance < 0) | (distance >= window)
        if self.documents is not None:
            query_ids = self.documents[:, None, None, query.position : query.end, None]
            other = query_ids != self.documents[:, None, None, None, key.position : key.end]
            hidden = other if hidden is None else other | hidden
        return hidden


CAUSAL = Mask()


@dataclass(frozen=True)
class VisibleBlock:
    """The rows of one rank's queries that see some of another rank's keys, and the rows of these keys."""

    query_rows: tuple[Rows, ...]
    key_rows: tuple[Rows, ...]

    @property
    def queries(self) -> slice:
        return slice(self.query_rows[0].start, self.query_rows[-1].stop)

    @property
    def keys(self) -> slice:
        return slice(self.key_rows[0].start, self.key_rows[-1].stop)

    @property
    def is_causal(self) -> bool:
        """Does causality hide keys inside the block? It does for a rank's own keys only."""
        return self.query_rows == self.key_rows


class PartialSoftmax:
    """softmax(scores) @ value for `query` [batch, heads, sequence, head_dim], over keys that come in parts."""

    def __init__(self, query: Tensor) -> None:
        self.numerator = torch.zeros_like(query, dtype=wide_dtype(query.dtype), memory_format=torch.contiguous_format)
        self.denominator = torch.zeros_like(self.numerator[..., :1])  # [batch, heads, sequence, 1]
        # The lowest finite number, not -inf: a row without keys so far must not subtract infinities.
        self.peak = torch.full_like(self.denominator, torch.finfo(self.numerator.dtype).min)

    def add(self, rows: slice, numerator: Tensor, denominator: Tensor, peak: Tensor) -> None:
        """Add a part for some rows: sums of exp(score - peak) * value and of exp(score - peak)."""
        old_peak = self.peak[:, :, rows]
        new_peak = torch.maximum(old_peak, peak)
        old_weight, weight = (old_peak - new_peak).exp_(), (peak - new_peak).exp_()
        self.numerator[:, :, rows].mul_(old_weight).add_(numerator * weight)
        self.denominator[:, :, rows].mul_(old_weight).add_(denominator * weight)
        old_peak.copy_(new_peak)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Returns the result [batch, heads, sequence, head_dim] and logsumexp [batch, heads, sequence] of all parts."""
        return self.numerator / self.denominator, (self.peak + self.denominator.log()).squeeze(-1)


@dataclass(frozen=True)
class AttentionResult:
    """Queries, result, gradient of the result, and logsumexp of each row of a whole softmax, for backward."""

    query: Tensor
    out: Tensor
    grad_out: Tensor
    logsumexp: Tensor


@dataclass(frozen=True)
class GradientSums:
    """Sums of the gradients of query, key and value so far, in the dtype of sums."""

    query: Tensor
    key: Tensor
    value: Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which sums of `dtype` are computed."""
    return torch.promote_types(dtype, torch.float32)


def attend(
    softmax: PartialSoftmax, query: Tensor, key: Tensor, value: Tensor, block: VisibleBlock, mask: Mask, scale: float
) -> None:
    """Add the attention of the block's queries to its keys to `softmax`.

    query [batch, heads, sequence, head_dim]; key and value [batch, kv_heads, sequence, head_dim].
    """
    if _can_fuse(query, key, value, mask):
        parts = query[:, :, block.queries], key[:, :, block.keys], value[:, :, block.keys]
        out, logsumexp = _flash(*parts, block.is_causal, scale)
        softmax.add(block.queries, out, torch.ones_like(logsumexp)[..., None], logsumexp[..., None])
        return
    for query_rows, key_rows in _visible_tiles(block, mask):
        rows, keys = slice(query_rows.start, query_rows.stop), slice(key_rows.start, key_rows.stop)
        hidden = mask.hidden(query_rows, key_rows, query.device)
        part = _attend_tile(_group(query[:, :, rows], key) * scale, _wide(key, keys), _wide(value, keys), hidden)
        softmax.add(rows, *(tensor.flatten(1, 2) for tensor in part))


def attend_backward(
    gradients: GradientSums,
    result: AttentionResult,
    key: Tensor,
    value: Tensor,
    block: VisibleBlock,
    mask: Mask,
    scale: float,
) -> None:
    """Add the block's part of the gradients of query, key and value."""
    if _can_fuse(result.query, key, value, mask):
        parts = _flash_backward(result, key[:, :, block.keys], value[:, :, block.keys], block, scale)
        gradients.query[:, :, block.queries].add_(parts[0])
        gradients.key[:, :, block.keys].add_(parts[1])
        gradients.value[:, :, block.keys].add_(parts[2])
        return
    for query_rows, key_rows in _visible_tiles(block, mask):
        rows, keys = slice(query_rows.start, query_rows.stop), slice(key_rows.start, key_rows.stop)
        hidden = mask.hidden(query_rows, key_rows, key.device)
        own = [_group(tensor[:, :, rows], key) for tensor in (result.query, result.out, result.grad_out)]
        logsumexp = _group(result.logsumexp[:, :, rows, None], key)
        grad_query, grad_key, grad_value = _attend_tile_backward(
            own[0] * scale, own[1], own[2], logsumexp, _wide(key, keys), _wide(value, keys), hidden
        )
        gradients.query[:, :, rows].add_(grad_query.flatten(1, 2), alpha=scale)
        gradients.key[:, :, keys].add_(grad_key)
        gradients.value[:, :, keys].add_(grad_value)


# --- tiles: query, out and their gradients as [batch, kv_heads, group, rows, head_dim], all in the dtype of sums


def _attend_tile(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(query, key, hidden)
    peak = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)  # finite for rows without keys
    weights = scores.sub_(peak).exp_()
    return _times(weights, value), weights.sum(-1, keepdim=True), peak


def _attend_tile_backward(
    query: Tensor, out: Tensor, grad_out: Tensor, logsumexp: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    weights = _scores(query, key, hidden).sub_(logsumexp).exp_()
    grad_value = weights.flatten(2, 3).mT @ grad_out.flatten(2, 3)  # summed over the group: [.., keys, head_dim]
    inner = (grad_out * out).sum(-1, keepdim=True)  # from the normalisation of the weights
    grad_scores = _times(grad_out, value.mT).sub_(inner).mul_(weights)
    return _times(grad_scores, key), grad_scores.flatten(2, 3).mT @ query.flatten(2, 3), grad_value


def _scores(query: Tensor, key: Tensor, hidden: Tensor | None) -> Tensor:
    scores = _times(query, key.mT)  # [batch, kv_heads, group, rows, keys]
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)


def _times(grouped: Tensor, matrix: Tensor) -> Tensor:
    """Returns [batch, kv_heads, group, rows, n] @ [batch, kv_heads, n, m] without copying the matrix for each group."""
    product: Tensor = (grouped.flatten(2, 3) @ matrix).unflatten(2, grouped.shape[2:4])
    return product


def _group(tensor: Tensor, key: Tensor) -> Tensor:
    """Reshapes [batch, heads, rows, n] to [batch, kv_heads, group, rows, n]: the query heads that share a key head."""
    grouped: Tensor = tensor.to(wide_dtype(tensor.dtype)).unflatten(1, (key.shape[1], -1))
    return grouped


def _wide(tensor: Tensor, rows: slice) -> Tensor:
    return tensor[:, :, rows].to(wide_dtype(tensor.dtype))


def _visible_tiles(block: VisibleBlock, mask: Mask) -> Iterator[tuple[Rows, Rows]]:
    for query_rows in block.query_rows:
        for query_tile in query_rows.tiles():
            for key_rows in block.key_rows:
                for key_tile in key_rows.tiles():
                    if mask.sees(query_tile, key_tile):
                        yield query_tile, key_tile


# --- torch's kernels, by private names, because the public function does not return the logsumexp


def _can_fuse(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> bool:
    if mask.sliding_window is not None or mask.documents is not None:
        return False
    if query.is_cuda:
        grouped = query.shape[1] != key.shape[1]
        given = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, True, grouped)
        # The private function does not pad heads for the kernel, as the public one does.
        return query.shape[-1] % 8 == 0 and torch.backends.cuda.can_use_flash_attention(given)
    return query.device.type == "cpu"


def _flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if query.is_cuda:
        out, logsumexp, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
    else:
        out, logsumexp = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=scale
        )
    return out, logsumexp


def _flash_backward(
    result: AttentionResult, key: Tensor, value: Tensor, block: VisibleBlock, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    query, out, grad_out = (tensor[:, :, block.queries] for tensor in (result.query, result.out, result.grad_out))
    logsumexp = result.logsumexp[:, :, block.queries].contiguous()
    given = (grad_out, query, key, value, out, logsumexp)
    grads: tuple[Tensor, Tensor, Tensor]
    if query.is_cuda:
        unused = torch.empty((), dtype=torch.int64, device=query.device)  # the rng state of dropout
        lengths = (None, None, query.shape[2], key.shape[2])
        grads = _aten._scaled_dot_product_flash_attention_backward(
            *given, *lengths, 0.0, block.is_causal, unused, unused, scale=scale
        )
    else:
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, block.is_causal, scale=scale)
    return grads

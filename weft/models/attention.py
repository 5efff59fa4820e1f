"""What attention is made of in all language models: causal softmax attention, rotary embeddings, and RMSNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, computed in at least float32 and rounded before weighting."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(hidden.dtype)


class CausalAttention(nn.Module):
    """Softmax attention in which position t attends to positions t - window < s <= t. It has no parameters.

    It is a separate module so that a strategy that splits the sequence can replace it. If `documents` [batch, sequence]
    is set before a forward, a position attends only to positions with the same number.
    """

    documents: Tensor | None = None

    def __init__(self, sliding_window: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self.dropout = dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query is [batch, heads, sequence, head_dim]; key and value have as many heads or fewer. The result has the
        shape of query.
        """
        group, sequence = query.shape[1] // key.shape[1], query.shape[2]
        dropout = self.dropout if self.training else 0.0
        windowed = self.sliding_window is not None and sequence > self.sliding_window
        if not windowed and self.documents is None:
            return F.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=group > 1
            )
        # Kernels that take a mask do not support fewer key heads, so the key heads are repeated.
        key, value = (heads.repeat_interleave(group, dim=1) for heads in (key, value))
        positions = torch.arange(sequence, device=query.device)
        distance = positions[:, None] - positions[None, :]  # [sequence, sequence]
        mask = distance >= 0
        if self.sliding_window is not None:
            mask = mask & (distance < self.sliding_window)
        if self.documents is not None:
            mask = mask & (self.documents[:, None, :, None] == self.documents[:, None, None, :])  # [batch, 1, s, s]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + head_dim / 2) of heads [batch, heads, sequence, head_dim] by its position's angle."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin

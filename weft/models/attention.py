"""What attention is made of in language models: causal softmax attention, rotary embeddings, RMSNorm, and DeepSeek-V3's
latent attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.architectures import DecoderConfig


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


class LatentAttention(nn.Module):
    """DeepSeek-V3's attention: keys and values of all heads are made from one small latent vector of each token.

        hidden -> q_a -> norm -> q_b -> queries of each head: a part without positions, and a rotated part
        hidden -> kv_a -> latent, and one rotated key for all heads
                  latent -> norm -> kv_b -> the other part of each head's key, and its value

    If q_lora_rank is 0, queries are not latent. Names of modules are those of transformers' DeepseekV3Attention.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        heads = config.num_attention_heads
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value_dim, self.latent_dim = config.v_head_dim, config.kv_lora_rank
        query_size = heads * (self.nope_dim + self.rope_dim)
        if config.q_lora_rank:
            self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, 1e-6)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query_size, bias=False)
        else:
            self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, self.latent_dim + self.rope_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(self.latent_dim, 1e-6)
        self.kv_b_proj = nn.Linear(self.latent_dim, heads * (self.nope_dim + self.value_dim), bias=False)
        self.o_proj = nn.Linear(heads * self.value_dim, config.hidden_size, bias=False)
        self.core = CausalAttention()

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if hasattr(self, "q_proj"):
            queries = self.q_proj(hidden)
        else:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        # [batch, sequence, heads * head_dim] -> [batch, heads, sequence, head_dim]
        query = queries.unflatten(-1, (-1, self.nope_dim + self.rope_dim)).transpose(1, 2)
        plain, turned = query.split([self.nope_dim, self.rope_dim], dim=-1)
        query = torch.cat([plain, rotate(_halves(turned), cos, sin)], dim=-1)
        latent, shared = self.kv_a_proj_with_mqa(hidden).split([self.latent_dim, self.rope_dim], dim=-1)
        shared = rotate(_halves(shared[:, None]), cos, sin)  # [batch, 1, sequence, rope_dim]
        pairs = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (-1, self.nope_dim + self.value_dim))
        key, value = pairs.transpose(1, 2).split([self.nope_dim, self.value_dim], dim=-1)
        key = torch.cat([key, shared.expand(*key.shape[:-1], self.rope_dim)], dim=-1)
        mixed: Tensor = self.core(query, key, value)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))  # [batch, sequence, hidden]
        return out


def _halves(heads: Tensor) -> Tensor:
    """Features 0, 2, 4, ... and then 1, 3, 5, ...: DeepSeek rotates neighbours, `rotate` feature i with i + dim / 2."""
    return torch.cat([heads[..., 0::2], heads[..., 1::2]], dim=-1)

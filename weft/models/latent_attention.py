"""DeepSeek-V3's attention: keys and values of all heads are made from one small latent vector of each token.

    hidden -> q_a -> norm -> q_b -> queries of each head: a part without positions, and a rotated part
    hidden -> kv_a -> latent, and one rotated key for all heads
              latent -> norm -> kv_b -> the other part of each head's key, and its value

Names of modules are those of transformers' DeepseekV3Attention.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.architectures import DecoderConfig
from weft.models.attention import CausalAttention, RMSNorm, rotate


class LatentAttention(nn.Module):
    """Causal attention with latent queries (unless q_lora_rank is 0), keys and values."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        heads, self.nope_dim, self.rope_dim = (
            config.num_attention_heads,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
        )
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

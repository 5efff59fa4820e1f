"""GPT-2: learned positions, LayerNorm, GELU and a tied head; a plain PyTorch model without any code for parallelism.

Module and parameter names are those of transformers' GPT2LMHeadModel, config keys those of its config.json. The
projections are nn.Linear, weight [out, in], so that the same code splits the matmuls of all models. transformers stores
them transposed (Conv1D); `hf.py` transposes them when it reads and writes Hugging Face folders.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.architectures import GPT2Config
from weft.errors import ConfigError
from weft.models.attention import CausalAttention
from weft.models.decoder import TiedHead


class GPT2Attention(nn.Module):
    """Causal attention. One projection computes q, k and v, in this order."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.head_dim = config.n_embd // config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.core = CausalAttention(dropout=config.attn_pdrop)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.c_attn(hidden).chunk(3, dim=-1)
        # three times [batch, sequence, heads * head_dim] -> [batch, heads, sequence, head_dim]
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        mixed: Tensor = self.core(query, key, value)
        out: Tensor = self.resid_dropout(self.c_proj(mixed.transpose(1, 2).flatten(-2)))
        return out  # [batch, sequence, hidden]


class GPT2MLP(nn.Module):
    """c_proj(gelu(c_fc(hidden))), with the tanh form of GELU ("gelu_new")."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.inner_size)
        self.c_proj = nn.Linear(config.inner_size, config.n_embd)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.c_proj(F.gelu(self.c_fc(hidden), approximate="tanh")))
        return out


class GPT2Layer(nn.Module):
    """One block: attention and MLP, each with a norm before it and a residual connection."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = GPT2Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden))
        out: Tensor = hidden + self.mlp(self.ln_2(hidden))
        return out


class GPT2Body(nn.Module):
    """The model without its head: embeddings, layers, final norm."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(GPT2Layer(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        sequence, num_positions = tokens.shape[1], self.wpe.num_embeddings
        if sequence > num_positions:
            raise ConfigError(
                f"a sequence of {sequence} tokens exceeds n_positions = {num_positions}; "
                f"use sequences of at most {num_positions}, or a larger n_positions"
            )
        if positions is None:
            positions = torch.arange(sequence, device=tokens.device)
        hidden: Tensor = self.drop(self.wte(tokens) + self.wpe(positions))  # [batch, sequence, hidden]
        for layer in self.h:
            hidden = layer(hidden)
        normed: Tensor = self.ln_f(hidden)
        return normed


class GPT2(TiedHead):
    """tokens [batch, sequence] -> logits [batch, sequence, vocab]. Positions [sequence] are 0, 1, ... if not given."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.transformer = GPT2Body(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tied_to = config.embedding_name if config.tie_word_embeddings else None
        self.tie()

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        logits: Tensor = self.lm_head(self.transformer(tokens, positions))
        return logits

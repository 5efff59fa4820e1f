"""GPT-2: learned positions, LayerNorm, GELU and a tied head; a plain PyTorch model without any code for parallelism.

Module and parameter names are those of transformers' GPT2LMHeadModel, config keys those of its config.json. The
projections are nn.Linear, weight [out, in], so that the same code splits the matmuls of all models. transformers stores
them transposed (Conv1D); `hf.py` transposes them when it reads and writes Hugging Face folders.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.models.decoder import CausalAttention, TiedHead
from weft.models.decoder_config import divisors, require_positive


@dataclass(frozen=True)
class GPT2Config:
    """The config of a GPT-2. n_inner = None means 4 * n_embd. Dropout is off by default."""

    architecture: Literal["gpt2"] = "gpt2"
    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    layer_norm_epsilon: float = 1e-5
    resid_pdrop: float = 0.0
    embd_pdrop: float = 0.0
    attn_pdrop: float = 0.0
    tie_word_embeddings: bool = True

    embedding_name: ClassVar[str] = "transformer.wte.weight"

    def __post_init__(self) -> None:
        require_positive(self, "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "layer_norm_epsilon")
        if self.n_inner is not None:
            require_positive(self, "n_inner")
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name} = {getattr(self, name)} is no dropout probability; use 0 <= {name} < 1")
        if self.n_embd % self.n_head:
            raise ConfigError(
                f"n_head = {self.n_head} does not divide n_embd = {self.n_embd}; use one of {divisors(self.n_embd)}"
            )

    @property
    def num_layers(self) -> int:
        return self.n_layer

    @property
    def inner_size(self) -> int:
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    def shrunk(self, num_layers: int = 2) -> GPT2Config:
        """A tiny config of the same structure, for a quick verification in float64."""
        num_heads = min(self.n_head, 8)
        return replace(
            self,
            vocab_size=min(self.vocab_size, 61),
            n_positions=min(self.n_positions, 64),
            n_embd=num_heads * min(self.n_embd // self.n_head, 32 // num_heads),
            n_layer=min(self.n_layer, num_layers),
            n_head=num_heads,
            n_inner=None if self.n_inner is None else min(self.n_inner, 64),
        )


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

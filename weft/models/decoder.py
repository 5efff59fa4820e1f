"""The decoder family Llama, Mistral and Qwen, with and without experts: plain PyTorch, no code for parallelism.

Module and parameter names are those of transformers' LlamaForCausalLM, so a Hugging Face folder loads name by name.
Config keys are those of its config.json. The architectures differ in these options:

    llama     optional biases (attention_bias, mlp_bias), optional Llama-3 scaling of the rotary frequencies
    mistral   optional sliding_window
    qwen2     biases on q, k and v only (qkv_bias)
    qwen3     an RMSNorm on each head of q and k (qk_norm), head_dim independent of hidden_size / heads
    mixtral   mistral with experts (`experts.py`) in place of the MLP of each layer; qwen2_moe, qwen3_moe: alike
    deepseek_v3   latent attention experts in groups with sigmoid scores, shared experts

Rotary tables are computed in each forward from the config, at negligible cost. So a model that is cast, or built on the
meta device and moved by to_empty, has no table with stale values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from weft.architectures import DecoderConfig, RopeScaling
from weft.models.attention import CausalAttention, LatentAttention, RMSNorm, rotate
from weft.models.expert_rows import sequence_keys
from weft.models.experts import SparseMLP, SwiGLU


class Attention(nn.Module):
    """Grouped-query attention with rotary embeddings. The numbers of heads follow from the projections' sizes."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias or bool(config.qkv_bias)
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.core = CausalAttention(config.sliding_window)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (-1, self.head_dim)
        # [batch, sequence, heads * head_dim] -> [batch, heads, sequence, head_dim]
        query = self.q_norm(self.q_proj(hidden).unflatten(-1, heads)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden).unflatten(-1, heads)).transpose(1, 2)
        value = self.v_proj(hidden).unflatten(-1, heads).transpose(1, 2)
        mixed: Tensor = self.core(rotate(query, cos, sin), rotate(key, cos, sin), value)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))  # [batch, sequence, hidden]
        return out


class DecoderLayer(nn.Module):
    """One block: attention and MLP (or experts), each with a norm before it and a residual connection."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.self_attn = LatentAttention(config) if config.architecture == "deepseek_v3" else Attention(config)
        self.mlp = (
            SparseMLP(config, index)
            if config.has_experts(index)
            else SwiGLU(config.hidden_size, config.intermediate_size, config.mlp_bias)
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor | None = None) -> Tensor:
        """`keys` [batch] are those of `expert_rows.draw_priorities`, for experts that choose tokens at random."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        normed = self.post_attention_layernorm(hidden)
        out: Tensor = hidden + (self.mlp(normed, keys) if isinstance(self.mlp, SparseMLP) else self.mlp(normed))
        return out


class DecoderBody(nn.Module):
    """The model without its head: embedding, layers, final norm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        hidden: Tensor = self.embed_tokens(tokens)  # [batch, sequence, hidden]
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = rotary_tables(self.config, positions, hidden.dtype)
        is_random = self.config.capacity is not None and self.config.capacity.selection == "random"
        keys = sequence_keys(tokens) if is_random and self.training else None
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, cos, sin) if keys is None else layer(hidden, cos, sin, keys + index)
        normed: Tensor = self.norm(hidden)
        return normed


class TiedHead(nn.Module):
    """A model whose `lm_head` shares the parameter named `tied_to`, also after casts and moves. None: not tied."""

    lm_head: nn.Linear
    tied_to: str | None

    def tie(self) -> None:
        if self.tied_to is not None:
            self.lm_head.weight = self.get_parameter(self.tied_to)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TiedHead:
        # to_empty from the meta device creates a new parameter per module, so they would no longer be shared.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tie()
        return self


class Decoder(TiedHead):
    """tokens [batch, sequence] -> logits [batch, sequence, vocab]. Positions [sequence] are 0, 1, ... if not given."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderBody(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tied_to = config.embedding_name if config.tie_word_embeddings else None
        self.tie()

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        logits: Tensor = self.lm_head(self.model(tokens, positions))
        return logits


def rotary_tables(config: DecoderConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles of `positions` [sequence], each [sequence, head_dim].

    Angles are float32 for every dtype, as in transformers: the published weights were trained with that rounding.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)  # [head_dim / 2]
    if config.rope_scaling is not None:
        frequencies = scale_frequencies(frequencies, config.rope_scaling)
    angles = positions.to(torch.float32)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama-3 scaling. `smooth` is 0 at the longest wavelength that is interpolated and 1 at the shortest."""
    wavelengths = 2 * math.pi / frequencies
    original = scaling.original_max_position_embeddings
    smooth = (original / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / scaling.low_freq_factor, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < original / scaling.high_freq_factor, frequencies, scaled)

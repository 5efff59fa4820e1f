"""A Llama as one would write it by hand for one GPU, without any library but PyTorch: what weft is held against.

q, k and v in one matrix, gate and up in another, each layer compiled by itself, and head and loss in chunks whose
backward runs at once, so that logits never exist whole. Weights, gradients and moments in bf16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models import DecoderConfig

CHUNK_ROWS = 4096


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.head_dim
        self.head_dim = width
        self.sizes = [config.num_attention_heads * width] + [config.num_key_value_heads * width] * 2
        self.norm_1, self.norm_2 = nn.RMSNorm(hidden, eps=1e-6), nn.RMSNorm(hidden, eps=1e-6)
        self.qkv = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.out = nn.Linear(self.sizes[0], hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, hidden, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(hidden)).split(self.sizes, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        query, key = turn(query, cos, sin), turn(key, cos, sin)
        grouped = self.sizes[0] > self.sizes[1]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(self.norm_2(hidden)).chunk(2, dim=-1)
        result: Tensor = hidden + self.down(F.silu(gate) * up)
        return result


def turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


class PlainLlama(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        exponents = torch.arange(0, self.config.head_dim, 2, device=tokens.device) / self.config.head_dim
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        angles = positions[:, None] / self.config.rope_theta**exponents
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return self.norm(hidden)


def chunk_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def plain_step(model: PlainLlama, tokens: Tensor, labels: Tensor, chunk: object) -> Tensor:
    """Forward and backward; the mean loss."""
    hidden = model(tokens)
    rows, targets = hidden.detach().flatten(0, 1).requires_grad_(), labels.flatten()
    total = torch.zeros((), device=tokens.device)
    for part, target in zip(rows.split(CHUNK_ROWS), targets.split(CHUNK_ROWS), strict=True):
        loss = chunk(part, model.head.weight, target) / len(targets)  # type: ignore[operator]
        loss.backward()
        total += loss.detach()
    assert rows.grad is not None
    hidden.backward(rows.grad.view(hidden.shape))
    return total

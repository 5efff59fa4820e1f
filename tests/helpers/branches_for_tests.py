"""Models with independent branches, as users write them, and batches for them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def arm(inputs: int, outputs: int, kernel: int, norm: bool) -> nn.Sequential:
    made = nn.BatchNorm2d(outputs) if norm else nn.GroupNorm(1, outputs)
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2), made, nn.ReLU(inplace=True))


class InceptionCell(nn.Module):
    """Four arms of unequal cost, concatenated. `thin` channels lie between the two convolutions of one of them."""

    def __init__(self, inputs: int, norm: bool, thin: int) -> None:
        super().__init__()
        self.one = arm(inputs, 4, 1, norm)
        self.three = nn.Sequential(arm(inputs, thin, 1, norm), arm(thin, 6, 3, norm))
        self.five = nn.Sequential(arm(inputs, 2, 1, norm), arm(2, 4, 5, norm))
        self.pooled = arm(inputs, 2, 1, norm)

    def forward(self, images: Tensor) -> Tensor:
        pooled = self.pooled(nn.functional.max_pool2d(images, 3, 1, 1))
        return torch.cat([self.one(images), self.three(images), self.five(images), pooled], 1)


class Inception(nn.Module):
    def __init__(self, norm: bool = True, thin: int = 3) -> None:
        super().__init__()
        self.stem = arm(3, 8, 3, norm)
        self.cells = nn.ModuleList([InceptionCell(8, norm, thin), InceptionCell(16, norm, thin)])
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images)
        for cell in self.cells:
            hidden = cell(hidden)
        return self.head(hidden.mean((2, 3)))


class Tower(nn.Module):
    def __init__(self, rows: int, width: int, depth: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(depth)
        )
        self.temperature = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(width, 8)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids).mean(1) / self.temperature
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.out(hidden)


class TwoTowers(nn.Module):
    """Two embeddings of different tables, which meet in a product."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = Tower(11, 12, 2), Tower(7, 16, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.user(ids[:, :3] % 11) * self.item(ids[:, 3:] % 7) * self.scale)


class Heads(nn.Module):
    """A trunk and four heads of unequal widths, whose results meet in one of several ways."""

    def __init__(self, join: str = "sum") -> None:
        super().__init__()
        self.join = join
        self.trunk = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16))
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 5)) for width in (4, 8, 32, 16)
        )

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.trunk(rows)
        if self.join == "sum":
            return sum(head(hidden) for head in self.heads)
        results = [head(hidden) for head in self.heads]
        if self.join == "stack":
            return torch.stack(results).mean(0)
        if self.join == "concat":
            return torch.cat(results, 1)
        mixed = torch.stack([results[0] * results[1], results[2].sigmoid() * results[3]])
        return torch.logsumexp(mixed, 0) + torch.einsum("bi,bj->bi", results[0], results[3])


class Attention(nn.Module):
    """Self-attention of two heads, as users write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 2, width // 2
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        q, k, v = (
            one(hidden).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class ReadingTower(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table, self.norm, self.attention = nn.Embedding(rows, width), nn.LayerNorm(width), Attention(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.out = nn.Linear(width, 8)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)
        hidden = hidden + self.attention(self.norm(hidden))
        return self.out((hidden + self.down(nn.functional.gelu(self.up(hidden)))).mean(1))


class ReadingTowers(TwoTowers):
    """Two towers with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = ReadingTower(11, 8), ReadingTower(7, 12)


def drawn(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(index)


def labels(index: int) -> Tensor:
    return torch.randint(0, 5, (4,), generator=drawn(index + 100))


def images(index: int) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 8, 8, generator=drawn(index)), labels(index)


def ids(index: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 77, (4, 6), generator=drawn(index)), labels(index)


def rows(index: int) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6, generator=drawn(index)), labels(index)


# Models and their batches, by name, for branches of one batch and of a split one.
MODELS: dict[str, tuple[Any, Any]] = {
    "inception": (partial(Inception, norm=False), images),
    "towers": (TwoTowers, ids),
    **{join: (partial(Heads, join), rows) for join in ("sum", "stack", "concat", "any")},
}
# With layers that the axis x splits too.
SPLIT_MODELS: dict[str, tuple[Any, Any]] = {
    "inception": (partial(Inception, norm=False, thin=4), images),
    "towers": (ReadingTowers, ids),
    "heads": (partial(Heads, "any"), rows),
}

"""Models with independent branches, as users write them, and batches for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def arm(inputs: int, outputs: int, kernel: int, norm: bool) -> nn.Sequential:
    made = nn.BatchNorm2d(outputs) if norm else nn.GroupNorm(1, outputs)
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2), made, nn.ReLU(inplace=True))


class InceptionCell(nn.Module):
    """Four arms of unequal cost, concatenated."""

    def __init__(self, inputs: int, norm: bool) -> None:
        super().__init__()
        self.one = arm(inputs, 4, 1, norm)
        self.three = nn.Sequential(arm(inputs, 3, 1, norm), arm(3, 6, 3, norm))
        self.five = nn.Sequential(arm(inputs, 2, 1, norm), arm(2, 4, 5, norm))
        self.pooled = arm(inputs, 2, 1, norm)

    def forward(self, images: Tensor) -> Tensor:
        pooled = self.pooled(nn.functional.max_pool2d(images, 3, 1, 1))
        return torch.cat([self.one(images), self.three(images), self.five(images), pooled], 1)


class Inception(nn.Module):
    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.stem = arm(3, 8, 3, norm)
        self.cells = nn.ModuleList([InceptionCell(8, norm), InceptionCell(16, norm)])
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

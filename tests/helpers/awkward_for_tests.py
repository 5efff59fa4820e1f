"""Chains of three blocks whose subclasses do unusual things, batches for them, and the plans they are tried under."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import weft

WIDTH, CLASSES, VOCABULARY = 8, 4, 12
PIPE, DATA = weft.Plan(pipe=weft.Pipe(2), micro_batch=2), weft.Plan(data=2)
X, STAGE_3 = weft.Plan(tensor=weft.Tensor(x=2)), weft.Plan(shard=weft.Shard(2, 3))


def vectors(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, WIDTH, generator=generator), torch.randint(0, CLASSES, (4,), generator=generator)


def tokens(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    found = torch.randint(0, VOCABULARY, (2, 4, 6), generator=generator)
    return found[0], found[1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.down(functional.gelu(self.up(hidden)))
        return out


class Chain(nn.Module):
    """Subclasses change a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(value))
        return out

    def body(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Scaled(nn.Module):
    """Multiplies its logits by a number that it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([Block(), Block()])
        self.head, self.scale = nn.Linear(WIDTH, VOCABULARY), nn.Parameter(torch.tensor(0.1))

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.table(value)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.head(hidden) * self.scale.exp()
        return out


class MaxNorm(Scaled):
    """Its embedding changes its weights in every forward, in those of an evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0)

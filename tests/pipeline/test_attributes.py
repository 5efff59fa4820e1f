"""Pipelines of models whose layers are attributes, and of parameters that two modules hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft

pytestmark = pytest.mark.processes

WIDTH, CLASSES = 8, 11


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, CLASSES, (4, 5), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.gelu(self.linear(self.norm(hidden)))


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.first, self.second = Layer(), Layer()

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.second(self.first(self.embedding(tokens))))
        return logits


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Attributes()

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.net(tokens)
        return logits


class TiedBias(nn.Module):
    """The head's bias is also a parameter of the model, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.bias = nn.Parameter(torch.zeros(CLASSES))
        self.head.bias, self.head.weight = self.bias, self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


@pytest.mark.parametrize("model", [Attributes, Wrapped, TiedBias])
def test_two_stages(model: Callable[[], nn.Module]) -> None:
    weft.verify(model, batch, weft.Plan(pipe=weft.Pipe(2), micro_batch=2), steps=2).require()


def test_three_stages_of_attributes() -> None:
    weft.verify(Attributes, batch, weft.Plan(pipe=weft.Pipe(3), micro_batch=2), steps=2).require()

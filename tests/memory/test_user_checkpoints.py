"""The user's own checkpoints (torch.utils.checkpoint) around blocks: exact and predicted, or refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
from weft.errors import PlanError

pytestmark = pytest.mark.processes

WIDTH = 6
PIPE = weft.Plan(pipe=weft.Pipe(2), micro_batch=2)
STAGE_3 = weft.Plan(shard=weft.Shard(2, 3))
X = weft.Plan(tensor=weft.Tensor(2))


def batch(step: int) -> tuple[Tensor, Tensor]:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)), torch.arange(4) % 3


class Chain(nn.Module):
    """Checkpoints each block in training."""

    is_reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)) for _ in range(4)]
        )

    def run(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=self.is_reentrant) if self.training else layer(hidden)
        return hidden

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.run(self.enter(inputs)))
        return logits


class Reentrant(Chain):
    is_reentrant = True


class Together(Chain):
    """All blocks in one checkpoint, which stages cut."""

    def one_by_one(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def run(self, hidden: Tensor) -> Tensor:
        if not self.training:
            return self.one_by_one(hidden)
        out: Tensor = checkpoint(self.one_by_one, hidden, use_reentrant=False)
        return out


class WithCode(Together):
    """The code between blocks in the checkpoint is another stage's."""

    def one_by_one(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden * 1.5)
        return hidden


@pytest.mark.parametrize("plan", [PIPE, STAGE_3], ids=["pipe", "stage 3"])
@pytest.mark.parametrize("model", [Chain, Together])
def test_checkpoints_that_are_not_reentrant(model: Callable[[], nn.Module], plan: weft.Plan) -> None:
    weft.verify(model, batch, plan, steps=2).require()


@pytest.mark.parametrize(
    ("model", "plan", "words"),
    [
        (Reentrant, PIPE, r"runs 'layers\.0' in a checkpoint with use_reentrant=True.*use use_reentrant=False"),
        (WithCode, PIPE, r"checkpoint of the model's own .* runs code of another stage again before 'layers\.2'"),
        (Reentrant, STAGE_3, r"block 'layers\.0' in a checkpoint of its own .*, reentrant\).*use_reentrant=False"),
        (Together, X, r"block 'layers\.0' in a checkpoint of its own .*over x = 2 and is not predicted"),
    ],
)
def test_other_checkpoints_are_refused_by_name(model: Callable[[], nn.Module], plan: weft.Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        weft.verify(model, batch, plan)

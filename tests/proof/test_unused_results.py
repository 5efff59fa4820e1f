"""Models that compute what no result depends on, detach what goes on, or compute without gradients: bytes are exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from awkward_for_tests import VOCABULARY, WIDTH, tokens
from torch import Tensor, nn
from torch.nn import functional

import weft
from weft.proof.prove import verify

pytestmark = pytest.mark.processes

X, Y, STAGE_3 = (
    weft.Plan(tensor=weft.Tensor(x=2)),
    weft.Plan(tensor=weft.Tensor(y=2)),
    weft.Plan(shard=weft.Shard(2, 3)),
)
SEQUENCE = weft.Plan(tensor=weft.Tensor(x=2, sequence=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(hidden)

    def inner(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(hidden)))
        return out


class Detached(nn.Module):
    """Trains its last blocks only: the stream is detached before them."""

    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.table(value)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden.detach() if number == 2 else hidden)
        out: Tensor = self.head(self.norm(hidden))
        return out


class Unused(Detached):
    """No result depends on the last block, nor on a second call of the head."""

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.table(value)
        for block in self.blocks[:-1]:
            hidden = block(hidden)
        self.seen = self.head(self.norm(self.blocks[-1](hidden))).detach()
        out: Tensor = self.head(self.norm(hidden))
        return out


class DetachingBlock(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        return super().inner(hidden.detach())


class DraftingBlock(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            before = super().inner(hidden)
        return super().inner(hidden) + before


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (Detached, STAGE_3),
        (Detached, X),
        (Detached, SEQUENCE),
        (Unused, STAGE_3),
        (Unused, Y),
        (Unused, X),
        (lambda: Detached(DetachingBlock), SEQUENCE),
        (lambda: Detached(DraftingBlock), SEQUENCE),
    ],
)
def test_the_bytes_of_what_backward_does_not_pass(make: Callable[[], nn.Module], plan: weft.Plan) -> None:
    verify(make, tokens, plan, steps=2).require()

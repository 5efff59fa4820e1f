"""What tensor.sequence and y ask of a chain of blocks: of which parameters are used in it, and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from awkward_for_tests import VOCABULARY, WIDTH, tokens
from nets_for_tests import mlp_block
from torch import Tensor, nn

import weft
from weft.errors import PlanError
from weft.inspection import split_probe
from weft.parallel.apply import refuse
from weft.profiling import profile
from weft.proof.prove import verify

SEQUENCE = weft.Plan(tensor=weft.Tensor(x=2, sequence=True))


class Chain(nn.Module):
    """Subclasses change a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(mlp_block(WIDTH) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def used(self) -> Iterator[nn.Module]:
        return iter(self.blocks)

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.table(value)
        for number, block in enumerate(self.used()):
            hidden = self.between(block(hidden), value, number)
        return self.head(self.norm(hidden))

    def between(self, hidden: Tensor, value: Tensor, number: int) -> Tensor:
        return hidden


class Scaled(Chain):
    """A trained number of its own scales the result of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.ones(4))

    def between(self, hidden: Tensor, value: Tensor, number: int) -> Tensor:
        return hidden * self.scales[number] if number < 2 else hidden


class Conditioned(Chain):
    """What it adds between blocks is computed before them, of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        self.added = self.condition[value[:, 0]][:, None]
        return super().forward(value)

    def between(self, hidden: Tensor, value: Tensor, number: int) -> Tensor:
        return hidden + self.added if number < 2 else hidden


class OneNorm(Chain):
    """The last norm is that of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = self.get_submodule("blocks.1.norm")  # type: ignore[assignment]


class SkipsFirst(Chain):
    """An evaluation passes over the first block."""

    left = slice(1, None)

    def used(self) -> Iterator[nn.Module]:
        return iter(self.blocks if self.training else self.blocks[self.left])


class SkipsLast(SkipsFirst):
    """An evaluation passes over the last block."""

    left = slice(2)

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value).relu()  # so that the stream is gathered behind the last block


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Scaled, r"sums the gradients of the blocks' parameters, .* 'scales' is used there and is none of them"),
        (Conditioned, r"'condition' is used there and is none of them"),
        (OneNorm, r"'blocks.1.norm.bias' is one of them and is used elsewhere, too"),
    ],
)
def test_a_parameter_that_is_used_for_parts_and_wholes_of_sequences_is_refused(
    make: Callable[[], nn.Module], words: str
) -> None:
    counted = profile(make(), lambda: tokens(0)[0])
    with pytest.raises(PlanError, match=words):
        refuse(counted, SEQUENCE)
    refuse(counted, weft.Plan(tensor=weft.Tensor(x=2)))
    refuse(profile(Chain(), lambda: tokens(0)[0]), SEQUENCE)


def test_numbers_that_are_not_of_features_are_refused_over_y() -> None:
    """Each rank would take its part of them for the whole."""
    with pytest.raises(PlanError, match="would split the 4 numbers of 'scales', which are not as many"):
        refuse(profile(Scaled(), lambda: tokens(0)[0]), weft.Plan(tensor=weft.Tensor(y=2)))


def test_asking_about_y_copies_no_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search asks about hundreds of plans, and the embeddings of a large model take gigabytes."""
    copied: list[nn.Module] = []
    random_copy = split_probe.random_copy

    def noted(module: nn.Module, generator: torch.Generator) -> nn.Module:
        copied.extend(module.modules())
        return random_copy(module, generator)

    monkeypatch.setattr(split_probe, "random_copy", noted)
    refuse(profile(Chain(), lambda: tokens(0)[0]), weft.Plan(tensor=weft.Tensor(y=2)))
    assert copied
    assert not [module for module in copied if isinstance(module, nn.Embedding)]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("make", "words"),
    [(SkipsFirst, "called the last block and not the first"), (SkipsLast, "called the first block and not the last")],
)
def test_a_chain_of_which_an_end_is_not_called_is_refused(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        verify(make, tokens, SEQUENCE)

"""A proof that linears pair is used again only for a module that computes the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.inspection.pairing import pair

WIDTH = 16


class Held(nn.Module):
    """Two linears around a function that the module holds in some way."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held
        if isinstance(held, Tensor):
            self.register_buffer("mask", held, persistent=False)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        inner, held = self.fc1(hidden), self.held
        if isinstance(held, Tensor):  # which ones are summed with others
            inner = inner + self.mask * inner.sum(-1, keepdim=True)
        elif held is None or isinstance(held, (bool, type)):
            inner = inner.softmax(-1) if held in (None, True, dict) else F.gelu(inner)
        else:
            while isinstance(held, (list, dict)):
                held = held[0]
            inner = held(inner)
        out: Tensor = self.fc2(inner)
        return out


def _softmax(inner: Tensor) -> Tensor:
    return inner.softmax(-1)


class Softened(nn.Module):
    """A softmax whose class does not say so."""

    def __init__(self, is_soft: tuple[bool, ...]) -> None:
        super().__init__()
        self.is_soft = is_soft

    def forward(self, inner: Tensor) -> Tensor:
        return inner.softmax(-1) if self.is_soft[0] else F.gelu(inner)


@pytest.mark.parametrize(
    ("proved", "other"),
    [
        (F.gelu, _softmax),
        ([F.gelu], [_softmax]),
        ({0: [F.gelu]}, {0: [_softmax]}),
        (partial(F.gelu, approximate="none"), partial(F.softmax, dim=-1)),
        (partial(F.softmax, dim=0), partial(F.softmax, dim=-1)),
        ([nn.GELU()], [nn.Softmax(-1)]),
        (Softened((False,)), Softened((True,))),
        ([Softened((False,))], [Softened((True,))]),
        (list, dict),
        (False, None),
        (False, True),
        (torch.zeros(1), torch.ones(1)),
        (Softened((False,)).forward, Softened((True,)).forward),
    ],
)
def test_a_proof_is_of_one_kind_of_module(proved: Any, other: Any) -> None:
    model = nn.Module()
    for given in ((proved, other), (other, proved)):
        model.blocks = nn.ModuleList([Held(one) for one in given])
        splits = pair(model, {}).splits
        kinds = [splits[f"blocks.{number}.fc1"].kind for number in range(2)]
        assert kinds == ["column" if one is proved else "gathered" for one in given]


def test_alike_modules_are_proved_once() -> None:
    proofs: dict[Any, Any] = {}
    held = [lambda: [F.gelu], lambda: partial(F.gelu, approximate="none"), lambda: [nn.GELU()], lambda: torch.zeros(1)]
    model = nn.Module()
    model.blocks = nn.ModuleList([Held(make()) for make in held for _ in range(3)])
    assert {split.kind for split in pair(model, proofs).splits.values()} == {"column", "row"}
    assert len(proofs) == len(held)

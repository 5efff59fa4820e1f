"""The gradient of a whole flat buffer: what is copied, added, scaled and zeroed in it."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.profiling import Parameter
from weft.sharding.layout import FlatLayout
from weft.sharding.whole_gradient import WholeGradient

LAYOUT = FlatLayout((Parameter("a", (2, 3), True), Parameter("b", (), True), Parameter("c", (8,), True)), 1)


def gradient_of(values: dict[int, Tensor], whole: WholeGradient, mean: float = 1.0) -> None:
    whole.held.update(values)
    whole.copy_held(torch.tensor([mean], dtype=torch.float64), mean != 1)


def new() -> WholeGradient:
    whole = WholeGradient(LAYOUT, is_unsummed=True, sums_squares=True)
    whole.set_tensor(torch.full((LAYOUT.numel,), 7.0, dtype=torch.float64))
    return whole


def test_gradients_are_copied_then_added_and_missing_ones_are_zero() -> None:
    whole = new()
    assert whole.is_empty
    gradient_of({0: torch.ones(2, 3)}, whole)
    assert not whole.is_empty
    assert not whole.adds_held
    whole.held[0] = torch.ones(2, 3)
    assert whole.adds_held
    gradient_of({1: torch.tensor(5.0)}, whole)
    whole.zero_padding()
    whole.finish()
    assert [view.unique().tolist() for view in whole.views] == [[2.0], [5.0], [0.0]]
    assert float(whole.tensor.sum()) == 2 * 6 + 5  # padding is zero
    assert whole.is_empty


def test_means_scale_copied_and_added_gradients() -> None:
    whole = new()
    gradient_of({2: torch.full((8,), 4.0)}, whole, mean=0.25)
    gradient_of({2: torch.full((8,), 8.0)}, whole, mean=0.25)
    assert whole.views[2].unique().tolist() == [3.0]


def test_discarded_gradients_are_overwritten() -> None:
    whole = new()
    gradient_of({2: torch.ones(8)}, whole)
    whole.held[0] = torch.ones(2, 3)
    whole.discard()
    assert whole.is_empty
    gradient_of({2: torch.full((8,), 2.0)}, whole)
    assert whole.views[2].unique().tolist() == [2.0]

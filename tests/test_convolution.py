"""Convolutions over x: output, dInput, dWeight and dBias as nn.Conv has them, in float64; bytes as told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.comm import Axis
from weft.local import run_local
from weft.mesh import Mesh
from weft.parallel import convolution
from weft.parallel.convolution import Kind, column, gathered, is_convolution, refuse, row
from weft.plan import Plan
from weft.plan import Tensor as TensorPlan

TOLERANCE = 1e-12
# (make the convolution, shape of an input)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(3, 8, 3), (2, 3, 11)),
    "1d, stride, padding, dilation": (lambda: nn.Conv1d(4, 12, 3, stride=2, padding=3, dilation=2), (3, 4, 13)),
    "2d": (lambda: nn.Conv2d(4, 8, 3, padding=1), (2, 4, 5, 6)),
    "2d, no bias, uneven kernel": (lambda: nn.Conv2d(4, 4, (3, 2), stride=(1, 2), bias=False), (2, 4, 7, 6)),
    "2d, same": (lambda: nn.Conv2d(8, 4, 3, padding="same", dilation=2), (1, 8, 6, 5)),
    "2d, circular": (lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), (2, 4, 5, 5)),
    "2d, patches": (lambda: nn.Conv2d(3, 8, 4, stride=4), (2, 3, 8, 8)),
    "2d, without a batch": (lambda: nn.Conv2d(4, 8, 3), (4, 5, 6)),
    "3d": (lambda: nn.Conv3d(4, 8, 2, stride=(1, 2, 1), padding=1, dilation=(1, 1, 2)), (2, 4, 4, 5, 6)),
}


def own_part(module: Any, kind: Kind, axis: Axis) -> Any:
    """A copy of a convolution with this rank's part of its parameters."""
    part = copy.deepcopy(module)
    for leaf, parameter in module.named_parameters():
        part._parameters[leaf] = nn.Parameter(own(parameter.detach(), split_dim(kind, leaf), axis).clone())
    return part


def split_dim(kind: Kind, leaf: str) -> int | None:
    """The dim of a parameter that goes over x."""
    if kind == "row":
        return 1 if leaf == "weight" else None
    return 0


def own(tensor: Tensor, dim: int | None, axis: Axis) -> Tensor:
    """Our part along a dim, computed apart from weft."""
    return tensor if dim is None else tensor.tensor_split(axis.degree, dim)[axis.index]


def differences(module: nn.Module, part: nn.Module, kind: Kind, axis: Axis) -> dict[str, float]:
    """How far the gradients of a part are from its part of the whole's."""
    found = {}
    for leaf, parameter in module.named_parameters():
        gradient = part.get_parameter(leaf).grad
        assert parameter.grad is not None
        assert gradient is not None
        found[leaf] = float((gradient - own(parameter.grad, split_dim(kind, leaf), axis)).abs().max())
    return found


def told(axis: Axis) -> list[list[Any]]:
    return [[operation, value.calls, value.num_bytes] for (_, operation), value in axis.ledger]


def x_axis(degree: int) -> Axis:
    torch.manual_seed(0)
    return Mesh(Plan(tensor=TensorPlan(degree)))["x"]


def run_gathered(name: str, axis: Axis) -> dict[str, Any]:
    make, shape = CASES[name]
    module = make().double()
    value = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = module(value)
    weights = torch.randn_like(expected)  # a loss that tells every output from every other
    (expected * weights).sum().backward()
    part, entered = own_part(module, "gathered", axis), value.detach().clone().requires_grad_()
    out = gathered(part, axis, entered)
    (out * weights).sum().backward()
    assert entered.grad is not None
    assert value.grad is not None
    return {
        "shape": out.shape == expected.shape,
        "forward": float((out - expected).detach().abs().max()),
        "input": float((entered.grad - value.grad).abs().max()),
        **differences(module, part, "gathered", axis),
        "traffic": told(axis) == [["all_gather", 1, out.numel() * 8], ["all_reduce", 1, value.numel() * 8]],
    }


def run_pair(axis: Axis, needs_gradient: bool = True) -> dict[str, Any]:
    first = nn.Conv2d(3, 8, 3, stride=2, padding=1).double()
    second = nn.Conv2d(8, 5, 3, padding=2, dilation=2).double()
    value = torch.randn(2, 3, 9, 7, dtype=torch.float64, requires_grad=needs_gradient)
    expected = second(torch.nn.functional.gelu(first(value)))
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    first_part, second_part = own_part(first, "column", axis), own_part(second, "row", axis)
    entered = value.detach().clone().requires_grad_(needs_gradient)
    out = row(second_part, axis, torch.nn.functional.gelu(column(first_part, axis, entered)))
    (out * weights).sum().backward()
    found: dict[str, Any] = {"forward": float((out - expected).detach().abs().max())}
    if needs_gradient:
        assert entered.grad is not None
        assert value.grad is not None
        found["input"] = float((entered.grad - value.grad).abs().max())
    for name, whole, part, kind in (("first", first, first_part, "column"), ("second", second, second_part, "row")):
        found |= {f"{name}.{leaf}": error for leaf, error in differences(whole, part, kind, axis).items()}  # type: ignore[arg-type]
    told_bytes = [out.numel() * 8] + [value.numel() * 8] * needs_gradient
    found["traffic"] = told(axis) == [["all_reduce", len(told_bytes), sum(told_bytes)]]
    return found


def wrong(found: dict[str, Any]) -> list[str]:
    """What is not true, or not zero."""
    return [name for name, value in found.items() if value is False or (value is not True and not value < TOLERANCE)]


@pytest.mark.parametrize("degree", [2, 4])
def test_gathered_convolutions_are_the_whole_ones(degree: int) -> None:
    def rank(_: int) -> dict[str, list[str]]:
        axis, found = x_axis(degree), {}
        for name in CASES:
            axis.ledger.clear()
            found[name] = wrong(run_gathered(name, axis))
        return found

    assert run_local(rank, degree) == [{name: [] for name in CASES}] * degree


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_pairs_are_the_whole_ones_and_say_nothing_in_between(degree: int, needs_gradient: bool) -> None:
    assert run_local(lambda rank: wrong(run_pair(x_axis(degree), needs_gradient)), degree) == [[]] * degree


def test_one_rank_computes_the_convolution_itself() -> None:
    axis = x_axis(1)
    assert {name: wrong({**run_gathered(name, axis), "traffic": not told(axis)}) for name in CASES} == {
        name: [] for name in CASES
    }


# --- negative controls


def test_finds_an_input_gradient_that_is_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "enter", lambda value, axis: value)
    assert run_local(lambda rank: wrong(run_gathered("2d", x_axis(2))), 2) == [["input", "traffic"]] * 2
    assert run_local(lambda rank: wrong(run_pair(x_axis(2))), 2) == [["input", "traffic"]] * 2


def test_finds_partial_sums_that_are_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "leave", lambda value, axis: value)
    assert run_local(lambda rank: wrong(run_pair(x_axis(2))), 2) == [["forward", "traffic"]] * 2


def test_finds_channels_that_are_gathered_along_another_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "_channel_dim", lambda module: 0)

    def rank(_: int) -> bool:
        module = nn.Conv2d(4, 8, 3, padding=1).double()
        axis = x_axis(2)
        out = gathered(own_part(module, "gathered", axis), axis, torch.randn(2, 4, 5, 6, dtype=torch.float64))
        return tuple(out.shape) == (2, 8, 5, 6)

    assert run_local(rank, 2) == [False, False]


# --- refusals


@pytest.mark.parametrize(
    ("module", "kind", "degree", "message"),
    [
        (nn.Conv2d(6, 9, 3), "gathered", 2, "2 does not divide the 9 output channels of 'c'; use one of 1, 3, 9"),
        (nn.Conv1d(6, 9, 3), "column", 4, "4 does not divide the 9 output channels of 'c'; use one of 1, 3, 9"),
        (nn.Conv3d(6, 8, 3), "row", 4, "4 does not divide the 6 input channels of 'c'; use one of 1, 2, 3, 6"),
        (nn.Conv2d(4, 8, 3, groups=2), "gathered", 2, "'c' (Conv2d, groups = 2) is not a plain nn.Conv1d"),
        (nn.ConvTranspose2d(4, 8, 3), "gathered", 2, "'c' (ConvTranspose2d, groups = 1) is not a plain nn.Conv1d"),
        (nn.Linear(4, 8), "row", 2, "'c' (Linear, groups = none) is not a plain nn.Conv1d"),
    ],
)
def test_what_cannot_be_split_is_refused(module: nn.Module, kind: Kind, degree: int, message: str) -> None:
    reason = refuse("c", module, kind, degree)
    assert reason is not None
    assert message in reason


def test_what_can_be_split_is_not_refused() -> None:
    assert refuse("c", nn.Conv2d(6, 8, 3), "gathered", 4) is None
    assert refuse("c", nn.Conv2d(6, 8, 3), "row", 3) is None
    assert is_convolution(nn.Conv3d(2, 2, 1))
    assert not is_convolution(nn.LazyConv2d(4, 3))

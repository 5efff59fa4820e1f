"""Functions on tiles under every form of arguments that torch takes, against the whole image in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiles_for_tests import Case, compare_all
from torch import Tensor, nn

from weft.errors import PlanError
from weft.parallel.apply import refuse
from weft.plan import Plan, Tile
from weft.profiling import profile
from weft.spatial.arguments import DRAWS, PARAMETERS, POINTWISE
from weft.spatial.rules import RULES

pytestmark = pytest.mark.processes

Function = Callable[[Tensor], Any]


class Calls(nn.Module):
    """A function behind a convolution, whose weights see what it does to gradients."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first, self.function = nn.Conv2d(3, 4, 3, padding=1), function

    def forward(self, value: Tensor) -> Any:
        return self.function(self.first(value))


def over_channels(value: Tensor) -> Tensor:
    """One for each of 4 channels."""
    return torch.linspace(0.5, 2, 4, dtype=torch.float64).view(4, *(1 for _ in range(value.dim() - 2)))


WEIGHT = torch.linspace(-1, 1, 4 * 4 * 9, dtype=torch.float64).view(4, 4, 3, 3)
SCALES = torch.linspace(0.5, 2, 4, dtype=torch.float64)
MATRIX = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)

FORMS: dict[str, Function] = {
    "mean, axis": lambda v: v * v.mean(axis=(2, 3), keepdims=True),
    "mean, both names": lambda v: v * torch.mean(x=v, axis=(-1, -2), keepdim=True),
    "mean of channels": lambda v: v - v.mean(axis=1, keepdims=True),
    "mean of everything": lambda v: v - v.mean(dim=[]),
    "sum, keepdims alone": lambda v: v * torch.sum(v, (2, 3), keepdims=True),
    "sum, numpy's numbers": lambda v: v * v.sum(np.int64(1), True) + v.sum((np.int64(2), 3))[..., None, None],
    "sum to another dtype": lambda v: v * v.sum(axis=(2, 3), keepdims=True, dtype=torch.float64),
    "amax": lambda v: v * torch.amax(a=v, axis=1, keepdims=True),
    "max": lambda v: v * v.max(axis=1, keepdims=True)[0] + v.min(1, keepdim=True).values,
    "max of two": lambda v: torch.max(x1=v, x2=-v) + torch.min(v, other=v * 2) + torch.max(v, v * 3),
    "var, unbiased by position": lambda v: v * v.var(1, True)[:, None] + v.std(1, False, True),
    "var, correction": lambda v: v * v.var(axis=1, correction=0, keepdims=True),
    "logsumexp": lambda v: v - v.logsumexp(axis=(0, 1), keepdims=True),
    "prod": lambda v: v * v.prod(axis=1, keepdims=True),
    "flip, one by one": lambda v: v.flip(0, 1) * v.flip((1,)) * torch.flip(input=v, dims=[-3, 0]),
    "softmax": lambda v: v.softmax(axis=1) + torch.softmax(v, 1, torch.float64) + F.log_softmax(v, 1),
    "cumsum": lambda v: v.cumsum(axis=1) + torch.cumsum(x=v, axis=0),
    "cat": lambda v: torch.cat([v, v * 2], axis=1) * torch.concatenate(tensors=(v * 3, v), axis=1),
    "stack": lambda v: torch.stack([v, v * 2], axis=-3).flatten(1, 2) * torch.concat((v, v), dim=1),
    "chunks": lambda v: v.chunk(2, axis=1)[1] * v.tensor_split(sections=2, dim=1)[0] * v.split(2, 1)[0],
    "unbind": lambda v: v.unbind(axis=1)[2] * torch.unbind(x=v, axis=1)[0] * v.select(axis=1, index=3),
    "narrow": lambda v: v.narrow(length=2, start=1, dim=1) * v.index_select(axis=1, index=torch.tensor([3, 0])),
    "sort": lambda v: v * torch.sort(v, stable=True, axis=1, descending=True)[0] + v.topk(4, axis=1)[0],
    "glu": lambda v: F.glu(v, 1) * F.normalize(v, dim=1)[:, :2],
    "roll": lambda v: v * v.roll(1, 1) * torch.roll(shifts=(1,), dims=(1,), input=v),
    "movedim": lambda v: (v.movedim(destination=3, source=1) * torch.moveaxis(v, 1, -1)).permute(0, 3, 1, 2),
    "moveaxis of two": lambda v: torch.moveaxis(v, destination=(0, 3), source=(1, 0)).permute((3, 0, 1, 2)),
    "permute": lambda v: (v.permute(0, 2, 3, 1) * torch.permute(dims=(0, 2, 3, 1), input=v)).movedim(3, 1),
    "transpose": lambda v: (
        v.transpose(dim1=2, dim0=1) * v.swapaxes(axis1=1, axis0=2) * torch.swapdims(v, 1, dim1=2)
    ).transpose(1, 2),
    "squeeze": lambda v: (
        v[:, :1].squeeze(1) * v[:, :1].squeeze(axis=1) * v[:1, :1].squeeze(0, 1) * torch.squeeze(v[:1, :1], (0, 1))
    ),
    "unsqueeze": lambda v: v.unsqueeze(axis=1) * torch.unsqueeze(x=v, dim=np.int64(1)),
    "reshape": lambda v: (
        v.reshape(shape=(2, 2, 2, 6, 8)) * v.view(size=(2, 2, 2, 6, 8)) * torch.reshape(shape=(2, 2, 2, 6, 8), x=v)
    ),
    "flatten": lambda v: torch.flatten(end_dim=1, input=v) * v.unflatten(1, (2, 2)).flatten(0, 2),
    "expand": lambda v: (
        v[:, :1].expand(size=(2, 4, 6, 8)) * v[:1].expand(2, 4, 6, 8) * v[:, :1].expand_as(other=v)
        + over_channels(v).expand_as(v)
    ),
    "sizes": lambda v: v * v.size(dim=-1) * torch.numel(input=v) / len(v) * v.shape[2] * v.nelement(),
    "to another's dtype": lambda v: v * over_channels(v).to(v) * over_channels(v).type_as(other=v),
    "where": lambda v: torch.where(other=v, input=v * 2, condition=v > 0) + torch.where(v < 0, x1=v, x2=v * 3),
    "operands": lambda v: torch.add(x1=v, x2=v, alpha=3) * torch.clamp(x=v, max=0.5) + torch.mul(v, other=v),
    "in place": lambda v: torch.relu_(input=v * 1) + F.relu(inplace=True, input=v * 2) + torch.relu_(x=v * 3),
    "linear": lambda v: (
        F.linear(weight=MATRIX.t(), input=v.movedim(1, -1)) * torch.matmul(other=MATRIX, input=v.movedim(1, -1))
    ).movedim(-1, 1),
    "convolution": lambda v: (
        F.conv2d(weight=WEIGHT, x=v, padding=1, groups=1)
        + torch.conv2d(v, WEIGHT, None, 1, padding="same")
        + F.conv_transpose2d(x1=v, weight=WEIGHT, padding=1)
    ),
    "pools": lambda v: (
        F.avg_pool2d(x=v, kernel_size=2)
        + F.avg_pool2d(v, stride=2, kernel_size=2)
        + torch.max_pool2d(kernel_size=2, input=v)
        + F.adaptive_avg_pool2d(v, output_size=(3, 4))
        + F.adaptive_max_pool2d(output_size=(3, 4), input=v)
    ),
    "shuffles": lambda v: (
        F.pixel_shuffle(v, upscale_factor=2) * torch.pixel_shuffle(upscale_factor=2, input=v)
        + F.interpolate(v[:, :1], scale_factor=2)
    ),
    "unshuffle": lambda v: torch.pixel_unshuffle(downscale_factor=2, input=v),
    "pad": lambda v: F.pad(pad=(1, 2, 0, 1), value=0.5, input=v),
    "pad that crops, then in place": lambda v: F.pad(v, (-1, -1, -1, -1)).mul_(2) * v[:, :, 1:-1, 1:-1],
    "pad of nothing, then in place": lambda v: F.pad(v, (0, 0, 0, 0)).mul_(2) * v,
    "slice, then in place": lambda v: torch.relu_((v * 1)[:, :, 1:]) * v[:, :, 1:].clone().mul_(2) * v[:, :, :-1],
    "norms": lambda v: (
        torch.group_norm(x=v, num_groups=2, weight=SCALES)
        + torch.layer_norm(v, (4, 6, 8), None, None, 1e-5, False)
        + torch.instance_norm(v, SCALES, None, None, None, True, 0.1, 1e-5, False)
        + torch.batch_norm(v, SCALES, SCALES * 2, None, None, True, 0.1, 1e-5, False)
        + torch.group_norm(v, 4, SCALES, SCALES * 2, 1e-5, False)
    ),
}


@pytest.mark.parametrize("grid", [(1, 2), (2, 1)])
def test_every_form_of_arguments(grid: tuple[int, int]) -> None:
    cases: list[Case] = [(lambda function=function: Calls(function), (2, 3, 6, 8)) for function in FORMS.values()]
    for name, found in zip(FORMS, compare_all(cases, grid), strict=True):
        assert found["forward"] <= 1e-13, (name, found)
        assert found["gradient"] <= 1e-11, (name, found)


def reason(function: Function, plan: Tile) -> str:
    """Why a function is refused."""
    found = profile(Calls(function), lambda: (torch.zeros(2, 3, 6, 8),))
    with pytest.raises(PlanError) as error:
        refuse(found, Plan(tile=plan))
    return str(error.value)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda v: v.flip(1, 2), "the operation 'flip' works along rows or columns"),
        (lambda v: v.chunk(2, axis=3)[0], "the operation 'chunk' works along rows or columns"),
        (lambda v: v.unbind(axis=2)[0], "the operation 'unbind' works along rows or columns"),
        (lambda v: torch.cat([v, v], axis=-1), "the operation 'cat' joins images along rows or columns"),
        (lambda v: v.mean(axis=-1), "the operation 'mean' works along rows or columns"),
        (lambda v: v - v.var(False), "the operation 'var' works along rows and columns"),
        (lambda v: v - v.amax(dim=[]), "the operation 'amax' works along rows and columns"),
        (lambda v: v.roll(1), "the operation 'roll' works along rows or columns"),
        (
            lambda v: torch.neg(v.detach(), out=torch.empty_like(v)),
            "the operation 'neg' writes its result into",
        ),
        (
            lambda v: torch.mean(v.detach(), (2, 3), out=v.new_empty(2, 4)),
            "the operation 'mean' writes its result",
        ),
        (lambda v: v.view(dtype=torch.int32), "the operation 'view' looks at pixels as another dtype"),
        (lambda v: v.view(torch.int32), "the operation 'view' looks at pixels as another dtype"),
        (lambda v: v[:, :1].squeeze_(1), "the operation 'squeeze' changes the shape of a tensor in place"),
    ],
)
def test_what_an_alias_means_is_refused_by_name(function: Function, words: str) -> None:
    assert f"tile = 1 × 2: {words}" in reason(function, Tile(1, 2))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda v: v - v.mean(axis=0, keepdims=True), "the operation 'mean' works along samples"),
        (lambda v: v - v.mean(), "the operation 'mean' works along samples"),
        (lambda v: v.flip(1, 0), "the operation 'flip' works along samples"),
        (lambda v: v.softmax(axis=0), "the operation 'softmax' works along samples"),
        (lambda v: torch.cat([v, v], axis=0), "the operation 'cat' works along samples"),
        (lambda v: v + v[0], "the operation 'getitem' works along samples"),
        (lambda v: v / v.norm(), "the operation 'norm' takes samples together"),
    ],
)
def test_shares_of_the_batch_are_not_taken_together(function: Function, words: str) -> None:
    plan = Tile(1, 2, hand_over="batch")
    assert f"tile = 1 × 2: {words}" in reason(lambda v: function(v.flatten(2)), plan)


def test_every_rule_has_a_signature() -> None:
    assert set(RULES) - POINTWISE - DRAWS == set(PARAMETERS)

"""Layers of image models that other models lack: norms of channels, stochastic depth, gates by a pooled mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import weft
from weft.proof.float64 import Float64
from weft.proof.prove import verify

CHANNELS, SIZE = 8, 4
X, DATA = weft.Plan(tensor=weft.Tensor(x=2)), weft.Plan(data=2)


def images(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, SIZE, SIZE, generator=generator), torch.randint(0, 4, (4,), generator=generator)


class ChannelNorm(nn.LayerNorm):
    """Norms the channels of images."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ImageNorm(nn.LayerNorm):
    """Norms channels, rows and columns together."""

    def __init__(self, channels: int) -> None:
        super().__init__((channels, SIZE, SIZE))


class Block(nn.Module):
    """A depthwise convolution and an MLP over channels, without a convolution that x splits."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.mix, self.norm = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS), norm(CHANNELS)
        self.up, self.down = nn.Linear(CHANNELS, 2 * CHANNELS), nn.Linear(2 * CHANNELS, CHANNELS)

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.norm(self.mix(value)).permute(0, 2, 3, 1)
        return value + self.drop(self.down(functional.gelu(self.up(hidden))).permute(0, 3, 1, 2))

    def drop(self, value: Tensor) -> Tensor:
        return value


class ImageModel(nn.Module):
    def __init__(self, block: type[Block] = Block, norm: type[nn.Module] = ChannelNorm) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, CHANNELS, 1), nn.Linear(CHANNELS, 4)
        self.blocks = nn.ModuleList(block(norm) for _ in range(2))

    def forward(self, value: Tensor) -> Tensor:
        value = self.stem(value)
        for block in self.blocks:
            value = block(value)
        out: Tensor = self.head(value.mean((2, 3)))
        return out


@pytest.mark.processes
@pytest.mark.sampled(1)
@pytest.mark.parametrize("norm", [ChannelNorm, ImageNorm])
def test_a_norm_that_does_not_run_on_rows_of_features_is_proved_under_x(norm: type[nn.Module]) -> None:
    verify(lambda: ImageModel(norm=norm), images, X, steps=2).require()


# --- masks that are drawn


class Dropping(Block):
    """Leaves out the block for some samples, and scales the others, while it trains (stochastic depth)."""

    def drop(self, value: Tensor) -> Tensor:
        if not self.training:
            return value
        return value * value.new_empty(len(value), 1, 1, 1).bernoulli_(0.75).div_(0.75)


class Sampling(Block):
    """Its mask is of integers, which have no mean."""

    def drop(self, value: Tensor) -> Tensor:
        return value * torch.empty(len(value), 1, 1, 1, dtype=torch.long).bernoulli_(0.5) if self.training else value


@pytest.mark.processes
def test_stochastic_depth_is_proved_as_if_nothing_were_dropped_and_this_is_said() -> None:
    report = verify(lambda: ImageModel(Dropping), images, DATA, steps=2).require()
    assert report.not_proved[0].startswith("random masks (bernoulli): the proof uses their mean, as if nothing")
    report = verify(lambda: ImageModel(Sampling), images, DATA)
    assert report.not_proved[-1].startswith("the model draws random numbers (test_image_models.py")


@pytest.mark.parametrize(
    "draw",
    [
        lambda value: value.bernoulli_(0.25),
        lambda value: value.bernoulli_(torch.tensor(0.25)),
        lambda value: value.bernoulli(0.25),
        lambda value: torch.bernoulli(value, p=0.25),
        lambda value: torch.bernoulli(torch.full_like(value, 0.25)),
    ],
)
def test_the_mean_of_a_mask(draw: Any) -> None:
    with Float64() as wide:
        assert torch.equal(draw(torch.ones(2, 3)), torch.full((2, 3), 0.25))
    assert not wide.draws
    assert len(wide.notes) == 1

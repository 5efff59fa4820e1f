"""U-Net (Ronneberger et al., 2015): a class for each pixel. Convolutions are padded, so the image keeps its size.

Down: two convolutions and a pool, `depth` times, with twice the channels each time. Up: the image is upsampled by two,
concatenated with the features of this size from the way down, and passed through two convolutions. It has BatchNorm,
as is usual today.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from weft.models.decoder_config import require_positive
from weft.models.vision.norm import NormKind, make_norm


@dataclass(frozen=True)
class UNetConfig:
    """The config of a U-Net. `up` selects how the image is upsampled: by a transposed convolution, or bilinearly
    followed by a 1 × 1 convolution.
    """

    architecture: Literal["unet"] = "unet"
    depth: int = 4
    width: int = 64
    num_classes: int = 2
    in_channels: int = 3
    up: Literal["transposed", "bilinear"] = "transposed"
    norm: NormKind = "batch"

    is_dense: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive(self, "depth", "width", "num_classes", "in_channels")

    @property
    def size_multiple(self) -> int:
        """Height and width must be multiples of this."""
        return int(2**self.depth)

    @property
    def num_layers(self) -> int:
        """The number of pairs of convolutions."""
        return 2 * self.depth + 1

    def shrunk(self, num_layers: int = 2) -> UNetConfig:
        """A tiny config of the same structure, for a quick verification in float64."""
        depth = max(2, -(-(num_layers - 1) // 2))
        return replace(self, depth=min(self.depth, depth), width=min(self.width, 4))


class DoubleConv(nn.Sequential):
    """Two times a 3 × 3 convolution, a norm and a ReLU."""

    def __init__(self, norm: NormKind, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            make_norm(norm, outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            make_norm(norm, outputs),
            nn.ReLU(inplace=True),
        )


class BilinearUpsample(nn.Sequential):
    """Upsamples an image by two, bilinearly, and halves its channels by a 1 × 1 convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__(
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), nn.Conv2d(channels, channels // 2, 1)
        )


class UNet(nn.Module):
    """images [batch, channels, height, width] -> logits [batch, classes, height, width]."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        widths = [config.width * 2**level for level in range(config.depth + 1)]
        inputs = [config.in_channels, *widths]
        self.down = nn.ModuleList(
            DoubleConv(config.norm, inputs[level], widths[level]) for level in range(config.depth + 1)
        )
        self.pool = nn.MaxPool2d(2)
        self.doubles, self.up = nn.ModuleList(), nn.ModuleList()
        for level in reversed(range(config.depth)):
            bigger, smaller = widths[level + 1], widths[level]
            doubles = (
                nn.ConvTranspose2d(bigger, smaller, 2, stride=2)
                if config.up == "transposed"
                else BilinearUpsample(bigger)
            )
            self.doubles.append(doubles)
            self.up.append(DoubleConv(config.norm, bigger, smaller))
        self.classifier = nn.Conv2d(config.width, config.num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        hidden, passed = images, []
        for level, convolve in enumerate(self.down):
            hidden = convolve(hidden if level == 0 else self.pool(hidden))
            passed.append(hidden)
        passed.pop()  # the smallest features are `hidden` itself
        for double, convolve in zip(self.doubles, self.up, strict=True):
            hidden = convolve(torch.cat([passed.pop(), double(hidden)], dim=1))
        logits: Tensor = self.classifier(hidden)
        return logits

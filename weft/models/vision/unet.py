"""U-Net (Ronneberger et al., 2015): a class for each pixel. Convolutions are padded, so the image keeps its size.

Down: two convolutions and a pool, `depth` times, with twice the channels each time. Up: the image is upsampled by two,
concatenated with the features of this size from the way down, and passed through two convolutions. It has BatchNorm,
as is usual today.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.architectures.vision import NormKind, UNetConfig
from weft.models.vision.norm import make_norm


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

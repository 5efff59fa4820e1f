"""ResNet and ResNeXt for large images (He et al., 2015; Xie et al., 2016): images [batch, 3, height, width] -> logits.

Module and parameter names are torchvision's, and so is the stride of a bottleneck (in its 3 × 3 convolution), so
torchvision's weights load name by name. ResNeXt-50 32x4d is depth 50, groups 32 and width_per_group 4.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.architectures.vision import ResNetConfig
from weft.models.vision.norm import make_norm


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions with a residual connection."""

    def __init__(self, config: ResNetConfig, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = make_norm(config.norm, channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = make_norm(config.norm, channels)
        self.downsample = shortcut(config, inputs, channels, stride)

    def forward(self, images: Tensor) -> Tensor:
        residual = images if self.downsample is None else self.downsample(images)
        hidden = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(images)))))
        out: Tensor = self.relu(hidden + residual)
        return out


class Bottleneck(nn.Module):
    """1 × 1 to few channels, 3 × 3 (in groups), 1 × 1 to 4 × `channels`, with a residual connection."""

    def __init__(self, config: ResNetConfig, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        inner, outputs = config.inner(channels), 4 * channels
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = make_norm(config.norm, inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, groups=config.groups, bias=False)
        self.bn2 = make_norm(config.norm, inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = make_norm(config.norm, outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(config, inputs, outputs, stride)

    def forward(self, images: Tensor) -> Tensor:
        residual = images if self.downsample is None else self.downsample(images)
        hidden = self.relu(self.bn1(self.conv1(images)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        out: Tensor = self.relu(self.bn3(self.conv3(hidden)) + residual)
        return out


def shortcut(config: ResNetConfig, inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """Returns a convolution and norm that map a block's input to its output's shape; None if the shapes are equal."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False),
        make_norm(config.norm, outputs),
    )


class ResNet(nn.Module):
    """A stem that divides height and width by 4, four stages of blocks, of which all but the first halve them, and a
    classifier.
    """

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.conv1 = nn.Conv2d(config.in_channels, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = make_norm(config.norm, width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        outputs = [(4 if config.kind == "bottleneck" else 1) * width * 2**index for index in range(4)]
        self.layer1 = _stage(config, width, 0)
        self.layer2 = _stage(config, outputs[0], 1)
        self.layer3 = _stage(config, outputs[1], 2)
        self.layer4 = _stage(config, outputs[2], 3)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(outputs[3], config.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.maxpool(self.relu(self.bn1(self.conv1(images))))  # [batch, width, height / 4, width / 4]
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(hidden), 1))
        return logits  # [batch, classes]


def _stage(config: ResNetConfig, inputs: int, index: int) -> nn.Sequential:
    """Returns a stage: blocks of one size, of which the first takes the output of the stage before."""
    channels, count, stride = config.width * 2**index, config.stages[index], 1 if index == 0 else 2
    if config.kind == "basic":
        rest = [BasicBlock(config, channels, channels, 1) for _ in range(count - 1)]
        return nn.Sequential(BasicBlock(config, inputs, channels, stride), *rest)
    more = [Bottleneck(config, 4 * channels, channels, 1) for _ in range(count - 1)]
    return nn.Sequential(Bottleneck(config, inputs, channels, stride), *more)

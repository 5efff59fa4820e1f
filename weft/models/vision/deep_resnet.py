"""ResNets of any depth for small images: version 1 of depth 6n + 2, version 2 of depth 9n + 2 (ResNet-1001 and deeper).

HyPar-Flow and GEMS train these networks, which are those of Keras' CIFAR example: three stages of n blocks of 16, 32
and 64 channels (version 1: two 3 × 3 convolutions), or of 64, 128 and 256 (version 2: bottlenecks whose norms come
before their convolutions). Shortcuts have no norm. Version 2 is wider inside than in He et al. (2016): the inside of a
bottleneck has as many channels as the output of the stage before (16, 64, 128, not 16, 32, 64). Keras' convolutions
have biases, which the norms after them cancel or replace; here they have none.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.architectures.vision import DeepResNetConfig
from weft.models.vision.norm import make_norm


class BlockV1(nn.Module):
    """Two 3 × 3 convolutions, each followed by a norm, and a residual connection; ReLU of the sum."""

    def __init__(self, config: DeepResNetConfig, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = make_norm(config.norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = make_norm(config.norm, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False) if inputs != outputs else None
        self.relu = nn.ReLU(inplace=True)

    def forward(self, images: Tensor) -> Tensor:
        residual = images if self.shortcut is None else self.shortcut(images)
        hidden = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(images)))))
        out: Tensor = self.relu(hidden + residual)
        return out


class BlockV2(nn.Module):
    """A bottleneck with a norm and a ReLU before each convolution, and a residual connection.

    The first block of the model has none before its first convolution, because the stem ends with them.
    """

    def __init__(
        self, config: DeepResNetConfig, inputs: int, inner: int, outputs: int, stride: int, is_first: bool
    ) -> None:
        super().__init__()
        self.norm1 = None if is_first else make_norm(config.norm, inputs)
        self.conv1 = nn.Conv2d(inputs, inner, 1, stride=stride, bias=False)
        self.norm2 = make_norm(config.norm, inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.norm3 = make_norm(config.norm, inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False) if inputs != outputs else None
        self.relu = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        residual = images if self.shortcut is None else self.shortcut(images)
        hidden = images if self.norm1 is None else self.relu(self.norm1(images))
        hidden = self.conv2(self.relu(self.norm2(self.conv1(hidden))))
        out: Tensor = self.conv3(self.relu(self.norm3(hidden))) + residual
        return out


class DeepResNet(nn.Module):
    """images [batch, channels, height, width] -> logits [batch, classes]. Height and width are halved twice."""

    def __init__(self, config: DeepResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.conv = nn.Conv2d(config.in_channels, config.width, 3, padding=1, bias=False)
        self.norm = make_norm(config.norm, config.width)
        self.relu = nn.ReLU(inplace=True)
        first, second, third = (config.width * 2**index * (4 if config.version == 2 else 1) for index in range(3))
        self.stage1 = _stage(config, config.width, first, 1)
        self.stage2 = _stage(config, first, second, 2)
        self.stage3 = _stage(config, second, third, 2)
        self.last_norm = make_norm(config.norm, third) if config.version == 2 else None
        self.pool = nn.AdaptiveAvgPool2d((1, 1))
        self.classifier = nn.Linear(third, config.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.relu(self.norm(self.conv(images)))
        hidden = self.stage3(self.stage2(self.stage1(hidden)))
        if self.last_norm is not None:
            hidden = self.relu(self.last_norm(hidden))
        logits: Tensor = self.classifier(torch.flatten(self.pool(hidden), 1))
        return logits


def _stage(config: DeepResNetConfig, inputs: int, outputs: int, stride: int) -> nn.Sequential:
    count = config.blocks_per_stage
    if config.version == 1:
        rest = [BlockV1(config, outputs, outputs, 1) for _ in range(count - 1)]
        return nn.Sequential(BlockV1(config, inputs, outputs, stride), *rest)
    more = [BlockV2(config, outputs, inputs, outputs, 1, is_first=False) for _ in range(count - 1)]
    return nn.Sequential(BlockV2(config, inputs, inputs, outputs, stride, is_first=stride == 1), *more)

"""Models with convolutions, as people write them, and batches for them: for the tests of the axes x and y."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from tensor_for_tests import BATCH, VOCABULARY, WIDTH, Layer
from torch import Tensor, nn

NUM_CLASSES = 5


def image_batch(step: int) -> tuple[Tensor, Tensor]:
    """Eight images [3, 8, 8] and a class each."""
    generator = torch.Generator().manual_seed(600 + step)
    return torch.randn(BATCH, 3, 8, 8, generator=generator), torch.randint(
        0, NUM_CLASSES, (BATCH,), generator=generator
    )


def volume_batch(step: int) -> tuple[Tensor, Tensor]:
    """Eight volumes [4, 4, 4, 4]."""
    images, labels = image_batch(step)
    return torch.cat([images, images[:, :1]], 1).view(BATCH, 4, 4, 4, 4), labels


def text_batch(step: int) -> tuple[Tensor, Tensor]:
    """Eight sequences of twelve tokens."""
    generator = torch.Generator().manual_seed(700 + step)
    tokens = torch.randint(0, VOCABULARY, (BATCH, 12), generator=generator)
    return tokens, torch.randint(0, NUM_CLASSES, (BATCH,), generator=generator)


def plain(bias: bool = True) -> nn.Module:
    """A chain: two pairs, one of them over a pool, a lone convolution, and a classifier behind a flatten."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=bias), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 6, 3, padding=1, bias=bias), nn.Conv2d(6, 8, 1, bias=bias), nn.GELU()),
        *(nn.Conv2d(8, 12, (3, 2), stride=(1, 2), bias=bias), nn.GroupNorm(3, 12), nn.ReLU(inplace=True)),
        *(nn.Conv2d(12, 4, 3, padding="same", bias=bias), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 8)),
    )


class Classic(nn.Module):
    """Convolutions and linears as attributes, put together by functions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3, dilation=2)
        self.fc1, self.fc2 = nn.Linear(48, 16), nn.Linear(16, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu_(self.conv2(F.relu_(self.conv1(images))))
        out: Tensor = self.fc2(F.relu_(self.fc1(hidden.flatten(1))))
        return out


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, norm: Callable[[int], nn.Module], inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1, self.relu = norm(outputs), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), norm(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), norm(outputs))

    def forward(self, hidden: Tensor) -> Tensor:
        identity = hidden if self.downsample is None else self.downsample(hidden)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(hidden)))))
        out += identity
        result: Tensor = self.relu(out)
        return result


class ResNet(nn.Module):
    """A small one in torchvision's manner: a stem, two stages, an average and a classifier."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), norm(8)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(Residual(norm, 8, 8, 1), Residual(norm, 8, 8, 1))
        self.layer2 = nn.Sequential(Residual(norm, 8, 16, 2))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(16, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        hidden = self.avgpool(self.layer2(self.layer1(hidden)))
        logits: Tensor = self.fc(torch.flatten(hidden, 1))
        return logits


def group_resnet() -> nn.Module:
    """With GroupNorm."""
    return ResNet(lambda channels: nn.GroupNorm(4, channels))


def batch_resnet() -> nn.Module:
    """With BatchNorm."""
    return ResNet(nn.BatchNorm2d)


class ViT(nn.Module):
    """A vision transformer whose patches are embedded by a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.positions = nn.Parameter(torch.linspace(-1, 1, 4 * WIDTH).view(1, 4, WIDTH))
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.patch(images).flatten(2).transpose(1, 2) + self.positions  # [batch, patches, width]
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden).mean(1))
        return logits


class Text(nn.Module):
    """Tokens through convolutions in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(12, 16, 3, padding=1), nn.GELU(), nn.Conv1d(16, 12, 3, padding=2, dilation=2))
            for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(12, NUM_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens).transpose(1, 2)  # [batch, channels, tokens]
        for layer in self.layers:
            hidden = hidden + self.scale * layer(hidden)
        logits: Tensor = self.head(hidden.mean(-1))
        return logits


def volumes() -> nn.Module:
    """Convolutions in three dimensions, of which the last makes the classes."""
    return nn.Sequential(
        *(nn.Conv3d(4, 8, 2, padding=1), nn.Tanh(), nn.Conv3d(8, 12, 3, stride=2, bias=False), nn.SiLU()),
        *(nn.Conv3d(12, 8, 2, padding=1, padding_mode="circular"), nn.AdaptiveAvgPool3d(1), nn.Flatten()),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "no bias": lambda: plain(bias=False),
    "classic": Classic, "GroupNorm": group_resnet, "BatchNorm": batch_resnet, "vit": ViT, "text": Text,
    "volumes": volumes,
}  # fmt: skip
BATCHES = {"text": text_batch, "volumes": volume_batch}

"""AmoebaNet-D (Real et al., 2018) of any number of layers and filters, as GPipe (Huang et al., 2018) trains it.

Every cell takes the results of the two cells before it, maps both to its number of channels, combines pairs of states
five times and concatenates some of the states. A state is an input or a sum of two operations on earlier states. Normal
cells keep the image's size; reduction cells halve it. The order of pairs is that of Google's reference implementation
and of torchgpipe. It gives the parameter counts of GPipe's table: (18, 208) has 82 million.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from weft.architectures.vision import NUM_GROUPS, AmoebaNetDConfig, NormKind
from weft.models.vision.norm import make_norm


class Genotype(NamedTuple):
    """The structure of a cell. Each pair of (state, operation) gives the next state; `result` lists the states that are
    concatenated.

    States 0 and 1 are the results of the previous cell and of the cell before that.
    """

    pairs: tuple[tuple[tuple[int, str], tuple[int, str]], ...]
    result: tuple[int, ...]


NORMAL = Genotype(
    (
        ((1, "conv_1x1"), (1, "max_pool_3x3")),
        ((1, "identity"), (0, "conv_1x7_7x1")),
        ((0, "conv_1x1"), (0, "conv_1x7_7x1")),
        ((2, "max_pool_3x3"), (2, "identity")),
        ((1, "avg_pool_3x3"), (5, "conv_1x1")),
    ),
    (0, 3, 4, 6),
)
REDUCTION = Genotype(
    (
        ((0, "max_pool_2x2"), (0, "max_pool_3x3")),
        ((2, "identity"), (1, "conv_3x3")),
        ((2, "conv_1x7_7x1"), (2, "max_pool_3x3")),
        ((3, "identity"), (1, "max_pool_2x2")),
        ((2, "avg_pool_3x3"), (3, "conv_1x1")),
    ),
    (4, 5, 6),
)


class AmoebaNetD(nn.Module):
    """images [batch, channels, height, width] -> logits [batch, classes]."""

    def __init__(self, config: AmoebaNetDConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.filters // 4
        self.stem = nn.Sequential(
            nn.Conv2d(config.in_channels, channels, 3, stride=2, padding=1, bias=False),
            make_norm(config.norm, channels),
        )
        group = [False] * (config.layers // NUM_GROUPS)
        reductions = [True, True, *group, True, *group, True, *group]
        cells, last, before, halved = [], channels, channels, False
        for reduces in reductions:
            channels *= 2 if reduces else 1
            cells.append(Cell(config.norm, last, before, channels, reduces, halved))
            last, before, halved = cells[-1].out_channels, last, reduces
        self.cells = nn.ModuleList(cells)
        self.pool = nn.AdaptiveAvgPool2d((1, 1))
        self.classifier = nn.Linear(last, config.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        before = last = self.stem(images)
        for cell in self.cells:
            before, last = last, cell(last, before)
        logits: Tensor = self.classifier(torch.flatten(self.pool(last), 1))
        return logits


class Cell(nn.Module):
    """One cell. `last` and `before` are the channels of the results of the previous cell and of the cell before that;
    `halved` says that the previous cell was a reduction.
    """

    def __init__(self, norm: NormKind, last: int, before: int, channels: int, reduces: bool, halved: bool) -> None:
        super().__init__()
        self.genotype = REDUCTION if reduces else NORMAL
        self.out_channels = channels * len(self.genotype.result)
        self.take_last = conv(norm, last, channels)
        if halved:
            self.take_before: nn.Module = FactorizedReduce(norm, before, channels)
        else:
            self.take_before = conv(norm, before, channels) if before != channels else nn.Identity()
        self.operations = nn.ModuleList(
            operation(norm, name, channels, stride=2 if reduces and state < 2 else 1)
            for pair in self.genotype.pairs
            for state, name in pair
        )

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        states = [self.take_last(last), self.take_before(before)]
        for index, ((left, _), (right, _)) in enumerate(self.genotype.pairs):
            first, second = self.operations[2 * index], self.operations[2 * index + 1]
            states.append(first(states[left]) + second(states[right]))
        return torch.cat([states[index] for index in self.genotype.result], dim=1)


class FactorizedReduce(nn.Module):
    """Halves the size: even pixels give half of the channels, odd pixels the other half."""

    def __init__(self, norm: NormKind, inputs: int, outputs: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.shift = nn.ZeroPad2d((-1, 1, -1, 1))  # replaces each pixel by the one below and to the right of it
        self.odd = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.norm = make_norm(norm, outputs)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.relu(images)
        out: Tensor = self.norm(torch.cat([self.even(hidden), self.odd(self.shift(hidden))], dim=1))
        return out


def operation(norm: NormKind, name: str, channels: int, stride: int) -> nn.Module:
    """Returns the operation of a cell with this name. It keeps the number of channels."""
    inner = channels // 4
    match name:
        case "identity":
            assert stride == 1, "a genotype strides only from a cell's inputs"
            return nn.Identity()
        case "max_pool_2x2":
            return nn.MaxPool2d(2, stride=stride)
        case "max_pool_3x3":
            return nn.MaxPool2d(3, stride=stride, padding=1)
        case "avg_pool_3x3":
            return nn.AvgPool2d(3, stride=stride, padding=1, count_include_pad=False)
        case "conv_1x1":
            return conv(norm, channels, channels, stride=(stride, stride))
        case "conv_3x3":
            return nn.Sequential(
                *conv(norm, channels, inner),
                *conv(norm, inner, inner, (3, 3), (stride, stride)),
                *conv(norm, inner, channels),
            )
        case "conv_1x7_7x1":
            return nn.Sequential(
                *conv(norm, channels, inner),
                *conv(norm, inner, inner, (1, 7), (1, stride)),
                *conv(norm, inner, inner, (7, 1), (stride, 1)),
                *conv(norm, inner, channels),
            )
    raise AssertionError(name)


def conv(
    norm: NormKind, inputs: int, outputs: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
) -> nn.Sequential:
    """Returns a sequence of ReLU, convolution and norm."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False), make_norm(norm, outputs)
    )

"""Small models with the structure of those in torchvision and timm, written with plain torch: layers, norms, gates,
windows, branches and heads are as there, and sizes are tiny. Initial values are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES, SAMPLES, PIXELS = 4, 4, 32
Model = Callable[[], nn.Module]


def image_batch(step: int) -> tuple[Tensor, Tensor]:
    """Images and their classes."""
    rng = torch.Generator().manual_seed(step)
    images = torch.randn(SAMPLES, 3, PIXELS, PIXELS, generator=rng)
    return images, torch.randint(0, CLASSES, (SAMPLES,), generator=rng)


def mask_batch(step: int) -> tuple[Tensor, Tensor]:
    """Images and a class of each pixel, some of which do not count."""
    images, _ = image_batch(step)
    rng = torch.Generator().manual_seed(100 + step)
    labels = torch.randint(0, CLASSES, (SAMPLES, PIXELS, PIXELS), generator=rng)
    return images, labels.masked_fill(torch.rand(labels.shape, generator=rng) < 0.1, -100)


# --- parts


def norm_conv(
    given: int,
    out: int,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    act: type[nn.Module] | None = nn.ReLU,
    bias: bool = False,
    dilation: int = 1,
) -> nn.Sequential:
    """Returns a convolution, batch norm and an activation."""
    padding = dilation * (kernel // 2)
    layers: list[nn.Module] = [nn.Conv2d(given, out, kernel, stride, padding, dilation, groups, bias=bias)]
    layers.append(nn.BatchNorm2d(out))
    return nn.Sequential(*layers, *([act()] if act is not None else []))


class Add(nn.Module):
    """Adds what its layers compute to its input, which a shortcut may change."""

    def __init__(self, layers: nn.Module, shortcut: nn.Module | None = None, act: nn.Module | None = None) -> None:
        super().__init__()
        self.layers, self.shortcut, self.act = layers, shortcut or nn.Identity(), act or nn.Identity()

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = self.act(self.shortcut(value) + self.layers(value))
        return out


class Gate(nn.Module):
    """Squeeze and excitation: scales channels by what a pooled mean says."""

    def __init__(self, width: int, hidden: int, last: type[nn.Module] = nn.Sigmoid) -> None:
        super().__init__()
        self.pool, self.down, self.up = (
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(width, hidden, 1),
            nn.Conv2d(hidden, width, 1),
        )
        self.last = last()

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = value * self.last(self.up(functional.relu(self.down(self.pool(value)))))
        return out


class Concat(nn.Module):
    """Concatenates the results of branches."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, value: Tensor) -> Tensor:
        return torch.cat([branch(value) for branch in self.branches], 1)


class ChannelNorm(nn.LayerNorm):
    """Norms the channels of images."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Attention(nn.Module):
    """Attention of all tokens, from one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, value: Tensor) -> Tensor:
        batch, tokens, width = value.shape
        q, k, v = self.qkv(value).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return out


class TokenBlock(nn.Module):
    """A block of a vision transformer; `scale` is that of its residual branches."""

    def __init__(self, width: int, mixer: nn.Module | None = None, scale: float | None = None) -> None:
        super().__init__()
        self.norm1, self.mixer, self.norm2 = nn.LayerNorm(width), mixer or Attention(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.scale = None if scale is None else nn.Parameter(torch.full((2, width), scale))

    def forward(self, value: Tensor) -> Tensor:
        scales = (1.0, 1.0) if self.scale is None else self.scale
        value = value + scales[0] * self.mixer(self.norm1(value))
        out: Tensor = value + scales[1] * self.mlp(self.norm2(value))
        return out


class Classifier(nn.Module):
    """A first layer, blocks, a global mean and a linear."""

    def __init__(self, first: nn.Module, blocks: Sequence[nn.Module], width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.stem, self.blocks = first, nn.ModuleList(blocks)
        self.pool, self.drop, self.head = nn.AdaptiveAvgPool2d(1), nn.Dropout(drop), nn.Linear(width, CLASSES)

    def forward(self, value: Tensor) -> Tensor:
        value = self.stem(value)
        for block in self.blocks:
            value = block(value)
        out: Tensor = self.head(self.drop(self.pool(value).flatten(1)))
        return out


class Patches(nn.Module):
    """A model of tokens: patches, a class token, positions, blocks, and a head on the class token or the mean."""

    def __init__(self, blocks: Sequence[nn.Module], width: int = 16, patch: int = 8, with_class: bool = True) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width)) if with_class else None
        self.positions = nn.Parameter(0.02 * torch.randn(1, (PIXELS // patch) ** 2 + with_class, width))
        self.blocks, self.norm, self.head = nn.ModuleList(blocks), nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, value: Tensor) -> Tensor:
        value = self.embed(value).flatten(2).transpose(1, 2)
        if self.token is not None:
            value = torch.cat([self.token.expand(len(value), -1, -1), value], 1)
        value = value + self.positions
        for block in self.blocks:
            value = block(value)
        value = self.norm(value)
        out: Tensor = self.head(value[:, 0] if self.token is not None else value.mean(1))
        return out


# --- convolutional models


def basic(given: int, out: int, stride: int = 1, bias: bool = False) -> nn.Module:
    layers = nn.Sequential(norm_conv(given, out, 3, stride, bias=bias), norm_conv(out, out, act=None, bias=bias))
    shortcut = norm_conv(given, out, 1, stride, act=None) if stride > 1 or given != out else None
    return Add(layers, shortcut, nn.ReLU())


def _bottleneck(
    given: int, out: int, stride: int = 1, groups: int = 1, gate: bool = False, inner: int = 8
) -> nn.Module:
    middle = [Gate(inner, 4)] if gate else []
    layers = [norm_conv(given, inner, 1), norm_conv(inner, inner, 3, stride, groups), *middle]
    shortcut = norm_conv(given, out, 1, stride, act=None) if stride > 1 or given != out else None
    return Add(nn.Sequential(*layers, norm_conv(inner, out, 1, act=None)), shortcut, nn.ReLU())


def inverted(
    given: int, out: int, stride: int = 1, act: type[nn.Module] = nn.ReLU6, gate: type[nn.Module] | None = None
) -> nn.Module:
    inner = 2 * given
    layers: list[nn.Module] = [norm_conv(given, inner, 1, act=act), norm_conv(inner, inner, 3, stride, inner, act)]
    if gate is not None:
        layers.append(Gate(inner, 4, gate))
    layers.append(norm_conv(inner, out, 1, act=None))
    return Add(nn.Sequential(*layers)) if stride == 1 and given == out else nn.Sequential(*layers)


class Shuffle(nn.Module):
    """A unit of ShuffleNet V2: half of the channels pass, and channels are shuffled."""

    def __init__(self, given: int, out: int, stride: int) -> None:
        super().__init__()
        half, own = out // 2, given if stride > 1 else given // 2
        self.stride = stride
        self.left = (
            nn.Sequential(norm_conv(own, own, 3, stride, own, act=None), norm_conv(own, half, 1))
            if stride > 1
            else nn.Identity()
        )
        self.right = nn.Sequential(
            norm_conv(own, half, 1), norm_conv(half, half, 3, stride, half, act=None), norm_conv(half, half, 1)
        )

    def forward(self, value: Tensor) -> Tensor:
        left, right = value.chunk(2, 1) if self.stride == 1 else (value, value)
        joined = torch.cat([self.left(left), self.right(right)], 1)
        batch, width, rows, columns = joined.shape
        return joined.view(batch, 2, width // 2, rows, columns).transpose(1, 2).reshape(joined.shape)


class Dense(nn.Module):
    """A layer of DenseNet: appends new channels."""

    def __init__(self, given: int, growth: int = 8) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(given), nn.Conv2d(given, growth, 3, padding=1, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        return torch.cat([value, self.conv(functional.relu(self.norm(value)))], 1)


class NeXtBlock(nn.Module):
    """A block of ConvNeXt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width, 1e-6)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gamma = nn.Parameter(torch.full((width, 1, 1), 1e-6))

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.down(functional.gelu(self.up(self.norm(self.mix(value).permute(0, 2, 3, 1)))))
        return value + self.gamma * hidden.permute(0, 3, 1, 2)


class Res2(nn.Module):
    """The middle of a block of Res2Net: groups of channels, each given the result of the one before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(norm_conv(width // 4, width // 4) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        first, *others = value.chunk(4, 1)
        found = [first]
        for conv, own in zip(self.convs, others, strict=True):
            found.append(conv(own if len(found) == 1 else own + found[-1]))
        return torch.cat(found, 1)


class Ghost(nn.Module):
    """A module of GhostNet: half of the channels by a cheap convolution of the others."""

    def __init__(self, given: int, out: int) -> None:
        super().__init__()
        self.first, self.cheap = norm_conv(given, out // 2, 1), norm_conv(out // 2, out // 2, 3, groups=out // 2)

    def forward(self, value: Tensor) -> Tensor:
        first = self.first(value)
        return torch.cat([first, self.cheap(first)], 1)


class SelectiveKernel(nn.Module):
    """Chooses between kernels by a softmax of what a pooled mean says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.small, self.large = norm_conv(width, width, 3), norm_conv(width, width, 3, dilation=2)
        self.down, self.choose = nn.Linear(width, 8), nn.Linear(8, 2 * width)

    def forward(self, value: Tensor) -> Tensor:
        both = torch.stack([self.small(value), self.large(value)], 1)
        weights = self.choose(self.down(both.sum(1).mean((2, 3))).relu()).view(len(value), 2, -1, 1, 1)
        return (both * weights.softmax(1)).sum(1)


class TwoResolutions(nn.Module):
    """A module of HRNet: two resolutions that exchange features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.low, self.high = norm_conv(width, width, 3, 2), basic(width, width), basic(width, width)
        self.up = norm_conv(width, width, 1, act=None)

    def forward(self, value: Tensor) -> Tensor:
        low = functional.interpolate(self.up(self.low(self.down(value))), scale_factor=2, mode="nearest")
        return functional.relu(self.high(value) + low)


class StandardConv(nn.Conv2d):
    """A convolution whose weights have mean 0 and variance 1 (NFNet, BiT)."""

    def forward(self, value: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / (weight.var((1, 2, 3), keepdim=True, unbiased=False) + 1e-8).sqrt()
        return functional.conv2d(value, weight, self.bias, self.stride, self.padding)


def stem(width: int = 8, act: type[nn.Module] = nn.ReLU) -> nn.Module:
    return norm_conv(3, width, 3, 2, act=act)


def _vgg(norm: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for given, out in ((3, 8), (8, 16), (16, 16)):
        layers += [nn.Conv2d(given, out, 3, padding=1), *([nn.BatchNorm2d(out)] if norm else []), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    head = (nn.Linear(256, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    return nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(4), nn.Flatten(), *head)


def _inception(given: int) -> nn.Module:
    pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), norm_conv(given, 8, 1))
    wide = nn.Sequential(norm_conv(given, 4, 1), norm_conv(4, 8, 5))
    return Concat(norm_conv(given, 8, 1), nn.Sequential(norm_conv(given, 4, 1), norm_conv(4, 8)), wide, pooled)


def _fire(given: int) -> nn.Module:
    expand = Concat(
        nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU()), nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU())
    )
    return nn.Sequential(nn.Conv2d(given, 4, 1), nn.ReLU(), expand)


def _nf_block(width: int) -> nn.Module:
    layers = [nn.GELU(), StandardConv(width, width, 3, padding=1), nn.GELU(), StandardConv(width, width, 3, padding=1)]
    return Add(nn.Sequential(*layers, Gate(width, 4)))


def _conv_mixer(width: int) -> nn.Module:
    depthwise = Add(
        nn.Sequential(nn.Conv2d(width, width, 5, padding=2, groups=width), nn.GELU(), nn.BatchNorm2d(width))
    )
    return nn.Sequential(depthwise, nn.Conv2d(width, width, 1), nn.GELU(), nn.BatchNorm2d(width))


def _rep_vgg(width: int) -> nn.Module:
    return Add(
        norm_conv(width, width, act=None), Add(norm_conv(width, width, 1, act=None), nn.BatchNorm2d(width)), nn.ReLU()
    )


CONVOLUTIONAL: dict[str, Model] = {
    "alexnet": partial(_vgg, False),
    "vgg_bn": partial(_vgg, True),
    "squeezenet": lambda: Classifier(nn.Conv2d(3, 8, 3, 2), [_fire(8), nn.MaxPool2d(3, 2), _fire(16)], 16, 0.5),
    "resnet": lambda: Classifier(stem(), [basic(8, 8), basic(8, 16, 2), basic(16, 16)], 16),
    "resnet_biases": lambda: Classifier(stem(), [basic(8, 8, bias=True), basic(8, 16, 2, True)], 16),
    "wide_resnet": lambda: Classifier(stem(), [_bottleneck(8, 16, inner=16), _bottleneck(16, 16, 2, inner=32)], 16),
    "resnext": lambda: Classifier(stem(), [_bottleneck(8, 16, 1, 4), _bottleneck(16, 16, 2, 4)], 16),
    "seresnet": lambda: Classifier(stem(), [_bottleneck(8, 16, 1, gate=True), _bottleneck(16, 16, gate=True)], 16),
    "regnet": lambda: Classifier(stem(), [_bottleneck(8, 16, 2, 2, True), _bottleneck(16, 16, 1, 2, True)], 16),
    "res2net": lambda: Classifier(stem(16), [Add(Res2(16)), Add(Res2(16))], 16),
    "sknet": lambda: Classifier(stem(), [Add(SelectiveKernel(8)), Add(SelectiveKernel(8))], 8),
    "densenet": lambda: Classifier(stem(), [Dense(8), Dense(16), nn.AvgPool2d(2), Dense(24)], 32),
    "googlenet": lambda: Classifier(stem(), [_inception(8), nn.MaxPool2d(2), _inception(32)], 32),
    "mobilenet_v2": lambda: Classifier(stem(act=nn.ReLU6), [inverted(8, 8), inverted(8, 16, 2), inverted(16, 16)], 16),
    "mobilenet_v3": lambda: Classifier(
        stem(act=nn.Hardswish),
        [
            inverted(8, 8, 2, nn.ReLU, nn.Hardsigmoid),
            inverted(8, 16, 2, nn.Hardswish, nn.Hardsigmoid),
            inverted(16, 16, 1, nn.Hardswish, nn.Hardsigmoid),
        ],
        16,
    ),
    "mnasnet": lambda: Classifier(stem(), [inverted(8, 16, 2, nn.ReLU), inverted(16, 16, 1, nn.ReLU)], 16, 0.2),
    "efficientnet": lambda: Classifier(
        stem(act=nn.SiLU), [inverted(8, 16, 2, nn.SiLU, nn.Sigmoid), inverted(16, 16, 1, nn.SiLU, nn.Sigmoid)], 16
    ),
    "shufflenet": lambda: Classifier(
        nn.Sequential(stem(), nn.MaxPool2d(3, 2, 1)), [Shuffle(8, 16, 2), Shuffle(16, 16, 1), norm_conv(16, 32, 1)], 32
    ),
    "ghostnet": lambda: Classifier(stem(), [Ghost(8, 16), Add(Ghost(16, 16)), Gate(16, 4)], 16),
    "repvgg": lambda: Classifier(stem(), [_rep_vgg(8), _rep_vgg(8)], 8),
    "hrnet": lambda: Classifier(stem(), [TwoResolutions(8), TwoResolutions(8)], 8),
    "nfnet": lambda: Classifier(nn.Conv2d(3, 8, 3, 2, 1), [_nf_block(8), _nf_block(8)], 8),
    "convnext": lambda: Classifier(
        nn.Sequential(nn.Conv2d(3, 16, 4, 4), ChannelNorm(16)), [NeXtBlock(16), NeXtBlock(16)], 16
    ),
    "convmixer": lambda: Classifier(
        nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.GELU(), nn.BatchNorm2d(16)), [_conv_mixer(16), _conv_mixer(16)], 16
    ),
}

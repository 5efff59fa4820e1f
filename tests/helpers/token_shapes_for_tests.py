"""More small models with the structure of those in torchvision and timm: vision transformers, mixers, segmentation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from image_shapes_for_tests import (
    CLASSES,
    CONVOLUTIONAL,
    Attention,
    Classifier,
    Concat,
    Model,
    Patches,
    TokenBlock,
    basic,
    image_batch,
    inverted,
    mask_batch,
    norm_conv,
    stem,
)
from torch import Tensor, nn
from torch.nn import functional


class Windows(nn.Module):
    """Attention in windows of 4 × 4 pixels, with a learned bias of relative positions; or over a grid of them."""

    def __init__(self, width: int, heads: int = 2, is_grid: bool = False, shift: int = 0) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.is_grid, self.shift, self.norm = is_grid, shift, nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(49, heads))
        rows = torch.arange(16) // 4
        columns = torch.arange(16) % 4
        index = (rows[:, None] - rows + 3) * 7 + columns[:, None] - columns + 3
        self.register_buffer("index", index, persistent=False)

    def forward(self, value: Tensor) -> Tensor:
        """Takes and returns [batch, rows, columns, channels]."""
        batch, rows, columns, width = value.shape
        hidden = self.norm(value)
        if self.shift:
            hidden = hidden.roll((-self.shift, -self.shift), (1, 2))
        if self.is_grid:
            parts = hidden.view(batch, 4, rows // 4, 4, columns // 4, width).permute(0, 2, 4, 1, 3, 5)
        else:
            parts = hidden.view(batch, rows // 4, 4, columns // 4, 4, width).permute(0, 1, 3, 2, 4, 5)
        shape = parts.shape
        q, k, v = (
            self.qkv(parts.reshape(-1, 16, width))
            .view(-1, 16, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        scores = scores + self.bias[self.index.flatten()].view(16, 16, -1).permute(2, 0, 1)
        mixed = self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(shape))
        order = (0, 3, 1, 4, 2, 5) if self.is_grid else (0, 1, 3, 2, 4, 5)
        mixed = mixed.permute(order).reshape(batch, rows, columns, width)
        if self.shift:
            mixed = mixed.roll((self.shift, self.shift), (1, 2))
        return value + mixed


class MaxViTBlock(nn.Module):
    """A block of MaxViT: an inverted bottleneck, attention in windows, and over a grid."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = inverted(width, width, 1, nn.GELU, nn.Sigmoid)
        self.window, self.grid = Windows(width), Windows(width, is_grid=True)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.grid(self.window(self.conv(value).permute(0, 2, 3, 1)))
        return (hidden + self.mlp(hidden)).permute(0, 3, 1, 2)


class SwinBlock(nn.Module):
    """Attention in windows, then in shifted ones."""

    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.window = Windows(width, shift=shift)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.window(value.permute(0, 2, 3, 1))
        return (hidden + self.mlp(hidden)).permute(0, 3, 1, 2)


class TokenMLP(nn.Module):
    """Mixes tokens by an MLP over them (MLP-Mixer)."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(tokens, 2 * tokens), nn.Linear(2 * tokens, tokens)

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(value.transpose(1, 2)))).transpose(1, 2)
        return out


class SpatialGate(nn.Module):
    """Multiplies half of the channels by a linear of the others over tokens (gMLP)."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 2 * width), nn.Linear(width, width), nn.LayerNorm(width)
        self.mix = nn.Linear(tokens, tokens)

    def forward(self, value: Tensor) -> Tensor:
        left, right = functional.gelu(self.up(value)).chunk(2, -1)
        out: Tensor = self.down(left * self.mix(self.norm(right).transpose(1, 2)).transpose(1, 2))
        return out


class ChannelAttention(nn.Module):
    """Attention of channels (XCiT)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj, self.heat = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            nn.Parameter(torch.ones(1)),
        )

    def forward(self, value: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.qkv(value).chunk(3, -1))
        scores = functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).transpose(1, 2) * self.heat
        out: Tensor = self.proj((scores.softmax(-1) @ v).transpose(1, 2))
        return out


class TalkingHeads(nn.Module):
    """Attention whose scores are mixed over heads, before and behind the softmax (CaiT)."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))
        self.before, self.behind, self.heads = nn.Linear(heads, heads), nn.Linear(heads, heads), heads

    def forward(self, value: Tensor) -> Tensor:
        batch, tokens, width = value.shape
        q, k, v = (one(value).view(batch, tokens, self.heads, -1).transpose(1, 2) for one in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5).permute(0, 2, 3, 1)
        weights = self.behind(self.before(scores).softmax(-2)).permute(0, 3, 1, 2)
        out: Tensor = self.proj((weights @ v).transpose(1, 2).reshape(batch, tokens, width))
        return out


class Pooling(nn.Module):
    """Mixes tokens by a mean of neighbours, less the token itself (PoolFormer), on images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.GroupNorm(1, width), nn.GroupNorm(1, width)
        self.mlp = nn.Sequential(nn.Conv2d(width, 32, 1), nn.GELU(), nn.Conv2d(32, width, 1))

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.norm(value)
        value = value + functional.avg_pool2d(hidden, 3, 1, 1, count_include_pad=False) - hidden
        out: Tensor = value + self.mlp(self.norm2(value))
        return out


class ImageAttention(nn.Module):
    """Attention of all pixels of an image [batch, channels, rows, columns] (CoAtNet)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = TokenBlock(width)

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = self.block(value.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(value.shape)
        return out


class LevitAttention(nn.Module):
    """Attention with batch norm behind its projections, over tokens (LeViT)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.norm = nn.Linear(width, 3 * width, bias=False), nn.BatchNorm1d(3 * width)
        self.proj, self.norm2 = nn.Linear(width, width, bias=False), nn.BatchNorm1d(width)

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.qkv(value)
        q, k, v = self.norm(hidden.flatten(0, 1)).view(hidden.shape).chunk(3, -1)
        mixed = self.proj(functional.hardswish((q @ k.transpose(1, 2) * 0.25).softmax(-1) @ v))
        out: Tensor = self.norm2(mixed.flatten(0, 1)).view(mixed.shape)
        return out


# --- a class for each pixel; classes are the last dim of the result


class UNet(nn.Module):
    """An encoder and a decoder with a skip connection; its convolutions have biases before batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = self.twice(3, 8), self.twice(8, 16), self.twice(16, 8)
        self.pool, self.up, self.head = nn.MaxPool2d(2), nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(8, CLASSES, 1)

    def twice(self, given: int, out: int) -> nn.Module:
        return nn.Sequential(norm_conv(given, out, bias=True), norm_conv(out, out, bias=True))

    def forward(self, value: Tensor) -> Tensor:
        first = self.first(value)
        joined = torch.cat([self.up(self.second(self.pool(first))), first], 1)
        out: Tensor = self.head(self.third(joined))
        return out.permute(0, 2, 3, 1)


class LRASPP(nn.Module):
    """The head of MobileNetV3 for segmentation: a branch gated by a pooled one."""

    def __init__(self) -> None:
        super().__init__()
        self.low = norm_conv(3, 8, 3, 2, act=nn.Hardswish)
        self.body = nn.Sequential(inverted(8, 16, 2, nn.Hardswish, nn.Hardsigmoid), inverted(16, 16, 1, nn.Hardswish))
        self.cbr = norm_conv(16, 8, 1)
        self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 8, 1, bias=False), nn.Sigmoid())
        self.low_head, self.high_head = nn.Conv2d(8, CLASSES, 1), nn.Conv2d(8, CLASSES, 1)

    def forward(self, value: Tensor) -> Tensor:
        low = self.low(value)
        high = self.body(low)
        gated = self.cbr(high) * self.scale(high)
        gated = functional.interpolate(gated, size=low.shape[-2:], mode="bilinear", align_corners=False)
        out = self.low_head(low) + self.high_head(gated)
        out = functional.interpolate(out, size=value.shape[-2:], mode="bilinear", align_corners=False)
        return out.permute(0, 2, 3, 1)


class Segmentation(nn.Module):
    """A backbone and a head (FCN, DeepLab), resized to the image."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(stem(), basic(8, 8), basic(8, 16, 2)), head

    def forward(self, value: Tensor) -> Tensor:
        out = functional.interpolate(self.head(self.body(value)), size=value.shape[-2:], mode="bilinear")
        return out.permute(0, 2, 3, 1)


def _fcn() -> nn.Module:
    return nn.Sequential(norm_conv(16, 8), nn.Dropout(0.1), nn.Conv2d(8, CLASSES, 1))


def _deeplab() -> nn.Module:
    parts = Concat(norm_conv(16, 8, 1), norm_conv(16, 8, dilation=2), norm_conv(16, 8, dilation=3))
    return nn.Sequential(parts, norm_conv(24, 8), nn.Conv2d(8, CLASSES, 1))


def patches() -> nn.Module:
    return nn.Conv2d(3, 16, 4, 4)


TOKENS: dict[str, Model] = {
    "vit": lambda: Patches([TokenBlock(16), TokenBlock(16)]),
    "deit3": lambda: Patches([TokenBlock(16, scale=1e-6), TokenBlock(16, scale=1e-6)]),
    "cait": lambda: Patches([TokenBlock(16, TalkingHeads(16), 1e-5), TokenBlock(16, TalkingHeads(16), 1e-5)]),
    "xcit": lambda: Patches([TokenBlock(16, ChannelAttention(16), 1.0), TokenBlock(16, ChannelAttention(16), 1.0)]),
    "mixer": lambda: Patches([TokenBlock(16, TokenMLP(16)), TokenBlock(16, TokenMLP(16))], with_class=False),
    "gmlp": lambda: Patches(
        [TokenBlock(16, SpatialGate(16, 16)), TokenBlock(16, SpatialGate(16, 16))], with_class=False
    ),
    "levit": lambda: Patches(
        [TokenBlock(16, LevitAttention(16)), TokenBlock(16, LevitAttention(16))], with_class=False
    ),
    "beit": lambda: Patches([TokenBlock(16, Attention(16, 4), 0.1), TokenBlock(16, Attention(16, 4), 0.1)]),
    "swin": lambda: Classifier(patches(), [SwinBlock(16, 0), SwinBlock(16, 2)], 16),
    "maxvit": lambda: Classifier(patches(), [MaxViTBlock(16), MaxViTBlock(16)], 16),
    "coatnet": lambda: Classifier(stem(16), [inverted(16, 16, 2, nn.GELU, nn.Sigmoid), ImageAttention(16)], 16),
    "poolformer": lambda: Classifier(patches(), [Pooling(16), Pooling(16)], 16),
}
MASKS: dict[str, Model] = {
    "unet": UNet,
    "lraspp": LRASPP,
    "fcn": lambda: Segmentation(_fcn()),
    "deeplab": lambda: Segmentation(_deeplab()),
}

Batch = Callable[[int], tuple[Tensor, Tensor]]
SHAPES: dict[str, tuple[Model, Batch]] = {
    **{name: (model, image_batch) for name, model in {**CONVOLUTIONAL, **TOKENS}.items()},
    **{name: (model, mask_batch) for name, model in MASKS.items()},
}

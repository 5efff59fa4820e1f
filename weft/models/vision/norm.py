"""The norm of convolutions: BatchNorm as published, or GroupNorm, which does not mix the images of a batch."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from weft.architectures.vision import NormKind

CHANNELS_PER_GROUP = 16


def make_norm(kind: NormKind, channels: int) -> nn.Module:
    """Returns a norm for channels. Groups have 16 of them, or the greatest common divisor of 16 and their number."""
    if kind == "batch":
        return BatchNorm(channels)
    return nn.GroupNorm(channels // math.gcd(channels, CHANNELS_PER_GROUP), channels)


class BatchNorm(nn.BatchNorm2d):
    """nn.BatchNorm2d whose parameters may have a narrower dtype than its running statistics.

    With bf16 parameters the statistics stay wide, because the small updates of their means would be lost otherwise.
    torch requires parameters and statistics of the same dtype, so parameters are cast here.
    """

    def forward(self, images: Tensor) -> Tensor:
        mean, variance = self.running_mean, self.running_var
        if mean is None or mean.dtype == self.weight.dtype:
            return super().forward(images)
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        assert self.momentum is not None
        weight, bias = self.weight.to(mean.dtype), self.bias.to(mean.dtype)
        return F.batch_norm(images, mean, variance, weight, bias, self.training, self.momentum, self.eps)

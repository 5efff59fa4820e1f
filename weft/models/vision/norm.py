"""The norm behind every convolution: BatchNorm as published, or GroupNorm, which does not mix the images of a batch."""

from __future__ import annotations

import math
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

NormKind = Literal["batch", "group"]
CHANNELS_PER_GROUP = 16


def make_norm(kind: NormKind, channels: int) -> nn.Module:
    """A norm of `channels`; groups are of 16 channels, or of as many of them as divide."""
    if kind == "batch":
        return BatchNorm(channels)
    return nn.GroupNorm(channels // math.gcd(channels, CHANNELS_PER_GROUP), channels)


class BatchNorm(nn.BatchNorm2d):
    """nn.BatchNorm2d that also computes where its parameters are narrower than its running statistics.

    Under bf16 statistics stay wide, or the small steps of their means would be lost; and torch takes parameters of
    their dtype only.
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

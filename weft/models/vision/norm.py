"""The norm behind every convolution: BatchNorm as published, or GroupNorm, which does not mix the images of a batch."""

from __future__ import annotations

import math
from typing import Literal

from torch import nn

NormKind = Literal["batch", "group"]
CHANNELS_PER_GROUP = 16


def make_norm(kind: NormKind, channels: int) -> nn.Module:
    """A norm of `channels`; groups are of 16 channels, or of as many of them as divide."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(channels // math.gcd(channels, CHANNELS_PER_GROUP), channels)

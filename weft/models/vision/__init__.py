"""Image models as published, in plain PyTorch without any code for parallelism.

Every spatial operation is a module (convolution, pool, norm, padding, upsampling), never a slice or a function call, so
that an axis that splits the image can replace it.
"""

from __future__ import annotations

from torch import nn

from weft.architectures.vision import (
    VISION_CONFIGS,
    AmoebaNetDConfig,
    DeepResNetConfig,
    NormKind,
    ResNetConfig,
    UNetConfig,
    VisionConfig,
)
from weft.models.vision.amoebanet import AmoebaNetD
from weft.models.vision.deep_resnet import DeepResNet
from weft.models.vision.resnet import ResNet
from weft.models.vision.unet import UNet

__all__ = [
    "VISION_CONFIGS",
    "AmoebaNetD",
    "AmoebaNetDConfig",
    "DeepResNet",
    "DeepResNetConfig",
    "NormKind",
    "ResNet",
    "ResNetConfig",
    "UNet",
    "UNetConfig",
    "VisionConfig",
    "VisionModel",
    "build_vision",
]

VisionModel = ResNet | DeepResNet | AmoebaNetD | UNet


def build_vision(config: VisionConfig) -> VisionModel:
    """Build the model of a config on the default device. Its running statistics are initialised, its parameters not."""
    model: VisionModel
    match config:
        case ResNetConfig():
            model = ResNet(config)
        case DeepResNetConfig():
            model = DeepResNet(config)
        case AmoebaNetDConfig():
            model = AmoebaNetD(config)
        case UNetConfig():
            model = UNet(config)
    # Running statistics are on the CPU even if the model is on the meta device: they are small, and not parameters.
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None and module.running_mean.is_meta:
            for name, buffer in module._buffers.items():
                assert buffer is not None
                module._buffers[name] = buffer.new_zeros(buffer.shape, device="cpu")
            module.reset_running_stats()
    return model

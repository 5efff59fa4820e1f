"""Examples of image tasks have labels of the shape that the model's output asks for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from weft.architectures.vision import ResNetConfig, UNetConfig, VisionConfig
from weft.data.config import ImageShape
from weft.models import build
from weft.models.loss import ExampleLoss
from weft.step.task import ImageTask

MODELS = [ResNetConfig(depth=18, width=4), UNetConfig(depth=2, width=4)]


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.architecture)
def test_the_example_loss_is_over_images_or_over_pixels(config: VisionConfig) -> None:
    task = ImageTask(ImageShape(32, 16, 3), config.is_dense)
    output_shape = build(config)(task.example(2, torch.float32)[0]).shape
    assert output_shape == ((2, config.num_classes, 32, 16) if config.is_dense else (2, config.num_classes))
    _, labels = task.random(config, 2, seed=1)
    assert labels.shape == task.example(2, torch.float32)[1].shape
    output = torch.randn(output_shape)
    assert torch.allclose(ExampleLoss(lambda: labels)(output), F.cross_entropy(output, labels, reduction="sum"))

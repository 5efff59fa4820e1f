"""The task of a run: the inputs and labels of its model, and its objective. Predictions, proofs and training share it.

A task makes an example batch (zeros, of which only the shapes matter) and a random batch for a proof.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from weft.data.config import DataConfig, ImageShape, PreferenceConfig
from weft.models import IGNORE, LanguageConfig, ModelConfig, VisionConfig
from weft.run_file import Run
from weft.step.objective import CLASSIFICATION, Objective, with_z_loss
from weft.step.preference import preference

SMALL_SEQUENCE = 16
SMALL_SIZE = 64  # pixels: after five halvings 2 × 2 are left
MASKED = 0.2  # share of a proof's labels that are ignored


class Task(ABC):
    """A kind of training task. `unit` is the unit of its speed."""

    unit: ClassVar[str]

    @property
    @abstractmethod
    def objective(self) -> Objective:
        """The loss and the measures of the task."""

    @abstractmethod
    def example(self, num_samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns inputs and labels of a micro-batch, all zero, for a model that computes in `dtype`."""

    @abstractmethod
    def shrunk(self, model: ModelConfig) -> Task:
        """Returns the same task with small samples that still suit a (shrunk) model."""

    @abstractmethod
    def random(self, model: ModelConfig, num_samples: int, seed: int) -> tuple[Tensor, ...]:
        """Returns random inputs and labels of a whole batch; some labels are ignored."""


@dataclass(frozen=True)
class LanguageTask(Task):
    """Predicts the next token for each token of a sequence."""

    sequence: int
    z_loss: float = 0.0

    unit = "tokens"

    @property
    def objective(self) -> Objective:
        return with_z_loss(self.z_loss)

    def example(self, num_samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        def zeros() -> Tensor:
            return torch.zeros(num_samples, self.sequence, dtype=torch.long, device="cpu")

        return zeros(), zeros()

    def shrunk(self, model: ModelConfig) -> LanguageTask:
        return replace(self, sequence=min(SMALL_SEQUENCE, self.sequence))

    def random(self, model: ModelConfig, num_samples: int, seed: int) -> tuple[Tensor, ...]:
        assert isinstance(model, LanguageConfig)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, model.vocab_size, (num_samples, self.sequence + 1), generator=generator)
        return tokens[:, :-1].contiguous(), _masked(tokens[:, 1:].clone(), generator)


@dataclass(frozen=True)
class PreferenceTask(LanguageTask):
    """Prefers the chosen of two answers (DPO). A sample is a pair of sequences."""

    beta: float = 0.1

    @property
    def objective(self) -> Objective:
        return preference(self.beta)

    def example(self, num_samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return super().example(2 * num_samples, dtype)

    def random(self, model: ModelConfig, num_samples: int, seed: int) -> tuple[Tensor, ...]:
        inputs, labels = super().random(model, 2 * num_samples, seed)
        generator = torch.Generator().manual_seed(seed)
        reference = -50 * torch.rand(num_samples, 2, dtype=torch.float64, generator=generator)
        return inputs.unflatten(0, (-1, 2)), labels.unflatten(0, (-1, 2)), reference


@dataclass(frozen=True)
class ImageTask(Task):
    """Predicts the class of each image, or (`is_dense`) of each pixel."""

    shape: ImageShape
    is_dense: bool = False

    unit = "images"

    @property
    def objective(self) -> Objective:
        return CLASSIFICATION

    def example(self, num_samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        height, width, channels = self.shape
        images = torch.zeros(num_samples, channels, height, width, dtype=dtype, device="cpu")
        return images, torch.zeros(self._label_shape(num_samples), dtype=torch.long, device="cpu")

    def shrunk(self, model: ModelConfig) -> ImageTask:
        assert isinstance(model, VisionConfig)
        size = -(-SMALL_SIZE // model.size_multiple) * model.size_multiple
        return replace(self, shape=ImageShape(size, size, self.shape.channels))

    def random(self, model: ModelConfig, num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
        assert isinstance(model, VisionConfig)
        generator = torch.Generator().manual_seed(seed)
        height, width, channels = self.shape
        images = torch.randn(num_samples, channels, height, width, generator=generator)
        labels = torch.randint(0, model.num_classes, self._label_shape(num_samples), generator=generator)
        return images, _masked(labels, generator)

    def _label_shape(self, num_samples: int) -> tuple[int, ...]:
        return (num_samples, self.shape.height, self.shape.width) if self.is_dense else (num_samples,)


def _masked(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Sets a random share of the labels to IGNORE, in place."""
    labels[torch.rand(labels.shape, generator=generator) < MASKED] = IGNORE
    return labels


def task_of(run: Run) -> Task:
    """Returns the task of a run."""
    if isinstance(run.data, PreferenceConfig):
        return PreferenceTask(run.data.sequence, beta=run.train.dpo_beta)
    if isinstance(run.data, DataConfig):
        return LanguageTask(run.data.sequence, run.train.z_loss)
    assert isinstance(run.model, VisionConfig), "the run file was checked"
    return ImageTask(run.data.shape(run.model.in_channels), run.model.is_dense)

"""Runs a model in training or evaluation mode, and gives each of its modules its own mode back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Set a model to training or evaluation mode inside the context. Afterwards each module has the mode it had.

    A user may keep some modules of a model that trains in evaluation mode, such as frozen batch norms. The model's
    `train` is called both times, because a model's own may do more than set the modes of modules.
    """
    modes = [(module, module.training) for module in model.modules()]
    was_training = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(was_training)
        for module, mode in modes:
            module.training = mode

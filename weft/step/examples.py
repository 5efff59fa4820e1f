"""Example micro-batches of a run, and the profile of its model and loss for one of them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from weft.models import ModelConfig
from weft.models.loss import ExampleLoss
from weft.models.loss_head import install_loss_head, is_loss_in_head
from weft.models.tuning import Tuning
from weft.profiling import Profile, profile
from weft.run_file import Run
from weft.sharding.layout import COMPUTE_DTYPE
from weft.step.task import Task, task_of


@lru_cache(maxsize=8)
def _profile_of(
    model: ModelConfig, tuning: Tuning, task: Task, dtype: torch.dtype, micro_batch: int, in_head: bool
) -> Profile:
    module = tuning.build_on_meta(model)
    if in_head:
        install_loss_head(module)

    def example() -> tuple[Tensor]:
        return (task.example(micro_batch, dtype)[0],)

    def labels() -> Tensor:
        return task.example(micro_batch, dtype)[1]

    counted = profile(module, example, ExampleLoss(labels), dtype)
    return replace(counted, gathers_logits=not task.objective.splits_logits)


def micro_batch_profile(run: Run) -> Profile:
    """Returns the profile of the run's model and loss for one micro-batch, in the compute dtype."""
    dtype, in_head = COMPUTE_DTYPE[run.plan.precision], is_loss_in_head(run.plan)
    return _profile_of(run.model, run.tuning, task_of(run), dtype, run.split.micro_batch, in_head)


def example_inputs(run: Run) -> tuple[Tensor]:
    """Returns the arguments of one forward of the run's model, with whole sequences."""
    return (_example(run)[0],)


def example_loss(run: Run) -> ExampleLoss:
    """Returns the loss for `example_inputs`.

    A run is split into stages with the same example as its prediction.
    """
    return ExampleLoss(lambda: _example(run)[1])


def _example(run: Run) -> tuple[Tensor, ...]:
    return task_of(run).example(run.split.micro_batch, COMPUTE_DTYPE[run.plan.precision])


def model_flops(model_profile: Profile) -> float:
    """FLOPs of one micro-batch's forward and backward, with half of attention (causal) and without recompute."""
    attention = sum(block.attention_flops for block in model_profile.all)
    return 3 * (model_profile.flops - attention / 2)

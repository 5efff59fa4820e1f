"""Trains the unsplit model with torch's own functions and none of weft's. Proofs compare plans with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from weft.step.objective import Batch, Objective

LEARNING_RATE = 1e-2
# AdamW's epsilon. With the usual 1e-8, rounding noise of 1e-17 in a gradient of zero moves a parameter by a billionth
# of a step.
EPSILON = 1e-6

ModelFn = Callable[[], nn.Module]
BatchFn = Callable[[int], Batch]


@dataclass
class SequentialResult:
    """Losses and gradient norms of all steps, gradients of the first step, and parameters and buffers after the last.

    `measured` are the means of the objective's measures on the first batch, evaluated after the steps.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    measured: list[float]


def run_sequential(
    model: nn.Module,
    batch_fn: BatchFn,
    objective: Objective,
    steps: int,
    clip: float | None,
    part: int,
    replicas: Sequence[int],
) -> SequentialResult:
    """Trains the model for some steps, with `part` samples of a batch at a time, and returns the results.

    `part` is the whole batch, unless batch norms should see micro-batches. Part i of a batch then updates the running
    statistics of `replicas[i]`, if replicas are given.
    """
    optimizer, statistics = make_optimizer(model), _Statistics(model, replicas)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        batch = to_double(batch_fn(step))
        count = objective.count(batch).clamp(min=1)
        loss = torch.zeros((), dtype=torch.float64, device=count.device)
        for number, start in enumerate(range(0, len(batch[0]), part)):
            with statistics.of(number):
                mean = objective.total(model, tuple(tensor[start : start + part] for tensor in batch)) / count
            mean.backward()
            loss += mean.detach()
        statistics.average()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip if clip is not None else float("inf"))
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        norms.append(norm.item())
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    measured = _evaluate(model, to_double(batch_fn(0)), objective, part)
    return SequentialResult(losses, norms, gradients, parameters, buffers, measured)


def _evaluate(model: nn.Module, batch: Batch, objective: Objective, part: int) -> list[float]:
    measure, was_training = objective.measure or objective.total, model.training
    model.eval()
    with torch.no_grad():
        parts = [tuple(tensor[start : start + part] for tensor in batch) for start in range(0, len(batch[0]), part)]
        total = torch.stack([measure(model, one).double() for one in parts]).sum(0)
    model.train(was_training)
    return (total / objective.count(batch)).flatten().tolist()


class _Statistics:
    """A model's buffers (running statistics), one copy for each mirrored replica.

    Each replica's micro-batches update its copy. At the end of a step all copies become their mean.
    """

    def __init__(self, model: nn.Module, replicas: Sequence[int]) -> None:
        self._replicas, self._buffers = replicas, list(model.buffers())
        self._copies = [[buffer.clone() for buffer in self._buffers] for _ in set(replicas)]

    @contextmanager
    def of(self, part: int) -> Iterator[None]:
        """Inside the context, part `part` of the batch runs with its replica's buffers."""
        own = self._copies[self._replicas[part]] if self._copies else []
        pairs = list(zip(self._buffers, own, strict=True)) if own else []
        for buffer, copy in pairs:
            buffer.copy_(copy)
        yield
        for buffer, copy in pairs:
            copy.copy_(buffer)

    def average(self) -> None:
        """Set all copies to their mean, at the end of a step."""
        for all_copies in zip(self._buffers, *self._copies, strict=True) if self._copies else ():
            total = torch.stack(all_copies[1:]).sum(0)
            rounding = None if total.is_floating_point() else "floor"
            for copy in all_copies:
                copy.copy_(total.div(len(self._copies), rounding_mode=rounding))


def make_model(model_fn: ModelFn) -> nn.Module:
    """Returns a new model in float64. Its parameters have the same values on every call."""
    torch.manual_seed(0)
    return model_fn().double()


def make_optimizer(model: nn.Module) -> Optimizer:
    """Returns the optimizer with which both sides of a proof train."""
    trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    trained = trained or [torch.zeros(0, requires_grad=True)]  # a frozen stage has none
    return AdamW(trained, lr=LEARNING_RATE, eps=EPSILON, fused=True)


def to_double(batch: Batch) -> Batch:
    """Returns a batch with its floating-point tensors in float64."""
    return tuple(tensor.to(double_of(tensor.dtype)) for tensor in batch)


def double_of(dtype: torch.dtype) -> torch.dtype:
    """Returns float64 for a floating-point dtype; any other dtype unchanged."""
    return torch.float64 if dtype.is_floating_point else dtype

"""The unsplit model, trained by torch's own functions and none of weft's: what the oracle holds plans against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from weft.step.objective import Batch, Objective

LEARNING_RATE = 1e-2
# Of AdamW: its usual 1e-8 makes a billionth of a step from the 1e-17 that rounding leaves of a gradient of zero.
EPSILON = 1e-6

ModelFn = Callable[[], nn.Module]
BatchFn = Callable[[int], Batch]


@dataclass
class Sequential:
    """What came of it: losses and gradient norms of the steps, the first gradients, and what there was at the end.

    `measured` are the means that the objective measures of the first batch, after the steps, in evaluation.
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
) -> Sequential:
    """`part` samples at a time: all, unless their statistics are to be those of micro-batches.

    Part i then counts for the running statistics of `replicas[i]`.
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
    return Sequential(losses, norms, gradients, parameters, buffers, measured)


def _evaluate(model: nn.Module, batch: Batch, objective: Objective, part: int) -> list[float]:
    measure, was_training = objective.measure or objective.total, model.training
    model.eval()
    with torch.no_grad():
        parts = [tuple(tensor[start : start + part] for tensor in batch) for start in range(0, len(batch[0]), part)]
        total = torch.stack([measure(model, one).double() for one in parts]).sum(0)
    model.train(was_training)
    return (total / objective.count(batch)).flatten().tolist()


class _Statistics:
    """A model's buffers as mirrored replicas have them: each counts its own micro-batches, and a step ends with the
    mean of all.
    """

    def __init__(self, model: nn.Module, replicas: Sequence[int]) -> None:
        self._replicas, self._buffers = replicas, list(model.buffers())
        self._copies = [[buffer.clone() for buffer in self._buffers] for _ in set(replicas)]

    @contextmanager
    def of(self, part: int) -> Iterator[None]:
        """While a part of the batch runs."""
        own = self._copies[self._replicas[part]] if self._copies else []
        pairs = list(zip(self._buffers, own, strict=True)) if own else []
        for buffer, copy in pairs:
            buffer.copy_(copy)
        yield
        for buffer, copy in pairs:
            copy.copy_(buffer)

    def average(self) -> None:
        """At the end of a step."""
        for all_copies in zip(self._buffers, *self._copies, strict=True) if self._copies else ():
            total = torch.stack(all_copies[1:]).sum(0)
            rounding = None if total.is_floating_point() else "floor"
            for copy in all_copies:
                copy.copy_(total.div(len(self._copies), rounding_mode=rounding))


def make_model(model_fn: ModelFn) -> nn.Module:
    """The same on every call, in float64."""
    torch.manual_seed(0)
    return model_fn().double()


def make_optimizer(model: nn.Module) -> Optimizer:
    """The one that both sides of a proof train with."""
    trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    trained = trained or [torch.zeros(0, requires_grad=True)]  # of a frozen stage
    return AdamW(trained, lr=LEARNING_RATE, eps=EPSILON, fused=True)


def to_double(batch: Batch) -> Batch:
    """A batch in float64."""
    return tuple(tensor.to(double_of(tensor.dtype)) for tensor in batch)


def double_of(dtype: torch.dtype) -> torch.dtype:
    """float64 for what is floating-point."""
    return torch.float64 if dtype.is_floating_point else dtype

"""One training step under any plan: the same function trains, is verified and is benchmarked.

Losses are normalised by the number of valid targets in the whole batch, over all ranks and micro-batches, so that
every layout computes the same loss and the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.comm import all_reduce
from weft.mesh import Mesh
from weft.optim.stepper import stepper
from weft.parallel.context.axis import own_tokens
from weft.parallel.gradient_norm import grad_norm
from weft.parallel.model_state import sync_gradients
from weft.parallel.tile import own_targets, repeats
from weft.pipeline.rank_model import pipeline_of
from weft.pipeline.runtime import Pipeline, Work
from weft.pipeline.sections import raising_lost_rank
from weft.pipeline.shared_parameters import running_statistics
from weft.plan import Plan
from weft.step.cuda_graph import Graph
from weft.step.objective import (
    CROSS_ENTROPY,
    Batch,
    Objective,
)

Before = Callable[[int], None]


@dataclass(frozen=True)
class Checks:
    """What a step is held to. `judge(loss, norm)` [] says whether the update is to be made (0); otherwise parameters,
    the optimizer's state and running statistics stay as they are. `before_update()` may look at all before they change;
    `micro_batch(index, compute)` does a forward and backward, outside of pipelines, and gives its loss.
    """

    judge: Callable[[Tensor, Tensor], Tensor]
    before_update: Callable[[], None] = lambda: None
    micro_batch: Callable[[int, Callable[[], Tensor]], Tensor] = lambda index, compute: compute()


@dataclass(frozen=True)
class StepResult:
    """The batch's mean loss, the gradient norm before clipping and the valid targets, on the device; and, where steps
    are judged, whether the update was made (0) or why it was not (see `numbers.py`).
    """

    loss: Tensor
    grad_norm: Tensor
    num_targets: Tensor
    verdict: Tensor | None = None


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    micro_batches: Sequence[Batch],
    mesh: Mesh,
    objective: Objective = CROSS_ENTROPY,
    clip: float | None = 1.0,
    before_micro_batch: Before = lambda index: None,
    checks: Checks | None = None,
    graph: Graph | None = None,
) -> StepResult:
    """Forward, backward and update over this rank's micro-batches of one step: whole sequences, whatever the plan, but
    this rank's tiles of images (`weft.tile`), with labels of their pixels or of all samples. `graph` replays the first
    two.
    """
    statistics = running_statistics(model) if checks is not None else ()
    before = [tensor.clone() for tensor in statistics]
    stepper(optimizer).begin()
    micro_batches = [own_targets(own_tokens(batch, mesh["context"]), model, mesh) for batch in micro_batches]
    num_targets = torch.stack([objective.count(batch) for batch in micro_batches]).sum().double()
    all_reduce(num_targets, mesh["tokens"]).wait()
    # Gradients become the mean over the ranks of `batch`, so each rank's loss is scaled up by their number.
    scale = mesh["batch"].degree / num_targets.clamp(min=1)
    norm: Tensor | None = None
    pipeline = pipeline_of(model)
    if pipeline is not None:
        work = Work(micro_batches, objective.total, scale, before_micro_batch)
        loss, norm = _run_pipeline(pipeline, work, mesh, None if checks is None else checks.before_update)
    else:
        loss = _run(model, micro_batches, mesh, objective, scale, before_micro_batch, checks, graph)
        all_reduce(loss, mesh["losses"]).wait()
        if checks is not None:
            checks.before_update()
    loss = loss / num_targets.clamp(min=1)
    mesh.ledger.phase("the update")
    judge = None if checks is None else partial(checks.judge, loss)
    norm, verdict = stepper(optimizer).update(model, mesh, clip, judge, norm)
    optimizer.zero_grad(set_to_none=True)
    for tensor, old in zip(statistics, before, strict=True):
        assert verdict is not None
        tensor.copy_(torch.where(verdict == 0, tensor, old))
    return StepResult(loss, norm, num_targets / repeats(model, mesh.plan), verdict)


def _run(
    model: nn.Module,
    batches: Sequence[Batch],
    mesh: Mesh,
    objective: Objective,
    scale: Tensor,
    before: Before,
    checks: Checks | None,
    graph: Graph | None,
) -> Tensor:
    """Forward and backward, outside of pipelines; the sum of this rank's losses."""

    def begin(index: int) -> None:
        mesh.ledger.phase("forward and backward")  # a sign of life, also of a model without units
        before(index)

    if graph is None:
        do = None if checks is None else checks.micro_batch
        return _run_in_turn(model, objective, mesh.plan, batches, scale, begin, do)
    before(0)
    return graph.run(batches, scale, partial(_run_in_turn, model, objective, mesh.plan))


def _run_pipeline(
    model: Pipeline, work: Work, mesh: Mesh, before_update: Callable[[], None] | None
) -> tuple[Tensor, Tensor]:
    """All that comes before the update; the sum of all losses, and the gradient norm. Until then nothing has changed
    that lasts: a rank that is lost can be done without.
    """

    def compute() -> tuple[Tensor, Tensor]:
        loss = model.run(work)
        with raising_lost_rank("the sum of losses, or of the gradient norm,"):
            all_reduce(loss, mesh["losses"]).wait()
            if before_update is not None:
                before_update()
            return loss, grad_norm(model, mesh)

    if model.sections is None:
        return compute()
    loss, norm = model.sections.run(lambda: [number.item() for number in compute()])
    return torch.tensor(loss, dtype=torch.float64), torch.tensor(norm, dtype=torch.float64)


def _run_in_turn(
    model: nn.Module,
    objective: Objective,
    plan: Plan,
    batches: Sequence[Batch],
    scale: Tensor,
    before: Before = lambda index: None,
    do: Callable[[int, Callable[[], Tensor]], Tensor] | None = None,
) -> Tensor:
    """Forward and backward of one micro-batch after another; the sum of their losses."""
    loss = torch.zeros((), dtype=torch.float64, device=scale.device)

    def compute(index: int) -> Tensor:
        before(index)
        total = objective.total(model, batches[index])
        (total * scale.to(total.dtype)).backward()
        return total.detach()

    for index in range(len(batches)):
        is_last = index == len(batches) - 1
        sync_gradients(model, is_last or plan.memory.accumulate == "slice")
        loss += compute(index) if do is None else do(index, partial(compute, index))
    return loss


def evaluate(model: nn.Module, batches: Sequence[Batch], mesh: Mesh, objective: Objective = CROSS_ENTROPY) -> Tensor:
    """The mean loss over all ranks' batches (whole sequences), without gradients; the same on every rank.

    An objective with several measures gives the mean of each, [len(measures)].
    """
    measure = objective.measure or objective.total
    shape = (len(objective.measures),) if objective.measure else ()
    batches = [own_targets(own_tokens(batch, mesh["context"]), model, mesh) for batch in batches]
    was_training = model.training
    model.eval()
    with torch.no_grad():
        pipeline = pipeline_of(model)
        if pipeline is not None:
            total = _evaluate_pipeline(pipeline, Work(batches, measure, shape=shape), mesh)
        else:
            total = torch.stack([_measured(model, batch, measure, mesh) for batch in batches]).sum(0)
            all_reduce(total, mesh["losses"]).wait()
    model.train(was_training)
    count = torch.stack([objective.count(batch) for batch in batches]).sum().double()
    all_reduce(count, mesh["tokens"]).wait()
    return total / count


def _measured(model: nn.Module, batch: Batch, measure: Callable[[nn.Module, Batch], Tensor], mesh: Mesh) -> Tensor:
    mesh.ledger.phase("evaluating")  # a sign of life for each batch: whoever watches must not take it for a hang
    return measure(model, batch).double()


def _evaluate_pipeline(model: Pipeline, work: Work, mesh: Mesh) -> Tensor:
    """The sum over all ranks."""

    def compute() -> Tensor:
        total = model.run(work)
        with raising_lost_rank("the sum of losses"):
            all_reduce(total, mesh["losses"]).wait()
        return total

    if model.sections is None:
        return compute()
    numbers = model.sections.run(lambda: compute().flatten().tolist())
    return torch.tensor(numbers, dtype=torch.float64).view(work.shape)

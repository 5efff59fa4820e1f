"""One training step under any plan. Training, proofs and benchmarks use the same function.

Losses are divided by the number of valid targets in the whole batch, over all ranks and micro-batches. So every plan
computes the same loss and the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.comm import all_reduce
from weft.errors import PlanError
from weft.inspection.annotations import Annotation
from weft.inspection.functional_call import in_mode
from weft.mesh import Mesh
from weft.models.router import change_biases
from weft.optim.stepper import stepper
from weft.parallel.context.axis import own_tokens
from weft.parallel.gradient_norm import grad_norm
from weft.parallel.model_state import sync_gradients, watching_reads
from weft.parallel.tensor.vocabulary import whole_logits
from weft.parallel.tile import own_targets, repeats
from weft.pipeline.rank_model import pipeline_of, rank_model
from weft.pipeline.runtime import Pipeline, Work
from weft.pipeline.sections import raising_lost_rank
from weft.pipeline.shared_parameters import running_statistics
from weft.plan import Plan
from weft.sharding.layout import COMPUTE_DTYPE
from weft.step.batch import Batch, plain_batch
from weft.step.cuda_graph import Graph
from weft.step.model_loss import default_objective
from weft.step.objective import CROSS_ENTROPY, Objective, counts_of, training_total
from weft.step.used_tokens import UsedTokens

Before = Callable[[int], None]


@dataclass(frozen=True)
class Checks:
    """Checks of a step.

    `judge(loss, norm)` [] returns 0 if the update is to be made. Otherwise parameters, optimizer state and running
    statistics stay unchanged. `before_update()` runs before the update and may read them. `micro_batch(index, compute)`
    runs one forward and backward by calling `compute`, and returns its loss; pipelines do not use it.
    """

    judge: Callable[[Tensor, Tensor], Tensor]
    before_update: Callable[[], None] = lambda: None
    micro_batch: Callable[[int, Callable[[], Tensor]], Tensor] = lambda index, compute: compute()


@dataclass(frozen=True)
class StepResult:
    """The batch's mean loss, the gradient norm before clipping and the number of valid targets, on the device.

    If steps are judged, `verdict` is 0 if the update was made, or else says why it was not (see
    `resilience/bad_numbers.py`).
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
    objective: Objective | None = None,
    clip: float | None = 1.0,
    before_micro_batch: Before = lambda index: None,
    checks: Checks | None = None,
    graph: Graph | None = None,
) -> StepResult:
    """Runs forward, backward and update over this rank's micro-batches of one step.

    Micro-batches hold whole sequences under any plan. Images are this rank's tiles (`weft.tile`), with labels of the
    tile's pixels or of whole samples. Without an `objective`, batches are as in `weft.verify`: the model's keyword
    arguments with labels, or (inputs, labels). `graph` replays forward and backward as a CUDA graph.
    `before_micro_batch(index)` runs before each forward.
    """
    objective, micro_batches = _settled(objective, micro_batches, model, mesh)
    statistics = running_statistics(model) if checks is not None else ()
    before = [tensor.clone() for tensor in statistics]
    used = UsedTokens(model, mesh, objective, micro_batches, in_place=graph is not None)
    micro_batches = [own_part(batch, model, mesh, objective) for batch in micro_batches]
    counts = counts_of(objective, micro_batches, used.masks)
    all_reduce(counts, mesh["tokens"]).wait()
    num_targets = counts[0]
    stepper(optimizer).begin(num_targets)
    # Gradients are averaged over the ranks of `batch`, so each rank's loss is multiplied by their number.
    scales = mesh["batch"].degree / counts.clamp(min=1)

    def begin(index: int) -> None:
        used.tell(index)
        before_micro_batch(index)

    norm: Tensor | None = None
    pipeline = pipeline_of(model)
    if pipeline is not None:
        work = Work(micro_batches, objective.total, scales, begin)
        loss, norm = _run_pipeline(pipeline, work, mesh, None if checks is None else checks.before_update)
    else:
        run = partial(_run_in_turn, model, objective, mesh.plan)
        loss = _run(run, micro_batches, mesh, scales, begin, checks, graph)
        all_reduce(loss, mesh["losses"]).wait()
        if checks is not None:
            checks.before_update()
    used.end()
    loss = loss / num_targets.clamp(min=1)
    mesh.ledger.phase("the update")
    judge = None if checks is None else partial(checks.judge, loss)
    norm, verdict = stepper(optimizer).update(model, mesh, clip, judge, norm)
    optimizer.zero_grad(set_to_none=True)
    keeps = None if verdict is None else verdict != 0
    change_biases(rank_model(model).models, lambda counts: all_reduce(counts, mesh["tokens"]).wait(), keeps)
    for tensor, old in zip(statistics, before, strict=True):
        assert verdict is not None
        tensor.copy_(torch.where(verdict == 0, tensor, old))
    return StepResult(loss, norm, num_targets / repeats(model, mesh.plan), verdict)


def _settled(
    objective: Objective | None, batches: Sequence[Batch], model: nn.Module, mesh: Mesh
) -> tuple[Objective, list[Batch]]:
    """Returns the objective of a step, and its batches, with mappings of any kind as dicts.

    If no objective is given, the first batch decides. A model is evaluated for this once for each set of keys.
    """
    if isinstance(batches, Mapping):
        raise PlanError(
            f"a dict ({', '.join(map(str, batches))}) was given as the list of batches; put it into a list: [batch]"
        )
    batches = [plain_batch(batch) for batch in batches]
    if objective is not None or not batches:
        return objective or CROSS_ENTROPY, batches
    keys = tuple(batches[0]) if isinstance(batches[0], dict) else ()
    known = _OBJECTIVES.setdefault(model, {})
    if keys not in known:
        if keys and mesh.plan.tile.degree > 1:
            raise PlanError(
                "what a model's own loss counts cannot be told from tiles; give "
                "objective=weft.model_loss(model, batch), of the model before weft.parallelize and whole images"
            )
        measure, dtype = partial(_measure_alike, model, mesh), COMPUTE_DTYPE[mesh.plan.precision]
        known[keys] = default_objective(rank_model(model).models[0], batches[0], dtype, measure)
    return known[keys], batches


_OBJECTIVES = Annotation[dict[tuple[str, ...], Objective]]("objectives")  # by the keys of a batch


def _measure_alike(model: nn.Module, mesh: Mesh, total: Callable[[nn.Module, Batch], Tensor], batch: Batch) -> Tensor:
    """Returns a total in an evaluation, summed over ranks with their own batches. It is equal on all ranks.

    The model's own code has the logits of all classes, but only this rank's tokens, in the order that `context` gives
    them. That changes the loss, but neither which labels it counts nor whether it is a mean over them.
    """
    with ExitStack() as inside, in_mode(model, training=False), torch.no_grad():
        for one in rank_model(model).models:
            inside.enter_context(whole_logits(one))
        return _sum_of(model, [own_tokens(batch, mesh["context"])], total, (), mesh)


def own_part(batch: Batch, model: nn.Module, mesh: Mesh, objective: Objective) -> Batch:
    """Returns this rank's tokens of a micro-batch, or the targets of its samples, if the plan splits these."""
    return own_targets(own_tokens(objective.aligned(batch, mesh.plan), mesh["context"]), model, mesh)


def _run(
    run_in_turn: Callable[..., Tensor],
    batches: Sequence[Batch],
    mesh: Mesh,
    scales: Tensor,
    before: Before,
    checks: Checks | None,
    graph: Graph | None,
) -> Tensor:
    """Runs forward and backward without a pipeline, by `_run_in_turn`. Returns the sum of this rank's losses."""

    def begin(index: int) -> None:
        mesh.ledger.phase("forward and backward")  # shows progress, also for a model without units
        before(index)

    if graph is None:
        do = None if checks is None else checks.micro_batch
        return run_in_turn(batches, scales, begin, do)
    before(0)
    return graph.run(batches, scales, run_in_turn)


def _run_pipeline(
    model: Pipeline, work: Work, mesh: Mesh, before_update: Callable[[], None] | None
) -> tuple[Tensor, Tensor]:
    """Runs all of a pipeline's step before the update. Returns the sum of all losses, and the gradient norm.

    Until the update nothing lasting has changed, so the step can be repeated without a lost rank.
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
    scales: Tensor,
    before: Before = lambda index: None,
    do: Callable[[int, Callable[[], Tensor]], Tensor] | None = None,
) -> Tensor:
    """Runs forward and backward of one micro-batch after another, with losses times `scales` (`training_total`).
    Returns the sum of their losses.
    """
    loss = torch.zeros((), dtype=torch.float64, device=scales.device)

    def compute(index: int) -> Tensor:
        before(index)
        with watching_reads(model):
            total = training_total(objective, model, batches[index], scales)
        (total * scales[0].to(total.dtype)).backward()
        return total.detach()

    for index in range(len(batches)):
        is_last = index == len(batches) - 1
        sync_gradients(model, is_last or plan.memory.accumulate == "slice")
        loss += compute(index) if do is None else do(index, partial(compute, index))
    return loss


def evaluate(model: nn.Module, batches: Sequence[Batch], mesh: Mesh, objective: Objective | None = None) -> Tensor:
    """Returns the mean loss over all ranks' batches (whole sequences), without gradients. It is equal on all ranks.

    Batches and objectives are as in `train_step`. For an objective with several measures, returns the mean of each,
    [len(measures)].
    """
    objective, batches = _settled(objective, batches, model, mesh)
    measure = objective.measure or objective.total
    shape = (len(objective.measures),) if objective.measure else ()
    batches = [own_part(batch, model, mesh, objective) for batch in batches]
    with in_mode(model, training=False), torch.no_grad():
        total = _sum_of(model, batches, measure, shape, mesh)
    count = torch.stack([objective.count(batch) for batch in batches]).sum().double()
    all_reduce(count, mesh["tokens"]).wait()
    return total / count


def _sum_of(
    model: nn.Module,
    batches: Sequence[Batch],
    measure: Callable[[nn.Module, Batch], Tensor],
    shape: tuple[int, ...],
    mesh: Mesh,
) -> Tensor:
    """Returns the sum of a measure of that shape over all ranks' batches."""
    pipeline = pipeline_of(model)
    if pipeline is not None:
        return _evaluate_pipeline(pipeline, Work(batches, measure, shape=shape), mesh)
    total = torch.stack([_measured(model, batch, measure, mesh) for batch in batches]).sum(0)
    all_reduce(total, mesh["losses"]).wait()
    return total


def _measured(model: nn.Module, batch: Batch, measure: Callable[[nn.Module, Batch], Tensor], mesh: Mesh) -> Tensor:
    mesh.ledger.phase("evaluating")  # shows progress for each batch, so that the watchdog sees no hang
    with watching_reads(model):
        return measure(model, batch).double()


def _evaluate_pipeline(model: Pipeline, work: Work, mesh: Mesh) -> Tensor:
    """Returns the sum of the measures over all ranks."""

    def compute() -> Tensor:
        total = model.run(work)
        with raising_lost_rank("the sum of losses"):
            all_reduce(total, mesh["losses"]).wait()
        return total

    if model.sections is None:
        return compute()
    numbers = model.sections.run(lambda: compute().flatten().tolist())
    return torch.tensor(numbers, dtype=torch.float64).view(work.shape)

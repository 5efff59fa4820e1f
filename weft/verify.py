"""The oracle: runs a plan on local Gloo processes in float64 against the unsplit model, and compares everything.

Every rank also trains the sequential model by itself, with torch's own functions and none of weft's, and compares its
own pieces: loss of each step, every gradient of the first step, every parameter after the last, the bytes it sent
against the bytes predicted, and the bytes its state occupies against the bytes predicted. Both are then evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import weft.optim
from weft.cluster import load
from weft.comm import Traffic, add_traffic, expand
from weft.comm.ledger import Key
from weft.config import Run
from weft.data.order import local_indices
from weft.errors import PlanError, VerifyError
from weft.local import run_local
from weft.memory.activations import ACTIVATIONS
from weft.memory.sent import sending_from
from weft.mesh import Mesh, level_degrees
from weft.parallel import all_units, cost, host_bytes, named_buffers, named_pieces, parallelize, refuse, state_bytes
from weft.parallel.layout import Part
from weft.parallel.tile import own_tiles
from weft.pipeline.schedules import make_schedule
from weft.plan import BatchSplit, Memory, Plan, split_batch
from weft.predict import refuse_run
from weft.profile import Profile, profile
from weft.sequential import (
    EPSILON,
    LEARNING_RATE,
    BatchFn,
    ModelFn,
    double_of,
    make_model,
    make_optimizer,
    run_sequential,
    to_double,
)
from weft.shrink import proofs_of
from weft.train.step import CROSS_ENTROPY, Batch, Objective, evaluate, step_traffic, train_step

TOLERANCE = 1e-9
# Tensors much smaller than the largest one are compared with this fraction of it: the gradient of an attention key's
# bias, for one, is zero in mathematics and noise in any floating point.
FLOOR = 1e-6


@dataclass(frozen=True)
class Check:
    """One line of the report: what was compared, the worst difference and where, or predicted and counted bytes."""

    what: str
    expected: str
    found: str
    where: str
    passed: bool


@dataclass(frozen=True)
class Report:
    """All checks of one plan, and what they leave out of the run, in words."""

    plan: Plan
    checks: tuple[Check, ...]
    not_proved: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the plan was found to equal the sequential model."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def first_failure(self) -> Check | None:
        """The first check that did not pass."""
        return next((check for check in self.checks if not check.passed), None)

    def require(self) -> Report:
        """Raise VerifyError with the first offender, or return the report."""
        if not self.checks:
            raise VerifyError(f"{self.plan.describe_axes()} was not proved: {'; '.join(self.not_proved)}")
        failure = self.first_failure
        if failure is not None:
            raise VerifyError(
                f"{self.plan.describe_axes()} differs from the sequential model in {failure.what}: "
                f"expected {failure.expected}, found {failure.found} ({failure.where})"
            )
        return self


def verify(
    model_fn: ModelFn,
    batch_fn: BatchFn,
    plan: Plan,
    *,
    objective: Objective = CROSS_ENTROPY,
    steps: int = 3,
    clip: float | None = 1.0,
    tolerance: float = TOLERANCE,
    timeout_seconds: float = 120.0,
    ranks_per_node: int | None = None,
) -> Report:
    """Prove that `plan` computes what the unsplit model does.

    `model_fn()` makes the model (the same on every call after torch.manual_seed(0)); `batch_fn(step)` makes the tensors
    of a whole global batch, samples first. Its state and the plan's precision become float64, that of its matmuls too,
    and no update is delayed. `ranks_per_node` lays the ranks out as if so many shared a node, for a hierarchical plan.
    """
    not_proved = _inexact(plan)
    plan = replace(plan, precision="fp64", matmul="compute", memory=_exact(plan.memory))
    example = batch_fn(0)
    split = split_batch(plan, len(example[0]), example[0].shape[1] if plan.context.degree > 1 else 1)
    counted = _profile(model_fn, example, split)
    refuse(counted, plan)
    cost(counted, plan, split)  # what cannot be split is told before any rank starts

    def rank(index: int) -> dict[str, Any]:
        with sending_from(1):  # tensors of any size, for memory.activations
            return _run_rank(counted, model_fn, batch_fn, plan, split, objective, steps, clip, ranks_per_node)

    answers = run_local(rank, plan.num_ranks, timeout_seconds)
    if not _can_evaluate(counted, plan):
        not_proved += ("evaluation: the running statistics of batch norms are each rank's own",)
    checks = (*_judge(answers, tolerance), _check_coverage(answers, plan))
    return Report(plan, checks, not_proved)


def _inexact(plan: Plan) -> tuple[str, ...]:
    """The options that a proof in float64 is without."""
    found = [f"plan.matmul = '{plan.matmul}'"] if plan.matmul != "compute" else []
    memory, default = plan.memory, Memory()
    for key in ("master", "state", "delay"):
        if getattr(memory, key) != getattr(default, key):
            found.append(f"plan.memory.{key} = {str(getattr(memory, key)).lower()}")
    return tuple(f"{one}: the proof is of exact updates in float64" for one in found)


def _exact(memory: Memory) -> Memory:
    return replace(memory, master=True, state="master", delay=False)


def verify_run(run: Run) -> Report:
    """Prove a run's plan on a shrunk copy of its model, with random samples of which some labels are masked.

    What cannot work as it is, is refused before. A report without checks says that the plan fits no copy that is small.
    """
    refuse_run(run)
    ranks_per_node = None if run.cluster == "local" else load(run.cluster).node.num_devices
    refused: PlanError | None = None
    for proof in proofs_of(run):
        try:
            report = verify(
                proof.model,
                proof.batch,
                proof.plan,
                objective=proof.objective,
                clip=run.train.clip,
                ranks_per_node=ranks_per_node,
            )
        except PlanError as error:  # the run itself was not refused
            refused = refused or error
            continue
        return replace(report, not_proved=(*proof.not_proved, *report.not_proved))
    return Report(run.plan, (), (f"the plan fits the run and no small copy of its model: {refused}",))


# --- on each rank


def _run_rank(
    counted_profile: Profile,
    model_fn: ModelFn,
    batch_fn: BatchFn,
    plan: Plan,
    split: BatchSplit,
    objective: Objective,
    steps: int,
    clip: float | None,
    ranks_per_node: int | None,
) -> dict[str, Any]:
    part = split.batch
    if counted_profile.batch_mixers:
        part = split.micro_batch * (split.num_batch_ranks if plan.statistics == "batch" else 1)
    replicas = _replicas(plan, split) if _has_alike_buffers(plan) else []
    expected = run_sequential(make_model(model_fn), batch_fn, objective, steps, clip, part, replicas)
    mesh = Mesh(plan, ranks_per_node=ranks_per_node)
    model = parallelize(make_model(model_fn), plan, mesh, example=counted_profile.example)
    optimizer = _optimizer(model)
    watch = _Watch(model, optimizer)
    mesh.ledger.clear()
    losses, norms = [], []
    for step in range(steps):
        batches = _own_batches(batch_fn(step), split, mesh["batch"].index)
        batches = [own_tiles(batch, model, mesh) for batch in batches]
        result = train_step(model, optimizer, batches, mesh, objective, clip)
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
    pieces, counted = _pieces(model), _plain(mesh.ledger.entries())
    measured = None
    if _can_evaluate(counted_profile, plan):
        batches = _own_batches(batch_fn(0), split, mesh["batch"].index)
        batches = [own_tiles(batch, model, mesh) for batch in batches]
        measured = evaluate(model, batches, mesh, objective).flatten().tolist()
    predicted = cost(counted_profile, plan, split, mesh.coordinates)
    flat = add_traffic(predicted.traffic, step_traffic(plan))
    traffic = expand(flat, level_degrees(plan, ranks_per_node))
    return {
        "loss": _worst_number(losses, expected.losses),
        "grad_norm": _worst_number(norms, expected.norms),
        "gradient": _worst_tensor(watch.gradients, expected.gradients),
        "parameter": _worst_tensor(pieces, expected.parameters),
        "buffer": _worst_buffer(model, expected.buffers) if _has_alike_buffers(plan) else None,
        "evaluation": None if measured is None else _worst_measure(measured, expected.measured, objective),
        "num_compared": sum(tensor.numel() for part, tensor in pieces if _is_first(part)),
        "num_expected": sum(tensor.numel() for tensor in expected.parameters.values()),
        "predicted": _plain({key: value * steps for key, value in traffic.items()}),
        "counted": counted,
        "predicted_state": dict(predicted.state_bytes),
        "counted_state": watch.state,
        "predicted_host": dict(predicted.host_bytes),
        "counted_host": watch.host,
    }


def _replicas(plan: Plan, split: BatchSplit) -> list[int]:
    """The replica of each micro-batch, where a pipeline has mirrored ones."""
    pipe = plan.pipe
    if pipe.degree == 1:
        return []
    schedule = make_schedule(pipe.schedule, pipe.degree, split.accumulation, **pipe.options)
    steps = [step for rank in range(pipe.degree) for step in schedule.compute(rank)]
    found = {step.micro_batch: step.replica for step in steps}
    return [found[number] for number in sorted(found)] if len(schedule.placement) > 1 else []


def _has_alike_buffers(plan: Plan) -> bool:
    """Whether running statistics are to be those of the sequential model: of views, with the samples of all ranks."""
    return plan.is_viewed and (plan.num_batch_ranks == 1 or plan.statistics == "batch")


def _can_evaluate(counted: Profile, plan: Plan) -> bool:
    """Whether what a model computes in evaluation is to be the sequential one's: running statistics are alike."""
    return not counted.batch_mixers or _has_alike_buffers(plan)


class _Watch:
    """Keeps the gradients that the first update sees, and the size of the state at the last one."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.gradients: list[tuple[Part, Tensor]] = []
        self.state: dict[str, int] = {}
        self.host: dict[str, int] = {}
        optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, _: Any, options: dict[str, Any]) -> None:
        if not self.gradients:
            scale = options.get("scale")  # of clipping, where the optimizer does it
            self.gradients = [
                (part, piece.grad.flatten() * (1.0 if scale is None else scale))
                for part, piece in named_pieces(self.model)
                if piece.grad is not None
            ]
        self.state = state_bytes(self.model, optimizer)
        self.host = host_bytes(self.model, optimizer)


def _optimizer(model: nn.Module) -> Optimizer:
    return weft.optim.AdamW(model, lr=LEARNING_RATE, eps=EPSILON) if all_units(model) else make_optimizer(model)


def _profile(model_fn: ModelFn, batch: Batch, split: BatchSplit) -> Profile:
    inputs = batch[0][: split.micro_batch]
    return profile(make_model(model_fn), lambda: (inputs.to("cpu", double_of(inputs.dtype), copy=True),))


def _own_batches(batch: Batch, split: BatchSplit, index: int) -> list[Batch]:
    rows = local_indices(torch.arange(split.batch).numpy(), split.micro_batch, split.num_batch_ranks, index)
    return [tuple(tensor[torch.from_numpy(chosen)] for tensor in to_double(batch)) for chosen in rows]


def _pieces(model: nn.Module) -> list[tuple[Part, Tensor]]:
    return [(part, piece.detach().flatten()) for part, piece in named_pieces(model)]


def _worst_number(found: list[float], expected: list[float]) -> tuple[float, str]:
    errors = [abs(a - b) / max(abs(b), 1e-300) for a, b in zip(found, expected, strict=True)]
    worst = max(range(len(errors)), key=lambda step: _badness(errors[step]))
    return errors[worst], f"step {worst + 1}"


def _worst_measure(found: list[float], expected: list[float], objective: Objective) -> tuple[float, str]:
    errors = []
    for one, told in zip(found, expected, strict=True):
        is_equal = one == told or (one != one and told != told)  # no label counts: both are NaN
        errors.append(0.0 if is_equal else abs(one - told) / max(abs(told), 1e-300))
    worst = max(range(len(errors)), key=lambda index: _badness(errors[index]))
    return errors[worst], objective.measures[worst]


def _worst_tensor(found: list[tuple[Part, Tensor]], expected: dict[str, Tensor]) -> tuple[float, str]:
    largest = max((float(tensor.abs().max()) for tensor in expected.values() if tensor.numel()), default=1.0)
    worst = (0.0, "-")
    for part, tensor in found:
        reference = expected.get(part.parameter.name)
        if reference is None:  # the sequential run never reached it: it has no gradient, and here it must be zero
            difference, scale = float(tensor.abs().max()), 0.0
        else:
            cut = part.parameter.cut
            local = (reference if cut is None else cut.take(reference)).flatten()[part.start : part.stop]
            difference, scale = float((tensor - local).abs().max()), float(reference.abs().max())
        error = difference / max(scale, FLOOR * largest)
        if _badness(error) > _badness(worst[0]):
            worst = (error, part.parameter.name)
    return worst


def _worst_buffer(model: nn.Module, expected: dict[str, Tensor]) -> tuple[float, str]:
    """Running statistics, of those that norms take over several ranks."""
    worst = (0.0, "-")
    for name, buffer in named_buffers(model):
        if buffer.numel():
            found, told = buffer.double(), expected[name].double()
            error = float((found - told).abs().max() / told.abs().max().clamp(min=1e-300))
            worst = max(worst, (error, name), key=lambda pair: _badness(pair[0]))
    return worst


def _is_first(part: Part) -> bool:
    """Whether this rank counts for a part that several ranks of x × y, or of pipe, hold alike."""
    return not part.parameter.copy and (part.parameter.cut is None or part.parameter.cut.is_first)


def _badness(error: float) -> float:
    return float("inf") if error != error else error  # NaN compares false with everything, and would be lost


def _plain(traffic: dict[Key, Traffic]) -> dict[str, list[int]]:
    return {f"{axis} {operation}": [value.calls, value.num_bytes] for (axis, operation), value in traffic.items()}


# --- from all ranks


def _judge(answers: list[dict[str, Any]], tolerance: float) -> list[Check]:
    checks = []
    for key, what in (
        ("loss", "loss"),
        ("grad_norm", "gradient norm"),
        ("gradient", "worst gradient"),
        ("parameter", "worst parameter after the steps"),
        ("buffer", "worst buffer after the steps"),
        ("evaluation", "evaluation after the steps"),
    ):
        if answers[0][key] is None:
            continue
        errors = [(answer[key][0], f"rank {rank}, {answer[key][1]}") for rank, answer in enumerate(answers)]
        error, where = max(errors, key=lambda pair: _badness(pair[0]))
        checks.append(Check(what, f"≤ {tolerance:.0e}", f"{error:.1e}", where, error <= tolerance))
    keys = sorted({key for answer in answers for key in (*answer["predicted"], *answer["counted"])})
    checks += [_equal(f"traffic: {key}", answers, "predicted", "counted", key, _traffic_text) for key in keys]
    kinds = answers[0]["predicted_state"]
    checks += [
        _equal(f"state: {kind}", answers, "predicted_state", "counted_state", kind, _bytes_text) for kind in kinds
    ]
    checks += [
        _equal(f"host: {kind}", answers, "predicted_host", "counted_host", kind, _bytes_text)
        for kind in sorted({key for answer in answers for key in (*answer["predicted_host"], *answer["counted_host"])})
    ]
    return checks


def _check_coverage(answers: list[dict[str, Any]], plan: Plan) -> Check:
    """A piece that no rank holds is not compared, so the pieces are counted: each once in every replica."""
    compared = sum(answer["num_compared"] for answer in answers)
    expected = answers[0]["num_expected"] * plan.data * plan.tile.degree * plan.context.degree
    return Check("parameters held", f"{expected:,}", f"{compared:,}", "all ranks", compared == expected)


def _equal(
    what: str, answers: list[dict[str, Any]], predicted: str, counted: str, key: str, text: Callable[[Any], str]
) -> Check:
    for rank, answer in enumerate(answers):
        expected, found = answer[predicted].get(key), answer[counted].get(key)
        is_less = key == ACTIVATIONS and (found or 0) < (expected or 0)  # transformers masks shapes, but no data
        if expected != found and not is_less:
            return Check(what, text(expected), text(found), f"rank {rank}", False)
    value = text(answers[0][predicted].get(key))
    return Check(what, value, value, "all ranks", True)


def _traffic_text(value: list[int] | None) -> str:
    return "nothing" if value is None else f"{value[1]:,} B in {value[0]} calls"


def _bytes_text(value: int | None) -> str:
    return f"{value or 0:,} B"

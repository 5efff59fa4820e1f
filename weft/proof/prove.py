"""Runs a plan on local processes in float64, and compares it with the unsplit model.

Ranks compute on CPUs, or share this machine's GPUs. On a GPU, the sequential model runs on the same GPU, blocks may be
compiled, a step may be recorded as a CUDA graph, and bf16 may be compared with float64 within a stated tolerance.

Every rank also trains the sequential model, with torch's own functions and none of weft's, and compares its own pieces
with it: the loss of each step, every gradient of the first step and every parameter after the last. It compares the
bytes that it sent and the bytes of its state with the predicted ones. Then both models are evaluated and compared.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import weft.optim
from weft.cluster.hardware import load
from weft.comm import Traffic, add_traffic, expand
from weft.comm.backends import DeviceType
from weft.comm.ledger import Key
from weft.compile.blocks import compile_blocks, wants_compile
from weft.data.order import local_indices
from weft.errors import PlanError, WeftError, error_class
from weft.launch.fork import fork_obstacle
from weft.launch.function_names import import_by_name, importable_name
from weft.launch.local_ranks import run_local, run_spawned
from weft.memory.activation_choice import offload_from
from weft.mesh import Mesh, level_degrees
from weft.parallel.apply import cost, parallelize, refuse
from weft.parallel.model_state import all_units, host_bytes, named_buffers, named_pieces, state_bytes
from weft.parallel.tile import own_tiles
from weft.plan import BatchSplit, Memory, Plan, split_batch
from weft.planner.predict import refuse_run
from weft.profile import Profile, profile
from weft.proof.report import TOLERANCE, Check, ProofReport, nan_as_inf, report_of
from weft.proof.sequential import (
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
from weft.proof.small_run import small_runs_of
from weft.run_file import Run
from weft.schedule.schedules import make_schedule
from weft.schema import build_dataclass, to_table
from weft.sharding.layout import COMPUTE_DTYPE, ParameterPart
from weft.step.cuda_graph import WARM_STEPS, Graph, recording_stream, wants_graph
from weft.step.objective import CROSS_ENTROPY, Batch, Objective, step_traffic
from weft.step.train_step import evaluate, train_step

__all__ = ["TOLERANCE", "Check", "ProofReport", "verify", "verify_run"]

logger = logging.getLogger("weft")

STEPS = 3
SECONDS, SLOW_SECONDS = 120.0, 400.0  # time limits for all ranks, without and with compiling
# Errors of tensors much smaller than the largest one are relative to this fraction of the largest. For example, the
# gradient of an attention key's bias is zero in theory and rounding noise in floating point.
FLOOR = 1e-6


@dataclass(frozen=True)
class Trial:
    """How a plan is run for a proof: its device, number of steps, and whether it compiles or records."""

    plan: Plan
    steps: int = STEPS
    clip: float | None = 1.0
    ranks_per_node: int | None = None
    device: DeviceType = "cpu"
    compiles: bool = False
    records: bool = False  # records a CUDA graph
    not_proved: tuple[str, ...] = ()  # parts of the run that are not proved, in words


def verify(
    model_fn: ModelFn,
    batch_fn: BatchFn,
    plan: Plan,
    *,
    objective: Objective = CROSS_ENTROPY,
    steps: int = STEPS,
    clip: float | None = 1.0,
    tolerance: float | None = None,
    timeout_seconds: float = 120.0,
    ranks_per_node: int | None = None,
    device: DeviceType = "cpu",
    precision: Literal["fp64", "bf16"] = "fp64",
    compiles: bool = False,
) -> ProofReport:
    """Check that `plan` computes what the unsplit model does, and return a report of all comparisons.

    `model_fn()` returns the model, the same on every call after torch.manual_seed(0). `batch_fn(step)` returns the
    tensors of a whole global batch, with samples in the first dim. The model's state, the plan's precision and its
    matmuls become float64, and no update is delayed. `ranks_per_node` arranges the ranks as if that many shared a node,
    for a hierarchical plan.

    With `device="cuda"` ranks share this machine's GPUs, in new processes that import the functions, so define these at
    the top level of a file. `precision="bf16"` computes as a bf16 run does and compares with float64, within
    `BF16_TOLERANCES`. `compiles` compiles blocks with torch.compile.
    """
    proved, left_out = plan_to_prove(plan, precision), inexact_options(plan)
    trial = Trial(proved, steps, clip, ranks_per_node, device, compiles, not_proved=left_out)
    if device == "cpu" and fork_obstacle() is None:
        return prove_plan(model_fn, batch_fn, objective, trial, tolerance, timeout_seconds)
    arguments = {
        "model": importable_name(model_fn, "model_fn"),
        "batch": importable_name(batch_fn, "batch_fn"),
        "objective": _objective_names(objective),
        "trial": {**asdict(trial), "plan": to_table(trial.plan)},
    }
    answers = run_spawned(f"{__name__}:spawned_rank", arguments, trial.plan.num_ranks, timeout_seconds, device, True)
    return _report(answers, trial, tolerance)


def plan_to_prove(plan: Plan, precision: Literal["fp64", "bf16"]) -> Plan:
    """Returns the plan that is run in a proof: with this precision, and without options that are not exact."""
    return replace(plan, precision=precision, matmul="compute", memory=_exact(plan.memory))


def prove_plan(
    model_fn: ModelFn,
    batch_fn: BatchFn,
    objective: Objective,
    trial: Trial,
    tolerance: float | None,
    timeout_seconds: float,
) -> ProofReport:
    """Prove a plan on forked ranks. Nothing here runs a backward, because after one torch cannot fork on machines with
    GPUs. Computing a plan's cost runs one, so each rank computes the cost itself.
    """
    split, counted = _split_and_profile(model_fn, batch_fn, trial.plan)

    def rank(index: int) -> dict[str, Any]:
        return _answer_of_rank(counted, model_fn, batch_fn, objective, trial, split)

    answers = run_local(rank, trial.plan.num_ranks, timeout_seconds, trial.device, own_errors=True)
    return _report(answers, trial, tolerance)


def spawned_rank(
    rank: int, model: str, batch: str, objective: Mapping[str, Any], trial: Mapping[str, Any]
) -> dict[str, Any]:
    """Run a rank in a new process, which imports the functions by name."""
    values = {**trial, "plan": build_dataclass(Plan, trial["plan"], "plan"), "not_proved": tuple(trial["not_proved"])}
    own, model_fn, batch_fn = Trial(**values), import_by_name(model), import_by_name(batch)
    try:
        split, counted = _split_and_profile(model_fn, batch_fn, own.plan)
    except WeftError as error:
        return _refused(error)
    return _answer_of_rank(counted, model_fn, batch_fn, _objective(objective), own, split)


def _objective_names(objective: Objective) -> dict[str, Any]:
    """Returns an objective as the names of its functions."""
    functions = {"count": objective.count, "total": objective.total, "measure": objective.measure}
    names = {key: None if one is None else importable_name(one, f"objective.{key}") for key, one in functions.items()}
    return {**names, "measures": list(objective.measures), "splits_logits": objective.splits_logits}


def _objective(names: Mapping[str, Any]) -> Objective:
    functions = {key: names[key] and import_by_name(names[key]) for key in ("count", "total", "measure")}
    return Objective(**functions, measures=tuple(names["measures"]), splits_logits=names["splits_logits"])


def _split_and_profile(model_fn: ModelFn, batch_fn: BatchFn, plan: Plan) -> tuple[BatchSplit, Profile]:
    """Returns how the batch is split, and the profile of the model. Raises a WeftError if the plan does not fit."""
    example = batch_fn(0)
    split = split_batch(plan, len(example[0]), example[0].shape[1] if plan.context.degree > 1 else 1)
    counted = _profile(model_fn, example, split, plan)
    refuse(counted, plan)
    return split, counted


def _report(answers: list[dict[str, Any]], trial: Trial, tolerance: float | None) -> ProofReport:
    refused = next((answer["refused"] for answer in answers if "refused" in answer), None)
    if refused is not None:
        raise (error_class(refused[0]) or WeftError)(refused[1])
    return report_of(answers, trial.plan, trial.not_proved, tolerance, trial.device)


def inexact_options(plan: Plan) -> tuple[str, ...]:
    """Returns the options of a plan that a proof leaves out, in words."""
    found = [f"plan.matmul = '{plan.matmul}'"] if plan.matmul != "compute" else []
    memory, default = plan.memory, Memory()
    for key in ("master", "state", "delay"):
        if getattr(memory, key) != getattr(default, key):
            found.append(f"plan.memory.{key} = {str(getattr(memory, key)).lower()}")
    return tuple(f"{one}: the proof is of exact updates in float64" for one in found)


def _exact(memory: Memory) -> Memory:
    return replace(memory, master=True, state="master", delay=False)


def verify_run(
    run: Run, device: DeviceType = "cpu", precision: Literal["fp64", "bf16"] = "fp64", compiles: bool = False
) -> ProofReport:
    """Prove a run's plan on a smaller copy of its model, with random samples of which some labels are masked.

    A run that cannot work is refused first. A report without checks means that the plan fits no small copy.
    """
    refuse_run(run)
    return prove_run(run, device, precision, compiles)


def prove_run(
    run: Run, device: DeviceType = "cpu", precision: Literal["fp64", "bf16"] = "fp64", compiles: bool = False
) -> ProofReport:
    """Like `verify_run`, for a run that has been checked already.

    It forks ranks and runs no backward itself, so that a child of the fork server can call it. With `compiles`, on a
    GPU, the proof compiles and records what the run does.
    """
    ranks_per_node = None if run.cluster == "local" else load(run.cluster).node.num_devices
    kind, refused = torch.device(device), None
    records = compiles and wants_graph(run, kind)
    for proof in small_runs_of(run):
        trial = Trial(
            plan_to_prove(proof.plan, precision),
            STEPS + (WARM_STEPS if records else 0),
            run.train.clip,
            ranks_per_node,
            device,
            compiles and wants_compile(run, kind),
            records,
            (*proof.not_proved, *inexact_options(proof.plan)),
        )
        seconds = SLOW_SECONDS if compiles else SECONDS
        try:
            return prove_plan(proof.model, proof.batch, proof.objective, trial, None, seconds)
        except PlanError as error:  # the run itself was not refused
            refused = refused or error
    return ProofReport(run.plan, (), (f"the plan fits the run and no small copy of its model: {refused}",))


# --- on each rank


def _answer_of_rank(
    counted: Profile, model_fn: ModelFn, batch_fn: BatchFn, objective: Objective, trial: Trial, split: BatchSplit
) -> dict[str, Any]:
    """Returns a rank's answer, or why the plan is refused. All ranks refuse alike, before any communication."""
    counted = replace(counted, gathers_logits=not objective.splits_logits)
    try:
        cost(counted, trial.plan, split)
    except WeftError as error:
        return _refused(error)
    with ExitStack() as inside:
        inside.enter_context(offload_from(1))  # tensors of any size, for memory.activations
        if trial.records:
            inside.enter_context(recording_stream(_device(trial)))
        return _run_rank(counted, model_fn, batch_fn, objective, trial, split)


def _refused(error: WeftError) -> dict[str, Any]:
    """Returns a rank's answer if the plan does not fit the model."""
    return {"refused": [type(error).__name__, str(error)]}


def _device(trial: Trial) -> torch.device:
    """Returns this rank's device: the CPU, or the current GPU, which was set when the rank started."""
    return torch.device("cuda", torch.cuda.current_device()) if trial.device == "cuda" else torch.device("cpu")


def _run_rank(
    counted: Profile, model_fn: ModelFn, batch_fn: BatchFn, objective: Objective, trial: Trial, split: BatchSplit
) -> dict[str, Any]:
    plan, steps, device, part = trial.plan, trial.steps, _device(trial), split.batch
    if counted.batch_mixers:
        part = split.micro_batch * (split.num_batch_ranks if plan.statistics == "batch" else 1)
    replicas = _replicas(plan, split) if _has_equal_buffers(plan) else []
    whole = make_model(model_fn).to(device)
    expected = run_sequential(whole, _on(device, batch_fn), objective, steps, trial.clip, part, replicas)
    mesh = Mesh(plan, device, ranks_per_node=trial.ranks_per_node)
    model = parallelize(make_model(model_fn).to(device), plan, mesh, example=counted.example)
    if trial.compiles:
        compile_blocks(model, logger.warning)
    graph = Graph(model, logger.warning) if trial.records else None
    optimizer = _optimizer(model)
    recorder = _StateRecorder(model, optimizer)
    mesh.ledger.clear()
    losses, norms = [], []
    for step in range(steps):
        batches = _own_batches(_on(device, batch_fn)(step), split, mesh["batch"].index)
        batches = [own_tiles(batch, model, mesh) for batch in batches]
        result = train_step(model, optimizer, batches, mesh, objective, trial.clip, graph=graph)
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
    pieces, sent = _pieces(model), _plain(mesh.ledger.entries())
    measured = None
    if _can_evaluate(counted, plan):
        batches = _own_batches(_on(device, batch_fn)(0), split, mesh["batch"].index)
        batches = [own_tiles(batch, model, mesh) for batch in batches]
        measured = evaluate(model, batches, mesh, objective).flatten().tolist()
    predicted = cost(counted, plan, split, mesh.coordinates)
    flat = add_traffic(predicted.traffic, step_traffic(plan))
    traffic = expand(flat, level_degrees(plan, trial.ranks_per_node))
    return {
        "loss": _worst_number(losses, expected.losses),
        "grad_norm": _worst_number(norms, expected.norms),
        "gradient": _worst_tensor(recorder.gradients, expected.gradients),
        "parameter": _worst_tensor(pieces, expected.parameters),
        "buffer": _worst_buffer(model, expected.buffers) if _has_equal_buffers(plan) else None,
        "evaluation": None if measured is None else _worst_measure(measured, expected.measured, objective),
        "num_compared": sum(tensor.numel() for part, tensor in pieces if _is_first(part)),
        "num_expected": sum(tensor.numel() for tensor in expected.parameters.values()),
        "predicted": _plain({key: value * steps for key, value in traffic.items()}),
        "counted": sent,
        "predicted_state": dict(predicted.state_bytes),
        "counted_state": recorder.state,
        "predicted_host": dict(predicted.host_bytes),
        "counted_host": recorder.host,
    }


def _on(device: torch.device, batch_fn: BatchFn) -> BatchFn:
    """Returns a function with the same batches on a device."""
    return lambda step: tuple(tensor.to(device) for tensor in batch_fn(step))


def _replicas(plan: Plan, split: BatchSplit) -> list[int]:
    """Returns the replica of each micro-batch if the pipeline has mirrored replicas; else an empty list."""
    pipe = plan.pipe
    if pipe.degree == 1:
        return []
    schedule = make_schedule(pipe.schedule, pipe.degree, split.accumulation, **pipe.options)
    steps = [step for rank in range(pipe.degree) for step in schedule.compute(rank)]
    found = {step.micro_batch: step.replica for step in steps}
    return [found[number] for number in sorted(found)] if len(schedule.placement) > 1 else []


def _has_equal_buffers(plan: Plan) -> bool:
    """Should running statistics equal the sequential model's? They should if norms see the samples of all ranks."""
    return plan.is_viewed and (plan.num_batch_ranks == 1 or plan.statistics == "batch")


def _can_evaluate(counted: Profile, plan: Plan) -> bool:
    """Should the evaluation equal the sequential model's? It should if their running statistics are equal."""
    return not counted.batch_mixers or _has_equal_buffers(plan)


class _StateRecorder:
    """Records the gradients of the first update, and the bytes of the state at the last one."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.gradients: list[tuple[ParameterPart, Tensor]] = []
        self.state: dict[str, int] = {}
        self.host: dict[str, int] = {}
        optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, _: Any, options: dict[str, Any]) -> None:
        if not self.gradients:
            scale = options.get("scale")  # the factor of clipping, if the optimizer applies it
            self.gradients = [
                (part, piece.grad.flatten() * (1.0 if scale is None else scale))
                for part, piece in named_pieces(self.model)
                if piece.grad is not None
            ]
        self.state = state_bytes(self.model, optimizer)
        self.host = host_bytes(self.model, optimizer)


def _optimizer(model: nn.Module) -> Optimizer:
    return weft.optim.AdamW(model, lr=LEARNING_RATE, eps=EPSILON) if all_units(model) else make_optimizer(model)


def _profile(model_fn: ModelFn, batch: Batch, split: BatchSplit, plan: Plan) -> Profile:
    inputs = batch[0][: split.micro_batch]

    def example() -> tuple[Tensor]:
        return (inputs.to("cpu", double_of(inputs.dtype), copy=True),)

    return profile(make_model(model_fn), example, dtype=COMPUTE_DTYPE[plan.precision])


def _own_batches(batch: Batch, split: BatchSplit, index: int) -> list[Batch]:
    rows = local_indices(torch.arange(split.batch).numpy(), split.micro_batch, split.num_batch_ranks, index)
    chosen = [torch.from_numpy(row).to(batch[0].device) for row in rows]
    return [tuple(tensor[row] for tensor in to_double(batch)) for row in chosen]


def _pieces(model: nn.Module) -> list[tuple[ParameterPart, Tensor]]:
    return [(part, piece.detach().flatten()) for part, piece in named_pieces(model)]


def _worst_number(found: list[float], expected: list[float]) -> tuple[float, str]:
    errors = [abs(a - b) / max(abs(b), 1e-300) for a, b in zip(found, expected, strict=True)]
    worst = max(range(len(errors)), key=lambda step: nan_as_inf(errors[step]))
    return errors[worst], f"step {worst + 1}"


def _worst_measure(found: list[float], expected: list[float], objective: Objective) -> tuple[float, str]:
    errors = []
    for one, reference in zip(found, expected, strict=True):
        is_equal = one == reference or (one != one and reference != reference)  # both are NaN if no label counts
        errors.append(0.0 if is_equal else abs(one - reference) / max(abs(reference), 1e-300))
    worst = max(range(len(errors)), key=lambda index: nan_as_inf(errors[index]))
    return errors[worst], objective.measures[worst]


def _worst_tensor(found: list[tuple[ParameterPart, Tensor]], expected: dict[str, Tensor]) -> tuple[float, str]:
    largest = max((float(tensor.abs().max()) for tensor in expected.values() if tensor.numel()), default=1.0)
    worst = (0.0, "-")
    for part, tensor in found:
        reference = expected.get(part.parameter.name)
        if reference is None:  # no gradient in the sequential run, so it must be zero here
            difference, scale = float(tensor.abs().max()), 0.0
        else:
            cut = part.parameter.cut
            local = (reference if cut is None else cut.take(reference)).flatten()[part.start : part.stop]
            difference, scale = float((tensor - local).abs().max()), float(reference.abs().max())
        error = difference / max(scale, FLOOR * largest)
        if nan_as_inf(error) > nan_as_inf(worst[0]):
            worst = (error, part.parameter.name)
    return worst


def _worst_buffer(model: nn.Module, expected: dict[str, Tensor]) -> tuple[float, str]:
    """Returns the largest error among buffers (running statistics of norms), and its name."""
    worst = (0.0, "-")
    for name, buffer in named_buffers(model):
        if buffer.numel():
            found, reference = buffer.double(), expected[name].double()
            error = float((found - reference).abs().max() / reference.abs().max().clamp(min=1e-300))
            worst = max(worst, (error, name), key=lambda pair: nan_as_inf(pair[0]))
    return worst


def _is_first(part: ParameterPart) -> bool:
    """Is this the first of the ranks of x × y, or of pipe, that hold the same part?"""
    return not part.parameter.copy and (part.parameter.cut is None or part.parameter.cut.is_first)


def _plain(traffic: dict[Key, Traffic]) -> dict[str, list[int]]:
    return {f"{axis} {operation}": [value.calls, value.num_bytes] for (axis, operation), value in traffic.items()}

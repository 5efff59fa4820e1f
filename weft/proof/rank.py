"""What each rank of a proof does: train the unsplit model and its part of the split one, and compare the two."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import weft.optim
from weft.cluster.hardware import load
from weft.comm import Traffic, add_traffic, expand
from weft.comm.backends import DeviceType
from weft.comm.ledger import Key
from weft.compile.blocks import compile_blocks
from weft.data.order import local_indices
from weft.errors import PlanError, WeftError
from weft.inspection.nested_tensors import map_tensors
from weft.memory.activation_choice import offload_from
from weft.mesh import Mesh
from weft.parallel.apply import cost, parallelize
from weft.parallel.model_state import all_units, host_bytes, named_pieces, state_bytes
from weft.parallel.tile import own_tiles
from weft.pipeline.rank_model import rank_model
from weft.plan import BatchSplit, Plan
from weft.profiling import Profile
from weft.proof.compare import Worst, noise_of, worst_buffer, worst_number, worst_piece
from weft.proof.float64 import Float64
from weft.proof.report import TOLERANCE
from weft.proof.result import compare_result
from weft.proof.routed_rows import RoutedRows
from weft.proof.sample_dependence import sample_dependence
from weft.proof.sequential import (
    EPSILON,
    LEARNING_RATE,
    BatchFn,
    ModelFn,
    SequentialResult,
    make_model,
    make_optimizer,
    run_sequential,
    to_double,
)
from weft.schedule.schedules import make_schedule
from weft.sharding.layout import ParameterPart
from weft.step.batch import Batch, plain_batch, take_samples
from weft.step.cuda_graph import Graph, recording_stream
from weft.step.objective import Objective, step_traffic
from weft.step.train_step import evaluate, train_step

logger = logging.getLogger("weft")

STEPS = 3
MAX_MESSAGE = 300  # characters of an error of a model's own code that are repeated


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
    cluster: str | None = None  # by whose links `communication.between = "fastest"` chooses
    not_proved: tuple[str, ...] = ()  # parts of the run that are not proved, in words


@dataclass(frozen=True)
class Case:
    """The model, batches and objective of a proof, how a batch is split, and the model's profile."""

    model_fn: ModelFn
    batch_fn: BatchFn
    objective: Objective
    split: BatchSplit
    counted: Profile

    def batch(self, step: int, device: torch.device) -> Batch:
        """Returns the whole batch of a step on a device."""
        return map_tensors(lambda tensor: tensor.to(device), plain_batch(self.batch_fn(step)))


def answer_of_rank(case: Case, trial: Trial) -> dict[str, Any]:
    """Returns a rank's answer, or why the plan is refused. All ranks refuse alike, before any communication."""
    assert case.counted.model is not None
    try:
        with _explained(trial.plan, type(case.counted.model).__name__), _arithmetic(trial):
            cost(case.counted, trial.plan, case.split)
    except WeftError as error:
        return refused(error)
    with ExitStack() as inside:
        inside.enter_context(offload_from(1))  # tensors of any size, for memory.activations
        if trial.records:
            inside.enter_context(recording_stream(_device(trial)))
        return _run_rank(case, trial)


def refused(error: WeftError) -> dict[str, Any]:
    """Returns a rank's answer if the plan does not fit the model."""
    return {"refused": [type(error).__name__, str(error)]}


def _arithmetic(trial: Trial) -> AbstractContextManager[Any]:
    """Returns the mode in which a model computes in a proof. Compiled blocks do without one."""
    return nullcontext() if trial.compiles else Float64(is_wide=trial.plan.precision == "fp64")


def _device(trial: Trial) -> torch.device:
    """Returns this rank's device: the CPU, or the current GPU, which was set when the rank started."""
    return torch.device("cuda", torch.cuda.current_device()) if trial.device == "cuda" else torch.device("cpu")


def _run_rank(case: Case, trial: Trial) -> dict[str, Any]:
    plan, split, objective, device = trial.plan, case.split, case.objective, _device(trial)
    run = _sequential(case, trial, device)
    with unsplit(type(case.counted.model).__name__):
        expected = run(False)
    mesh = Mesh(plan, device, trial.ranks_per_node, None if trial.cluster is None else load(trial.cluster))
    model = make_model(case.model_fn).to(device)
    arithmetic = _arithmetic(trial)
    with _explained(plan, type(model).__name__):
        with arithmetic:
            model = parallelize(model, plan, mesh, example=case.counted.example)
        found = _train(model, case, trial, mesh, arithmetic)
    errors = {
        "loss": worst_number(found.losses, expected.losses),
        "grad_norm": worst_number(found.norms, expected.norms),
        "gradient": worst_piece(found.recorder.gradients, expected.gradients),
        "parameter": worst_piece(found.pieces, expected.parameters),
    }
    notes = [*expected.notes, *_compare_buffers(case, plan, found.buffers, expected, errors)]
    if _can_evaluate(case.counted, plan):
        batches = _own_batches(case, 0, model, mesh)
        rows = _rows(split, mesh)[0]
        with arithmetic:
            measured = evaluate(model, batches, mesh, objective).flatten().tolist()
            errors["evaluation"] = worst_number(measured, expected.measured, objective.measures)
            notes += compare_result(model, mesh, objective, batches[0], rows, split.batch, expected.outputs, errors)
    noise: dict[str, float] = {}
    dependence: str | None = None
    if plan.precision == "fp64" and not all(error <= TOLERANCE for error, _ in errors.values()):
        noise = noise_of(expected, run(True), objective.measures)
        if not expected.draws and not plan.has_batch_statistics:  # these are meant to depend on the whole batch
            dependence = _dependence(case, trial, device, expected, noise)
    with arithmetic:
        predicted = cost(case.counted, plan, split, mesh.coordinates)
    flat = add_traffic(predicted.traffic, step_traffic(plan))
    traffic = expand(flat, mesh.levels, mesh.is_leader)
    expected_bytes = _plain({key: value * trial.steps for key, value in traffic.items()})
    for key, added in found.routed.added_bytes(case.counted).items():
        expected_bytes["{} {}".format(*key)][1] += added
    return {
        "errors": {key: list(worst) for key, worst in errors.items()},
        "noise": noise,
        "notes": notes,
        "draws": list(expected.draws),
        "calls": _unusual_calls(case.counted, expected),
        "made_buffers": list(expected.made),
        "dependence": dependence,
        "num_compared": sum(tensor.numel() for part, tensor in found.pieces if _is_first(part)),
        "num_expected": sum(tensor.numel() for tensor in expected.parameters.values()),
        "predicted": expected_bytes,
        "counted": found.sent,
        "predicted_state": dict(predicted.state_bytes),
        "counted_state": found.recorder.state,
        "predicted_host": dict(predicted.host_bytes),
        "counted_host": found.recorder.host,
    }


@contextmanager
def _explained(plan: Plan, name: str) -> Iterator[None]:
    """Raise a PlanError where a model that runs unsplit fails under the plan, for a reason that no rule foresaw."""
    try:
        yield
    except (WeftError, dist.DistError):
        raise
    except Exception as error:
        raise PlanError(
            f"{name} runs unsplit and fails under {plan.describe_axes()}: {_described(error)}. Its code does something "
            f"that this plan changes, and no rule of weft names it (it may take parameters from parameters() or "
            f"named_parameters(), which are this rank's parts, or expect all features); use another plan"
        ) from error


@contextmanager
def unsplit(name: str) -> Iterator[None]:
    """Raise a PlanError where a model's own code fails before it is split."""
    try:
        yield
    except WeftError:
        raise
    except Exception as error:
        raise PlanError(
            f"{name} fails before it is split, on a batch of batch_fn: {_described(error)}; return what its forward "
            f"takes: (inputs, labels) for one input, or a dict of arguments for several"
        ) from error


def _described(error: Exception) -> str:
    """Returns an error of a model's own code in words: its class, its message and the last line of that code."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((one for one in reversed(frames) if _is_of_a_model(one.filename)), frames[-1])
    message = str(error).strip().partition("\n")[0]  # torch's may go on for a page
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]} …"
    return f"{type(error).__name__}: {message} ({Path(frame.filename).name}:{frame.lineno})"


def _is_of_a_model(file: str) -> bool:
    """Is this file neither torch's nor weft's, but for weft's models?"""
    weft_root = Path(__file__).parents[1]
    is_ours = file.startswith(str(weft_root)) and not file.startswith(str(weft_root / "models"))
    return not is_ours and not file.startswith(str(Path(torch.__file__).parent))


# --- the unsplit model


def _sequential(case: Case, trial: Trial, device: torch.device) -> Callable[[bool], SequentialResult]:
    """Returns a function that trains the unsplit model, in another order of summing if it is given True.

    It runs whole batches. If forwards change buffers, it runs what all ranks together do at a time, and with batch
    norms whose statistics are each rank's own, one micro-batch at a time.
    """
    plan, split = trial.plan, case.split
    together = split.micro_batch * split.num_batch_ranks
    parts = [split.batch, together]
    if case.counted.batch_mixers:
        parts = [together if plan.statistics == "batch" else split.micro_batch]

    def run(reordered: bool) -> SequentialResult:
        model = make_model(case.model_fn).to(device)
        replicas = _replicas(plan, split) if parts[0] == together else []
        return run_sequential(
            model,
            lambda step: case.batch(step, device),
            case.objective,
            trial.steps,
            trial.clip,
            parts[0],
            replicas,
            reordered,
            keeps_casts=trial.compiles and plan.precision == "fp64",
        )

    def run_as_ranks_do(reordered: bool) -> SequentialResult:
        result = run(reordered)
        if result.changed and parts[1:] and parts[0] != together:
            parts.pop(0)
            result = run(reordered)
        return result

    return run_as_ranks_do


def _dependence(
    case: Case, trial: Trial, device: torch.device, expected: SequentialResult, noise: Mapping[str, float]
) -> str | None:
    """Returns in words that the unsplit model computes something else from micro-batches; None if it does not."""
    size = case.split.micro_batch

    def run_parts() -> SequentialResult:
        model, batches = make_model(case.model_fn).to(device), partial(case.batch, device=device)
        return run_sequential(model, batches, case.objective, trial.steps, trial.clip, size, [])

    return sample_dependence(type(case.counted.model).__name__, size, expected, run_parts, noise)


def _replicas(plan: Plan, split: BatchSplit) -> list[int]:
    """Returns the replica of each micro-batch if the pipeline has mirrored replicas; else an empty list."""
    pipe = plan.pipe
    if pipe.degree == 1:
        return []
    schedule = make_schedule(pipe.schedule, pipe.degree, split.accumulation, **pipe.options)
    steps = [step for rank in range(pipe.degree) for step in schedule.compute(rank)]
    found = {step.micro_batch: step.replica for step in steps}
    return [found[number] for number in sorted(found)] if len(schedule.placement) > 1 else []


def _unusual_calls(counted: Profile, expected: SequentialResult) -> list[str]:
    """Returns in words how a loss called the model and its blocks, where it is not as the profile counted."""
    words = []
    if expected.inner_gradients:
        words.append(
            f"the loss computes gradients before its own backward (torch.autograd.grad, "
            f"{', '.join(expected.inner_gradients)}), for which the profile counts no communication; use data, or "
            f"shard stage 1 or 2"
        )
    for name, usual in [("", 1), *((block.name, block.calls) for block in counted.blocks)]:
        forward, backward = expected.calls[name, "forward"], expected.calls[name, "backward"]
        if (forward, backward) != (usual, 0):
            what = f"block '{name}'" if name else "the model"
            again = f" and {backward} times in backward (checkpointing by the model itself)" if backward else ""
            words.append(
                f"one loss calls {what} {forward} times{again}, and the profile counted {usual}, for which bytes are "
                f"predicted; compute the loss from one call, of all inputs together"
            )
    return words


# --- the split model


@dataclass
class _Found:
    """What a rank's part of the split model computed, sent and holds."""

    losses: list[float]
    norms: list[float]
    pieces: list[tuple[ParameterPart, Tensor]]
    buffers: list[tuple[str, Tensor]]
    sent: dict[str, list[int]]
    recorder: _StateRecorder
    routed: RoutedRows


def _train(model: nn.Module, case: Case, trial: Trial, mesh: Mesh, arithmetic: AbstractContextManager[Any]) -> _Found:
    """Train the split model. `arithmetic` is the mode of its forwards and backwards."""
    if trial.compiles:
        compile_blocks(model, logger.warning)
    graph = Graph(model, logger.warning) if trial.records else None
    optimizer = _optimizer(model)
    recorder, routed = _StateRecorder(model, optimizer), RoutedRows(model, mesh)
    if isinstance(arithmetic, Float64):
        arithmetic.pause_in(optimizer)
        arithmetic.stay_in_recompute(model)
    mesh.ledger.clear()
    losses, norms = [], []
    for step in range(trial.steps):
        batches = _own_batches(case, step, model, mesh)
        with arithmetic:
            result = train_step(model, optimizer, batches, mesh, case.objective, trial.clip, graph=graph)
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
    return _Found(losses, norms, _pieces(model), _buffers(model), _plain(mesh.ledger.entries()), recorder, routed)


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


def _rows(split: BatchSplit, mesh: Mesh) -> list[Tensor]:
    """Returns the samples of each of this rank's micro-batches."""
    rows = local_indices(
        torch.arange(split.batch).numpy(), split.micro_batch, split.num_batch_ranks, mesh["batch"].index
    )
    return [torch.from_numpy(row).to(mesh.device) for row in rows]


def _own_batches(case: Case, step: int, model: nn.Module, mesh: Mesh) -> list[Batch]:
    batch = to_double(case.batch(step, mesh.device))
    aligned = case.objective.aligned(batch, mesh.plan)
    return [own_tiles(take_samples(aligned, rows), model, mesh) for rows in _rows(case.split, mesh)]


def _pieces(model: nn.Module) -> list[tuple[ParameterPart, Tensor]]:
    return [(part, piece.detach().flatten().clone()) for part, piece in named_pieces(model)]


def _buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns copies of all buffers on this rank, by their names in the whole model."""
    return [(name, buffer.clone()) for own in rank_model(model).models for name, buffer in own.named_buffers()]


def _compare_buffers(
    case: Case, plan: Plan, buffers: list[tuple[str, Tensor]], expected: SequentialResult, errors: dict[str, Worst]
) -> list[str]:
    """Compares every buffer. Returns in words which are not compared."""
    mixers = () if _has_batch_statistics(plan) else tuple(f"{name}." for name in case.counted.batch_mixers)
    shapes = {name: buffer.shape for name, buffer in expected.buffers.items()}
    own = [name for name, _ in buffers if name.startswith(mixers)] if mixers else []
    others = [name for name, buffer in buffers if shapes.get(name) != buffer.shape]
    compared = [(name, buffer) for name, buffer in buffers if name not in {*own, *others}]
    if compared:
        worst = worst_buffer(compared, expected)
        if worst.where in expected.changed and plan.num_batch_ranks > 1 and worst.error > TOLERANCE:
            worst = Worst(worst.error, f"{worst.where}, which forwards change by the samples of each rank alone")
        errors["buffer"] = worst
    words = [f"buffer '{name}': a rank holds only a part of it, or weft made it" for name in others]
    if own:
        words.append(f"{len(own)} buffers ('{own[0]}', …): the running statistics of batch norms are each rank's own")
    return words


def _has_batch_statistics(plan: Plan) -> bool:
    """Should running statistics equal the sequential model's? They should if norms see the samples of all ranks."""
    return plan.num_batch_ranks == 1 or plan.statistics == "batch"


def _can_evaluate(counted: Profile, plan: Plan) -> bool:
    """Should the evaluation equal the sequential model's? It should if their running statistics are equal."""
    return not counted.batch_mixers or _has_batch_statistics(plan)


def _is_first(part: ParameterPart) -> bool:
    """Is this the first of the ranks of x × y, or of pipe, that hold the same part?"""
    return not part.parameter.copy and (part.parameter.cut is None or part.parameter.cut.is_first)


def _plain(traffic: dict[Key, Traffic]) -> dict[str, list[int]]:
    return {f"{axis} {operation}": [value.calls, value.num_bytes] for (axis, operation), value in traffic.items()}

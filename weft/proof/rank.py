"""What each rank of a proof does: train the unsplit model and its part of the split one, and compare the two."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import weft.optim
from weft.cluster.hardware import load
from weft.comm import Axis, Traffic, add_traffic, all_gather, expand
from weft.comm.ledger import Key
from weft.compile.blocks import compile_blocks
from weft.data.order import local_indices
from weft.errors import WeftError
from weft.memory.activation_copies import offload_from
from weft.mesh import Mesh
from weft.parallel.apply import cost, parallelize
from weft.parallel.expert.layers import axis_of_rows, distributed_layers, routed_counts
from weft.parallel.expert.traffic import ExpertTraffic, layer_traffics
from weft.parallel.model_state import all_units, host_bytes, named_pieces, state_bytes
from weft.parallel.tile import own_tiles
from weft.pipeline.rank_model import rank_model
from weft.plan import BatchSplit, Plan
from weft.profiling import Profile
from weft.proof.compare import Noise, Pairs, buffers, largest_of, noise_of, numbers, pieces
from weft.proof.float64 import Float64
from weft.proof.report import NOISE_MULTIPLE, TOLERANCE, Worst, severity
from weft.proof.result import compare_result
from weft.proof.sequential import (
    EPSILON,
    LEARNING_RATE,
    NUM_RUNS,
    SequentialResult,
    make_model,
    make_optimizer,
    to_double,
)
from weft.proof.trial import (
    Case,
    Trial,
    dependence,
    device_of,
    explained,
    fitting,
    refuse_bad_numbers,
    sequential,
    unsplit,
    unusual_calls,
)
from weft.sharding.layout import ParameterPart
from weft.step.batch import Batch, take_samples
from weft.step.cuda_graph import Graph, recording_stream
from weft.step.objective import step_traffic
from weft.step.train_step import evaluate, train_step

logger = logging.getLogger("weft")


def answer_of_rank(case: Case, trial: Trial) -> dict[str, Any]:
    """Returns a rank's answer, or why the plan is refused. All ranks refuse alike, before any communication."""
    assert case.counted.model is not None
    try:
        with explained(trial.plan, type(case.counted.model).__name__), fitting(), _arithmetic(trial):
            cost(case.counted, trial.plan, case.split)
    except WeftError as error:
        return refused(error)
    with ExitStack() as inside:
        inside.enter_context(offload_from(1))  # tensors of any size, for memory.activations
        if trial.records:
            inside.enter_context(recording_stream(device_of(trial)))
        return _run_rank(case, trial)


def refused(error: WeftError) -> dict[str, Any]:
    """Returns a rank's answer if the plan does not fit the model."""
    return {"refused": [type(error).__name__, str(error)]}


def _arithmetic(trial: Trial) -> AbstractContextManager[Any]:
    """Returns the mode in which a model computes in a proof. Compiled blocks do without one."""
    return nullcontext() if trial.compiles else Float64(is_wide=trial.plan.precision == "fp64")


def _run_rank(case: Case, trial: Trial) -> dict[str, Any]:
    plan, split, objective, device = trial.plan, case.split, case.objective, device_of(trial)
    run = sequential(case, trial, device)
    with fitting(), unsplit(type(case.counted.model).__name__):
        expected = run(0)
        refuse_bad_numbers(type(case.counted.model).__name__, expected)
    mesh = Mesh(plan, device, trial.ranks_per_node, None if trial.cluster is None else load(trial.cluster))
    model = make_model(case.model_fn).to(device)
    arithmetic = _arithmetic(trial)
    with explained(plan, type(model).__name__):
        with fitting(), arithmetic:
            model = parallelize(model, plan, mesh, example=case.counted.example)
        found = _train(model, case, trial, mesh, arithmetic)
    compared = {
        "loss": numbers(found.losses, expected.losses),
        "grad_norm": numbers(found.norms, expected.norms),
        "gradient": pieces(found.recorder.gradients, expected.gradients),
        "parameter": pieces(found.pieces, expected.parameters),
    }
    notes = [*expected.notes, *_compare_buffers(case, plan, found.buffers, expected, compared)]
    # The evaluation should equal the sequential model's if their running statistics are equal.
    if not case.counted.batch_mixers or _has_batch_statistics(plan):
        batches = _own_batches(case, 0, model, mesh)
        rows = _rows(split, mesh)[0]
        with arithmetic:
            measured = evaluate(model, batches, mesh, objective).flatten().tolist()
            compared["evaluation"] = numbers(measured, expected.measured, objective.measures)
            result, words = compare_result(model, mesh, objective, batches[0], rows, split.batch, expected.outputs)
        notes += words
        if result is not None:
            compared["result"] = result
    noise: dict[str, dict[str, float]] = {}
    depends: str | None = None
    is_close = all(pairs.worst().error <= TOLERANCE for pairs in compared.values())
    if plan.precision == "fp64" and trial.tolerance is None and not is_close:
        noise = noise_of((run(number + 1) for number in range(NUM_RUNS)), expected, objective.measures)
        if not expected.draws and not plan.has_batch_statistics:  # these are meant to depend on the whole batch
            depends = dependence(case, trial, device, expected, noise)
    with arithmetic:
        predicted = cost(case.counted, plan, split, mesh.coordinates)
    flat = add_traffic(predicted.traffic, step_traffic(plan))
    traffic = expand(flat, mesh.levels, mesh.is_leader)
    expected_bytes = _plain({key: value * trial.steps for key, value in traffic.items()})
    for key, added in found.routed.added_bytes(case.counted).items():
        expected_bytes["{} {}".format(*key)][1] += added
    return {
        "errors": {key: list(_worst(key, pairs, noise, expected, plan)) for key, pairs in compared.items()},
        "notes": notes,
        "draws": list(expected.draws),
        "calls": unusual_calls(case.counted, expected),
        "made_buffers": list(expected.made),
        "dependence": depends,
        "num_compared": sum(tensor.numel() for part, tensor in found.pieces if _is_first(part)),
        "num_expected": sum(tensor.numel() for tensor in expected.parameters.values()),
        "predicted": expected_bytes,
        "counted": found.sent,
        "predicted_state": dict(predicted.state_bytes),
        "counted_state": found.recorder.state,
        "predicted_host": dict(predicted.host_bytes),
        "counted_host": found.recorder.host,
    }


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
    say = logger.warning if mesh.is_first else logger.debug
    if trial.compiles:
        compile_blocks(model, say)
    graph = Graph(model, say) if trial.records else None
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
    case: Case, plan: Plan, found: list[tuple[str, Tensor]], expected: SequentialResult, compared: dict[str, Pairs]
) -> list[str]:
    """Compares every buffer. Returns in words which are not compared."""
    mixers = () if _has_batch_statistics(plan) else tuple(f"{name}." for name in case.counted.batch_mixers)
    shapes = {name: buffer.shape for name, buffer in expected.buffers.items()}
    own = [name for name, _ in found if name.startswith(mixers)] if mixers else []
    others = [name for name, buffer in found if shapes.get(name) != buffer.shape]
    pairs = [(name, buffer) for name, buffer in found if name not in {*own, *others}]
    if pairs:
        compared["buffer"] = buffers(pairs, expected)
    words = [f"buffer '{name}': a rank holds only a part of it, or weft made it" for name in others]
    if own:
        words.append(f"{len(own)} buffers ('{own[0]}', …): the running statistics of batch norms are each rank's own")
    return words


def _worst(quantity: str, pairs: Pairs, noise: Mapping[str, Noise], expected: SequentialResult, plan: Plan) -> Worst:
    """Returns the worst error of a quantity, and says where the unsplit model explains it."""
    worst = pairs.worst(noise.get(quantity))
    if worst.error <= TOLERANCE:
        return worst
    words, name = "", worst.where
    is_difference, _ = severity(worst)
    if quantity == "buffer" and is_difference and name in expected.changed and plan.num_batch_ranks > 1:
        words = ", which forwards change by the samples of each rank alone"
    elif quantity in ("gradient", "parameter") and name in expected.gradients:
        rounding = NOISE_MULTIPLE * noise.get("gradient", {}).get(name, 0.0)
        if largest_of([expected.gradients[name]]) <= rounding:
            words = ", whose gradient is rounding and nothing else, so its steps are not determined"
    return worst._replace(where=f"{name}{words}")


def _has_batch_statistics(plan: Plan) -> bool:
    """Should running statistics equal the sequential model's? They should if norms see the samples of all ranks."""
    return plan.num_batch_ranks == 1 or plan.statistics == "batch"


def _is_first(part: ParameterPart) -> bool:
    """Is this the first of the ranks of x × y, or of pipe, that hold the same part?"""
    return not part.parameter.copy and (part.parameter.cut is None or part.parameter.cut.is_first)


def _plain(traffic: dict[Key, Traffic]) -> dict[str, list[int]]:
    return {f"{axis} {operation}": [value.calls, value.num_bytes] for (axis, operation), value in traffic.items()}


class RoutedRows:
    """Counts the rows that this rank's tokens send to each expert in training, in each call of each layer.

    The bytes of the all-to-alls of `expert` depend on it, and a plan's cost is for experts that all get the same number
    of tokens. A proof adds what the counted rows change. Recompute does not count.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._mesh = mesh
        self._counts: dict[str, list[Tensor]] = {}  # of all calls of a layer, in their order
        self._axes: dict[str, Axis] = {}
        for own in rank_model(model).models:
            for name, layer in distributed_layers(own).items():
                self._axes[name] = axis_of_rows(layer)
                layer.register_forward_pre_hook(self._counter(name, own), with_kwargs=True)

    def _counter(self, name: str, model: nn.Module) -> Any:
        def count(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if model.training and torch._C._current_graph_task_id() == -1:
                given = inspect.signature(layer.forward).bind(*args, **kwargs).args  # in the order of its parameters
                counts = routed_counts(layer, *given)
                if counts is not None:
                    self._counts.setdefault(name, []).append(counts)

        return count

    def added_bytes(self, profile: Profile) -> dict[Key, int]:
        """Returns the bytes that this rank sent in addition to those of equal routing; negative if it sent fewer."""
        traffics: dict[str, list[ExpertTraffic]] = {}
        for one in layer_traffics(profile, self._mesh.plan):
            traffics.setdefault(one.name, []).append(one)
        added: dict[Key, int] = {}
        for name, counts in self._counts.items():
            axis, calls, none = self._axes[name], traffics.get(name, []), torch.zeros_like(counts[0])
            for number, call in enumerate(calls):  # of one micro-batch; every micro-batch has the same
                own = sum(counts[number :: len(calls)], none).view(axis.degree, -1).sum(-1)  # for each rank's experts
                whole = own.new_empty(axis.degree, axis.degree)
                all_gather(whole.view(-1), own, axis).wait()
                rows = int(whole[:, axis.index].sum() - own.sum())
                if rows:
                    added[call.key] = added.get(call.key, 0) + rows * call.row_bytes * call.num_sends_of_arrived
        return added

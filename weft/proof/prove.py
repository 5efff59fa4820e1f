"""Runs a plan on local processes in float64, and compares it with the unsplit model.

Ranks compute on CPUs, or share this machine's GPUs. On a GPU, the sequential model runs on the same GPU, blocks may be
compiled, a step may be recorded as a CUDA graph, and bf16 may be compared with float64 within a stated tolerance.

Every rank also trains the sequential model, with torch's own functions and none of weft's, and compares its own pieces
with it: the loss of each step, every gradient of the first step, every parameter and buffer after the last. It compares
the bytes that it sent and the bytes of its state with the predicted ones. Then both models are evaluated and compared,
with the result of a forward. `rank.py` is what a rank does, `compare.py` and `result.py` compare, `report.py` judges.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from weft.cluster.hardware import load
from weft.comm.backends import DeviceType
from weft.compile.blocks import wants_compile
from weft.errors import LocalError, PlanError, UnfitError, VerifyError, WeftError, error_class
from weft.inspection.nested_tensors import map_tensors
from weft.launch.fork import fork_obstacle
from weft.launch.local_ranks import import_by_name, importable_name, run_local, run_spawned
from weft.parallel.apply import refuse
from weft.parallel.context.axis import sequence_of
from weft.plan import Context, Memory, Plan, split_batch
from weft.planner.predict import refuse_run
from weft.profiling import profile
from weft.proof.float64 import Float64
from weft.proof.rank import answer_of_rank, refused
from weft.proof.report import TOLERANCE, Check, ProofReport, report_of
from weft.proof.result import arguments_of
from weft.proof.sequential import BatchFn, ModelFn, double_of, make_model, to_double
from weft.proof.small_run import small_runs_of
from weft.proof.trial import STEPS, Case, Trial, fitting, unsplit
from weft.run_file import Run
from weft.schema import build_dataclass, to_table
from weft.sharding.layout import COMPUTE_DTYPE
from weft.step.batch import Batch, num_samples, plain_batch, take_samples
from weft.step.cuda_graph import WARM_STEPS, wants_graph
from weft.step.model_loss import default_objective
from weft.step.objective import Objective

__all__ = ["TOLERANCE", "Check", "ProofReport", "Trial", "verify", "verify_run"]

_FUNCTIONS = ("count", "total", "measure", "align", "positions")  # of an objective
SECONDS, SLOW_SECONDS = 120.0, 400.0  # time limits for all ranks, without and with compiling


def verify(
    model_fn: ModelFn,
    batch_fn: BatchFn,
    plan: Plan,
    *,
    objective: Objective | None = None,
    steps: int = STEPS,
    clip: float | None = 1.0,
    tolerance: float | None = None,
    timeout_seconds: float = 300.0,
    ranks_per_node: int | None = None,
    device: DeviceType = "cpu",
    precision: Literal["fp64", "bf16"] = "fp64",
    compiles: bool = False,
    cluster: str | None = None,
) -> ProofReport:
    """Check that `plan` computes what the unsplit model does, and return a report of all comparisons.

    `model_fn()` returns the model, the same on every call after torch.manual_seed(0). `batch_fn(step)` returns a whole
    global batch: any nested value of tensors with samples in the first dim. Without an `objective`, a dict is the
    model's keyword arguments with `labels`, and the loss is the model's own (`weft.step.model_loss`); anything else is
    (inputs, labels) for cross-entropy.

    The model's state, the plan's precision, its matmuls and casts inside of the model become float64, and no update is
    delayed. An error above 1e-9 is compared with the model's own noise (`weft.proof.report`). A `tolerance` replaces
    both; 0 allows no difference at all. `ranks_per_node` arranges the ranks as if that many shared a node, for a
    hierarchical plan; by the links of `cluster`, it chooses the fastest collectives.

    With `device="cuda"` ranks share this machine's GPUs, in new processes that import the functions, so define these at
    the top level of a file. `precision="bf16"` computes as a bf16 run does and compares with float64, within
    `BF16_TOLERANCES`. `compiles` compiles blocks with torch.compile.
    """
    _refuse_arguments(model_fn, batch_fn, plan)
    _refuse_numbers(steps, clip, tolerance, timeout_seconds)
    proved, left_out = plan_to_prove(plan, precision), inexact_options(plan)
    trial = Trial(proved, steps, clip, ranks_per_node, device, compiles, False, cluster, left_out, tolerance)
    if device == "cpu" and fork_obstacle() is None:
        return prove_plan(model_fn, batch_fn, objective, trial, timeout_seconds)
    arguments = {
        "model": importable_name(model_fn, "model_fn"),
        "batch": importable_name(batch_fn, "batch_fn"),
        "objective": None if objective is None else _objective_names(objective),
        "trial": {**asdict(trial), "plan": to_table(trial.plan)},
    }
    answers = run_spawned(f"{__name__}:spawned_rank", arguments, trial.plan.num_ranks, timeout_seconds, device, True)
    return _report(answers, trial)


def _refuse_arguments(model_fn: Any, batch_fn: Any, plan: Any) -> None:
    """Raises PlanError if something else than two functions and a plan is given."""
    if isinstance(model_fn, nn.Module) or not callable(model_fn):
        name = type(model_fn).__name__
        raise PlanError(
            f"verify builds the model anew on each process, and model_fn is a {name}; give a function that returns a "
            f"new model, such as lambda: {name if isinstance(model_fn, nn.Module) else 'MyModel'}(...)"
        )
    if not callable(batch_fn):
        raise PlanError(
            f"verify asks for the batch of each step, and batch_fn is a {type(batch_fn).__name__}; give a function of "
            f"the step that returns the whole batch, such as lambda step: batch"
        )
    if not isinstance(plan, Plan):
        raise PlanError(f"plan is a {type(plan).__name__}; give a weft.Plan, such as weft.Plan(data=2)")


def _refuse_numbers(steps: int, clip: float | None, tolerance: float | None, timeout_seconds: float) -> None:
    """Raises PlanError if a proof with these numbers would compare nothing, or would let every difference pass."""
    if steps < 1:
        raise PlanError(f"steps = {steps}, and a proof compares the results of training; give at least 1")
    if clip is not None and not clip > 0:
        raise PlanError(f"clip = {clip:g} would leave no gradient to compare; give a norm above 0, or None")
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise PlanError(f"tolerance = {tolerance:g}; give a relative error of at least 0, or None for those of weft")
    if not timeout_seconds > 0:
        raise PlanError(f"timeout_seconds = {timeout_seconds:g}; give the seconds that all ranks may take, above 0")


def plan_to_prove(plan: Plan, precision: Literal["fp64", "bf16"]) -> Plan:
    """Returns the plan that is run in a proof: with this precision, and without options that are not exact."""
    communication = replace(plan.communication, gather="exact", scatter="exact", reduce="exact")
    memory = replace(plan.memory, master=True, state="master", delay=False)
    return replace(plan, precision=precision, matmul="compute", memory=memory, communication=communication)


def prove_plan(
    model_fn: ModelFn,
    batch_fn: BatchFn,
    objective: Objective | None,
    trial: Trial,
    timeout_seconds: float,
) -> ProofReport:
    """Prove a plan on forked ranks. Nothing here runs a backward, because after one torch cannot fork on machines with
    GPUs. Computing a plan's cost runs one, so each rank computes the cost itself.
    """
    with fitting():
        case = _case(model_fn, batch_fn, objective, trial.plan)

    def rank(index: int) -> dict[str, Any]:
        return answer_of_rank(case, trial)

    answers = run_local(rank, trial.plan.num_ranks, timeout_seconds, trial.device, own_errors=True)
    return _report(answers, trial)


def spawned_rank(
    rank: int, model: str, batch: str, objective: Mapping[str, Any] | None, trial: Mapping[str, Any]
) -> dict[str, Any]:
    """Run a rank in a new process, which imports the functions by name."""
    values = {**trial, "plan": build_dataclass(Plan, trial["plan"], "plan"), "not_proved": tuple(trial["not_proved"])}
    own, named = Trial(**values), None if objective is None else _objective(objective)
    try:
        with fitting():
            case = _case(import_by_name(model), import_by_name(batch), named, own.plan)
    except WeftError as error:
        return refused(error)
    return answer_of_rank(case, own)


def _objective_names(objective: Objective) -> dict[str, Any]:
    """Returns an objective as the names of its functions."""
    functions = {key: getattr(objective, key) for key in _FUNCTIONS}
    names = {key: None if one is None else importable_name(one, f"objective.{key}") for key, one in functions.items()}
    return {**names, "measures": list(objective.measures), "splits_logits": objective.splits_logits}


def _objective(names: Mapping[str, Any]) -> Objective:
    functions = {key: names[key] and import_by_name(names[key]) for key in _FUNCTIONS}
    return Objective(**functions, measures=tuple(names["measures"]), splits_logits=names["splits_logits"])


def _case(model_fn: ModelFn, batch_fn: BatchFn, objective: Objective | None, plan: Plan) -> Case:
    """Returns the model, batches and objective of a proof. Raises a WeftError if the plan does not fit them."""
    batch = plain_batch(batch_fn(0))
    samples = split_batch(replace(plan, context=Context()), num_samples(batch), 1)
    model, wide = make_model(model_fn), to_double(batch)
    with unsplit(type(model).__name__):
        with Float64():
            if objective is None:
                objective = default_objective(model, wide)
            wide = objective.aligned(wide, plan)
            args, kwargs = arguments_of(model, objective, take_samples(wide, slice(0, samples.micro_batch)))
        given = _by_name(model, args, kwargs) if kwargs else args
        counted = profile(model, partial(_example, given), dtype=COMPUTE_DTYPE[plan.precision])
    counted = replace(counted, gathers_logits=not objective.splits_logits)
    refuse(counted, plan)
    _refuse_tree(wide, plan)
    degree = plan.context.degree
    split = split_batch(plan, samples.batch, sequence_of(wide, degree)) if degree > 1 else samples
    return Case(model_fn, batch_fn, objective, split, counted)


def _refuse_tree(batch: Batch, plan: Plan) -> None:
    """Refuse tiles for batches of which weft does not know which tensors are the images' targets."""
    if plan.tile.degree > 1 and not (isinstance(batch, tuple) and len(batch) > 1):
        raise PlanError(
            f"tile = {plan.tile.rows} × {plan.tile.columns} splits images and their targets, and batch_fn returns a "
            f"{type(batch).__name__} that does not say which are which; return (inputs, targets), or use rows = "
            f"columns = 1"
        )


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arguments of a model by their names."""
    names = list(inspect.signature(model.forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _example(given: Any) -> Any:
    """Returns a copy of the arguments of one forward."""
    return map_tensors(lambda tensor: tensor.detach().to("cpu", double_of(tensor.dtype), copy=True), given)


def _report(answers: list[dict[str, Any]], trial: Trial) -> ProofReport:
    refused = next((answer["refused"] for answer in answers if "refused" in answer), None)
    if refused is not None:
        raise (error_class(refused[0]) or WeftError)(refused[1])
    dependence = next((answer["dependence"] for answer in answers if answer["dependence"]), None)
    if dependence is not None:
        raise PlanError(dependence)
    return report_of(answers, trial.plan, trial.not_proved, trial.tolerance, trial.device)


def inexact_options(plan: Plan) -> tuple[str, ...]:
    """Returns the options of a plan that a proof leaves out, in words."""
    found = [f"plan.matmul = '{plan.matmul}'"] if plan.matmul != "compute" else []
    memory, default = plan.memory, Memory()
    for key in ("master", "state", "delay"):
        if getattr(memory, key) != getattr(default, key):
            found.append(f"plan.memory.{key} = {str(getattr(memory, key)).lower()}")
    found += [f"plan.communication.{key} = '{wire}'" for key, wire in plan.communication.rounded.items()]
    return tuple(f"{one}: the proof is of exact updates in float64" for one in found)


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
    """Like `verify_run`, for a run that has been checked already. Raises a VerifyError if a proof does not end.

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
            None if run.cluster == "local" else run.cluster,
            (*proof.not_proved, *inexact_options(proof.plan)),
        )
        seconds = SLOW_SECONDS if compiles else SECONDS
        try:
            return prove_plan(proof.model, proof.batch, proof.objective, trial, seconds)
        except UnfitError as error:  # the run itself was not refused
            refused = refused or error
        except (PlanError, LocalError) as error:
            raise VerifyError(
                f"{trial.plan.describe_axes()} failed its proof, on a small copy of the model: {error}"
            ) from error
    return ProofReport(run.plan, (), (f"the plan fits the run and no small copy of its model: {refused}",))

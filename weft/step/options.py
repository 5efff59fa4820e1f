"""Refuses options of [train] that a plan does not allow, before a prediction, a proof or a rank starts."""

from __future__ import annotations

from weft.architectures import RecurrentConfig
from weft.data.config import DataConfig
from weft.errors import PlanError
from weft.parallel.tensor.vocabulary import refuse_z_loss
from weft.plan import AXES, Memory
from weft.run_file import Run
from weft.step.layer_drop import refuse_layer_drop


def refuse_options(run: Run) -> None:
    """Raises PlanError with the first reason why the plan does not allow the run's options."""
    reason = refuse_z_loss(run.train.z_loss, run.plan.tensor.x) or refuse_recurrent(run)
    if reason is None and run.train.layer_drop is not None:
        reason = refuse_layer_drop(run.plan)
    if reason is None and run.train.compressed is not None:
        reason = refuse_compressed(run)
    if reason is None and run.train.kfac is not None:
        reason = refuse_kfac(run)
    if reason is not None:
        raise PlanError(reason)


def refuse_recurrent(run: Run) -> str | None:
    """Returns why a recurrent model does not allow the run's options, and what to change; None if it does."""
    if not isinstance(run.model, RecurrentConfig):
        return None
    name = f"model.architecture = '{run.model.architecture}'"
    if isinstance(run.data, DataConfig) and run.data.documents == "separate":
        return (
            f"data.documents = 'separate' keeps attention inside of documents, and {name} has a state that passes from "
            f"one to the next; use data.kind = 'text' with data.documents = 'joined'"
        )
    if run.train.layer_drop is not None:
        return f"train.layer_drop skips blocks that add to a residual stream, and {name} has none; leave it out"
    return None


def refuse_compressed(run: Run) -> str | None:
    """Returns why the run's plan does not allow `train.compressed`, and what to change; None if it does."""
    plan, what = run.plan, f"train.compressed.kind = '{run.train.compressed.kind}'" if run.train.compressed else ""
    if plan.exact:
        return f"{what} changes the mathematics, and plan.exact = true; set plan.exact = false to accept it"
    if plan.data == 1:
        return f"{what} compresses what is sent over data, and plan.data = 1; leave it out, or set plan.data"
    if plan.communication.reduce != "exact":
        return (
            f"{what} compresses what is sent over data, and so does plan.communication.reduce = "
            f"'{plan.communication.reduce}'; leave one of them out"
        )
    if plan.pipe.degree > 1:
        return f"{what} is not built for pipelines, and plan.pipe = {plan.pipe.degree}; leave it out, or set pipe = 1"
    if (reason := _refuse_memory(what, plan.memory)) is not None:
        return reason
    if run.numbers.compare_every is not None:
        return f"{what} has state that differs between ranks of data; leave numbers.compare_every out"
    return None


def _refuse_memory(what: str, memory: Memory) -> str | None:
    """Returns why an optimizer with state of its own does not allow a memory policy; None if it does."""
    if memory.keeps_state_on_host or memory.delay or memory.state != "master" or not memory.master:
        return (
            f"{what} keeps its state in the master dtype on the device; set plan.memory.offload and weights to 0, "
            f"delay to false, master to true and state to 'master', or leave it out"
        )
    return None


def refuse_kfac(run: Run) -> str | None:
    """Returns why the run does not allow `train.kfac`, and what to change; None if it does."""
    plan, memory, numbers = run.plan, run.plan.memory, run.numbers
    if plan.exact:
        return "train.kfac is another update than AdamW's, and plan.exact = true; set plan.exact = false to accept it"
    for axis, degree in plan.degrees.items():
        if axis not in ("data", "shard") and degree > 1:
            key = f"plan.{AXES[axis].degree}"
            return f"train.kfac is built beside data and shard, and {key} = {degree}; leave it out, or set {key} = 1"
    if plan.shard.degree > 1 and plan.shard.stage != 1:
        return (
            f"train.kfac needs whole gradients on each rank, and plan.shard.stage = {plan.shard.stage} keeps slices; "
            f"set plan.shard.stage = 1, or leave train.kfac out"
        )
    if (reason := _refuse_memory("train.kfac", memory)) is not None:
        return reason
    given = {
        "train.compressed": run.train.compressed is not None,
        "train.layer_drop": run.train.layer_drop is not None,
        "train.compile = true": bool(run.train.compile),
        "train.graph = true": bool(run.train.graph),
        f"plan.memory.recompute = '{memory.recompute}'": memory.recompute != "none",
        f"plan.memory.activations = {memory.activations:g}": memory.activations > 0,
        f"plan.matmul = '{plan.matmul}'": plan.matmul != "compute",
        "plan.statistics = 'batch'": plan.has_batch_statistics,
        "numbers.repeat_every": numbers.repeat_every is not None,
    }
    if run.train.kfac is not None and run.train.kfac.mode == "sub-grid-async" and run.train.deterministic:
        return (
            "train.kfac.mode = 'sub-grid-async' uses inverses when they arrive, and train.deterministic = true; use "
            "'sub-grid', or leave train.deterministic out"
        )
    for what, is_given in given.items():
        if is_given:
            return f"train.kfac samples each layer once as it computes, and is not built for {what}; leave one out"
    return None

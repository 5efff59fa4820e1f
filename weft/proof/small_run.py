"""Makes the small copy of a run that is proved in its place: a small model, plan and batch of the same structure.

The run's objective, clipping and plan options stay; sizes and the number of micro-batches shrink. Names of modules
(`pipe.split`, `tile.until`) become those of blocks at the same relative position in the shorter chain. Whether a plan
is valid depends on sizes, so there are several copies, from the smallest on; the first that the plan fits is proved.
Each copy states in words which parts of the run it leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from weft.data.config import DataConfig, ImageShape
from weft.errors import PlanError
from weft.inspection.blocks import find_blocks, find_units
from weft.models import DecoderConfig, ModelConfig, build, initialise
from weft.models.tuning import Tuning
from weft.plan import Plan
from weft.run_file import Run
from weft.schedule.schedules import make_schedule
from weft.step.batch import Batch
from weft.step.examples import micro_batch_profile
from weft.step.objective import Objective
from weft.step.task import ImageTask, LanguageTask, Task, task_of

SMALL_MICRO_BATCH = 2
MAX_SIZE = 512  # pixels of an image's side in a proof
MAX_NUMEL = 20_000_000  # parameters of a model in a proof
_DEPTHS = ("num_hidden_layers", "n_layer", "layers", "depth")  # fields of model configs with the number of layers
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


@dataclass(frozen=True)
class SmallRun:
    """A small copy of a run, which is proved in its place. `not_proved` states what it leaves out, in words."""

    config: ModelConfig
    tuning: Tuning
    task: Task
    plan: Plan
    num_samples: int
    seed: int
    not_proved: tuple[str, ...]

    @property
    def objective(self) -> Objective:
        """The run's objective."""
        return self.task.objective

    def model(self) -> nn.Module:
        """Returns a new model. Its parameters have the same values on every call."""
        model = build(self.config)
        self.tuning.apply(model)
        initialise(model, self.seed)
        return model

    def batch(self, step: int) -> Batch:
        """Returns random samples of a whole batch, with some labels masked."""
        return self.task.random(self.config, self.num_samples, step)


def small_runs_of(run: Run) -> Iterator[SmallRun]:
    """Yields small copies of a run, from the smallest on. The run must have been checked."""
    left_out, task, small = _options_left_out(run), task_of(run), _small_model(run)
    found = []
    for config in [small, *_narrow_models(run, small)]:
        for sized in _sizes(task.shrunk(config), task, run.plan):
            fitted = _with_positions(config, sized)
            plan, words = _plan(run, fitted)
            found.append(_small_run(run, fitted, sized, plan, (*left_out, *words)))
            yield found[-1]
    for proof in found:
        if proof.plan.tile.until:
            plan = replace(proof.plan, tile=replace(proof.plan.tile, until=""))
            yield replace(proof, plan=plan, not_proved=(*proof.not_proved, _until_left_out(run)))


def _until_left_out(run: Run) -> str:
    return f"tile.until = '{run.plan.tile.until}': the proof hands tiles over where they need it"


def _small_run(run: Run, config: ModelConfig, task: Task, plan: Plan, left_out: tuple[str, ...]) -> SmallRun:
    micro_batch = _micro_batch(run)
    num_samples = plan.num_batch_ranks * micro_batch * _num_micro_batches(run)
    tuning, unmatched = run.tuning.for_copy(_on_meta(config))
    if unmatched:
        left_out = (*left_out, f"train.freeze = {list(unmatched)}: the proof's smaller model has no such parameters")
    return SmallRun(config, tuning, task, replace(plan, micro_batch=micro_batch), num_samples, run.train.seed, left_out)


def _options_left_out(run: Run) -> tuple[str, ...]:
    """Returns the options of a run that no copy has, in words. Those of the plan's precision are added by `verify`."""
    found = []
    if drops := [name for name in _DROPOUTS if getattr(run.model, name, 0)]:
        found.append(f"dropout (model.{drops[0]} = {getattr(run.model, drops[0]):g}): the proof drops nothing")
    if run.lora is not None and run.lora.dropout:
        found.append(f"lora.dropout = {run.lora.dropout:g}: the proof drops nothing")
    if run.train.layer_drop is not None:
        found.append("train.layer_drop: the proof skips no blocks")
    if run.train.compressed is not None:
        found.append("train.compressed: the proof is of exact updates in float64")
    if run.train.kfac is not None:
        found.append("train.kfac: the proof is of AdamW's updates in float64")
    if isinstance(run.data, DataConfig) and run.data.documents == "separate":
        found.append("data.documents = 'separate': every sequence of the proof is one document")
    found += [f"train.{key} = true: the proof runs without" for key in ("compile", "graph") if getattr(run.train, key)]
    return tuple(found)


# --- the model


def _small_model(run: Run) -> ModelConfig:
    sends = run.plan.memory.activations or run.plan.memory.weights
    return _without_dropout(run.model.shrunk(max(4 if sends else 2, run.plan.pipe.num_stages)))


def _narrow_models(run: Run, small: ModelConfig) -> Sequence[ModelConfig]:
    """Returns the run's own model with fewer layers, for plans that do not fit the sizes of the small one."""
    names = {field.name for field in fields(run.model)}
    depths: dict[str, Any] = {name: getattr(small, name) for name in _DEPTHS if name in names}
    if isinstance(run.model, DecoderConfig) and isinstance(small, DecoderConfig):
        depths["first_k_dense_replace"] = small.first_k_dense_replace
        if run.model.num_experts_per_layer:
            numbers = run.model.last_experts(small.num_hidden_layers)
            depths |= {"num_experts": 0, "num_experts_per_layer": numbers}
    narrow = _without_dropout(_changed(run.model, depths))
    if narrow == small or sum(one.numel() for one in _on_meta(narrow).parameters()) > MAX_NUMEL:
        return []
    return [narrow]


def _without_dropout(config: ModelConfig) -> ModelConfig:
    names = {field.name for field in fields(config)}
    return _changed(config, {name: 0.0 for name in _DROPOUTS if name in names})


def _with_positions(config: ModelConfig, task: Task) -> ModelConfig:
    """Returns a model whose learned positions, if it has any, suffice for the sequence."""
    longest = getattr(config, "n_positions", None)
    if longest is None or not isinstance(task, LanguageTask) or task.sequence <= longest:
        return config
    return _changed(config, {"n_positions": task.sequence})


def _changed(config: ModelConfig, values: Mapping[str, Any]) -> ModelConfig:
    return replace(config, **values)


def _on_meta(config: ModelConfig) -> nn.Module:
    with torch.device("meta"):
        return build(config)


# --- samples


def _sizes(small: Task, whole: Task, plan: Plan) -> list[Task]:
    """Returns the small task and, for plans that split samples into many parts, larger ones."""
    if isinstance(small, LanguageTask) and isinstance(whole, LanguageTask):
        context, tensor = plan.context.degree, plan.tensor
        parts = context * tensor.x * tensor.chunks if tensor.sequence else 1
        unit = math.lcm(2 * context if context > 1 else 1, parts)
        return [replace(small, sequence=min(-(-small.sequence // unit) * unit, whole.sequence))]
    assert isinstance(small, ImageTask)
    assert isinstance(whole, ImageTask)
    found = [small]
    longest = min(MAX_SIZE, whole.shape.height, whole.shape.width) if plan.tile.degree > 1 else 0
    while (size := 2 * found[-1].shape.height) <= longest:
        found.append(replace(small, shape=ImageShape(size, size, small.shape.channels)))
    return list(found)


def _micro_batch(run: Run) -> int:
    """Returns the micro-batch: at most two samples, or one for each tile if tiles become shares of the batch."""
    own, tile = run.split.micro_batch, run.plan.tile
    if tile.hand_over == "batch" and own % tile.degree == 0:
        return tile.degree
    return min(own, SMALL_MICRO_BATCH)


def _num_micro_batches(run: Run) -> int:
    """Returns the number of micro-batches: as few as the schedule allows to fill the pipeline twice; 2 without one."""
    pipe, own = run.plan.pipe, run.split.accumulation
    if pipe.degree == 1:
        return min(2, own)
    for count in range(min(pipe.batches or 2 * pipe.degree, own), own):
        try:
            make_schedule(pipe.schedule, pipe.degree, count, **pipe.options)
        except PlanError:
            continue
        return count
    return own


# --- the plan


def _plan(run: Run, config: ModelConfig) -> tuple[Plan, tuple[str, ...]]:
    """Returns the plan with names of modules of the small model, and in words the options that it lost."""
    whole, small, plan, words = micro_batch_profile(run).model, _on_meta(config), run.plan, []
    assert whole is not None
    if plan.pipe.split:
        split = _places(plan.pipe.split, whole, small)
        if split is None:
            split = ()
            words.append(f"pipe.split = {list(plan.pipe.split)}: the proof balances its stages by itself")
        plan = replace(plan, pipe=replace(plan.pipe, split=split))
    if plan.tile.until:
        until = _module(plan.tile.until, whole, small)
        if until is None:
            words.append(_until_left_out(run))
        plan = replace(plan, tile=replace(plan.tile, until=until or ""))
    return plan, tuple(words)


def _places(names: Sequence[str], whole: nn.Module, small: nn.Module) -> tuple[str, ...] | None:
    """Returns units of a small model at the relative positions of the named ones in the whole; in order, each once.

    None if there are none.
    """
    long, short, units = list(find_blocks(whole)), list(find_blocks(small)), find_units(small)
    numbers = [long.index(name) for name in names if name in long]
    found = [max(number * len(short) // len(long), min(number, 1)) for number in numbers]
    for place in range(1, len(found)):
        found[place] = max(found[place], found[place - 1] + 1)
    for place in range(len(found) - 1, -1, -1):
        found[place] = min(found[place], len(short) - len(found) + place)
    if any(number < 0 for number in found) or any(name not in long and name not in units for name in names):
        return None
    blocks = iter([short[number] for number in found])
    return tuple(next(blocks) if name in long else name for name in names)


def _module(name: str, whole: nn.Module, small: nn.Module) -> str | None:
    """Returns the small model's module of that name; else that of the nearest block, by relative position, that has it.

    None if there is none.
    """
    modules = dict(small.named_modules())
    if name in modules:
        return name
    long, short = list(find_blocks(whole)), list(find_blocks(small))
    number = next((i for i, block in enumerate(long) if f"{name}.".startswith(f"{block}.")), None)
    if number is None:
        return None
    inside, wanted = name[len(long[number]) :], number * len(short) // len(long)
    nearest = sorted(range(len(short)), key=lambda place: abs(place - wanted))
    return next((found for place in nearest if (found := short[place] + inside) in modules), None)

"""Applies a plan to a model. `STRATEGIES` is the table of axes and memory policies, in the order of application.

The next axis: a file with its `Strategy`, a line in the table, a field in `Plan`, its test and a page of docs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.comm import all_reduce
from weft.errors import PlanError
from weft.memory.activation_copies import sender_of
from weft.memory.offload_activations import ACTIVATIONS, ActivationPolicy
from weft.memory.offload_weights import WeightPolicy
from weft.memory.recompute import RecomputePolicy
from weft.mesh import Mesh
from weft.models.loss_head import install_loss_head, is_loss_in_head
from weft.models.vision.pools import mend_averages
from weft.parallel.context.axis import ContextAxis
from weft.parallel.data import DataAxis
from weft.parallel.fp8 import Fp8Matmuls
from weft.parallel.shard import ShardAxis
from weft.parallel.tensor.axis import TensorAxes, localise
from weft.parallel.tile import TileAxis, TileGradients
from weft.pipeline.build import Staging, build, stage
from weft.pipeline.build import refuse as refuse_pipeline
from weft.pipeline.cost import pipeline_cost
from weft.pipeline.runtime import Pipeline, Stage
from weft.plan import BatchSplit, Plan
from weft.profile import CUTS_ATTRIBUTE, Parameter, Profile, profile
from weft.sharding.flat_buffer import Flat
from weft.sharding.gradient_norm import norms
from weft.sharding.layout import COMPUTE_DTYPE, Part
from weft.sharding.streamed_buffer import StreamedFlat
from weft.sharding.units import Units, units_of
from weft.spatial.tiling import localise_tile, mark, tiling_for
from weft.strategy import Cost, Strategy, Values

# Recompute wraps the forwards that the tensor axes and tiles leave: a block may be a linear or a convolution itself.
STRATEGIES: tuple[Strategy, ...] = (
    TensorAxes(),
    TileAxis(),
    Fp8Matmuls(),
    RecomputePolicy(),
    ActivationPolicy(),
    WeightPolicy(),
    ShardAxis(),
    DataAxis(),
    ContextAxis(),
    TileGradients(),
)


def parallelize(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh | None = None,
    values: Values | None = None,
    example: Callable[[], tuple[Any, ...]] | None = None,
    finish: Callable[[Any], Any] | None = None,
) -> nn.Module:
    """Apply a plan to any model, in place, and return it: same modules, same names, hooks from outside.

    Needs `torch.distributed` initialised with as many processes as the plan has ranks (none for one). A model on the
    meta device takes its parameters from `values(name)`, one at a time; otherwise from itself, and every rank must
    hold the same values. Afterwards `model.parameters()` are this rank's pieces, for any element-wise optimizer.

    A plan with `pipe`, `tile` or `statistics = "batch"` also needs `example()`, the arguments of one forward of a
    micro-batch (whole sequences and images, whatever the plan; called for shapes alone). With `pipe`, what comes back
    is this rank's stages, a `Pipeline` that `train_step` runs. `finish(output)` computes the loss, whose memory then
    counts where stages are balanced by it; as in `weft.profile`.
    """
    mesh = mesh or Mesh(plan)
    is_traced = plan.pipe.degree > 1 or plan.is_viewed
    if is_loss_in_head(plan):
        install_loss_head(model)
    whole = profile(model, example if is_traced else None, finish, COMPUTE_DTYPE[plan.precision])
    refuse(whole, plan)
    tiling = tiling_for(whole, plan)
    if values is None:
        if any(parameter.is_meta for parameter in model.parameters()):
            raise PlanError("the model is on the meta device; pass values=, which gives a parameter's tensor by name")
        values = dict(model.named_parameters()).__getitem__
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise PlanError(
                f"buffer '{name}' is on the meta device, and its value is not among values=; build the model on a real "
                f"device, or set its buffers first"
            )
    if tiling is not None:
        mark(model, tiling)
    if plan.pipe.degree == 1:
        return _lay_out(plan, mesh, model, values)
    pipeline = build(stage(whole, plan, mesh.device), mesh, values, partial(_lay_out, plan, mesh))
    if tiling is not None:
        mark(pipeline, tiling)
    return pipeline


def _lay_out(plan: Plan, mesh: Mesh, model: nn.Module, values: Values) -> nn.Module:
    """Apply the strategies to a model, or to a stage of one."""
    local = partial(_local_value, model, values)
    for strategy in STRATEGIES:
        model = strategy.apply(model, plan, mesh, local)
    if not plan.is_viewed:  # a view mends what it sees
        mend_averages(model)  # last: strategies know layers by their types
    return model


def _local_value(model: nn.Module, values: Values, name: str) -> Tensor:
    """This rank's part of a parameter's value, once the tensor axes have said which that is."""
    cut = model.__dict__.get(CUTS_ATTRIBUTE, {}).get(name)
    return values(name) if cut is None else cut.take(values(name))


def refuse(model_profile: Profile, plan: Plan) -> None:
    """Raise the first reason why the plan does not fit the model."""
    for reason_for in (refuse_pipeline, *(strategy.refuse for strategy in STRATEGIES)):
        reason = reason_for(model_profile, plan)
        if reason is not None:
            raise PlanError(reason)


def cost(
    model_profile: Profile,
    plan: Plan,
    split: BatchSplit,
    coordinates: Mapping[str, int] | None = None,
    staging: Staging | None = None,
) -> Cost:
    """What a rank (the first, unless its mesh coordinates are given) pays for one step under the plan.

    Whoever asks for many ranks of a plan with `pipe` gives its `staging`, so that the model is cut once.
    """
    at = coordinates or dict.fromkeys(plan.degrees, 0)
    here = partial(localise, plan=plan, coordinates=at)
    own = partial(local_cost, plan=plan, coordinates=at)
    if plan.pipe.degree > 1:
        staging = staging or stage(model_profile, plan)
        return pipeline_cost(model_profile, staging, plan, split, at, here, own)
    return own(here(localise_tile(model_profile, plan, at)), split)


def local_cost(local: Profile, split: BatchSplit, plan: Plan, coordinates: Mapping[str, int]) -> Cost:
    """What a rank's part of a model, or of a stage, pays by all strategies."""
    return sum((strategy.cost(local, plan, split, coordinates) for strategy in STRATEGIES), Cost())


def all_units(model: nn.Module) -> list[Units]:
    """The units that hold a model's state: one set for each of its stages; none if one rank holds it plainly."""
    if isinstance(model, Pipeline):
        return [stage.units for stage in model.parts.values()]
    units = units_of(model)
    return [] if units is None else [units]


def all_flats(model: nn.Module) -> list[Flat]:
    """Every flat buffer of a model on this rank."""
    return [flat for units in all_units(model) for flat in units.flats]


def sync_gradients(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward reduces gradients; switch it off for all but the last micro-batch of a step."""
    for units in all_units(model):
        units.sync = enabled


def named_pieces(model: nn.Module) -> Iterator[tuple[Part, nn.Parameter]]:
    """Every parameter's part on this rank (empty ones left out) with the 1-D tensor that holds it.

    For a model that one rank holds plainly, the parts are the parameters themselves, in their own shapes.
    """
    if isinstance(model, Pipeline):
        for stage in model.parts.values():
            for part, piece in named_pieces(stage.model):
                yield replace(part, parameter=_in_the_whole(part.parameter, stage)), piece
        return
    units = units_of(model)
    if units is None:
        for name, parameter in model.named_parameters():
            spec = Parameter(name, tuple(parameter.shape), parameter.requires_grad)
            yield Part(spec, 0, parameter.numel(), 0), parameter
        return
    for flat in units.flats:
        for part, piece in zip(flat.layout.parts(flat.shard.index), flat.pieces, strict=True):
            if part.stop > part.start:
                yield part, piece


def _in_the_whole(parameter: Parameter, stage: Stage) -> Parameter:
    """A stage's parameter by its name in the whole model; copies are counted over stages, then replicas."""
    order = parameter.stages.index(stage.index) if parameter.stages else 0
    return replace(
        parameter, name=stage.names[parameter.name], copy=order + len(parameter.stages or (0,)) * stage.replica
    )


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a checkpoint holds, by their names in the whole model."""
    stages = [stage.model for stage in model.parts.values()] if isinstance(model, Pipeline) else [model]
    return _buffers_of(stages)


def buffers_to_save(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those of the stages that this rank answers for."""
    return _buffers_of([stage.model for stage in model.own] if isinstance(model, Pipeline) else [model])


def _buffers_of(models: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for own in models:
        kept = set(own.state_dict(keep_vars=True))
        yield from ((name, buffer) for name, buffer in own.named_buffers() if name in kept)


def parameter_names(model: nn.Module) -> set[str]:
    """The names of all parameters of the whole model."""
    return set(model.parameter_names) if isinstance(model, Pipeline) else {n for n, _ in model.named_parameters()}


def refresh(model: nn.Module) -> None:
    """Tell the model that its pieces were changed from outside (a checkpoint was loaded)."""
    for flat in all_flats(model):
        flat.refresh()


def state_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """What lives on this rank's device from step to step, by kind; all of it between backward and step."""
    pieces, flats = [piece for _, piece in named_pieces(model)], all_flats(model)
    away = {id(piece) for flat in flats if flat.on_host for piece in flat.pieces}
    gradients = [buffer for flat in flats for buffer in flat.device_gradients]
    there = {id(piece) for flat in flats if flat.is_streamed for piece in flat.pieces}
    gradients += [piece.grad for piece in pieces if id(piece) not in there]
    values = [value for piece, state in optimizer.state.items() if id(piece) not in away for value in state.values()]
    slices = [flat.slice for flat in flats if not (flat.on_host and flat.is_apart)]
    found = {
        "parameters": [*(pieces if not flats else ()), *(flat.whole for flat in flats), *slices],
        "gradients": [gradient for gradient in gradients if gradient is not None],
        "optimizer": [value for value in values if isinstance(value, Tensor)],
        "buffers": list(model.buffers()),
    }
    beside: dict[str, list[Tensor]] = getattr(optimizer, "beside", {})
    return {kind: [*found.get(kind, []), *beside.get(kind, [])] for kind in {**found, **beside}}


def host_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """What of a device's state, and of its activations, lives in host memory, by kind."""
    flats = [flat for flat in all_flats(model) if flat.on_host]
    sender = sender_of(model)
    slices = [flat.slice for flat in flats if flat.is_apart]
    streamed = [flat for flat in flats if isinstance(flat, StreamedFlat)]
    values = [value for flat in flats for piece in flat.pieces for value in optimizer.state.get(piece, {}).values()]
    found = {
        "parameters": [*slices, *(flat.home for flat in streamed)],
        "gradients": [flat.slice_gradient for flat in streamed if flat.slice_gradient is not None],
        "optimizer": [value for value in values if isinstance(value, Tensor)],
    }
    found[ACTIVATIONS] = sender.pool.buffers if sender is not None else []
    return {kind: tensors for kind, tensors in found.items() if tensors}


def state_bytes(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """What this rank's state really occupies, by kind; call it between backward and step. Held to `cost`."""
    return {kind: _storage_bytes(tensors) for kind, tensors in state_tensors(model, optimizer).items()}


def host_bytes(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """The same of host memory."""
    return {kind: _storage_bytes(tensors) for kind, tensors in host_tensors(model, optimizer).items()}


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def grad_norm(model: nn.Module, mesh: Mesh) -> Tensor:
    """The global norm of all gradients [], on the device.

    Each parameter counts once, whatever the mesh: slices are disjoint over `shard`, equal over `data`, and what several
    ranks of x × y (or of pipe) hold alike counts for each of them in part.
    """
    if isinstance(model, Pipeline) and model.is_shadowed:
        # A place for each stage, and one order of summing: the same norm to the bit, whoever holds which stage.
        squares = torch.zeros(model.num_stages, dtype=torch.float64, device=mesh.device)
        for stage in model.own:
            squares[stage.index] = _squared_norm(list(stage.units.flats), mesh.device)
        all_reduce(squares, mesh["state"]).wait()
        return squares.sum().sqrt()
    squared = _squared_norm(all_flats(model), mesh.device)
    all_reduce(squared, mesh["state"]).wait()
    return squared.sqrt()


def _squared_norm(flats: Iterable[Flat], device: torch.device) -> Tensor:
    """Of this rank's part of the gradients []."""
    squared = torch.zeros((), dtype=torch.float64, device=device)
    sums, gradients, known, replicas = list[Tensor](), list[Tensor](), list[Tensor | None](), list[int]()
    for flat in flats:
        own, others = flat.norms
        sums += own  # only where no other rank takes part
        gradients += others
        known += [flat.gradient_norm] * len(others)
        replicas += [flat.layout.replicas * flat.copies] * len(others)
    if sums:
        squared += torch.cat(sums).sum(dtype=squared.dtype)
    if gradients:  # a stage may be frozen
        here = [gradient for gradient, norm in zip(gradients, known, strict=True) if norm is None]
        found = iter(norms(here))
        squares = torch.stack([next(found) if norm is None else norm for norm in known]).double().square()
        if any(count > 1 for count in replicas):  # numbers from the host, which would wait for the device
            squares = squares / torch.tensor(replicas, dtype=squares.dtype).to(squares.device, non_blocking=True)
        squared += squares.sum()
    return squared


def clip_factor(norm: Tensor, max_norm: float | None) -> Tensor | None:
    """What gradients are scaled by so that their norm is at most `max_norm` []; NaN where the norm is not finite, for
    which weft's AdamW makes no update.
    """
    factor = _factor(norm, max_norm)
    return None if factor is None else torch.where(norm.isfinite(), factor, torch.nan)


def _factor(norm: Tensor, max_norm: float | None) -> Tensor | None:
    return None if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)


def clip_grad_norm(model: nn.Module, max_norm: float | None, mesh: Mesh, norm: Tensor | None = None) -> Tensor:
    """Scale all gradients so that their global norm (`norm`, where it is known) is at most `max_norm`, and return the
    norm before. Where that is infinite, finite gradients become 0, as with torch's own function.
    """
    if not all_units(model):
        return _clip_parameters(model, max_norm)
    norm = grad_norm(model, mesh) if norm is None else norm
    gradients = [flat.slice_gradient for flat in all_flats(model) if flat.slice_gradient is not None]
    factor = _factor(norm, max_norm)
    if factor is not None:
        for device in {gradient.device for gradient in gradients}:
            there = [gradient for gradient in gradients if gradient.device == device]
            torch._foreach_mul_(there, factor.to(device, there[0].dtype))
        for flat in all_flats(model):
            flat.forget_norm(factor)
    return norm


def _clip_parameters(model: nn.Module, max_norm: float | None) -> Tensor:
    """The same of a model that one rank holds plainly."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norm = torch.stack(norms(gradients)).double().square().sum().sqrt()
    factor = clip_factor(norm, max_norm)
    if factor is not None:
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
    return norm


__all__ = [
    "STRATEGIES",
    "Cost",
    "Strategy",
    "clip_factor",
    "clip_grad_norm",
    "cost",
    "grad_norm",
    "host_bytes",
    "named_pieces",
    "parallelize",
    "refresh",
    "refuse",
    "state_bytes",
    "state_tensors",
    "sync_gradients",
]

"""Applies a plan to a model. `STRATEGIES` is the table of axes and memory policies, in the order of application.

The next axis: a file with its `Strategy`, a line in the table, a field in `Plan`, its test and a page of docs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.comm import all_reduce
from weft.errors import PlanError
from weft.memory.recompute import RecomputePolicy
from weft.mesh import Mesh
from weft.parallel.context import ContextAxis
from weft.parallel.data import DataAxis
from weft.parallel.layout import Part
from weft.parallel.shard import ShardAxis
from weft.parallel.tensor import TensorAxes, localise
from weft.parallel.unit import units_of
from weft.plan import BatchSplit, Plan
from weft.profile import CUTS_ATTRIBUTE, Parameter, Profile, profile
from weft.strategy import Cost, Strategy, Values

STRATEGIES: tuple[Strategy, ...] = (TensorAxes(), RecomputePolicy(), ShardAxis(), DataAxis(), ContextAxis())


def parallelize(model: nn.Module, plan: Plan, mesh: Mesh | None = None, values: Values | None = None) -> nn.Module:
    """Apply a plan to any model, in place, and return it: same modules, same names, hooks from outside.

    Needs `torch.distributed` initialised with as many processes as the plan has ranks (none for one). A model on the
    meta device takes its parameters from `values(name)`, one at a time; otherwise from itself, and every rank must
    hold the same values. Afterwards `model.parameters()` are this rank's pieces, for any element-wise optimizer.
    """
    mesh = mesh or Mesh(plan)
    refuse(profile(model), plan)
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
    local = partial(_local_value, model, values)
    for strategy in STRATEGIES:
        model = strategy.apply(model, plan, mesh, local)
    return model


def _local_value(model: nn.Module, values: Values, name: str) -> Tensor:
    """This rank's part of a parameter's value, once the tensor axes have said which that is."""
    cut = model.__dict__.get(CUTS_ATTRIBUTE, {}).get(name)
    return values(name) if cut is None else cut.take(values(name))


def refuse(model_profile: Profile, plan: Plan) -> None:
    """Raise the first reason why the plan does not fit the model."""
    for strategy in STRATEGIES:
        reason = strategy.refuse(model_profile, plan)
        if reason is not None:
            raise PlanError(reason)


def cost(model_profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int] | None = None) -> Cost:
    """What a rank (the first, unless its mesh coordinates are given) pays for one step under the plan."""
    at = coordinates or dict.fromkeys(plan.degrees, 0)
    local = localise(model_profile, plan, at)
    return sum((strategy.cost(local, plan, split, at) for strategy in STRATEGIES), Cost())


def sync_gradients(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward reduces gradients; switch it off for all but the last micro-batch of a step."""
    units = units_of(model)
    if units is not None:
        units.sync = enabled


def named_pieces(model: nn.Module) -> Iterator[tuple[Part, nn.Parameter]]:
    """Every parameter's part on this rank (empty ones left out) with the 1-D tensor that holds it.

    For a model that one rank holds plainly, the parts are the parameters themselves, in their own shapes.
    """
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


def refresh(model: nn.Module) -> None:
    """Tell the model that its pieces were changed from outside (a checkpoint was loaded)."""
    units = units_of(model)
    if units is not None:
        for flat in units.flats:
            flat.refresh()


def state_bytes(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """What this rank's state really occupies, by kind; call it between backward and step. Held to `cost`."""
    units = units_of(model)
    pieces = [piece for _, piece in named_pieces(model)]
    parameters: list[Tensor] = [*pieces]
    gradients = [piece.grad for piece in pieces if piece.grad is not None]
    if units is not None:
        parameters += [buffer for flat in units.flats for buffer in (flat.whole, flat.slice)]
        buffers = [buffer for flat in units.flats for buffer in (flat.whole_gradient, flat.slice_gradient)]
        gradients += [buffer for buffer in buffers if buffer is not None]
    return {
        "parameters": _storage_bytes(parameters),
        "gradients": _storage_bytes(gradients),
        "optimizer": _storage_bytes(
            value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
        ),
        "buffers": _storage_bytes(model.buffers()),
    }


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def clip_grad_norm(model: nn.Module, max_norm: float | None, mesh: Mesh) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`, and return the norm before.

    Each parameter counts once, whatever the mesh: slices are disjoint over `shard`, equal over `data`, and what several
    ranks of x × y hold alike counts for each of them in part.
    """
    units = units_of(model)
    if units is None:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if max_norm is None else max_norm)
    gradients = [flat.slice_gradient for flat in units.flats if flat.slice_gradient is not None]
    replicas = [flat.layout.replicas for flat in units.flats if flat.slice_gradient is not None]
    norms = torch.stack(torch._foreach_norm(gradients)).double()
    squared = (norms.square() / torch.tensor(replicas, device=norms.device)).sum()
    all_reduce(squared, mesh["state"]).wait()
    norm = squared.sqrt()
    if max_norm is not None:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].dtype))
    return norm


__all__ = [
    "STRATEGIES",
    "Cost",
    "Strategy",
    "clip_grad_norm",
    "cost",
    "named_pieces",
    "parallelize",
    "refresh",
    "refuse",
    "state_bytes",
    "sync_gradients",
]

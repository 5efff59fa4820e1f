"""The global gradient norm of a parallel model, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from weft.comm import all_reduce
from weft.mesh import Mesh
from weft.parallel.model_state import (
    all_flats,
    all_units,
)
from weft.pipeline.rank_model import rank_model
from weft.sharding.flat_buffer import Flat
from weft.sharding.whole_gradient import norms


def grad_norm(model: nn.Module, mesh: Mesh) -> Tensor:
    """Returns the global norm of all gradients [], on the device.

    Each parameter counts once, whatever the mesh: slices are disjoint over `shard`, equal over `data`, and what several
    ranks of x × y (or of pipe) hold alike counts for each of them in part.
    """
    stages = rank_model(model).flats_by_stage()
    if stages is not None:  # one number per stage and one order of summing: the same bits, whoever holds which stage
        squares = torch.zeros(len(stages), dtype=torch.float64, device=mesh.device)
        for index, flats in stages.items():
            if flats:
                squares[index] = _squared_norm(flats, mesh.device)
        all_reduce(squares, mesh["state"]).wait()
        return squares.sum().sqrt()
    squared = _squared_norm(all_flats(model), mesh.device)
    all_reduce(squared, mesh["state"]).wait()
    return squared.sqrt()


def _squared_norm(flats: Iterable[Flat], device: torch.device) -> Tensor:
    """Returns the squared norm [] of this rank's part of the gradients."""
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
    """Returns the factor [] that scales gradients to a norm of at most `max_norm`; None without `max_norm`.

    It is NaN if the norm is not finite: a NaN scale makes weft's AdamW skip the update.
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
    """Clip the gradients of a model without flat buffers, and return the norm before."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norm = torch.stack(norms(gradients)).double().square().sum().sqrt()
    factor = clip_factor(norm, max_norm)
    if factor is not None:
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
    return norm

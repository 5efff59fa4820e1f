"""Pruned models with compressed state (SAMO, Singh and Bhatele 2023): pruned elements have no state at all.

`prune(model, masks)` replaces a parameter by the 1-D vector of its kept elements, under the same name. All other parts
of weft see that vector: flat buffers, gradients and their reduction, master weights, moments, offload, checkpoints.
Only the module that computes sees the whole matrix, with zeros at pruned positions. The vector is scattered into the
matrix before the module's forward. The matrix's gradient is gathered as soon as backward has it, so no dense gradient
outlives its matrix.

Bytes of a parameter of which a share f is kept, bf16 on one rank: dense weight 2, index 4f, and of the kept ones weight
2f, gradient 2f (4f where it is added up or reduced), master 4f, moments 8f: at most 2 + 22f, against 16 and more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import PlanError

LEAST_PRUNED = 0.25  # with less, index and dense copy cost more than they save
INDEX_SUFFIX = "_kept"


def prune(model: nn.Module, masks: Mapping[str, Tensor]) -> nn.Module:
    """Keep only the elements of each named parameter whose mask is true, in place.

    Call it before `weft.parallelize`.
    """
    named = dict(model.named_parameters())
    for name, mask in masks.items():
        if name not in named:
            raise PlanError(f"masks names '{name}', which is no parameter of the model")
        _check(name, named[name], mask)
    for name, mask in masks.items():
        _PrunedParameter(_owners(model, named[name]), named[name], mask)
    return model


def _check(name: str, parameter: nn.Parameter, mask: Tensor) -> None:
    if mask.dtype != torch.bool or mask.shape != parameter.shape:
        raise PlanError(
            f"the mask of '{name}' is {mask.dtype} {tuple(mask.shape)}; it must be torch.bool {tuple(parameter.shape)}"
        )
    kept = int(mask.sum())
    if kept > (1 - LEAST_PRUNED) * mask.numel():
        raise PlanError(
            f"the mask of '{name}' keeps {kept:,} of {mask.numel():,} elements; with less than {LEAST_PRUNED:.0%} "
            f"pruned compressed state is larger than dense state: leave this parameter out of masks"
        )


def _owners(model: nn.Module, parameter: nn.Parameter) -> list[tuple[nn.Module, str]]:
    """Return every (module, name) that holds a parameter. A tied parameter has several, and one index."""
    return [
        (module, name) for module in model.modules() for name, own in module._parameters.items() if own is parameter
    ]


class _PrunedParameter:
    """A pruned parameter: the vector of kept elements that modules hold, and the dense matrix for computing."""

    def __init__(self, owners: Sequence[tuple[nn.Module, str]], parameter: nn.Parameter, mask: Tensor) -> None:
        self.shape = parameter.shape
        places = mask.flatten().nonzero().view(-1)
        narrow = torch.int32 if mask.numel() < 1 << 31 else torch.int64
        values = parameter.detach().flatten()
        values = values.new_empty(len(places)) if parameter.is_meta else values[places.to(values.device)]
        kept = nn.Parameter(values, requires_grad=parameter.requires_grad)
        first, name = owners[0]
        self.holder, self.buffer = first, f"{name}{INDEX_SUFFIX}"
        first.register_buffer(self.buffer, places.to(narrow))
        first.register_buffer(f"{name}_dense", None, persistent=False)
        self.dense = f"{name}_dense"
        self._scattered_by = (0, 0)  # id and version of the index whose positions `dense` was filled with
        for module, own in owners:
            module._parameters[own] = kept
            module.register_forward_pre_hook(self._show(own))
            module.register_forward_hook(self._hide(own), always_call=True)

    def _show(self, name: str) -> Any:
        def show(module: nn.Module, _: Any) -> None:
            kept = module._parameters[name]
            assert kept is not None
            module.__dict__[name] = self._scatter(kept)  # an attribute of the instance hides the registered parameter

        return show

    def _hide(self, name: str) -> Any:
        def hide(module: nn.Module, *_: Any) -> None:
            module.__dict__.pop(name, None)

        return hide

    def _scatter(self, kept: Tensor) -> Tensor:
        index = getattr(self.holder, self.buffer)
        dense = self.holder._buffers[self.dense]
        if dense is None or (dense.dtype, dense.device) != (kept.dtype, kept.device):
            dense = torch.zeros(self.shape, dtype=kept.dtype, device=kept.device)
            self.holder._buffers[self.dense] = dense
        if self._scattered_by != (id(index), index._version):  # a checkpoint has loaded another index
            dense.zero_()
            self._scattered_by = (id(index), index._version)
        spread: Tensor = _Scatter.apply(kept, index, dense)
        return spread


class _Scatter(torch.autograd.Function):
    """Scatter kept elements [kept] into a given dense matrix; backward gathers their gradient."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, index: Tensor, dense: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        # A new tensor on the same storage, so that the tensor of an earlier micro-batch, whose backward is still to
        # come, does not look changed. The values written are those already there, unless the optimizer has run since.
        room = torch.empty(0, dtype=dense.dtype, device=dense.device)
        room.set_(dense.untyped_storage(), 0, dense.shape, dense.stride())
        room.view(-1)[index] = kept.detach()
        return room

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return gradients[0].reshape(-1).index_select(0, index), None, None

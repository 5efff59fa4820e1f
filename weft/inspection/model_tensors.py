"""The tensors of a model: parameters that several modules share, and buffers that a checkpoint holds.

allocate(model, device)     gives a model on the meta device memory; shared parameters stay shared
saved_buffers(model)        name and tensor of each buffer that state_dict has
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

_Place = tuple[nn.Module, str]  # of a parameter: its module and its name there


def allocate(model: nn.Module, device: torch.device | str) -> None:
    """Give all tensors of a model memory on a device, in place. Parameters have no values; buffers that are not on the
    meta device keep theirs.

    `nn.Module.to_empty` alone would give each module that shares a parameter a parameter of its own.
    """
    shared, buffers = _shared_parameters(model), dict(model.named_buffers())
    model.to_empty(device=device)
    for (first, own_name), others in shared:
        for module, name in others:
            module.register_parameter(name, first.get_parameter(own_name))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if not buffers[name].is_meta:
                buffer.copy_(buffers[name])


def _shared_parameters(model: nn.Module) -> list[tuple[_Place, list[_Place]]]:
    """Returns the first place of each parameter that a model has in several places, and the other ones."""
    places: dict[int, list[_Place]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [(found[0], found[1:]) for found in places.values() if len(found) > 1]


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and tensor of each buffer that a checkpoint holds: those that `state_dict` has."""
    saved = set(model.state_dict(keep_vars=True))
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)

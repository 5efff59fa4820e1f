"""Replaces a model's parameters, and those of its profile, by a rank's parts of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from weft.inspection.parameter_cut import Cut
from weft.profiling import PARAMETER_CUTS, Block, Profile


def cut_parameters(model: nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Replace all parameters by ones of the local shapes on the meta device. `ShardAxis` sets their values.

    `cuts` has the cut of every parameter, by name. Another axis may have cut the model before.
    """
    before = PARAMETER_CUTS.get(model) or {}
    cuts = {name: cut.beside(before.get(name)) for name, cut in cuts.items()}
    made: dict[int, nn.Parameter] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in names:
                if id(parameter) not in made:
                    shape = cuts[names[id(parameter)]].local_shape
                    empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[leaf] = made[id(parameter)]
    PARAMETER_CUTS.set(model, cuts)


def cut_profile(
    profile: Profile, cuts: Mapping[str, Cut], local: Callable[[Block], Block] = lambda block: block
) -> Profile:
    """Returns a profile with a rank's part of every parameter. `local` returns what else of a block the rank has."""

    def cut(block: Block) -> Block:
        parameters = (replace(p, shape=cuts[p.name].local_shape, cut=cuts[p.name]) for p in block.parameters)
        return replace(local(block), parameters=tuple(parameters))

    root, *blocks = map(cut, profile.all)
    return replace(profile, root=root, blocks=tuple(blocks))


def global_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter of a model before any axis cut it, by name."""
    cuts = PARAMETER_CUTS.get(model) or {}
    return {
        name: cuts[name].shape if name in cuts else tuple(parameter.shape)
        for name, parameter in model.named_parameters()
    }


def profiled_shapes(profile: Profile) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter of a profile, by name."""
    return {parameter.name: parameter.shape for block in profile.all for parameter in block.parameters}

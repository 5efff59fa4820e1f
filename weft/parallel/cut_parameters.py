"""Replaces a model's parameters by a rank's parts of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from weft.inspection.parameter_cut import Cut
from weft.profiling import PARAMETER_CUTS


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

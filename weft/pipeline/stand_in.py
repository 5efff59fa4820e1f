"""The model of a stage: the user's own, in which units of other stages are stand-ins without parameters."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import PlanError
from weft.inspection.annotations import Annotation
from weft.inspection.blocks import AbsentModule
from weft.pipeline.partition import Route

# On a stage's model: parameters that only other stages use, as fake tensors, by their names in the whole model.
ABSENT_PARAMETERS = Annotation[dict[str, Tensor]]("absent_parameters")


def skeleton(model: nn.Module) -> nn.Module:
    """Return a copy of a model with its parameters on the meta device: names, modules and ties without memory."""
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                raise PlanError(
                    f"the model cannot be cut into stages: '{name}' holds '{key}', a result computed from parameters, "
                    f"as torch.nn.utils.weight_norm leaves behind; compute it in forward (as "
                    f"torch.nn.utils.parametrizations.weight_norm does), or use pipe = 1"
                )
    return copy.deepcopy(model, {**_kept(model), **_empty(model.parameters())})


def _empty(parameters: Iterable[nn.Parameter]) -> dict[int, nn.Parameter]:
    """Return a parameter on the meta device for each parameter, by the id of the original."""
    return {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        for parameter in parameters
    }


def _kept(model: nn.Module) -> dict[int, Any]:
    """Return the objects that copies of a model share with it, by id: fake parameters, modules behind stand-ins."""
    kept = {id(fake): fake for fake in (ABSENT_PARAMETERS.get(model) or {}).values()}
    others = (module.__dict__["stands_for"] for module in model.modules() if isinstance(module, AbsentModule))
    return kept | {id(module): module for module in others}


def stage_model(
    whole: nn.Module, route: Route, stage_of: Mapping[str, int], stage: int
) -> tuple[nn.Module, dict[str, str]]:
    """Return a stage's model, made from the skeleton of the whole model, and its parameters' names in the whole model.

    Units that other stages call become stand-ins. Of the parameters outside of units, a stage holds those that its part
    of the model's own code uses, and the first stage also those that nothing uses. Tied parameters are held by all
    stages that use them.
    """
    units = {name: whole.get_submodule(name) for name in stage_of}
    in_units = {id(parameter) for module in units.values() for parameter in module.parameters()}
    parameters = dict(whole.named_parameters())
    free = {name for name, parameter in parameters.items() if id(parameter) not in in_units}
    used = route.parameters[stage]
    if stage == 0:
        used |= free - frozenset().union(*route.parameters)
    in_own = {id(p) for name, module in units.items() if stage_of[name] == stage for p in module.parameters()}
    empty = _empty(p for name, p in parameters.items() if id(p) in in_own or name in free or name in used)
    names = {id(empty[id(parameter)]): name for name, parameter in parameters.items() if id(parameter) in empty}
    elsewhere = {
        id(module): _stand_in(name, module, empty, names, used)
        for name, module in units.items()
        if stage_of[name] != stage
    }
    model = copy.deepcopy(whole, {**_kept(whole), **empty, **elsewhere})
    own = {id(inner) for name, at in stage_of.items() if at == stage for inner in model.get_submodule(name).modules()}
    absent = ABSENT_PARAMETERS.setdefault(model, {})
    whole_names = {id(parameter): name for name, parameter in parameters.items()}
    for path, module in list(model.named_modules()):
        if id(module) not in own and not isinstance(module, AbsentModule):
            for leaf, parameter in whole.get_submodule(path)._parameters.items():
                if parameter is not None and (name := whole_names[id(parameter)]) not in used:
                    del module._parameters[leaf]  # it is seen as a fake tensor
                    module.__dict__[leaf] = absent[name] = route.trace.fakes[name]
    return model, {name: names[id(parameter)] for name, parameter in model.named_parameters()}


def _stand_in(
    name: str, module: nn.Module, empty: Mapping[int, nn.Parameter], names: Mapping[int, str], used: Collection[str]
) -> AbsentModule:
    """Return a stand-in for another stage's unit.

    It holds the parameters that the model's own code uses in this stage.
    """
    stand_in = AbsentModule(name, module)
    for key, parameter in module.named_parameters():
        if id(parameter) not in empty or names[id(empty[id(parameter)])] not in used:
            continue
        if "." in key:
            raise PlanError(
                f"the model's own code uses parameter '{name}.{key}' of another stage from outside; use pipe = 1, or "
                f"put it into one stage (pipe.split)"
            )
        stand_in._parameters[key] = empty[id(parameter)]
    return stand_in

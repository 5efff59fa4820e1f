"""A stage's model: the user's own, in which the units of other stages are stand-ins that hold nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from weft.errors import PlanError
from weft.pipeline.partition import Route

ABSENT = "_weft_absent"  # of a stage's model: parameters that only other stages use, as shapes


class Elsewhere(nn.Module):
    """Stands for a unit of another stage; what it has beside parameters and modules can still be asked."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["module_name"], self.__dict__["stands_for"] = name, module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["stands_for"], name)

    def answer_by(self, pass_by: Callable[[str], Any]) -> None:
        """What to say for its result when it is called, by its name."""
        self.__dict__["pass_by"] = pass_by

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.__dict__["pass_by"](self.__dict__["module_name"])


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters are on the meta device: names, modules and ties without room."""
    memo: dict[int, Any] = {id(fake): fake for fake in model.__dict__.get(ABSENT, {}).values()}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def stage_model(
    whole: nn.Module, route: Route, stage_of: Mapping[str, int], stage: int
) -> tuple[nn.Module, dict[str, str]]:
    """A stage's model from the skeleton of the whole, and what its parameters are called in the whole.

    Units that are called elsewhere become stand-ins. Of the other parameters a stage holds those that its part of the
    model's own code uses, and the first stage those that nothing uses. Tied ones are held by all stages that use them.
    """
    model = skeleton(whole)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    in_units = {id(parameter) for name in stage_of for parameter in model.get_submodule(name).parameters()}
    used = route.parameters[stage]
    if stage == 0:
        used |= {n for i, n in names.items() if i not in in_units} - frozenset().union(*route.parameters)
    own = {id(inner) for name, at in stage_of.items() if at == stage for inner in model.get_submodule(name).modules()}
    for name in [name for name, at in stage_of.items() if at != stage]:
        _replace(model, name, names, used)
    for module in list(model.modules()):
        if id(module) not in own and not isinstance(module, Elsewhere):
            for leaf, parameter in list(module._parameters.items()):
                if parameter is not None and (name := names[id(parameter)]) not in used:
                    del module._parameters[leaf]  # seen as its shape
                    module.__dict__[leaf] = model.__dict__.setdefault(ABSENT, {})[name] = route.trace.fakes[name]
    return model, {name: names[id(parameter)] for name, parameter in model.named_parameters()}


def _replace(model: nn.Module, name: str, names: Mapping[int, str], used: Collection[str]) -> None:
    """Put a stand-in wherever a unit of another stage hangs; the model's own code may use its parameters here."""
    module = model.get_submodule(name)
    stand_in = Elsewhere(name, module)
    for key, parameter in module.named_parameters():
        if names[id(parameter)] not in used:
            continue
        if "." in key:
            raise PlanError(
                f"the model's own code uses parameter '{name}.{key}' of another stage from outside; use pipe = 1, or "
                f"put it into one stage (pipe.split)"
            )
        stand_in._parameters[key] = parameter  # type: ignore[assignment]
    for parent in list(model.modules()):
        for leaf, child in parent._modules.items():
            if child is module:
                parent._modules[leaf] = stand_in

"""Profiles a model, block by block: parameters, FLOPs, memory traffic, saved activations, outputs and shapes.

The blocks are found, not declared: they are the elements with parameters of the outermost `nn.ModuleList`s and
`nn.Sequential`s. Modules outside of them (embedding, final norm, head) are the root. Counts come from one forward on
fake tensors (`count.py`). They equal those of torch's FLOP counter and saved-tensor hooks on a real step, with the
exceptions that `flops.py` lists. `parts.py` has the classes of a profile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from weft.errors import PlanError
from weft.profiling.count import Tally, cast, count, fake
from weft.profiling.flops import KEPT_OPERATIONS
from weft.profiling.parts import (
    FULL_SHARES,
    BackwardShares,
    Block,
    Convolution,
    ExpertCall,
    Experts,
    Flops,
    Heads,
    LayerShape,
    Matmul,
    Parameter,
    Profile,
    ProfileCache,
    ProfileSource,
    RecordedCall,
    TensorMetadata,
)
from weft.profiling.structure import (
    PARAMETER_CUTS,
    SHARED_BY_STAGES,
    ParameterUses,
    find_parameters,
    stage_profile,
    structure,
)


def profile(
    model: nn.Module,
    example: Callable[[], Any] | None = None,
    finish: Callable[[Any], Any] | None = None,
    dtype: torch.dtype | None = None,
) -> Profile:
    """Returns the profile of a model.

    `example()` makes the arguments of one forward of a micro-batch. `finish(output)` computes the loss, whose saved
    bytes count for the root. Without an example, or if the forward depends on the values of its inputs (experts that
    are called one by one), the profile has only the structure (`counted` is false). With `dtype`, floating-point
    parameters and arguments are counted in that dtype, which is the one that a parallel model computes in.
    """
    _refuse_script(model)
    found = replace(structure(model), example=example, dtype=dtype)
    if example is None:
        return found
    tally = Tally()
    try:
        counted = replace(count(model, example, finish, dtype, found, tally), given=tally.given)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return found
    if finish is None:
        return counted
    source = ProfileSource(model, example, finish, dtype, {block.name: block for block in counted.all}, tally.given)
    return replace(counted, source=source, has_loss=True)


def _refuse_script(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"module '{name}'" if name else "the model"
            raise PlanError(
                f"{where} is a ScriptModule, whose code and parameters torch keeps where weft cannot split them; use "
                f"the module before torch.jit.script, and torch.compile for speed"
            )


__all__ = [
    "FULL_SHARES",
    "KEPT_OPERATIONS",
    "PARAMETER_CUTS",
    "SHARED_BY_STAGES",
    "BackwardShares",
    "Block",
    "Convolution",
    "ExpertCall",
    "Experts",
    "Flops",
    "Heads",
    "LayerShape",
    "Matmul",
    "Parameter",
    "ParameterUses",
    "Profile",
    "ProfileCache",
    "ProfileSource",
    "RecordedCall",
    "Tally",
    "TensorMetadata",
    "cast",
    "count",
    "fake",
    "find_parameters",
    "profile",
    "stage_profile",
]

"""What a model costs, block by block: parameters, FLOPs, bytes moved, saved for backward and handed on; its shapes.

The chain of blocks is found, not declared: the elements of the outermost `nn.ModuleList`s and `nn.Sequential`s that
hold parameters. What lies outside them (embedding, final norm, head) is the root. Counts come from one forward on fake
tensors (`tally.py`) and equal those of torch's FLOP counter and saved-tensor hooks on a real step; where they do not,
`products.py` says why. `parts.py` has the values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from weft.profile.count import Tally, cast, count, fake
from weft.profile.flops import KEPT_OPERATIONS
from weft.profile.parts import (
    WHOLE,
    Block,
    Convolution,
    Experts,
    Flops,
    Given,
    Heads,
    Layer,
    Matmul,
    Parameter,
    Profile,
    Shares,
    Source,
)
from weft.profile.structure import (
    CUTS_ATTRIBUTE,
    STAGES_ATTRIBUTE,
    Places,
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
    """The profile of a model. `example()` makes the arguments of one forward of a micro-batch, and `finish(output)`
    computes the loss, whose saved bytes count for the root; without an example, or where the forward depends on the
    values of its inputs (experts that are called one by one), only the structure is known (`counted` is false).
    With `dtype`, floating-point parameters and arguments count as of that one, in which a parallel model computes.
    """
    found = replace(structure(model), example=example, dtype=dtype)
    if example is None:
        return found
    tally = Tally()
    try:
        counted = count(model, example, finish, dtype, found, tally)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return found
    if finish is None:
        return counted
    source = Source(model, example, finish, dtype, {block.name: block for block in counted.all}, tally.given)
    return replace(counted, source=source, has_loss=True)


__all__ = [
    "CUTS_ATTRIBUTE",
    "KEPT_OPERATIONS",
    "STAGES_ATTRIBUTE",
    "WHOLE",
    "Block",
    "Convolution",
    "Experts",
    "Flops",
    "Given",
    "Heads",
    "Layer",
    "Matmul",
    "Parameter",
    "Places",
    "Profile",
    "Shares",
    "Source",
    "Tally",
    "cast",
    "count",
    "fake",
    "find_parameters",
    "profile",
    "stage_profile",
]

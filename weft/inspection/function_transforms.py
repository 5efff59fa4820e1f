"""Finds torch.func around the code that runs: a transform (vmap, grad, jvp), or functional_call."""

from __future__ import annotations

import sys
from types import FrameType

from torch import Tensor
from torch._C import _functorch
from torch.nn.utils import stateless

_CALL = stateless._functional_call.__code__  # what torch.func.functional_call runs


def transform_around() -> str:
    """Returns the name of the innermost transform that runs the caller ('vmap', 'grad', 'jvp'); '' if none does."""
    found = _functorch.peek_interpreter_stack()
    return "" if found is None else str(found.key().name).lower()


def functional_call_around() -> bool:
    """Does torch.func.functional_call run the caller, with other tensors in place of a module's own?"""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return frame is not None


def unwrapped(tensor: Tensor) -> Tensor:
    """Returns the tensor that a transform's own tensor stands for; under vmap, it has all samples."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor

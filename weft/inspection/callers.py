"""Finds what of torch runs the code that is running: a checkpoint (torch.utils.checkpoint), or torch.func."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Literal

from torch import Tensor
from torch._C import _functorch
from torch.nn.utils import stateless
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

CheckpointKind = Literal["", "reentrant", "not reentrant"]
_CALL = stateless._functional_call.__code__  # what torch.func.functional_call runs


def checkpoint_around(within: CodeType | None = None) -> CheckpointKind:
    """Returns the kind of checkpoint that runs the caller in its forward; '' if none does.

    With `within`, the code of a function that calls the caller, checkpoints around that function do not count.
    """
    frame: FrameType | None = sys._getframe(1)
    found: CheckpointKind = ""
    while frame is not None and frame.f_code is not within:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return "reentrant"
        if frame.f_globals is vars(checkpoint) and frame.f_code.co_name == "checkpoint":
            found = "not reentrant"
        frame = frame.f_back
    return found


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

"""Finds the user's own checkpointing (torch.utils.checkpoint) around the code that runs."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Literal

from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

CheckpointKind = Literal["", "reentrant", "not reentrant"]


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

"""The only place that forks: a process that could not have working children is refused.

A child has none of its parent's threads. torch's first backward on a machine with GPUs starts threads for them, and
every backward in a later child fails; once CUDA is initialised, no child can use it. So children are forked from a
process that has done neither: the nursery, which every command forks first, or a user's process before its first
backward.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from weft.errors import LaunchError

AUTOGRAD_THREAD = "pt_autograd"  # how torch names the threads of its backward


def fork() -> int:
    """os.fork, for a child that may compute: 0 in the child, its process id in the parent."""
    reason = why_not()
    if reason is not None:
        raise LaunchError(f"{reason}, so this process cannot fork ranks any more; {REMEDY}")
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fork()


REMEDY = (
    "start them before that, from a program of its own, or give functions at the top level of a file, which fresh "
    "processes can import"
)


def why_not() -> str | None:
    """Why children of this process could not compute; None where they can."""
    if torch.cuda.is_initialized():
        return "CUDA is initialised here"
    if any(name.startswith(AUTOGRAD_THREAD) for name in _thread_names()):
        return "torch's backward has started its threads here"
    return None


def _thread_names() -> list[str]:
    """The names of this process's threads; none where the system does not tell (macOS, which has no CUDA)."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        try:
            names.append(path.read_text().strip())
        except OSError:  # it has ended meanwhile
            continue
    return names

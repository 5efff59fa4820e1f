"""The only call of os.fork. It raises an error in a process whose children could not compute.

A child has none of its parent's threads. torch's first backward on a machine with GPUs starts threads for them, and
every backward in a child that is forked later fails. Once CUDA is initialised, no child can use it. So children are
forked from a process that has done neither: the fork server, which every command forks first, or a user's process
before its first backward.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from weft.errors import LaunchError

AUTOGRAD_THREAD = "pt_autograd"  # the prefix of the names of autograd's threads


def fork() -> int:
    """os.fork for a child that computes with torch. Returns 0 in the child and the child's process id in the parent."""
    reason = fork_obstacle()
    if reason is not None:
        raise LaunchError(f"{reason}, so this process cannot fork ranks any more; {REMEDY}")
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fork()


REMEDY = (
    "start them before that, from a program of its own, or give functions at the top level of a file, which fresh "
    "processes can import"
)


def fork_obstacle() -> str | None:
    """The reason why forked children of this process could not compute with torch; None if they can."""
    if torch.cuda.is_initialized():
        return "CUDA is initialised here"
    if any(name.startswith(AUTOGRAD_THREAD) for name in _thread_names()):
        return "torch's backward has started its threads here"
    return None


def _thread_names() -> list[str]:
    """The names of this process's threads. Empty on systems without /proc (macOS, which has no CUDA)."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        try:
            names.append(path.read_text().strip())
        except OSError:  # the thread has ended meanwhile
            continue
    return names

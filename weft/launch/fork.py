"""The only call of os.fork. It raises an error in a process whose children could not compute.

A child has none of its parent's threads. torch's first backward on a machine with GPUs starts threads for them, and
every backward in a child that is forked later fails. Once CUDA is initialised, no child can use it. So children are
forked from a process that has done neither: the fork server, which every command forks first, or a user's process
before its first backward.

A thread that ends or computes at the moment of the fork may hold a lock of a library, and in the child nobody would
release it: the child's first matmul would wait for ever. So the fork waits until other threads are at rest. OpenMP
keeps threads for its next loop. A child would count on those of its parent, and wait for ever, so they are ended first.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

import torch

from weft.errors import LaunchError

AUTOGRAD_THREAD = "pt_autograd"  # the prefix of the names of autograd's threads
OMP_PAUSE_HARD = 2  # of omp.h
REST_SECONDS = 2.0  # the longest wait for other threads; one that computes for longer does not end now


def fork() -> int:
    """os.fork for a child that computes with torch. Returns 0 in the child and the child's process id in the parent."""
    reason = fork_obstacle()
    if reason is not None:
        raise LaunchError(f"{reason}, so this process cannot fork ranks any more; {REMEDY}")
    sys.stdout.flush()
    sys.stderr.flush()
    wait_for_threads()
    end_openmp_threads()
    return os.fork()


def end_openmp_threads() -> None:
    """End the threads that GNU's OpenMP keeps for this thread. Its next loop starts others."""
    for path in _loaded_libraries("libgomp"):
        end = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)  # GCC 9 and later
        if end is not None:
            end(OMP_PAUSE_HARD)


def _loaded_libraries(name: str) -> set[str]:
    """The paths of loaded libraries whose file names begin so. Empty on systems without /proc."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    return {path for path in paths if Path(path).name.startswith(name) and Path(path).exists()}


def wait_for_threads() -> None:
    """Wait until no other thread of this process runs or is ready to, for some seconds at most."""
    until = time.monotonic() + REST_SECONDS
    while is_another_running() and time.monotonic() < until:
        time.sleep(0.001)


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


def is_another_running() -> bool:
    """Is another thread of this process on a CPU, or ready to be? False on systems without /proc."""
    own = threading.get_native_id()
    for path in Path("/proc/self/task").glob("*/stat"):
        try:  # "id (name) state ..": R is running or ready
            if int(path.parent.name) != own and path.read_text().rpartition(")")[2].split()[0] == "R":
                return True
        except OSError:  # the thread has ended meanwhile
            continue
    return False


def _thread_names() -> list[str]:
    """The names of this process's threads. Empty on systems without /proc (macOS, which has no CUDA)."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        try:
            names.append(path.read_text().strip())
        except OSError:  # the thread has ended meanwhile
            continue
    return names

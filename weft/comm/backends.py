"""Which library carries the collectives of ranks: Gloo between CPUs, NCCL between GPUs.

Several ranks may share a GPU, to prove a plan where it will run. NCCL allows that from 2.30 on, if asked to; with an
older one Gloo carries them, through the host's memory. Both give right results and say nothing about speed.
"""

from __future__ import annotations

import ctypes
import os
from typing import Literal

import torch
import torch.distributed as dist

SHARING_NCCL = (2, 30)
NCCL_LIBRARY = "libnccl.so.2"
SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
USUAL_QUEUES, MOST_QUEUES = 8, 32  # of a process
DeviceType = Literal["cpu", "cuda"]


def choose_backend(device: DeviceType, num_local_ranks: int) -> str:
    """The back-end of the world group, as torch names it, for so many ranks on this host."""
    if device == "cpu":
        return "gloo"
    if num_local_ranks <= torch.cuda.device_count():
        return "cpu:gloo,cuda:nccl"
    if nccl_shares_gpus():
        os.environ.setdefault(SHARING_VARIABLE, "1")
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def prepare_cuda(num_local_ranks: int) -> None:
    """Before anything initialises CUDA in a rank: streams that share one of CUDA's queues hold each other up, and a
    pipeline has a stream for each peer (`schedule/nccl_order.py`). A GPU has some 500 queues for all processes, who
    asks for one more is told "out of memory", and a process takes longer to start the more it has: ranks that share a
    GPU share the most that one may have, and have CUDA's usual number at least.
    """
    sharing = -(-num_local_ranks // max(1, torch.cuda.device_count()))
    os.environ.setdefault(QUEUES_VARIABLE, str(max(USUAL_QUEUES, MOST_QUEUES // sharing)))


def nccl_shares_gpus() -> bool:
    """Whether the NCCL that is loaded lets several ranks share a GPU."""
    return (nccl_version() or (0, 0)) >= SHARING_NCCL


def nccl_version() -> tuple[int, ...] | None:
    """The version of the NCCL that is loaded; torch.cuda.nccl.version() is that of the one torch was built with."""
    if not dist.is_nccl_available():
        return None
    number = ctypes.c_int()
    try:
        ctypes.CDLL(NCCL_LIBRARY).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # it is part of torch's own library: nobody can have put another in its place
        return tuple(torch.cuda.nccl.version()[:3])
    major, rest = divmod(number.value, 10_000)
    return major, *divmod(rest, 100)


def describe_backend(device: DeviceType, num_local_ranks: int) -> str:
    """For people: what carries collectives of so many ranks on this host."""
    if device == "cpu":
        return "Gloo"
    version = ".".join(map(str, nccl_version() or ()))
    shared = num_local_ranks > torch.cuda.device_count()
    if not shared:
        return f"NCCL {version}"
    if nccl_shares_gpus():
        return f"NCCL {version}, ranks share a GPU"
    return f"Gloo through host memory (ranks share a GPU, which NCCL {version or 'none'} does not allow; 2.30 does)"

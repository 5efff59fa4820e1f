"""Chooses the back-end of torch.distributed: Gloo between CPUs (MPI, if asked for), NCCL between GPUs.

Several ranks may share a GPU, to prove a plan on the device where it will run. NCCL supports that from 2.30 on, if an
environment variable asks for it. With an older NCCL, Gloo is used, through host memory. Both give correct results, but
their speed is not representative. Sums over ranks that a plan puts on one GPU (`plan.ranks_per_device`) go another way
(`device_sum.py`).
"""

from __future__ import annotations

import ctypes
import os
from typing import Literal

import torch
import torch.distributed as dist

from weft.comm.mpi_transport import register_mpi, wants_mpi

SHARING_NCCL = (2, 30)
NCCL_LIBRARY = "libnccl.so.2"
SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
USUAL_QUEUES, MOST_QUEUES = 8, 32  # CUDA's default and largest number of queues of a process
DeviceType = Literal["cpu", "cuda"]


def choose_backend(device: DeviceType, num_local_ranks: int, ranks_per_device: int = 1) -> str:
    """Returns the back-end of the world group for `num_local_ranks` ranks on this host, as `init_process_group` takes
    it.
    """
    if device == "cpu":
        return register_mpi() if wants_mpi(os.environ) else "gloo"
    if num_local_ranks <= torch.cuda.device_count() and ranks_per_device == 1:
        return "cpu:gloo,cuda:nccl"
    if nccl_shares_gpus():
        os.environ.setdefault(SHARING_VARIABLE, "1")
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def prepare_cuda(num_local_ranks: int) -> None:
    """Set the number of CUDA queues of this rank. Call it before anything initialises CUDA.

    Streams that share a queue delay each other, and a pipeline has a stream for each peer (`schedule/nccl_order.py`).
    A GPU has about 500 queues for all processes; a process that asks for one more gets "out of memory". A process also
    takes longer to start the more queues it has. So ranks that share a GPU divide the largest number that one process
    may have, but each gets at least CUDA's default.
    """
    sharing = -(-num_local_ranks // max(1, torch.cuda.device_count()))
    os.environ.setdefault(QUEUES_VARIABLE, str(max(USUAL_QUEUES, MOST_QUEUES // sharing)))


def nccl_shares_gpus() -> bool:
    """Returns whether the loaded NCCL lets several ranks share a GPU."""
    return (nccl_version() or (0, 0)) >= SHARING_NCCL


def nccl_version() -> tuple[int, ...] | None:
    """Returns the version of the loaded NCCL. torch.cuda.nccl.version() is the version that torch was built with."""
    if not dist.is_nccl_available():
        return None
    number = ctypes.c_int()
    try:
        ctypes.CDLL(NCCL_LIBRARY).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # NCCL is linked into torch's own library, so the loaded one is torch's
        return tuple(torch.cuda.nccl.version()[:3])
    major, rest = divmod(number.value, 10_000)
    return major, *divmod(rest, 100)


def describe_backend(device: DeviceType, num_local_ranks: int) -> str:
    """Returns a text that names the back-end for collectives of `num_local_ranks` ranks on this host."""
    if device == "cpu":
        return "MPI" if wants_mpi(os.environ) else "Gloo"
    version = ".".join(map(str, nccl_version() or ()))
    shared = num_local_ranks > torch.cuda.device_count()
    if not shared:
        return f"NCCL {version}"
    if nccl_shares_gpus():
        return f"NCCL {version}, ranks share a GPU"
    return f"Gloo through host memory (ranks share a GPU, which NCCL {version or 'none'} does not allow; 2.30 does)"

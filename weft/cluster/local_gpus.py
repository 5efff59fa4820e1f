"""The GPUs of this machine, also for a process that must not initialise CUDA.

A process that initialises CUDA cannot fork children that use CUDA, and it holds GPU memory that the ranks need. So the
process of a command does not use the GPUs: a child queries them and returns the list.

    sees_gpu()                  is there a GPU? Asking does not initialise CUDA
    gpus()                      the GPUs that this process sees, or the list given to `hide_gpus`
    with hide_gpus(found): ..   this process sees no GPU, and `gpus()` returns `found`
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
# With this variable torch asks NVIDIA's management library whether there is a GPU. Without it torch initialises CUDA,
# and then no forked child of the process can use a GPU.
_ASKS_LIBRARY = "PYTORCH_NVML_BASED_CUDA_CHECK"
BF16_CAPABILITY = (8, 0)  # Ampere and newer
_gpu_list: tuple[Gpu, ...] | None = None


@dataclass(frozen=True)
class Gpu:
    """One CUDA device, as the driver reports it. `num_peers` counts other devices whose memory it can access directly.
    `free_bytes` is None unless it was queried.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    num_peers: int = 0
    free_bytes: int | None = None

    @property
    def has_bf16(self) -> bool:
        return tuple(self.capability) >= BF16_CAPABILITY


def ask_library() -> None:
    """From now on, `torch.cuda.is_available` does not initialise CUDA in this process and its children."""
    os.environ.setdefault(_ASKS_LIBRARY, "1")


def sees_gpu() -> bool:
    """Does this process see a GPU, or does the list given to `hide_gpus` have one? Does not initialise CUDA."""
    import torch  # here, so that catalogs and run files are read without it

    ask_library()
    return torch.cuda.is_available() if _gpu_list is None else bool(_gpu_list)


def gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine: the list given to `hide_gpus`, or else the GPUs that this process sees."""
    return query_gpus() if _gpu_list is None else _gpu_list


def query_gpus(with_free_bytes: bool = False) -> tuple[Gpu, ...]:
    """Returns the GPUs that this process sees. Initialises CUDA if there are any. Querying free bytes allocates memory
    on each of them, so a rank does not do it.
    """
    import torch  # here, so that catalogs and run files are read without it

    if not torch.cuda.is_available():
        return ()
    indices = range(torch.cuda.device_count())
    found = []
    for index in indices:
        properties = torch.cuda.get_device_properties(index)
        peers = sum(torch.cuda.can_device_access_peer(index, other) for other in indices if other != index)
        free_bytes = torch.cuda.mem_get_info(index)[0] if with_free_bytes else None
        capability = (properties.major, properties.minor)
        found.append(Gpu(properties.name, properties.total_memory, capability, peers, free_bytes))
    return tuple(found)


@contextmanager
def hide_gpus(found: Sequence[Gpu]) -> Iterator[None]:
    """In this context this process sees no GPU (unless CUDA was initialised before), and `gpus()` returns `found`."""
    global _gpu_list
    before, visible = _gpu_list, os.environ.get(VISIBLE_VARIABLE)
    _gpu_list = tuple(found)
    os.environ[VISIBLE_VARIABLE] = ""
    try:
        yield
    finally:
        _gpu_list = before
        if visible is None:
            del os.environ[VISIBLE_VARIABLE]
        else:
            os.environ[VISIBLE_VARIABLE] = visible

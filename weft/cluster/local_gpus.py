"""The GPUs of this machine, and how a process that only starts others learns about them.

A process that initialises CUDA cannot fork children that use CUDA, and it holds memory on a GPU that belongs to the
ranks. So the process of a command does not touch the GPUs: a child looks at them and says what it found.

    gpus()                      what this process sees, or was told
    with described(found): ..   this process sees no GPU, and `gpus()` is `found`
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
BF16_CAPABILITY = (8, 0)  # from Ampere on
_described: tuple[Gpu, ...] | None = None


@dataclass(frozen=True)
class Gpu:
    """One CUDA device, as the driver reports it. `num_peers`: other devices whose memory it can reach directly;
    `free_bytes`, where they were asked for.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    num_peers: int = 0
    free_bytes: int | None = None

    @property
    def has_bf16(self) -> bool:
        return tuple(self.capability) >= BF16_CAPABILITY


def gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine: those that a child described, or else those that this process sees."""
    return look() if _described is None else _described


def look(with_free_bytes: bool = False) -> tuple[Gpu, ...]:
    """The GPUs that this process sees. Initialises CUDA where there are any; to ask for free bytes takes memory on each
    of them, so a rank does not.
    """
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
def described(found: Sequence[Gpu]) -> Iterator[None]:
    """While it lasts, this process sees no GPU (unless it has initialised CUDA before), and `gpus()` is `found`."""
    global _described
    before, visible = _described, os.environ.get(VISIBLE_VARIABLE)
    _described = tuple(found)
    os.environ[VISIBLE_VARIABLE] = ""
    try:
        yield
    finally:
        _described = before
        if visible is None:
            del os.environ[VISIBLE_VARIABLE]
        else:
            os.environ[VISIBLE_VARIABLE] = visible

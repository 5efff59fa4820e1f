"""The memory that a key-value cache may take, and words for more blocks than it holds."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from weft.errors import ConfigError
from weft.sharding.host_memory import available_host_bytes

GPU_SHARE = 0.92  # of a GPU's free memory, for the cache
CPU_SHARE = 0.25


class CacheBytes(NamedTuple):
    """What a cache takes on a rank: for each block, and beside all blocks."""

    per_block: float
    beside: int

    def of(self, num_blocks: int) -> float:
        """Bytes of a cache of so many blocks, and of one for padding."""
        return (num_blocks + 1) * self.per_block + self.beside

    def fitting(self, free: float) -> int:
        """The most blocks of a cache of so many bytes."""
        return int((free - self.beside) // self.per_block) - 1


def step_bytes(token_budget: int, max_running: int, widest: int, vocab: int) -> int:
    """Return what a step holds beside the cache: a few activations of each token, of which the widest linear gives
    `widest` numbers, and logits in float32 while sampling.
    """
    return 16 * token_budget * widest + 24 * max_running * vocab


def free_host_bytes(num_local_ranks: int) -> float:
    """The memory of the host that each of the ranks here can still have."""
    found = available_host_bytes()
    if found is None:
        found = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return found / num_local_ranks


def free_device_bytes(device: torch.device, num_local_ranks: int) -> float:
    """The memory of a rank's device that it can still have."""
    if device.type != "cuda":
        return free_host_bytes(num_local_ranks)
    torch.cuda.empty_cache()  # what torch keeps for itself is free, too
    return float(torch.cuda.mem_get_info(device)[0])


def refuse_cache_blocks(num_blocks: int, sizes: CacheBytes, device: torch.device, num_local_ranks: int) -> None:
    """Raise ConfigError if a cache of so many blocks takes more memory than its device has."""
    needed, free = sizes.of(num_blocks), free_device_bytes(device, num_local_ranks)
    if needed > free:
        what = f"num_blocks = {num_blocks} (--cache-blocks) of the key-value cache"
        raise ConfigError(_too_many(what, needed, f"of {device}", free, sizes.fitting(free)))


def refuse_swap_blocks(num_swapped: int, per_block: float, beside: float, num_local_ranks: int) -> None:
    """Raise ConfigError if blocks in host memory, and so many bytes beside them, are more than the host has."""
    needed, free = num_swapped * per_block, free_host_bytes(num_local_ranks) - beside
    if needed > free:
        what = f"swap_blocks = {num_swapped} (--swap-blocks)"
        raise ConfigError(_too_many(what, needed, "of host memory beside the cache", free, int(free // per_block)))


def _too_many(what: str, needed: float, where: str, free: float, fitting: int) -> str:
    change = f"give at most {fitting}" if fitting > 0 else "not even one fits, so free memory or leave it out"
    return f"{what} take {_size(needed)}, and {_size(free)} {where} are free for each rank here; {change}"


def _size(num_bytes: float) -> str:
    return f"{max(0.0, num_bytes) / 2**30:,.2f} GiB"

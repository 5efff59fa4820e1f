"""The memory of the key-value cache: how many blocks fit, and pages in host memory for requests that were sent back to
the queue for lack of blocks.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.sharding.host_memory import available_host_bytes, host_zeros

GPU_SHARE = 0.92  # of a GPU's free memory, for the cache
CPU_SHARE = 0.25


class CacheBytes(NamedTuple):
    """What a cache takes on a rank: for each block, and beside all blocks."""

    per_block: float
    beside: int

    def of(self, num_blocks: int) -> float:
        """Return the bytes of a cache of so many blocks and one more for padding."""
        return (num_blocks + 1) * self.per_block + self.beside

    def fitting(self, free: float) -> int:
        """Return the most blocks of a cache of so many bytes."""
        return int((free - self.beside) // self.per_block) - 1


def step_bytes(token_budget: int, max_running: int, widest: int, vocab: int) -> int:
    """Return what a step holds beside the cache: a few activations of each token, of which the widest linear gives
    `widest` numbers, and logits in float32 while sampling.
    """
    return 16 * token_budget * widest + 24 * max_running * vocab


def free_host_bytes(num_local_ranks: int) -> float:
    """Return the memory of the host that each of the ranks here can still have."""
    found = available_host_bytes()
    if found is None:
        found = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return found / num_local_ranks


def free_device_bytes(device: torch.device, num_local_ranks: int) -> float:
    """Return the memory of a rank's device that it can still have."""
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


class HostPages:
    """Room in host memory for `num_blocks` blocks of a cache, whose `pages` are tensors [blocks, ...].

    Blocks are copied whole. Copies are in the order of the device's work, so nobody waits for them: a saved block may
    be used again at once.
    """

    def __init__(self, pages: Sequence[Tensor], num_blocks: int, keeps_whole_blocks: bool = False) -> None:
        self.keeps_whole_blocks = keeps_whole_blocks
        self._pages = pages
        self._host = [
            host_zeros(num_blocks * page[0].numel(), page.dtype, page.device).view(num_blocks, *page.shape[1:])
            for page in pages
        ]
        self._free = list(range(num_blocks))
        self._held: dict[Hashable, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def save(self, owner: Hashable, blocks: Sequence[int]) -> bool:
        """Copy blocks to host memory; False, and nothing is copied, if there is no room."""
        if len(blocks) > len(self._free):
            return False
        self._held[owner] = [self._free.pop() for _ in blocks]
        for block, place in zip(blocks, self._held[owner], strict=True):
            for host, page in zip(self._host, self._pages, strict=True):
                host[place].copy_(page[block].contiguous(), non_blocking=True)
        return True

    def load(self, owner: Hashable, blocks: Sequence[int], first: int) -> None:
        """Copy what was saved of an owner, from its block number `first` on, into these blocks of the cache."""
        for block, place in zip(blocks, self._held[owner][first:], strict=True):
            for host, page in zip(self._host, self._pages, strict=True):
                page[block] = host[place].to(page.device, non_blocking=True)
        self.drop(owner)

    def drop(self, owner: Hashable) -> None:
        """Forget what was saved of an owner."""
        self._free += self._held.pop(owner)

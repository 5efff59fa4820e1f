"""Pages of the key-value cache in host memory, for requests that were sent back to the queue for lack of blocks.

Copies are in the order of the device's work, so nobody waits for them: a saved block may be used again at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from weft.sharding.host_memory import host_zeros


class HostPages:
    """Room for `num_blocks` blocks of a cache, whose `pages` are tensors [blocks, ...]. Blocks are copied whole."""

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

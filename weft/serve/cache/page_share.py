"""Which tokens of a request a rank holds, if the ranks of `context` hold its keys and values together.

A block of the cache is as many pages as there are ranks, end to end, and each rank holds one of them: page i of a
request is on rank i mod n. Block tables are the same on all ranks, and shares differ by one page at most. Own tokens
are counted from 0 on each rank, in the order of their positions:

    position   0 1 2 3 | 4 5 6 7 | 8 9        pages of 2 tokens, blocks of 4
    rank 0     0 1       2 3       4 5        its own tokens, by number
    rank 1         0 1       2 3
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PageShare:
    """The share of rank `index` of `degree` ranks, with pages of `page_size` tokens."""

    index: int
    degree: int
    page_size: int

    @property
    def block_size(self) -> int:
        """Tokens of a block, on all ranks together."""
        return self.degree * self.page_size

    def count(self, lengths: Tensor) -> Tensor:
        """How many of the first `lengths` tokens of a request are own ones. A negative length is none."""
        lengths = lengths.clamp(min=0)
        in_block = (lengths % self.block_size - self.index * self.page_size).clamp(0, self.page_size)
        return lengths // self.block_size * self.page_size + in_block

    def positions(self, number: int, device: torch.device) -> Tensor:
        """The positions of the first `number` own tokens."""
        own = torch.arange(number, device=device)
        return (own // self.page_size * self.degree + self.index) * self.page_size + own % self.page_size

    def sees(self, ends: Tensor, number: int, window: int | None) -> Tensor:
        """Which of the first `number` own tokens a query sees that attends to the last `window` tokens before each of
        `ends`: [ends, number].
        """
        own = torch.arange(number, device=ends.device)
        mask = own < self.count(ends)[:, None]
        return mask if window is None else mask & (own >= self.count(ends - window)[:, None])

    def own_slots(self, slots: Tensor, padding_slot: int) -> Tensor:
        """Where tokens with these slots in whole blocks go in own pages; those of other ranks go to `padding_slot`."""
        blocks, places = slots // self.block_size, slots % self.block_size
        own = blocks * self.page_size + places % self.page_size
        return torch.where(places // self.page_size == self.index, own, padding_slot)

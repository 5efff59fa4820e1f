"""The cache of one block of the model: a storage, a choice of tokens, and the ranks that hold pages together.

A step of a block is

    slots, keys, values = layer.room(batch)          where the step's keys and values are written
    query = rotate_and_store(..., slots, keys, values)
    mixed = layer.attend(query, keys, values, batch, window)

On a GPU, a step of few decodes over plain pages is one kernel instead (`whole_attention_kernel.py`). Which blocks
belong to which request is the business of `serve/scheduling/blocks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from weft.serve.attention.attend import merged
from weft.serve.attention.batch import CacheSizes, PagedBatch
from weft.serve.attention.plain import MAX_WHOLE_DECODES, PlainPages


class KeptPages(Protocol):
    """Keys and values in pages, and the attention to them."""

    pages: Sequence[Tensor]  # each [blocks, ...]; to copy a block is to copy its entry of each

    def room(self, batch: PagedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Slots [tokens], and keys and values [slots, key heads, head_dim] of which these slots are to be written."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        """Keep what was written to `keys` and `values`. Returns the attention [tokens, heads, head_dim], or this rank's
        part of it.
        """


class CacheLayer:
    """The keys and values of one block of the model on this rank."""

    def __init__(self, storage: KeptPages, sizes: CacheSizes) -> None:
        self.storage, self._axis = storage, sizes.context
        self.pages = storage.pages
        # Zeros for `whole_attention_kernel.py`; None: pages are not plain or not whole, or `attend` does more.
        self.counts: Tensor | None = None
        if isinstance(storage, PlainPages) and sizes.context is None:
            number = MAX_WHOLE_DECODES * sizes.num_key_heads
            self.counts = torch.zeros(number, dtype=torch.int32, device=sizes.device)

    def room(self, batch: PagedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """`KeptPages.room`."""
        return self.storage.room(batch)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        """Keep what was written to `keys` and `values`, and attend: [tokens, heads, head_dim]."""
        own = self.storage.attend(query, keys, values, batch, window)
        return own if self._axis is None else merged(own, self._axis, query.dtype)

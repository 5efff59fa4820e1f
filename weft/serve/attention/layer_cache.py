"""How the keys and values of a block of the model are kept in pages, and attended to: the interface, and the plain way.

A `CacheFormat` makes one `LayerCache` for each block of the model. A step of a block is

    slots, keys, values = layer.room(batch)          where the step's keys and values are written
    query = rotate_and_store(..., slots, keys, values)
    mixed = layer.attend(query, keys, values, batch, window)

On a GPU, a step of few decodes over plain pages is one kernel instead (`whole_attention_kernel.py`).

Which blocks belong to which request is not a format's business (`serve/scheduling/blocks.py`). Each format is one file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weft.comm import Axis
from weft.serve.attention.batch import PagedBatch
from weft.serve.attention.paged_attention import attend
from weft.serve.attention.split_attention import attend_over_ranks

MAX_WHOLE_DECODES = 16  # requests of a step whose attention is one kernel


@dataclass(frozen=True)
class CacheSizes:
    """The sizes of a cache: pages of `block_size` tokens, and `num_rows` requests that run at once."""

    num_blocks: int
    block_size: int
    num_rows: int
    num_key_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    context: Axis | None = None  # the ranks that hold the pages of each block together; None: this rank has all


class LayerCache(Protocol):
    """The keys and values of one block of the model."""

    pages: Sequence[Tensor]  # each [blocks, ...]; to copy a block is to copy its entry of each
    counts: Tensor | None  # zeros for `whole_attention_kernel.py`; None: pages are not plain, or `attend` does more

    def room(self, batch: PagedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Slots [tokens], and keys and values [slots, key heads, head_dim] of which these slots are to be written."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        """Keep what was written to `keys` and `values`, and attend: [tokens, heads, head_dim]."""


class CacheFormat(Protocol):
    """A way to keep keys and values."""

    name: str
    block_size: int | None  # that it needs; None: any
    keeps_whole_blocks: bool  # of requests sent back to the queue, only full blocks can be kept in host memory
    # Tokens of prompts attend to all before them, generated ones to some: these are decodes, whatever they are computed
    # with, so that results depend on neither chunks nor drafts.
    answers_choose: bool
    has_kernel: bool  # decodes on a GPU are one kernel, which reads a request's own tokens alone
    identity: str  # of the model that it was made for (`model_identity.py`); "": any

    def part(self, layers: range, key_heads: range) -> CacheFormat:
        """The format of a rank that has these of the model's layers and key heads."""

    def layer(self, index: int, sizes: CacheSizes) -> LayerCache:
        """The cache of the block number `index` of this rank's model."""

    def bytes_per_token(self, num_key_heads: int, head_dim: int, item_bytes: int) -> float:
        """Bytes of a token in the pages of one block of the model."""

    def bytes_per_row(self, num_key_heads: int, head_dim: int, item_bytes: int) -> int:
        """Bytes beside the pages for each running request, of one block of the model."""

    def bytes_of_layer(self, num_key_heads: int, head_dim: int, item_bytes: int) -> int:
        """Bytes beside the pages whatever runs, of one block of the model."""


class PlainLayer:
    """Keys and values as they are: [slots, key heads, head_dim] each."""

    def __init__(self, sizes: CacheSizes) -> None:
        shape = (2, sizes.num_blocks, sizes.block_size, sizes.num_key_heads, sizes.head_dim)
        self.pages: Sequence[Tensor] = torch.zeros(shape, dtype=sizes.dtype, device=sizes.device).unbind()
        self._keys, self._values = (page.flatten(0, 1) for page in self.pages)
        self._context = sizes.context
        self.counts: Tensor | None = None
        if sizes.context is None:
            number = MAX_WHOLE_DECODES * sizes.num_key_heads
            self.counts = torch.zeros(number, dtype=torch.int32, device=sizes.device)

    def room(self, batch: PagedBatch) -> tuple[Tensor, Tensor, Tensor]:
        return batch.slots, self._keys, self._values

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        if self._context is not None:
            return attend_over_ranks(query, keys, values, batch, window, self._context)
        return attend(query, keys, values, batch, window)


class PlainFormat:
    """Keys and values in the model's own dtype."""

    name = "plain"
    block_size: int | None = None
    keeps_whole_blocks = False
    answers_choose = False
    has_kernel = True
    identity = ""

    def part(self, layers: range, key_heads: range) -> CacheFormat:
        return self

    def layer(self, index: int, sizes: CacheSizes) -> LayerCache:
        return PlainLayer(sizes)

    def bytes_per_token(self, num_key_heads: int, head_dim: int, item_bytes: int) -> float:
        return 2 * num_key_heads * head_dim * item_bytes

    def bytes_per_row(self, num_key_heads: int, head_dim: int, item_bytes: int) -> int:
        return 0

    def bytes_of_layer(self, num_key_heads: int, head_dim: int, item_bytes: int) -> int:
        return 0


def staging(batch: PagedBatch, sizes: CacheSizes) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the keys and values of one step alone, for formats that change them before they are kept."""
    number = len(batch.slots)
    shape = (2, number, sizes.num_key_heads, sizes.head_dim)
    keys, values = torch.empty(shape, dtype=sizes.dtype, device=sizes.device)
    return torch.arange(number, device=sizes.device), keys, values

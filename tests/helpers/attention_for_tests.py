"""Pages, batches and plain attention for tests of the served attention."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.serve.attention.attend import attend_decodes
from weft.serve.attention.batch import CacheSizes, PagedBatch
from weft.serve.attention.choice import LokiChoice, LokiPages
from weft.serve.attention.plain import PlainPages


def pages_of(keys: Tensor, values: Tensor, block_size: int) -> PlainPages:
    """Pages of keys and values [slots, key heads, head_dim]."""
    return PlainPages(*(one.unflatten(0, (-1, block_size)) for one in (keys, values)))


def decodes_of(tables: Tensor, lengths: Tensor, block_size: int) -> PagedBatch:
    """A batch of requests whose newest tokens are decodes."""
    return PagedBatch(*[lengths] * 3, tables, lengths, lengths, block_size, len(tables))


def loki_of(keys: Tensor, values: Tensor, block_size: int, choice: LokiChoice, num_rows: int = 8) -> LokiPages:
    """Pages of keys along their axes already, and values [slots, key heads, head_dim]."""
    plain = pages_of(keys, values, block_size)
    (_, num_key_heads, head_dim), num_blocks = keys.shape, len(plain.pages[0])
    sizes = CacheSizes(num_blocks, block_size, num_rows, num_key_heads, head_dim, keys.dtype, keys.device)
    loki = LokiPages(torch.eye(head_dim).expand(num_key_heads, -1, -1), choice, plain, sizes)
    loki.pages[2].copy_(plain.pages[0][..., : choice.num_dims(head_dim)].transpose(1, 2))
    return loki


def chosen_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    block_size: int,
    window: int | None,
    choice: LokiChoice,
) -> Tensor:
    """The attention of decodes to chosen tokens, by plain functions; query and keys are along the same axes."""
    batch, loki = decodes_of(tables, lengths, block_size), loki_of(keys, values, block_size, choice)
    return attend_decodes(query, loki, batch, window)

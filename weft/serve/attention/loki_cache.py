"""Loki, as a format of the cache (`layer_cache.py`): a decode attends to tokens that a part of their keys chooses.

Keys of a head lie near a subspace of few dims. Calibration finds its axes, most important first
(`serve/calibration/loki_calibration.py`). Keys are kept along these axes instead of their own, which changes no product
with a query along the same axes. Their first dims are kept a second time, end to end, so that a GPU reads them alone. A
decode

    1. scores all tokens by the first dims of their keys alone; where several queries share a key head, each score is
       taken relative to its query's best, and the highest counts, so that each key and value is read once for all,
    2. takes for each key head the tokens with the highest scores, the newest ones and the first,
    3. attends to these exactly.

Prompts attend to everything, and so do decodes of few tokens. No token is ever lost. GPUs run the kernels of
`loki_kernel.py`; the plain functions below run on a CPU and in other dtypes than fp16 and bf16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.serve.attention.batch import PagedBatch, slots_of
from weft.serve.attention.layer_cache import CacheSizes, LayerCache, staging
from weft.serve.attention.loki_choice import LokiChoice, attention_to_chosen, chosen_tokens
from weft.serve.attention.paged_attention import attend_prompts


class LokiFormat:
    """Keys along calibrated axes [layers, key heads, head_dim, head_dim]: key @ axes[layer, head]."""

    name = "loki"
    block_size: int | None = None
    keeps_whole_blocks = False
    answers_choose = True
    has_kernel = True

    def __init__(self, axes: Tensor, choice: LokiChoice | None = None, identity: str = "") -> None:
        self.axes, self.choice, self.identity = axes, choice or LokiChoice(), identity

    def part(self, layers: range, key_heads: range) -> LokiFormat:
        own = self.axes[layers.start : layers.stop, key_heads.start : key_heads.stop]
        return LokiFormat(own, self.choice, self.identity)

    def layer(self, index: int, sizes: CacheSizes) -> LayerCache:
        return LokiLayer(self.axes[index], self.choice, sizes)

    def bytes_per_token(self, num_key_heads: int, head_dim: int, item_bytes: int) -> float:
        return num_key_heads * (2 * head_dim + self.choice.num_dims(head_dim)) * item_bytes

    def bytes_per_row(self, num_key_heads: int, head_dim: int, item_bytes: int) -> int:
        return 0

    def bytes_of_layer(self, num_key_heads: int, head_dim: int, item_bytes: int) -> int:
        return num_key_heads * head_dim**2 * max(4, item_bytes)  # the axes


class LokiLayer:
    """The cache of one block of the model."""

    counts: Tensor | None = None

    def __init__(self, axes: Tensor, choice: LokiChoice, sizes: CacheSizes) -> None:
        self._sizes, self._choice = sizes, choice
        self._axes = axes_of_heads(axes, sizes)
        shape = (2, sizes.num_blocks, sizes.block_size, sizes.num_key_heads, sizes.head_dim)
        keys, values = torch.zeros(shape, dtype=sizes.dtype, device=sizes.device)
        num_dims = choice.num_dims(sizes.head_dim)
        first = keys.new_zeros(sizes.num_blocks, sizes.num_key_heads, sizes.block_size, num_dims)
        self.pages: Sequence[Tensor] = (keys, values, first)
        self._keys, self._values = keys.flatten(0, 1), values.flatten(0, 1)

    def room(self, batch: PagedBatch) -> tuple[Tensor, Tensor, Tensor]:
        return staging(batch, self._sizes)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        number, parts = batch.num_decodes, []
        has_kernels = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
        query = self._turn_and_store(query, keys, values, batch.slots, has_kernels and not batch.prompt_queries)
        for begin in range(0, number, self._sizes.num_rows):  # tokens that are computed again may be more
            rows = slice(begin, min(begin + self._sizes.num_rows, number))
            given = (query[rows], self._keys, self._values, batch.tables[rows], batch.lengths[rows])
            if has_kernels:
                parts.append(chosen_attention_by_kernel(*given, self.pages[2], window, self._choice))
            else:
                parts.append(chosen_attention(*given, batch.block_size, window, self._choice))
        if batch.prompt_queries:
            parts.append(attend_prompts(query[number:], self._keys, self._values, batch, window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _turn_and_store(self, query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, by_kernel: bool) -> Tensor:
        """Queries along the axes. Keys along the axes, and values, go to the pages."""
        if by_kernel:
            from weft.serve.attention.loki_axes_kernel import turn_and_store_by_kernel

            return turn_and_store_by_kernel(query, keys, values, self._axes, slots, self.pages)
        keys, first = self._along_axes(keys), self.pages[2]
        self._keys[slots], self._values[slots] = keys, values
        size = first.shape[2]
        first[slots // size, :, slots % size] = keys[..., : first.shape[-1]]
        return self._along_axes(query)

    def _along_axes(self, heads: Tensor) -> Tensor:
        """Queries or keys [tokens, heads, head_dim] along the axes of their key heads."""
        grouped = heads.to(self._axes.dtype).unflatten(1, (len(self._axes), -1))  # [tokens, key heads, group, head_dim]
        return torch.einsum("thgd,hde->thge", grouped, self._axes).flatten(1, 2).to(heads.dtype)


def axes_of_heads(axes: Tensor, sizes: CacheSizes) -> Tensor:
    """The axes of a cache's heads, on its device. Raises ConfigError if they are of others."""
    if axes.shape != (sizes.num_key_heads, sizes.head_dim, sizes.head_dim):
        raise ConfigError(
            f"Loki's axes are of {axes.shape[0]} key heads of {axes.shape[-1]}, and the model has "
            f"{sizes.num_key_heads} of {sizes.head_dim}; run weft calibrate on the model that is served"
        )
    return axes.to(sizes.device, torch.promote_types(sizes.dtype, torch.float32)).contiguous()


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
    """`decode_attention` of `paged_attention.py` over chosen tokens; query and keys are along the same axes."""
    slots = slots_of(tables, tables.shape[1] * block_size, block_size).long()
    first = keys[..., : choice.num_dims(keys.shape[-1])][slots]  # [requests, tokens, key heads, dims]
    order, counts = chosen_tokens(query, first, lengths, window, choice)
    num_key_heads = keys.shape[1]
    rows = slots[:, None].expand(-1, num_key_heads, -1).gather(2, order)
    key_heads = torch.arange(num_key_heads, device=query.device)[None, :, None]
    return attention_to_chosen(query, keys[rows, key_heads], values[rows, key_heads], counts)


def first_dims(keys: Tensor, block_size: int, num_dims: int) -> Tensor:
    """The first dims of keys [slots, key heads, head_dim] as pages keep them: [blocks, key heads, block_size, dims]."""
    pages: Tensor = keys[..., :num_dims].unflatten(0, (-1, block_size))
    return pages.transpose(1, 2).contiguous()


def chosen_attention_by_kernel(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    first: Tensor,
    window: int | None,
    choice: LokiChoice,
) -> Tensor:
    """Equals `chosen_attention`. `first` are the first dims of keys: [blocks, key heads, block_size, dims]."""
    from weft.serve.attention.decode_attention_kernel import decode_attention_by_kernel
    from weft.serve.attention.loki_kernel import chosen_slots_by_kernel

    block_size = first.shape[2]
    numbers = (choice.tokens, choice.newest, choice.dense_below, choice.most_tokens(tables.shape[1] * block_size))
    chosen, counts = chosen_slots_by_kernel(query, first, tables, lengths, window, numbers)
    return decode_attention_by_kernel(query, keys, values, tables, counts, block_size, None, chosen)

"""Loki over keys and values in 4 bits: a format of the cache (`layer_cache.py`) that is both of two others.

Keys along Loki's axes (`loki_cache.py`) are kept as the cache of 4 bits keeps keys (`four_bit_cache.py`), in the same
bytes: no dim is kept a second time. A decode

    1. decodes the first dims of all keys, and scores tokens by them,
    2. chooses tokens, by the same functions as over 16 bits (`loki_choice.py`),
    3. decodes the keys and values of these alone, and attends to them.

The keys of a request's own page are as they are, in its tail, for scores and for attention. So results equal attention
over the decoded cache with the same choice, and with all tokens chosen the cache of 4 bits. Decodes are plain
functions; on GPUs, prompts have the kernels of the cache of 4 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.serve.cache.four_bit_cache import GROUP, FourBitFormat, FourBitLayer
from weft.serve.cache.layer_cache import CacheFormat, CacheSizes, LayerCache
from weft.serve.cache.loki_cache import LokiFormat, axes_of_heads
from weft.serve.cache.loki_choice import LokiChoice, attention_to_chosen, chosen_tokens
from weft.serve.cache.paged_attention import PagedBatch

TURNED_TOKENS = 16  # rows of a product with axes


class FourBitLokiFormat(FourBitFormat):
    """Keys along calibrated axes, in 4 bits."""

    answers_choose = True
    has_kernel = False

    def __init__(self, loki: LokiFormat, group: int = GROUP) -> None:
        super().__init__(group)
        self.name, self.loki, self.identity = f"{self.name},loki", loki, loki.identity

    def part(self, layers: range, key_heads: range) -> CacheFormat:
        return FourBitLokiFormat(self.loki.part(layers, key_heads), self.group)

    def layer(self, index: int, sizes: CacheSizes) -> LayerCache:
        return FourBitLokiLayer(self.loki.axes[index], self.loki.choice, sizes)

    def bytes_of_layer(self, num_key_heads: int, head_dim: int, item_bytes: int) -> int:
        return self.loki.bytes_of_layer(num_key_heads, head_dim, item_bytes)


class FourBitLokiLayer(FourBitLayer):
    """The cache of one block of the model."""

    has_kernel = False

    def __init__(self, axes: Tensor, choice: LokiChoice, sizes: CacheSizes) -> None:
        super().__init__(sizes)
        self._axes, self._choice = axes_of_heads(axes, sizes), choice

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        return super().attend(self._along_axes(query), self._along_axes(keys), values, batch, window)

    def _along_axes(self, heads: Tensor) -> Tensor:
        """Queries or keys [tokens, heads, head_dim] along the axes of their key heads, end to end as kernels take them.

        Each product has the same number of rows, whatever the number of tokens: so a key has the same bits, and codes,
        whichever tokens it is computed with.
        """
        number, num_key_heads = len(heads), len(self._axes)
        num_products = -(-number // TURNED_TOKENS)
        padded = heads.new_zeros(num_products * TURNED_TOKENS, *heads.shape[1:], dtype=self._axes.dtype)
        padded[:number] = heads
        rows = padded.unflatten(0, (num_products, -1)).unflatten(2, (num_key_heads, -1))
        rows = rows.permute(0, 2, 1, 3, 4)  # [products, key heads, tokens, group, head_dim]
        turned = torch.stack([one.flatten(1, 2) @ self._axes for one in rows]).unflatten(2, rows.shape[2:4])
        found: Tensor = turned.permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)
        return found[:number].to(heads.dtype).contiguous()

    def _attend_requests(
        self, query: Tensor, tables: Tensor, lengths: Tensor, rows: Tensor, window: int | None
    ) -> Tensor:
        first = self._first_dims(tables.long(), lengths, rows.long(), query.dtype)
        order, counts = chosen_tokens(query, first, lengths, window, self._choice)
        key, value = self._chosen(order, tables.long(), lengths, rows.long(), query.dtype)
        return attention_to_chosen(query, key, value, counts)

    def _first_dims(self, tables: Tensor, lengths: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The first dims of the keys of requests: [requests, tokens, key heads, dims]."""
        number, half = self._choice.num_dims(self._sizes.head_dim), self._sizes.head_dim // 2
        wide = torch.promote_types(dtype, torch.float32)
        bytes_of = self._key_codes[..., : min(number, half)][tables]  # [requests, blocks, key heads, tokens, dims]
        codes = bytes_of & 15
        if number > half:
            codes = torch.cat([codes, bytes_of[..., : number - half] >> 4], dim=-1)
        scale, least = self._key_ranges[:, :, :number][tables].to(wide).unbind(-1)
        first = (codes.to(wide) * scale[..., None, :] + least[..., None, :]).to(dtype).transpose(2, 3)
        own = (lengths.long() - 1) // self._size
        first[torch.arange(len(tables), device=tables.device), own] = self._tails[rows, own % 2][..., :number]
        return first.flatten(1, 2)

    def _chosen(
        self, places: Tensor, tables: Tensor, lengths: Tensor, rows: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The keys and values at places [requests, key heads, chosen]: [requests, key heads, chosen, head_dim]."""
        wide, size = torch.promote_types(dtype, torch.float32), self._size
        page, token = places // size, places % size
        blocks = tables[:, None].expand(-1, places.shape[1], -1).gather(2, page)
        heads = torch.arange(places.shape[1], device=places.device)[None, :, None]
        codes = self._key_codes[blocks, heads, token]
        scale, least = self._key_ranges[blocks, heads].to(wide).unbind(-1)
        keys = (torch.cat([codes & 15, codes >> 4], dim=-1).to(wide) * scale + least).to(dtype)
        own = ((lengths.long() - 1) // size)[:, None, None]
        tails = self._tails[rows[:, None, None], own % 2, token, heads]
        keys = torch.where((page == own)[..., None], tails, keys)
        codes = self._value_codes[blocks, heads, :, token % (size // 2)]  # [requests, key heads, chosen, head_dim]
        codes = codes >> (token // (size // 2) * 4)[..., None].to(torch.uint8) & 15
        scale, least = self._value_ranges[blocks, heads, :, token].to(wide).unbind(-1)  # [..., groups]
        grouped = codes.unflatten(-1, (scale.shape[-1], -1)).to(wide)
        return keys, (grouped * scale[..., None] + least[..., None]).flatten(-2).to(dtype)


def bytes_read(form: FourBitLokiFormat, head_dim: int, num_tokens: float, num_chosen: float) -> float:
    """Bytes of the cache that a decode reads for one key head.

    The first dims of all keys lie in as many bytes, with other dims, or in all bytes of keys. Of chosen tokens, the
    bytes of values have another token's codes, too. The ranges of keys are read for all pages.
    """
    first = min(form.loki.choice.num_dims(head_dim), head_dim // 2)
    ranges = form.bytes_per_token(1, head_dim, 2) - head_dim
    of_values = ranges - 4 * head_dim / form.group
    of_chosen = head_dim / 2 + head_dim + of_values
    return num_tokens * (first + 4 * head_dim / form.group) + num_chosen * of_chosen

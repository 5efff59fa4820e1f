"""Keys and values in 4 bits, as a format of the cache (`layer_cache.py`).

A page has 32, 64 or 128 tokens. Keys are coded by channel, over the tokens of a page, because some channels are much
larger than others; values are coded by token, over their channels: half a head, or a head no larger than a page. The
keys of the page that a request writes lie beside the pages as they are (its *tail*), and are coded when the page is
full.

A query attends to the keys of its own page as they are, and to those of all pages before it decoded; values are always
decoded. So results do not depend on which tokens are computed together, and equal attention over the decoded cache.

A tail has room for two pages: drafts that run into the next page and are rejected leave this one's keys in place.

On GPUs, tokens of decodes are added by one kernel (`four_bit_append_kernel.py`) and attended to by another
(`four_bit_attention_kernel.py`), for which codes lie as they do; prompts have kernels of their own
(`four_bit_prompt_kernel.py`). On a CPU, and in other dtypes than fp16 and bf16, all are plain functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.serve.attention.batch import PagedBatch
from weft.serve.attention.layer_cache import CacheFormat, CacheSizes, LayerCache, staging
from weft.serve.attention.paged_attention import masked_attention
from weft.serve.attention.shared_memory import has_room_for_four_bits, shared_bytes
from weft.serve.weights.group_codes import codes_of, group_range, pack_halves, unpack_halves

GROUPS = (32, 64, 128)  # tokens of a page, whose keys share a scale for each channel
GROUP = 64
DECODED_TOKENS = 1 << 15  # that plain functions decode at a time


class FourBitFormat:
    """4 bits for each key and value, in groups of so many; scales and least values of 16 bits."""

    keeps_whole_blocks = True  # a tail belongs to a running request
    answers_choose = False
    has_kernel = True
    identity = ""

    def __init__(self, group: int = GROUP) -> None:
        self.name = "int4" if group == GROUP else f"int4-{group}"
        self.group = group
        self.block_size: int | None = group

    def part(self, layers: range, key_heads: range) -> CacheFormat:
        return self  # groups are within heads

    def layer(self, index: int, sizes: CacheSizes) -> LayerCache:
        return FourBitLayer(sizes)

    def bytes_per_token(self, num_key_heads: int, head_dim: int, item_bytes: int) -> float:
        codes = head_dim  # half a byte for each key and value
        of_keys, of_values = 4 * head_dim / self.group, 4 * value_groups(head_dim, self.group)
        return num_key_heads * (codes + of_keys + of_values)

    def bytes_per_row(self, num_key_heads: int, head_dim: int, item_bytes: int) -> int:
        return 2 * self.group * num_key_heads * head_dim * item_bytes

    def bytes_of_layer(self, num_key_heads: int, head_dim: int, item_bytes: int) -> int:
        return 0


def value_groups(head_dim: int, group: int) -> int:
    """How many scales a value has: one, or one for each half of a head that is larger than a group."""
    return 1 if head_dim <= group else 2


class FourBitLayer:
    """The cache of one block of the model."""

    counts: Tensor | None = None
    has_kernel = True

    def __init__(self, sizes: CacheSizes) -> None:
        blocks, heads, dim = sizes.num_blocks, sizes.num_key_heads, sizes.head_dim
        if dim % 2 or sizes.block_size not in GROUPS:
            raise ConfigError(
                f"a cache of 4 bits needs heads of an even size and blocks of 32, 64 or 128 tokens, not heads of {dim} "
                f"and blocks of {sizes.block_size}; give block_size = {GROUP}, or serve without --cache int4"
            )
        self._sizes, self._size = sizes, sizes.block_size

        def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=sizes.device)

        # A byte has two channels of a key, half a head apart, or two tokens of a value's channel, half a page apart.
        # Ranges are pairs of a scale and a least value.
        self._key_codes = zeros(blocks, heads, self._size, dim // 2, dtype=torch.uint8)
        self._key_ranges = zeros(blocks, heads, dim, 2)
        self._value_codes = zeros(blocks, heads, dim, self._size // 2, dtype=torch.uint8)
        self._value_ranges = zeros(blocks, heads, value_groups(dim, self._size), self._size, 2)
        self.pages: Sequence[Tensor] = (self._key_codes, self._key_ranges, self._value_codes, self._value_ranges)
        # The last row is for padding.
        self._tails = zeros(sizes.num_rows + 1, 2, self._size, heads, dim, dtype=sizes.dtype)

    def room(self, batch: PagedBatch) -> tuple[Tensor, Tensor, Tensor]:
        return staging(batch, self._sizes)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        parts, number = list[Tensor](), batch.num_decodes
        has_kernels = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
        if number:
            decode = self._decode_by_kernel if self.has_kernel and has_kernels else self._decode
            parts.append(decode(query[:number], keys[:number], values[:number], batch, window))
        if batch.prompt_queries:
            prompts = (
                self._prompts_by_kernel
                if has_kernels and has_room_for_four_bits(shared_bytes(query.device))
                else self._prompts
            )
            parts.append(prompts(query[number:], keys[number:], values[number:], batch, window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _prompts(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        """Add the chunks of prompts to the cache, one after the other, and attend to it."""
        begin, number, parts = 0, batch.num_decodes, list[Tensor]()
        self._keep_values(values, batch.slots[number:])
        for index, count in enumerate(batch.prompt_queries, number):
            end = begin + count
            length = batch.prompt_lengths[index - number]
            row, blocks = batch.rows[index], batch.tables[index, : -(-length // self._size)]
            own = self._keep_prompt_keys(keys[begin:end], length, row, blocks)
            parts.append(self._attend_prompt(query[begin:end], own, length, blocks, window))
            begin = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _prompts_by_kernel(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None
    ) -> Tensor:
        from weft.serve.attention.four_bit_prompt_kernel import attend_prompts_by_kernel

        return attend_prompts_by_kernel(query, keys, values, self.pages, self._tails, batch, window)

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        self._keep_values(values, batch.slots[: batch.num_decodes])
        self._keep_decoded_keys(keys, batch)
        return self._attend_decodes(query, batch, window)

    def _decode_by_kernel(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None
    ) -> Tensor:
        from weft.serve.attention.four_bit_append_kernel import append_by_kernel
        from weft.serve.attention.four_bit_attention_kernel import four_bit_attention_by_kernel

        number = batch.num_decodes
        rows, tables, lengths = batch.rows[:number], batch.tables[:number], batch.lengths[:number]
        append_by_kernel(keys, values, self.pages, self._tails, batch.positions[:number], batch.slots[:number], rows)
        return four_bit_attention_by_kernel(query, self.pages, self._tails, tables, lengths, rows, window)

    def _keep_values(self, values: Tensor, slots: Tensor) -> None:
        """Code values. A byte has two tokens, which are written one after the other: in both turns, tokens of the other
        half of a page go to the page for padding.
        """
        grouped = values.unflatten(-1, (self._value_ranges.shape[2], -1))
        scale, least = group_range(grouped, 4)
        codes = codes_of(grouped, scale, least, 4).flatten(-2)
        blocks, places = slots // self._size, slots % self._size
        self._value_ranges[blocks, :, :, places] = torch.stack([scale, least], dim=-1)
        for half in range(2):
            own = torch.where(places // (self._size // 2) == half, blocks, self._sizes.num_blocks - 1)
            others = self._value_codes[own, :, :, places % (self._size // 2)] & (240 >> 4 * half)
            self._value_codes[own, :, :, places % (self._size // 2)] = others | (codes << 4 * half)

    def _keep_decoded_keys(self, keys: Tensor, batch: PagedBatch) -> None:
        """Add one token to each tail. Pages that are full now are coded; codes of others go to the page for padding."""
        number = batch.num_decodes
        places, rows = batch.positions[:number].long(), batch.rows[:number].long()
        halves = places // self._size % 2
        self._tails[rows, halves, places % self._size] = keys
        blocks = batch.slots[:number] // self._size
        blocks = torch.where(places % self._size == self._size - 1, blocks, self._sizes.num_blocks - 1)
        self._code_pages(self._tails[rows, halves], blocks)

    def _keep_prompt_keys(self, keys: Tensor, length: int, row: Tensor, blocks: Tensor) -> Tensor:
        """Add a chunk of a request to its tail, and code pages that are full. Returns the keys as they are, from the
        beginning of the chunk's first page on.
        """
        start = length - len(keys)
        first = start // self._size
        own = torch.cat([self._tails[row, first % 2, : start % self._size], keys])
        num_full = len(own) // self._size
        if num_full:
            pages = own[: num_full * self._size].unflatten(0, (num_full, self._size))
            self._code_pages(pages, blocks[first : first + num_full].long())
        last = (length - 1) // self._size
        for page in (first, last) if (last - first) % 2 else (last,):  # where both have one half of the tail, the last
            part = own[(page - first) * self._size : (page - first + 1) * self._size]
            self._tails[row, page % 2, : len(part)] = part
        return own

    def _code_pages(self, pages: Tensor, blocks: Tensor) -> None:
        """Code keys [pages, tokens, key heads, head_dim] into blocks."""
        grouped = pages.permute(0, 2, 3, 1)
        scale, least = group_range(grouped, 4)
        self._key_codes[blocks] = pack_halves(codes_of(grouped, scale, least, 4).transpose(-1, -2))
        self._key_ranges[blocks] = torch.stack([scale, least], dim=-1)

    def decoded(self, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The decoded keys and values of blocks [...]: [..., tokens, key heads, head_dim]."""
        wide = torch.promote_types(dtype, torch.float32)
        scale, least = self._key_ranges[blocks].to(wide).unbind(-1)  # [..., key heads, head_dim]
        keys = unpack_halves(self._key_codes[blocks]).to(wide) * scale[..., None, :] + least[..., None, :]
        scale, least = self._value_ranges[blocks].to(wide).unbind(-1)  # [..., key heads, groups, tokens]
        codes = unpack_halves(self._value_codes[blocks]).unflatten(-2, (scale.shape[-2], -1)).to(wide)
        values = (codes * scale[..., None, :] + least[..., None, :]).flatten(
            -3, -2
        )  # [..., key heads, head_dim, tokens]
        return keys.movedim(-3, -2).to(dtype), values.movedim(-1, -3).to(dtype)

    def _attend_decodes(self, query: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        """Attention of decodes, some requests at a time, so that few keys and values are decoded at once."""
        number = batch.num_decodes
        at_once = max(1, DECODED_TOKENS // (batch.tables.shape[1] * self._size))
        given = (query, batch.tables, batch.lengths, batch.rows)
        parts = []
        for begin in range(0, number, at_once):
            some, tables, lengths, rows = (one[begin : min(begin + at_once, number)] for one in given)
            parts.append(self._attend_requests(some, tables, lengths, rows, window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_requests(
        self, query: Tensor, tables: Tensor, lengths: Tensor, rows: Tensor, window: int | None
    ) -> Tensor:
        keys, values = self.decoded(tables.long(), query.dtype)  # [requests, blocks, tokens, key heads, head_dim]
        own = (lengths.long() - 1) // self._size
        keys[torch.arange(len(query), device=query.device), own] = self._tails[rows.long(), own % 2]
        places = torch.arange(tables.shape[1] * self._size, device=query.device)
        mask = places < lengths[:, None]
        if window is not None:
            mask = mask & (places >= lengths[:, None] - window)
        # Other requests may have left NaN behind the last token, and weights of 0 times NaN are NaN.
        unseen = ~mask[..., None, None]
        keys, values = (one.flatten(1, 2).masked_fill(unseen, 0) for one in (keys, values))
        return masked_attention(query[:, None], keys, values, mask[:, None, None])[:, 0]

    def _attend_prompt(self, query: Tensor, own: Tensor, length: int, blocks: Tensor, window: int | None) -> Tensor:
        """Attention of a chunk, page by page of its queries. `own` are the keys from its first page on."""
        decoded, values = (one.flatten(0, 1) for one in self.decoded(blocks.long(), query.dtype))
        start = length - len(query)
        first, parts = start // self._size, list[Tensor]()
        for page in range(first, (length - 1) // self._size + 1):
            begin, end = max(start, page * self._size), min(length, (page + 1) * self._size)
            of_page = own[(page - first) * self._size : end - first * self._size]
            keys = torch.cat([decoded[: page * self._size], of_page])
            places = torch.arange(end, device=query.device)
            distance = places[begin:, None] - places
            mask = distance >= 0
            if window is not None:
                mask = mask & (distance < window)
            queries = query[begin - start : end - start]
            parts.append(masked_attention(queries[None], keys[None], values[None, :end], mask)[0])
        return torch.cat(parts)

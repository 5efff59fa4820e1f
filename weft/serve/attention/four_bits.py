"""Keys and values in 4 bits, a storage of the cache.

A page has 32, 64 or 128 tokens. Keys are coded by channel, over the tokens of a page, because some channels are much
larger than others; values are coded by token, over their channels: half a head, or a head no larger than a page. The
keys of the page that a request writes lie beside the pages as they are (its *tail*), and are coded when the page is
full.

A query attends to the keys of its own page as they are, and to those of all pages before it dequantised; values always
are. So results do not depend on which tokens are computed together, and equal attention over the dequantised cache.

A tail has room for two pages: drafts that run into the next page and are rejected leave this one's keys in place.

On GPUs, tokens of decodes are added by one kernel (`four_bit_append_kernel.py`) and attended to by another
(`four_bit_attention_kernel.py`), for which codes lie as they do; prompts have kernels of their own
(`four_bit_prompt_kernel.py`). On a CPU, in other dtypes than fp16 and bf16, and over pages that ranks hold together,
all are plain functions: the kernels give no logarithms. A rank codes its own pages, and keeps the tail of a request
whose newest page is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.serve.attention.attend import (
    attend_chunk,
    attend_decodes,
    has_room_for_four_bits,
    joined,
    shared_bytes,
    staging,
    takes_kernels,
)
from weft.serve.attention.batch import CacheSizes, PagedBatch
from weft.serve.weights.group_codes import codes_of, group_range, pack_halves, unpack_halves

GROUPS = (32, 64, 128)  # tokens of a page, whose keys share a scale for each channel
GROUP = 64
DEQUANTISED_TOKENS = 1 << 15  # that plain functions dequantise at a time


@dataclass(frozen=True)
class FourBitStorage:
    """4 bits for each key and value, in groups of so many; scales and zero points of 16 bits."""

    group: int = GROUP
    kind = "int4"
    keeps_whole_blocks = True  # a tail belongs to a running request

    @property
    def name(self) -> str:
        return self.kind if self.group == GROUP else f"{self.kind}-{self.group}"

    @property
    def block_size(self) -> int | None:
        return self.group

    def new_pages(self, sizes: CacheSizes) -> FourBitPages:
        return FourBitPages(sizes)

    def bytes_per_token(self, num_key_heads: int, head_dim: int, item_bytes: int) -> float:
        codes = head_dim  # half a byte for each key and value
        of_keys, of_values = 4 * head_dim / self.group, 4 * value_groups(head_dim, self.group)
        return num_key_heads * (codes + of_keys + of_values)

    def bytes_per_row(self, num_key_heads: int, head_dim: int, item_bytes: int) -> int:
        return 2 * self.group * num_key_heads * head_dim * item_bytes


def value_groups(head_dim: int, group: int) -> int:
    """Return how many scales a value has: one, or one for each half of a head that is larger than a group."""
    return 1 if head_dim <= group else 2


class FourBitPages:
    """The keys and values of one block of the model."""

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
        # Ranges are pairs of a scale and a zero point.
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
        """Keep the keys and values of a step. Returns the attention of its tokens [tokens, heads, head_dim], or this
        rank's part of it.
        """
        parts, number = list[Tensor](), batch.num_decodes
        has_kernels = takes_kernels(query) and batch.share is None
        if number:
            decode = self._decode_by_kernel if has_kernels else self._decode
            parts.append(decode(query[:number], keys[:number], values[:number], batch, window))
        if batch.prompt_queries:
            by_kernel = has_kernels and has_room_for_four_bits(shared_bytes(query.device))
            prompts = self._prompts_by_kernel if by_kernel else self._prompts
            parts.append(prompts(query[number:], keys[number:], values[number:], batch, window))
        return joined(parts)

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        self._keep_values(values, batch.slots[: batch.num_decodes])
        self._keep_keys_of_decodes(keys, batch)
        return attend_decodes(query, self, batch, window)

    def _decode_by_kernel(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None
    ) -> Tensor:
        from weft.serve.attention.four_bit_append_kernel import append_by_kernel
        from weft.serve.attention.four_bit_attention_kernel import four_bit_attention_by_kernel

        number = batch.num_decodes
        rows, tables, lengths = batch.rows[:number], batch.tables[:number], batch.lengths[:number]
        append_by_kernel(keys, values, self.pages, self._tails, batch.positions[:number], batch.slots[:number], rows)
        return four_bit_attention_by_kernel(query, self.pages, self._tails, tables, lengths, rows, window)

    def _prompts(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        """Add the chunks of prompts to the cache, one after the other, and attend to it."""
        begin, number, parts = 0, batch.num_decodes, list[Tensor]()
        self._keep_values(values, batch.slots[number:])
        for index, count in enumerate(batch.prompt_queries, number):
            end = begin + count
            own = self._keep_prompt_keys(keys[begin:end], batch, index)
            parts += self._attend_prompt(query[begin:end], own, batch, index, window)
            begin = end
        return joined(parts)

    def _prompts_by_kernel(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None
    ) -> Tensor:
        from weft.serve.attention.four_bit_prompt_kernel import attend_prompts_by_kernel

        return attend_prompts_by_kernel(query, keys, values, self.pages, self._tails, batch, window)

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

    def _keep_keys_of_decodes(self, keys: Tensor, batch: PagedBatch) -> None:
        """Add one token to each tail. Pages that are full now are coded; codes of others go to the page for padding,
        and tokens of other ranks to the row for padding.
        """
        is_own, places = self._newest(batch)
        rows = batch.rows[: batch.num_decodes].long()
        rows = torch.where(is_own, rows, self._sizes.num_rows)
        halves = places // self._size % 2
        self._tails[rows, halves, places % self._size] = keys
        blocks = batch.slots[: batch.num_decodes] // self._size
        blocks = torch.where(places % self._size == self._size - 1, blocks, self._sizes.num_blocks - 1)
        self._code_pages(self._tails[rows, halves], blocks)

    def _newest(self, batch: PagedBatch) -> tuple[Tensor, Tensor]:
        """Return whether the newest token of each decode is this rank's own, and the number of the newest own one."""
        share, ends = batch.pages, batch.lengths[: batch.num_decodes].long()
        is_own = (ends - 1) // self._size % share.degree == share.index
        return is_own, (share.count(ends) - 1).clamp(min=0)

    def _keep_prompt_keys(self, keys: Tensor, batch: PagedBatch, index: int) -> Tensor:
        """Add a chunk of a request, number `index` of the batch, to its tail, and code pages that are full. Returns the
        own keys as they are, from the beginning of the chunk's first own page on.
        """
        share, end = batch.pages, batch.prompt_lengths[index - batch.num_decodes]
        row, length = batch.rows[index], share.number(end)
        if share.degree > 1:
            places = torch.arange(end - len(keys), end, device=keys.device)
            keys = keys[places // self._size % share.degree == share.index]
            if not len(keys):
                return keys
        start = length - len(keys)
        first = start // self._size
        own = torch.cat([self._tails[row, first % 2, : start % self._size], keys])
        num_full = len(own) // self._size
        if num_full:
            pages = own[: num_full * self._size].unflatten(0, (num_full, self._size))
            self._code_pages(pages, batch.tables[index, first : first + num_full].long())
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

    def dequantised(self, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the dequantised keys and values of blocks [...]: [..., tokens, key heads, head_dim]."""
        wide = torch.promote_types(dtype, torch.float32)
        scale, least = self._key_ranges[blocks].to(wide).unbind(-1)  # [..., key heads, head_dim]
        keys = unpack_halves(self._key_codes[blocks]).to(wide) * scale[..., None, :] + least[..., None, :]
        scale, least = self._value_ranges[blocks].to(wide).unbind(-1)  # [..., key heads, groups, tokens]
        codes = unpack_halves(self._value_codes[blocks]).unflatten(-2, (scale.shape[-2], -1)).to(wide)
        values = (codes * scale[..., None, :] + least[..., None, :]).flatten(
            -3, -2
        )  # [..., key heads, head_dim, tokens]
        return keys.movedim(-3, -2).to(dtype), values.movedim(-1, -3).to(dtype)

    def requests_at_once(self, batch: PagedBatch) -> int:
        """Return a number of requests of which few keys and values are dequantised at once."""
        return max(1, DEQUANTISED_TOKENS // (batch.tables.shape[1] * self._size))

    def read(self, query: Tensor, batch: PagedBatch, some: slice, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return dequantised keys and values. The keys of a request's newest page are as they are, on the rank that has
        it.
        """
        keys, values = self.dequantised(batch.tables[some].long(), query.dtype)
        is_own, newest = (one[some] for one in self._newest(batch))  # [requests, blocks, tokens, key heads, head_dim]
        requests, pages = torch.arange(len(query), device=query.device), newest // self._size
        tails = self._tails[batch.rows[some].long(), pages % 2]
        keys[requests, pages] = torch.where(is_own[:, None, None, None], tails, keys[requests, pages])
        return keys.flatten(1, 2), values.flatten(1, 2), batch.own_places(window)[1][some]

    def _attend_prompt(
        self, query: Tensor, own: Tensor, batch: PagedBatch, index: int, window: int | None
    ) -> list[Tensor]:
        """Return the attention of a chunk, page by page of its queries. `own` are this rank's keys from the chunk's
        first own page on.
        """
        share, length = batch.pages, batch.prompt_lengths[index - batch.num_decodes]
        start, number = length - len(query), share.number(length)
        first = number - len(own)  # the first token of `own`, by number
        blocks = batch.tables[index, : -(-number // self._size)].long()
        coded, values = (one.flatten(0, 1) for one in self.dequantised(blocks, query.dtype))
        parts = list[Tensor]()
        for page in range(start // self._size, (length - 1) // self._size + 1):
            begin, end = max(start, page * self._size), min(length, (page + 1) * self._size)
            before, seen = share.number(page * self._size), share.number(end)
            key = torch.cat([coded[:before], own[before - first : seen - first]])
            parts.append(attend_chunk(query[begin - start : end - start], key, values[:seen], end, window, share))
        return parts

"""Keys and values as they are, in pages: a storage of the cache, and the attention of all tokens to it.

On a CPU, and in dtypes other than fp16 and bf16, plain functions run. GPUs have Triton kernels for decodes
(`decode_attention_kernel.py`) and for prompts (`prompt_attention_kernel.py`), which come in tiles of `TILE_QUERIES`
tokens, and torch's flash attention for long prompts. Kernels give parts of shared pages too, except decodes with a
sliding window; flash attention does not, as it has no mask for pages that lie apart. A step of few decodes is one
kernel instead (`whole_attention_kernel.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.serve.attention.attend import (
    attend_chunk,
    attend_decodes,
    has_room_for_tiles,
    joined,
    room_for_parts,
    shared_bytes,
    takes_kernels,
)
from weft.serve.attention.batch import CacheSizes, DecodePlaces, PagedBatch, PageShare, decode_places, slots_of

MAX_WHOLE_DECODES = 16  # requests of a step whose attention is one kernel
_TILED_LENGTH = 2048  # of prompts that are attended to in tiles; torch's own flash attention copies keys and values
PromptAttention = Callable[[Tensor, Tensor, Tensor, PagedBatch, int | None], Tensor]
_MAX_HEAD_DIM = 256  # of kernels of prompts and of parts


class PlainStorage:
    """Keys and values in the model's own dtype, in pages of any size."""

    kind = name = "plain"
    block_size: int | None = None
    keeps_whole_blocks = False

    def new_pages(self, sizes: CacheSizes) -> PlainPages:
        shape = (2, sizes.num_blocks, sizes.block_size, sizes.num_key_heads, sizes.head_dim)
        return PlainPages(*torch.zeros(shape, dtype=sizes.dtype, device=sizes.device))

    def bytes_per_token(self, num_key_heads: int, head_dim: int, item_bytes: int) -> float:
        return 2 * num_key_heads * head_dim * item_bytes

    def bytes_per_row(self, num_key_heads: int, head_dim: int, item_bytes: int) -> int:
        return 0


class PlainPages:
    """The keys and values of one block of the model: [blocks, block_size, key heads, head_dim] each."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.pages: Sequence[Tensor] = (keys, values)
        self.keys, self.values = keys.flatten(0, 1), values.flatten(0, 1)

    def room(self, batch: PagedBatch) -> tuple[Tensor, Tensor, Tensor]:
        return batch.slots, self.keys, self.values

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        """Return the attention of a step's tokens [tokens, heads, head_dim], or this rank's part of it. Keys and values
        are in their slots already.
        """
        number, parts = batch.num_decodes, list[Tensor]()
        if batch.tiles is not None:
            return self._attend_recorded(query, batch, batch.tiles, window)
        if number:
            parts.append(self._attend_decodes(query[:number], batch, window))
        if batch.prompt_queries:
            parts.append(self.attend_prompts(query[number:], batch, window))
        return joined(parts)

    def requests_at_once(self, batch: PagedBatch) -> int:
        return batch.num_decodes

    def read(self, query: Tensor, batch: PagedBatch, some: slice, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        slots, mask = (one[some] for one in batch.own_places(window))
        return self.keys[slots], self.values[slots], mask

    def read_places(self, batch: PagedBatch, some: slice, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of some decodes at `places`, the numbers of own tokens [requests, key heads,
        chosen]: [requests, chosen, key heads, head_dim] each.
        """
        num_key_heads = places.shape[1]
        slots = batch.own_slots[some].long()[:, None].expand(-1, num_key_heads, -1).gather(2, places)
        key_heads = torch.arange(num_key_heads, device=places.device)[None, :, None]
        return self.keys[slots, key_heads].transpose(1, 2), self.values[slots, key_heads].transpose(1, 2)

    def _attend_recorded(self, query: Tensor, batch: PagedBatch, tiles: Tensor, window: int | None) -> Tensor:
        """Return the attention in a step that is recorded as a CUDA graph: padding is in no tile, and gets zeros."""
        number, out = batch.num_decodes, torch.zeros_like(query)
        if number:
            places = (batch.tables[:number], batch.lengths[:number], batch.block_size, window)
            decode = _kernel_for_decodes() if takes_kernels(query) else decode_attention
            decode(query[:number], self.keys, self.values, *places, out=out[:number])
        by_tiles = _kernel_for_tiles() if takes_kernels(query) else prompt_attention_by_tiles
        by_tiles(query, self.keys, self.values, batch.tables, tiles, batch.block_size, window, out)
        return out

    def _attend_decodes(self, query: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        number = batch.num_decodes
        if batch.share is None:
            if query.device.type == "cpu":
                return decode_at(query, self.keys, self.values, batch.decode_places(window))
            places = (batch.tables[:number], batch.lengths[:number], batch.block_size, window)
            decode = _kernel_for_decodes() if takes_kernels(query) else decode_attention
            mixed: Tensor = decode(query, self.keys, self.values, *places)
            return mixed
        if window is None and takes_kernels(query) and query.shape[-1] <= _MAX_HEAD_DIM:
            out = room_for_parts(query)
            places = (batch.tables[:number], batch.own_lengths, batch.block_size, None)
            _kernel_for_decodes()(query, self.keys, self.values, *places, out=out)
            return out
        return attend_decodes(query, self, batch, window)

    def attend_prompts(self, query: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        """Return the attention of the tokens of prompts alone [tokens of prompts, heads, head_dim], or this rank's
        part.
        """
        keys, values = self.keys, self.values
        on_gpu = takes_kernels(query) and query.shape[-1] <= _MAX_HEAD_DIM
        is_short = batch.share is not None or max(batch.prompt_lengths) <= _TILED_LENGTH
        has_room = has_room_for_tiles(query.shape[1], keys.shape[1], query.shape[2], shared_bytes(query.device))
        if on_gpu and is_short and has_room:
            out = torch.empty_like(query) if batch.share is None else room_for_parts(query)
            places = (batch.tables, batch.prompt_tiles, batch.block_size, window, out, batch.share)
            _kernel_for_tiles()(query, keys, values, *places)
            return out
        is_flash = on_gpu and batch.share is None and query.shape[-1] % 8 == 0
        prompt: PromptAttention = _flash_for(query) if is_flash else prompt_attention
        return prompt(query, keys, values, batch, window)


def _kernel_for_decodes():  # type: ignore[no-untyped-def]
    from weft.serve.attention.decode_attention_kernel import decode_attention_by_kernel

    return decode_attention_by_kernel


def _kernel_for_tiles():  # type: ignore[no-untyped-def]
    from weft.serve.attention.prompt_attention_kernel import prompt_attention_by_kernel

    return prompt_attention_by_kernel


def _flash_for(query: Tensor):  # type: ignore[no-untyped-def]
    from weft.serve.attention.paged_flash_kernel import has_paged_flash, paged_flash_attention

    has_pages = has_paged_flash(query.device, query.dtype, query.shape[-1])
    return paged_flash_attention if has_pages else flash_prompt_attention


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    block_size: int,
    window: int | None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the attention of one query for each request, to the last `window` of the request's `lengths` tokens.

    Into `out`, only the results of requests that have tokens are written.
    """
    mixed = decode_at(query, keys, values, decode_places(tables, lengths, block_size, window))
    return mixed if out is None else out.copy_(torch.where(lengths[:, None, None] > 0, mixed, out))


def decode_at(query: Tensor, keys: Tensor, values: Tensor, places: DecodePlaces) -> Tensor:
    """Return the attention of one query for each request [requests, heads, head_dim]. Queries that share a key head are
    rows of one product.
    """
    if isinstance(places, slice):
        key, value, mask = heads_at(keys, places), heads_at(values, places), None
    else:
        slots, mask = places[0], places[1][:, None, None]
        flat = (pages.index_select(0, slots.flatten()).unflatten(0, slots.shape) for pages in (keys, values))
        key, value = (one.transpose(1, 2) for one in flat)
    grouped = query.view(query.shape[0], keys.shape[1], -1, query.shape[2])
    return F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask).flatten(1, 2)


def heads_at(pages: Tensor, slots: slice) -> Tensor:
    """Return keys or values [slots, heads, head_dim] at some slots as [1, heads, slots, head_dim], a view by
    one call.
    """
    of_slot, of_head, of_number = pages.stride()
    size = (1, pages.shape[1], slots.stop - slots.start, pages.shape[2])
    start = pages.storage_offset() + slots.start * of_slot
    return pages.as_strided(size, (0, of_head, of_slot, of_number), start)


def prompt_attention(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
    """Return the attention of chunks of prompts, end to end: each query attends to its request's tokens up to
    its own.
    """
    chunks = zip(query.split(list(batch.prompt_queries)), batch.prompt_slots, batch.prompt_lengths, strict=True)
    return torch.cat(
        [attend_chunk(chunk, keys[slots], values[slots], end, window, batch.pages) for chunk, slots, end in chunks]
    )


def prompt_attention_by_tiles(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    tiles: Tensor,
    block_size: int,
    window: int | None,
    out: Tensor,
) -> None:
    """Equals `prompt_attention` for the tokens in tiles (see `PagedBatch`); their results go to `out`."""
    for first, number, row, position in tiles.T.tolist():
        if number:
            here, end = slice(first, first + number), position + number
            slots = slots_of(tables[row, None], end, block_size)[0]
            whole = PageShare(0, 1, block_size)
            out[here] = attend_chunk(query[here], keys[slots], values[slots], end, window, whole)


def flash_prompt_attention(
    query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None
) -> Tensor:
    """Equals `prompt_attention`, by torch's flash attention over sequences of different lengths, all in one call.

    Its causal mask is aligned to the end of the keys, as chunks need it.
    """
    slots, key_starts = batch.copied_prompts
    mixed: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        keys[slots],
        values[slots],
        batch.prompt_starts,
        key_starts,
        max(batch.prompt_queries),
        max(batch.prompt_lengths),
        0.0,
        True,
        False,
        window_size_left=None if window is None else window - 1,
        window_size_right=0,
    )[0]
    return mixed

"""Attention over pages: the keys and values of a request lie in blocks anywhere in the cache, which its table names.

Keys and values of one layer are [slots, key heads, head_dim] (`batch.py`). On a CPU, or in float32, the plain functions
below run. GPUs use Triton kernels for decodes (`decode_attention_kernel.py`) and for prompts
(`prompt_attention_kernel.py`), which come in tiles of `TILE_QUERIES` tokens, and torch's flash attention for long ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.serve.attention.batch import DecodePlaces, PagedBatch, decode_places, slots_of
from weft.serve.attention.shared_memory import has_room_for_tiles, shared_bytes

_TILED_LENGTH = 2048  # of prompts that are attended to in tiles; torch's own flash attention copies keys and values


def attend(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
    """Attention of the tokens of a batch: query and result are [tokens, heads, head_dim]."""
    num_decodes = batch.num_decodes
    if num_decodes == query.shape[0] and query.device.type == "cpu" and batch.tiles is None:
        return decode_at(query, keys, values, batch.decode_places(window))
    on_gpu = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    given = (batch.tables[:num_decodes], batch.lengths[:num_decodes], batch.block_size, window)
    decode = _kernel_for_decodes() if on_gpu else decode_attention
    if batch.tiles is not None:
        out = torch.zeros_like(query)  # padding is in no tile
        if num_decodes:
            decode(query[:num_decodes], keys, values, *given, out=out[:num_decodes])
        by_tiles = _kernel_for_tiles() if on_gpu else prompt_attention_by_tiles
        by_tiles(query, keys, values, batch.tables, batch.tiles, batch.block_size, window, out)
        return out
    parts = []
    if num_decodes and query.device.type == "cpu":
        parts.append(decode_at(query[:num_decodes], keys, values, batch.decode_places(window)))
    elif num_decodes:
        parts.append(decode(query[:num_decodes], keys, values, *given))
    if batch.prompt_queries:
        parts.append(attend_prompts(query[num_decodes:], keys, values, batch, window))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_prompts(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
    """Attention of the tokens of prompts alone: query and result are [tokens of prompts, heads, head_dim]."""
    on_gpu = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256
    if on_gpu and max(batch.prompt_lengths) <= _TILED_LENGTH and fits_tiles(query, keys):
        out = torch.empty_like(query)
        _kernel_for_tiles()(query, keys, values, batch.tables, batch.prompt_tiles, batch.block_size, window, out)
        return out
    is_flash = on_gpu and query.shape[-1] % 8 == 0
    prompt = _flash_for(query) if is_flash else prompt_attention
    return prompt(query, keys, values, batch, window)


def fits_tiles(query: Tensor, keys: Tensor) -> bool:
    """Has the kernel of prompts in tiles room in the GPU's shared memory?"""
    return has_room_for_tiles(query.shape[1], keys.shape[1], query.shape[2], shared_bytes(query.device))


def _kernel_for_decodes():  # type: ignore[no-untyped-def]
    from weft.serve.attention.decode_attention_kernel import decode_attention_by_kernel

    return decode_attention_by_kernel


def _kernel_for_tiles():  # type: ignore[no-untyped-def]
    from weft.serve.attention.prompt_attention_kernel import prompt_attention_by_kernel

    return prompt_attention_by_kernel


def _flash_for(query: Tensor):  # type: ignore[no-untyped-def]
    from weft.serve.attention.paged_flash_kernel import has_paged_flash, paged_flash_attention

    has_pages = has_paged_flash(query.device, query.dtype, query.shape[-1], prompt_attention)
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
    """One query for each request: it attends to the last `window` of the request's `lengths` tokens.

    Into `out`, only the results of requests that have tokens are written.
    """
    mixed = decode_at(query, keys, values, decode_places(tables, lengths, block_size, window))
    return mixed if out is None else out.copy_(torch.where(lengths[:, None, None] > 0, mixed, out))


def decode_at(query: Tensor, keys: Tensor, values: Tensor, places: DecodePlaces) -> Tensor:
    """One query [requests, heads, head_dim] for each request. Queries that share a key head are rows of one product."""
    if isinstance(places, slice):
        key, value, mask = heads_at(keys, places), heads_at(values, places), None
    else:
        slots, mask = places[0], places[1][:, None, None]
        flat = (pages.index_select(0, slots.flatten()).unflatten(0, slots.shape) for pages in (keys, values))
        key, value = (one.transpose(1, 2) for one in flat)
    grouped = query.view(query.shape[0], keys.shape[1], -1, query.shape[2])
    return F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask).flatten(1, 2)


def heads_at(pages: Tensor, slots: slice) -> Tensor:
    """Keys or values [slots, heads, head_dim] at some slots as [1, heads, slots, head_dim], a view by one call."""
    of_slot, of_head, of_number = pages.stride()
    size = (1, pages.shape[1], slots.stop - slots.start, pages.shape[2])
    start = pages.storage_offset() + slots.start * of_slot
    return pages.as_strided(size, (0, of_head, of_slot, of_number), start)


def prompt_attention(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
    """Queries of chunks of prompts, end to end: each attends to what its request has in the cache up to itself."""
    parts = zip(query.split(list(batch.prompt_queries)), batch.prompt_slots, strict=True)
    return torch.cat([_chunk_attention(part, keys, values, slots, window) for part, slots in parts])


def _chunk_attention(query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, window: int | None) -> Tensor:
    """Queries of the last tokens of those in `slots`."""
    positions = torch.arange(len(slots), device=slots.device)
    distance = positions[-len(query) :, None] - positions  # [queries, keys]
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    return masked_attention(query[None], keys[slots][None], values[slots][None], mask)[0]


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
            here, slots = slice(first, first + number), slots_of(tables[row, None], position + number, block_size)[0]
            out[here] = _chunk_attention(query[here], keys, values, slots, window)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention of [batch, tokens, heads, head_dim]; key heads may be fewer. The mask is broadcast over heads."""
    group = query.shape[2] // key.shape[2]
    key, value = (heads.repeat_interleave(group, dim=2).transpose(1, 2) for heads in (key, value))
    return F.scaled_dot_product_attention(query.transpose(1, 2), key, value, attn_mask=mask).transpose(1, 2)


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

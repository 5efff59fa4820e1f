"""Attention over pages: the keys and values of a request lie in blocks anywhere in the cache, which its table names.

Keys and values of one layer are [slots, key heads, head_dim]; token t of a request lies in slot
`table[t // block_size] * block_size + t % block_size`. On a CPU, or in float32, the plain functions below run. GPUs use
Triton kernels for decodes (`decode_attention_kernel.py`) and for prompts (`prompt_attention_kernel.py`), which come in
tiles of `TILE_QUERIES` tokens, and torch's flash attention for long prompts. In steps that are recorded as CUDA graphs,
nothing may depend on numbers that the host knows: there, a tensor describes the tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.serve.cache.page_share import PageShare
from weft.serve.cache.shared_memory import has_room_for_tiles, shared_bytes

TILE_QUERIES = 16  # tokens of a prompt in a tile, at most; with the heads that share a key head, enough for a matmul
_TILED_LENGTH = 2048  # of prompts that are attended to in tiles; torch's own flash attention copies keys and values


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; the host does not wait for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


DecodePlaces = slice | tuple[Tensor, Tensor]  # slots that lie end to end, of one request; or those of `decode_places`


@dataclass
class PagedBatch:
    """The tokens of one step, end to end: first `num_decodes` requests with one token each, then chunks of prompts."""

    tokens: Tensor  # [tokens] ids
    positions: Tensor  # [tokens] in their requests
    slots: Tensor  # [tokens] where their keys and values go
    tables: Tensor  # [requests, blocks] int32
    lengths: Tensor  # [requests] int32: tokens in the cache after this step
    rows: Tensor  # [requests] int32: the rows of the requests, of which each that runs has its own
    block_size: int
    num_decodes: int
    prompt_queries: Sequence[int] = ()  # tokens of each chunk of a prompt
    prompt_lengths: Sequence[int] = ()  # tokens of each of these requests in the cache after this step
    # Of a recorded step, instead of the two before (`tiles_of`). `lengths` of requests that do not decode are 0.
    tiles: Tensor | None = None  # [4, tiles] int32
    share: PageShare | None = None  # ranks hold pages together: slots and `block_size` are of this rank's pages
    _places: dict[int | None, DecodePlaces] = field(default_factory=dict)  # by window
    _own_places: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)  # of `share`, by window
    _angles: tuple[Tensor, Tensor] | None = None

    def decode_places(self, window: int | None) -> DecodePlaces:
        """Where the decodes attend to, on a CPU. All blocks of the model with this window share it."""
        found = self._places.get(window)
        if found is None:
            run = self._run(window) if self.num_decodes == 1 else None
            given = (self.tables[: self.num_decodes], self.lengths[: self.num_decodes], self.block_size, window)
            found = self._places[window] = run or decode_places(*given)
        return found

    def _run(self, window: int | None) -> slice | None:
        """The slots that the first request attends to, if its blocks lie one after the other."""
        length = int(self.lengths[0])
        first, *others = self.tables[0, : -(-length // self.block_size)].tolist()
        if others != list(range(first + 1, first + 1 + len(others))):
            return None
        start = first * self.block_size
        return slice(start if window is None else start + max(0, length - window), start + length)

    @cached_property
    def own_lengths(self) -> Tensor:
        """How many tokens of each decode are in this rank's pages, which are a share."""
        assert self.share is not None
        return self.share.count(self.lengths[: self.num_decodes])

    def own_places(self, window: int | None) -> tuple[Tensor, Tensor]:
        """`decode_places` of this rank's pages, which are a share."""
        if window not in self._own_places:
            assert self.share is not None
            number = self.num_decodes
            slots = slots_of(self.tables[:number], self.tables.shape[1] * self.block_size, self.block_size)
            self._own_places[window] = slots, self.share.sees(self.lengths[:number], slots.shape[1], window)
        return self._own_places[window]

    def angles(self, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The tokens' angles (`angles_at`), of tables for all positions. All blocks share them."""
        if self._angles is None:
            self._angles = angles_at(rotary, self.positions)
        return self._angles

    @cached_property
    def prompt_slots(self) -> list[Tensor]:
        """The slots of all tokens in the cache, of each request with a chunk of a prompt."""
        return [
            slots_of(self.tables[index, None], length, self.block_size)[0]
            for index, length in enumerate(self.prompt_lengths, self.num_decodes)
        ]

    @cached_property
    def prompt_tiles(self) -> Tensor:
        """The tiles of all prompts; their first token is number 0."""
        tiles = tiles_of(self.prompt_queries, self.prompt_lengths, first_row=self.num_decodes)
        return to_device(torch.tensor(tiles, dtype=torch.int32).T.contiguous(), self.tokens.device)

    @cached_property
    def prompt_pages(self) -> Tensor:
        """The pages of all prompts' tokens (`pages_of`)."""
        pages = pages_of(self.prompt_queries, self.prompt_lengths, self.block_size, self.num_decodes)
        return to_device(torch.tensor(pages, dtype=torch.int32).T.contiguous(), self.tokens.device)

    @cached_property
    def prompt_tokens(self) -> tuple[Tensor, Tensor]:
        """Of each token of a prompt, the row in the block tables, and how many tokens it may attend to (int32)."""
        chunks = enumerate(zip(self.prompt_queries, self.prompt_lengths, strict=True), self.num_decodes)
        each = [(row, length - number + index + 1) for row, (number, length) in chunks for index in range(number)]
        requests, lengths = to_device(torch.tensor(each, dtype=torch.int32).T.contiguous(), self.tokens.device)
        return requests, lengths

    @cached_property
    def prompt_starts(self) -> Tensor:
        """Where the queries of each prompt begin, and where the last ones end (int32)."""
        return to_device(_starts(self.prompt_queries), self.tokens.device)

    @cached_property
    def copied_prompts(self) -> tuple[Tensor, Tensor]:
        """The slots of all tokens of prompts end to end, and where those of each begin in them (int32)."""
        return torch.cat(self.prompt_slots), to_device(_starts(self.prompt_lengths), self.tokens.device)


def _starts(numbers: Sequence[int]) -> Tensor:
    return torch.tensor([0, *numbers]).cumsum(0).to(torch.int32)


def angles_at(rotary: tuple[Tensor, Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
    """From cos and sin [positions, head_dim]: what a head and the head with its halves swapped are multiplied with, at
    some positions, so that their sum is the rotated head. Both are [tokens, 1, head_dim].
    """
    cos, sin = (table[positions][:, None] for table in rotary)
    first, second = sin.chunk(2, dim=-1)
    return cos, torch.cat([-first, second], dim=-1)


def tiles_of(
    queries: Sequence[int], lengths: Sequence[int], first_token: int = 0, first_row: int = 0
) -> list[tuple[int, int, int, int]]:
    """The tiles of chunks of prompts: the first token, how many there are, the row in the block tables, the position.

    Each chunk has so many `queries`, the last of the `lengths` tokens that its request has in the cache.
    """
    found = []
    for row, (number, length) in enumerate(zip(queries, lengths, strict=True), first_row):
        found += [
            (first_token + start, min(TILE_QUERIES, number - start), row, length - number + start)
            for start in range(0, number, TILE_QUERIES)
        ]
        first_token += number
    return found


def pages_of(
    queries: Sequence[int], lengths: Sequence[int], block_size: int, first_row: int = 0
) -> list[tuple[int, int, int, int, int, bool]]:
    """The pages of chunks of prompts: the row in the block tables, the page's number in its request, the first of the
    chunk's tokens in it among the tokens of all chunks, where these begin and end in the page, and whether the page is
    one of the two that the request has beside the cache after the chunk (`four_bit_cache.py`).

    Each chunk has so many `queries`, the last of the `lengths` tokens that its request has in the cache.
    """
    found, before = [], 0  # tokens of chunks before this one
    for row, (number, length) in enumerate(zip(queries, lengths, strict=True), first_row):
        start = length - number
        first, last = start // block_size, (length - 1) // block_size
        for page in range(first, last + 1):
            begin, end = max(start - page * block_size, 0), min(length - page * block_size, block_size)
            is_kept = page == last or (page == first and (last - first) % 2 == 1)
            found.append((row, page, before + page * block_size + begin - start, begin, end, is_kept))
        before += number
    return found


def slots_of(tables: Tensor, length: int, block_size: int) -> Tensor:
    """The slots of the first `length` tokens of each table [requests, blocks] -> [requests, length]."""
    offsets = torch.arange(block_size, device=tables.device)
    num_blocks = -(-length // block_size)
    return (tables[:, :num_blocks, None] * block_size + offsets).flatten(1)[:, :length]


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
    from weft.serve.cache.decode_attention_kernel import decode_attention_by_kernel

    return decode_attention_by_kernel


def _kernel_for_tiles():  # type: ignore[no-untyped-def]
    from weft.serve.cache.prompt_attention_kernel import prompt_attention_by_kernel

    return prompt_attention_by_kernel


def _flash_for(query: Tensor):  # type: ignore[no-untyped-def]
    from weft.serve.cache.paged_flash_kernel import has_paged_flash, paged_flash_attention

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
    """One query for each request: it attends to the last `window` of the request's `lengths` tokens.

    Into `out`, only the results of requests that have tokens are written.
    """
    mixed = decode_at(query, keys, values, decode_places(tables, lengths, block_size, window))
    return mixed if out is None else out.copy_(torch.where(lengths[:, None, None] > 0, mixed, out))


def decode_places(tables: Tensor, lengths: Tensor, block_size: int, window: int | None) -> tuple[Tensor, Tensor]:
    """The slots of requests, and which of them their newest tokens attend to: both [requests, slots]."""
    slots = slots_of(tables, tables.shape[1] * block_size, block_size)
    positions = torch.arange(slots.shape[1], device=slots.device)
    mask = positions < lengths[:, None]
    return slots, mask if window is None else mask & (positions >= lengths[:, None] - window)


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

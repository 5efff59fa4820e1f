"""What a step attends to: its tokens, the pages of their requests, a rank's share of these pages, and tiles of prompts.

Keys and values of one layer are [slots, key heads, head_dim]; token t of a request lies in slot
`table[t // block_size] * block_size + t % block_size`. In steps that are recorded as CUDA graphs, nothing may depend on
numbers that the host knows: there, a tensor describes the tiles of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from weft.comm import Axis

TILE_QUERIES = 16  # tokens of a prompt in a tile, at most; with the heads that share a key head, enough for a matmul


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device; the host does not wait for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


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


DecodePlaces = slice | tuple[Tensor, Tensor]  # slots that lie end to end, of one request; or those of `decode_places`


@dataclass(frozen=True)
class PageShare:
    """Which tokens of a request rank `index` of `degree` ranks holds, if they hold its keys and values together.

    A block of the cache is as many pages as there are ranks, end to end, and each rank holds one of them: page i of a
    request is on rank i mod n. Block tables are the same on all ranks, and shares differ by one page at most. Own
    tokens are counted from 0 on each rank, in the order of their positions:

        position   0 1 2 3 | 4 5 6 7 | 8 9        pages of 2 tokens, blocks of 4
        rank 0     0 1       2 3       4 5        its own tokens, by number
        rank 1         0 1       2 3
    """

    index: int
    degree: int
    page_size: int

    @property
    def block_size(self) -> int:
        """Tokens of a block, on all ranks together."""
        return self.degree * self.page_size

    def count(self, lengths: Tensor) -> Tensor:
        """Return how many of the first `lengths` tokens of a request are own ones. A negative length is none."""
        lengths = lengths.clamp(min=0)
        in_block = (lengths % self.block_size - self.index * self.page_size).clamp(0, self.page_size)
        return lengths // self.block_size * self.page_size + in_block

    def number(self, length: int) -> int:
        """Return how many of the first `length` tokens of a request are own ones."""
        return int(self.count(torch.tensor(length)))

    def positions(self, number: int, device: torch.device) -> Tensor:
        """Return the positions of the first `number` own tokens."""
        own = torch.arange(number, device=device)
        return (own // self.page_size * self.degree + self.index) * self.page_size + own % self.page_size

    def sees(self, ends: Tensor, number: int, window: int | None) -> Tensor:
        """Return which of this rank's first `number` tokens a query sees that attends to the last `window` tokens
        before each of `ends`: [ends, number].
        """
        own = torch.arange(number, device=ends.device)
        mask = own < self.count(ends)[:, None]
        return mask if window is None else mask & (own >= self.count(ends - window)[:, None])

    def own_slots(self, slots: Tensor, padding_slot: int) -> Tensor:
        """Return the slots in this rank's pages of tokens with these slots in whole blocks; `padding_slot` for tokens
        of other ranks.
        """
        blocks, places = slots // self.block_size, slots % self.block_size
        own = blocks * self.page_size + places % self.page_size
        return torch.where(places // self.page_size == self.index, own, padding_slot)


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
    _own_places: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by window
    _angles: tuple[Tensor, Tensor] | None = None

    def decode_places(self, window: int | None) -> DecodePlaces:
        """Return the slots that decodes attend to, on a CPU. All blocks of the model with this window share them."""
        found = self._places.get(window)
        if found is None:
            run = self._run(window) if self.num_decodes == 1 else None
            given = (self.tables[: self.num_decodes], self.lengths[: self.num_decodes], self.block_size, window)
            found = self._places[window] = run or decode_places(*given)
        return found

    def _run(self, window: int | None) -> slice | None:
        """Return the slots that the first request attends to, if its blocks lie one after the other."""
        length = int(self.lengths[0])
        first, *others = self.tables[0, : -(-length // self.block_size)].tolist()
        if others != list(range(first + 1, first + 1 + len(others))):
            return None
        start = first * self.block_size
        return slice(start if window is None else start + max(0, length - window), start + length)

    @cached_property
    def pages(self) -> PageShare:
        """Which tokens lie in this rank's pages: its share, or all."""
        return PageShare(0, 1, self.block_size) if self.share is None else self.share

    @cached_property
    def own_lengths(self) -> Tensor:
        """How many tokens of each decode lie in this rank's pages."""
        return self.pages.count(self.lengths[: self.num_decodes])

    @cached_property
    def own_slots(self) -> Tensor:
        """The slots of all tokens of this rank's pages of each decode [requests, tokens]."""
        return slots_of(self.tables[: self.num_decodes], self.tables.shape[1] * self.block_size, self.block_size)

    def own_places(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Return `own_slots`, and which of these tokens each decode sees. All blocks of the model with this window
        share them.
        """
        if window not in self._own_places:
            lengths, number = self.lengths[: self.num_decodes], self.own_slots.shape[1]
            self._own_places[window] = self.own_slots, self.pages.sees(lengths, number, window)
        return self._own_places[window]

    def angles(self, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the tokens' angles (`angles_at`), of tables for all positions. All blocks share them."""
        if self._angles is None:
            self._angles = angles_at(rotary, self.positions)
        return self._angles

    @cached_property
    def prompt_slots(self) -> list[Tensor]:
        """The slots of all tokens in this rank's pages, of each request with a chunk of a prompt."""
        return [
            slots_of(self.tables[index, None], self.pages.number(length), self.block_size)[0]
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
    """Return the tiles of chunks of prompts: for each the first token, the number of tokens, the row in the block
    tables and the position.

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
    """Return the pages of chunks of prompts: for each the row in the block tables; the page's number in its request;
    the first of the chunk's tokens in it, among the tokens of all chunks; where these begin and end in the page; and
    whether it is one of the two pages whose keys the request keeps beside the cache after the chunk (`four_bits.py`).

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
    """Return the slots of the first `length` tokens of each table [requests, blocks] -> [requests, length]."""
    offsets = torch.arange(block_size, device=tables.device)
    num_blocks = -(-length // block_size)
    return (tables[:, :num_blocks, None] * block_size + offsets).flatten(1)[:, :length]


def decode_places(tables: Tensor, lengths: Tensor, block_size: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Return the slots of requests, and which of them their newest tokens attend to: both [requests, slots].

    Where they do not attend, slots are those of their own newest tokens: other requests may have left NaN elsewhere,
    and weights of 0 times NaN are NaN.
    """
    slots = slots_of(tables, tables.shape[1] * block_size, block_size)
    positions = torch.arange(slots.shape[1], device=slots.device)
    mask = positions < lengths[:, None]
    mask = mask if window is None else mask & (positions >= lengths[:, None] - window)
    newest = slots.gather(1, (lengths[:, None].long() - 1).clamp(min=0))
    return torch.where(mask, slots, newest), mask

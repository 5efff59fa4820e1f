"""Loki: a decode attends to tokens that a part of their keys chooses.

Keys of a head lie near a subspace of few dims. Calibration finds its axes, most important first
(`serve/calibration/loki_calibration.py`). Keys are kept along these axes instead of their own, which changes no product
with a query along the same axes. Their first dims are kept a second time, end to end, so that a GPU reads them alone. A
decode

    scores = first_scores(queries, first dims of keys)      by each query
    joint = highest of (scores - best of each query)        by each key head; tokens that are always chosen: infinite
    places = those of the highest                           of equal scores the first token

and attends to the chosen tokens exactly: of each key head those with the highest scores, the newest and the first one.
Scores of several queries that share a key head are taken relative to each query's best, and the highest counts, so that
each key and value is read once for all of them. Prompts attend to everything, and so do decodes of few tokens. No token
is ever lost.

Ranks of `context` that hold pages together score their own tokens. Two small all-gathers find the tokens that one rank
would choose: the first has each query's highest score, the second the scores and positions of each rank's best tokens,
as many as may be chosen in all. Each rank then attends to those of its own tokens that are among the chosen.

GPUs run the kernels of `loki_kernel.py`; plain functions run on a CPU, in dtypes other than
fp16 and bf16, and over pages that ranks hold together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import Axis, Key
from weft.errors import ConfigError
from weft.serve.attention.attend import attend_decodes, gathered, joined, staging, takes_kernels
from weft.serve.attention.batch import CacheSizes, PagedBatch, PageShare
from weft.serve.attention.plain import PlainPages


@dataclass(frozen=True)
class LokiChoice:
    """How a decode chooses tokens."""

    dims: float = 0.25  # share of a key's dims by which tokens are scored
    tokens: float = 0.25  # share of the tokens that are attended to
    newest: int = 64  # of these, so many are the newest
    dense_below: int = 1024  # a decode of fewer tokens attends to all

    def __post_init__(self) -> None:
        for name in ("dims", "tokens"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} = {getattr(self, name)} of Loki must be above 0 and at most 1")
        for name in ("newest", "dense_below"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)} of Loki must be at least 0")

    def num_dims(self, head_dim: int) -> int:
        return max(1, math.ceil(self.dims * head_dim))

    def num_tokens(self, lengths: Tensor) -> Tensor:
        """Return how many tokens a decode attends to, of requests with these `lengths`."""
        chosen = (self.tokens * lengths).ceil().long().clamp(min=self.newest + 1)
        return torch.where(lengths < self.dense_below, lengths, torch.minimum(chosen, lengths))

    def most_tokens(self, length: int) -> int:
        """Return a bound of `num_tokens` for requests of up to `length` tokens. Kernels compute in float32, and may
        choose one token more.
        """
        return min(length, max(math.ceil(self.tokens * length) + 1, self.newest + 1, self.dense_below))


class LokiPages:
    """The keys along the axes and the values of one block of the model, and the first dims of the keys a second time:
    [blocks, key heads, block_size, dims].
    """

    def __init__(self, axes: Tensor, choice: LokiChoice, plain: PlainPages, sizes: CacheSizes) -> None:
        self._plain, self._choice, self._sizes = plain, choice, sizes
        if axes.shape != (sizes.num_key_heads, sizes.head_dim, sizes.head_dim):
            raise ConfigError(
                f"Loki's axes are of {axes.shape[0]} key heads of {axes.shape[-1]}, and the model has "
                f"{sizes.num_key_heads} of {sizes.head_dim}; run weft calibrate on the model that is served"
            )
        wide = torch.promote_types(sizes.dtype, torch.float32)
        self._axes = axes.to(sizes.device, wide).contiguous()
        num_dims = choice.num_dims(sizes.head_dim)
        shape = (sizes.num_blocks, sizes.num_key_heads, sizes.block_size, num_dims)
        self._first = plain.keys.new_zeros(shape)
        self.pages: Sequence[Tensor] = (*plain.pages, self._first)

    def room(self, batch: PagedBatch) -> tuple[Tensor, Tensor, Tensor]:
        return staging(batch, self._sizes)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        """Keep the keys and values of a step. Returns the attention of its tokens [tokens, heads, head_dim], or this
        rank's part of it.
        """
        number, parts = batch.num_decodes, list[Tensor]()
        has_kernels = takes_kernels(query) and batch.share is None
        query = self._turn_and_store(query, keys, values, batch.slots, has_kernels and not batch.prompt_queries)
        if number:
            decode = self._decode_by_kernel if has_kernels else self._decode
            parts.append(decode(query[:number], batch, window))
        if batch.prompt_queries:
            parts.append(self._plain.attend_prompts(query[number:], batch, window))
        return joined(parts)

    def _decode(self, query: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        return attend_decodes(query, self, batch, window)

    def _decode_by_kernel(self, query: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        from weft.serve.attention.decode_attention_kernel import decode_attention_by_kernel
        from weft.serve.attention.loki_kernel import chosen_slots_by_kernel

        parts, number, size, at_once = list[Tensor](), batch.num_decodes, batch.block_size, self.requests_at_once(batch)
        choice, longest = self._choice, batch.tables.shape[1] * batch.block_size
        numbers = (choice.tokens, choice.newest, choice.dense_below, choice.most_tokens(longest))
        for begin in range(0, number, at_once):
            some = slice(begin, min(begin + at_once, number))
            tables, lengths = batch.tables[some], batch.lengths[some]
            chosen, counts = chosen_slots_by_kernel(query[some], self._first, tables, lengths, window, numbers)
            given = (query[some], self._plain.keys, self._plain.values, tables, counts, size, None, chosen)
            parts.append(decode_attention_by_kernel(*given))
        return joined(parts)

    def requests_at_once(self, batch: PagedBatch) -> int:
        """Return how many requests may run at once. A step that computes tokens again may have more decodes."""
        return self._sizes.num_rows

    def read(self, query: Tensor, batch: PagedBatch, some: slice, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        first = self._first[batch.tables[some].long()].transpose(2, 3).flatten(1, 2)
        places, mask = chosen_tokens(
            query, first, batch.lengths[some], window, self._choice, batch.pages, self._sizes.context
        )
        return *self._plain.read_places(batch, some, places), mask

    def _turn_and_store(self, query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, by_kernel: bool) -> Tensor:
        """Return queries along the axes, and write keys along the axes and values to the pages."""
        if by_kernel:
            from weft.serve.attention.loki_kernel import turn_and_store_by_kernel

            return turn_and_store_by_kernel(query, keys, values, self._axes, slots, self.pages)
        keys, first, size = self._along_axes(keys), self._first, self._first.shape[2]
        self._plain.keys[slots], self._plain.values[slots] = keys, values
        first[slots // size, :, slots % size] = keys[..., : first.shape[-1]]
        return self._along_axes(query)

    def _along_axes(self, heads: Tensor) -> Tensor:
        """Return queries or keys [tokens, heads, head_dim] along the axes of their key heads."""
        grouped = heads.to(self._axes.dtype).unflatten(1, (len(self._axes), -1))  # [tokens, key heads, group, head_dim]
        return torch.einsum("thgd,hde->thge", grouped, self._axes).flatten(1, 2).to(heads.dtype)


def first_scores(query: Tensor, first: Tensor) -> Tensor:
    """Return scores [requests, key heads, queries, tokens] of queries [requests, heads, head_dim] by the first dims of
    keys [requests, tokens, key heads, dims] along the same axes.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    heads = query[..., : first.shape[-1]].unflatten(1, (first.shape[2], -1))
    return torch.einsum("bhgd,bthd->bhgt", heads.to(wide), first.to(wide))


def chosen_tokens(
    query: Tensor,
    first: Tensor,
    lengths: Tensor,
    window: int | None,
    choice: LokiChoice,
    share: PageShare,
    axis: Axis | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the places [requests, key heads, chosen] of own tokens that queries may attend to, and which of them they
    do.

    `first` are the first dims [requests, tokens, key heads, dims] of the keys of all own tokens. Of equal scores, the
    first token is taken. Ranks of an `axis` that hold pages together choose as one rank with all pages would.
    """
    places, scores = share.positions(first.shape[1], first.device), first_scores(query, first)
    ends = lengths.long()
    begins = torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)
    outside = ((places < begins[:, None]) | (places >= ends[:, None]))[:, None]
    best = scores.masked_fill(outside[:, None], -torch.inf).amax(-1, keepdim=True)  # of each query
    best = best if axis is None else gathered(best, axis).amax(0)
    always = (places >= ends[:, None] - choice.newest) | (places == begins[:, None])
    joint = (scores - best).amax(2).masked_fill(always[:, None], torch.inf).masked_fill(outside, -torch.inf)
    most = most_candidates(choice, first.shape[1], share.degree)
    order = joint.argsort(dim=-1, descending=True, stable=True)[..., :most]
    number = choice.num_tokens(ends - begins)
    if axis is not None:
        return order, chosen_of_all(joint.gather(-1, order), places[order], number, axis)
    counts = torch.arange(order.shape[-1], device=first.device) < number[:, None]
    return order, counts[:, None].expand_as(order)


def chosen_of_all(scores: Tensor, places: Tensor, number: Tensor, axis: Axis) -> Tensor:
    """Return which candidates of this rank [requests, key heads, candidates] have one of the `number` [requests]
    highest scores of all ranks; of equal scores, the first token.
    """
    both = gathered(torch.stack([scores, places.to(scores.dtype)]), axis)  # positions below 2^24 are exact in float32
    every, every_place = both.movedim(0, -2).flatten(-2)  # [requests, key heads, ranks * candidates]
    by_place = every_place.argsort(-1)
    order = by_place.gather(-1, every.gather(-1, by_place).argsort(dim=-1, descending=True, stable=True))
    is_chosen = (torch.arange(order.shape[-1], device=order.device) < number[:, None, None]).expand_as(order)
    found = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, is_chosen)
    return found.chunk(axis.degree, dim=-1)[axis.index]


def most_candidates(choice: LokiChoice, num_own: int, degree: int) -> int:
    """Return how many tokens of a request a rank proposes: all `num_own` that it has, or as many as may be chosen."""
    return min(num_own, choice.most_tokens(num_own * degree))


def choice_calls(
    choice: LokiChoice,
    num_decodes: int,
    heads: tuple[int, int],
    pages: tuple[int, int, int],
    item_bytes: int,
) -> Iterator[tuple[Key, int]]:
    """Yield the collectives by which a layer chooses the tokens of decodes, beside those of `traffic.step_calls`.

    `heads` are a rank's heads and key heads; `pages` are the blocks of the longest request, the ranks of `context` and
    the tokens of a page. There are at most as many decodes as requests that run at once.
    """
    (num_heads, num_key_heads), (num_blocks, degree, page_size) = heads, pages
    wide, most = max(4, item_bytes), most_candidates(choice, num_blocks * page_size, degree)
    yield ("context", "all_gather"), degree * num_decodes * num_heads * wide
    yield ("context", "all_gather"), degree * 2 * num_decodes * num_key_heads * most * wide

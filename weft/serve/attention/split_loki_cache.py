"""Loki (`loki_cache.py`) over pages that the ranks of `context` hold together (`batch.py`).

A rank scores its own tokens by the first dims of their keys. Two small all-gathers find the tokens that one rank would
choose: the first has each query's highest score, to which scores are relative; the second has the scores and positions
of each rank's best tokens, as many as may be chosen in all. Each rank then attends to those of its own tokens that are
among the chosen, and results are added up as over a plain cache (`split_attention.py`). Plain functions choose and
attend, also on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from weft.comm import Axis, Key, all_gather
from weft.serve.attention.batch import PagedBatch, PageShare, slots_of
from weft.serve.attention.layer_cache import CacheSizes, LayerCache
from weft.serve.attention.loki_cache import LokiFormat, LokiLayer
from weft.serve.attention.loki_choice import LokiChoice, attended_since, first_scores, highest_by_query, joint_scores
from weft.serve.attention.split_attention import attend_own_prompts, merged, partial_attention, room_for_parts


class SplitLokiFormat(LokiFormat):
    """Keys along calibrated axes, of pages that ranks hold together."""

    has_kernel = False

    def part(self, layers: range, key_heads: range) -> SplitLokiFormat:
        own = super().part(layers, key_heads)
        return SplitLokiFormat(own.axes, own.choice, own.identity)

    def layer(self, index: int, sizes: CacheSizes) -> LayerCache:
        return SplitLokiLayer(self.axes[index], self.choice, sizes)


class SplitLokiLayer(LokiLayer):
    """The cache of one block of the model: a rank's pages."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        share, axis, number = batch.share, self._sizes.context, batch.num_decodes
        assert share is not None and axis is not None, "ranks hold pages together"  # noqa: PT018
        query = self._turn_and_store(query, keys, values, batch.slots, by_kernel=False)
        out = room_for_parts(query)
        for begin in range(0, number, self._sizes.num_rows):  # tokens that are computed again may be more
            rows = slice(begin, min(begin + self._sizes.num_rows, number))
            given = (query[rows], batch.tables[rows], batch.lengths[rows])
            out[rows] = self._attend_chosen(*given, share, axis, window)
        if batch.prompt_queries:
            attend_own_prompts(query[number:], self._keys, self._values, batch, window, out[number:])
        return merged(out, axis, query.dtype)

    def _attend_chosen(
        self, query: Tensor, tables: Tensor, lengths: Tensor, share: PageShare, axis: Axis, window: int | None
    ) -> Tensor:
        """This rank's part of the attention of decodes to chosen tokens."""
        slots = slots_of(tables, tables.shape[1] * share.page_size, share.page_size).long()
        places = share.positions(slots.shape[1], query.device)
        scores = first_scores(query, self._keys[..., : self.pages[2].shape[-1]][slots])
        best = gathered(highest_by_query(scores, places, lengths, window), axis).amax(0)
        joint = joint_scores(scores, best, places, lengths, window, self._choice.newest)
        most = most_candidates(self._choice, tables.shape[1], share.degree, share.page_size)
        order = joint.argsort(dim=-1, descending=True, stable=True)[..., :most]
        number = self._choice.num_tokens(lengths.long() - attended_since(lengths, window))
        chosen = chosen_of_all(joint.gather(-1, order), places[order], number, axis)
        heads = torch.arange(joint.shape[1], device=query.device)[None, :, None]
        rows = slots[:, None].expand(-1, joint.shape[1], -1).gather(2, order)
        key, value = (pages[rows, heads].transpose(1, 2) for pages in (self._keys, self._values))
        return partial_attention(query[:, None], key, value, chosen[:, None])[:, 0]


def gathered(own: Tensor, axis: Axis) -> Tensor:
    """The tensors of all ranks of an axis: [ranks, ...]."""
    parts = own.new_empty(axis.degree, *own.shape)
    all_gather(parts.view(-1), own.contiguous().view(-1), axis).wait()
    return parts


def chosen_of_all(scores: Tensor, places: Tensor, number: Tensor, axis: Axis) -> Tensor:
    """Which of this rank's candidates [requests, key heads, candidates] are among the `number` [requests] with the
    highest scores on all ranks; of equal scores, the first token.
    """
    both = gathered(torch.stack([scores, places.to(scores.dtype)]), axis)  # positions below 2^24 are exact in float32
    every, every_place = both.movedim(0, -2).flatten(-2)  # [requests, key heads, ranks * candidates]
    by_place = every_place.argsort(-1)
    order = by_place.gather(-1, every.gather(-1, by_place).argsort(dim=-1, descending=True, stable=True))
    is_chosen = (torch.arange(order.shape[-1], device=order.device) < number[:, None, None]).expand_as(order)
    found = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, is_chosen)
    return found.chunk(axis.degree, dim=-1)[axis.index]


def most_candidates(choice: LokiChoice, num_blocks: int, degree: int, page_size: int) -> int:
    """How many tokens of a request with so many blocks a rank proposes: all own ones, or as many as may be chosen."""
    return min(num_blocks * page_size, choice.most_tokens(num_blocks * degree * page_size))


def choice_calls(
    choice: LokiChoice,
    num_decodes: int,
    heads: tuple[int, int],
    pages: tuple[int, int, int],
    item_bytes: int,
) -> Iterator[tuple[Key, int]]:
    """Yields the collectives by which a layer chooses the tokens of decodes, beside those of `traffic.step_calls`.

    `heads` are a rank's heads and key heads; `pages` are the blocks of the longest request, the ranks of `context` and
    the tokens of a page. There are at most as many decodes as requests that run at once.
    """
    (num_heads, num_key_heads), (_, degree, _) = heads, pages
    wide, most = max(4, item_bytes), most_candidates(choice, *pages)
    yield ("context", "all_gather"), degree * num_decodes * num_heads * wide
    yield ("context", "all_gather"), degree * 2 * num_decodes * num_key_heads * most * wide

"""Keys and values in 4 bits (`four_bit_cache.py`) in pages that the ranks of `context` hold together (`batch.py`).

A rank codes its own pages, and keeps the tail of a request whose newest page is its own. A query attends to the keys of
its own page as they are, on the rank that has this page, and to those of all pages before it decoded, so results equal
those of one rank with pages of the same size. Plain functions, also on GPUs: the kernel for 4 bits gives no
log-sum-exps.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from weft.serve.attention.batch import PagedBatch, PageShare
from weft.serve.attention.four_bit_cache import DECODED_TOKENS, FourBitFormat, FourBitLayer
from weft.serve.attention.layer_cache import CacheSizes, LayerCache
from weft.serve.attention.split_attention import merged, partial_attention


class SplitFourBitFormat(FourBitFormat):
    """4 bits for each key and value, of pages that ranks hold together."""

    has_kernel = False

    def layer(self, index: int, sizes: CacheSizes) -> LayerCache:
        return SplitFourBitLayer(sizes)


class SplitFourBitLayer(FourBitLayer):
    """The cache of one block of the model: a rank's pages."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        share, axis, number = batch.share, self._sizes.context, batch.num_decodes
        assert share is not None and axis is not None, "ranks hold pages together"  # noqa: PT018
        self._keep_values(values, batch.slots)
        parts = list[Tensor]()
        if number:
            parts += self._decodes(query[:number], keys[:number], batch, share, window)
        begin = number
        for index, count in enumerate(batch.prompt_queries, number):
            end, length = begin + count, batch.prompt_lengths[index - number]
            own = self._keep_own_keys(keys[begin:end], length, batch.rows[index], batch.tables[index], share)
            parts += self._prompt(query[begin:end], own, length, batch.tables[index], share, window)
            begin = end
        return merged(torch.cat(parts), axis, query.dtype)

    def _decodes(
        self, query: Tensor, keys: Tensor, batch: PagedBatch, share: PageShare, window: int | None
    ) -> list[Tensor]:
        number, size = batch.num_decodes, share.page_size
        ends = batch.lengths[:number].long()
        is_own = (ends - 1) // size % share.degree == share.index  # has this rank the page of the newest token?
        places = (share.count(ends) - 1).clamp(min=0)  # of the newest own token
        rows = torch.where(is_own, batch.rows[:number].long(), self._sizes.num_rows)  # others go to the row for padding
        self._keep_decoded_keys(keys, replace(batch, positions=places, rows=rows))
        parts, at_once = list[Tensor](), max(1, DECODED_TOKENS // (batch.tables.shape[1] * size))
        for begin in range(0, number, at_once):
            some = slice(begin, min(begin + at_once, number))
            decoded, values = self.decoded(batch.tables[some].long(), query.dtype)
            here = is_own[some].nonzero()[:, 0]
            pages = places[some][here] // size
            decoded[here, pages] = self._tails[rows[some][here], pages % 2]
            key, value = decoded.flatten(1, 2), values.flatten(1, 2)
            mask = share.sees(ends[some], key.shape[1], window)
            parts.append(partial_attention(query[some, None], key, value, mask[:, None])[:, 0])
        return parts

    def _keep_own_keys(self, keys: Tensor, length: int, row: Tensor, table: Tensor, share: PageShare) -> Tensor:
        """Add the own tokens of a chunk to the tail, and code pages that are full. Returns the keys as they are, from
        the beginning of the chunk's first own page on.
        """
        places = torch.arange(length - len(keys), length, device=keys.device)
        mine = keys[places // share.page_size % share.degree == share.index]
        number = int(share.count(torch.tensor(length)))
        return self._keep_prompt_keys(mine, number, row, table) if len(mine) else mine

    def _prompt(
        self, query: Tensor, own: Tensor, length: int, table: Tensor, share: PageShare, window: int | None
    ) -> list[Tensor]:
        """Attention of a chunk, page by page of its queries. `own` are own keys from the chunk's first own page on."""
        size, start = share.page_size, length - len(query)
        number = int(share.count(torch.tensor(length)))
        first = (number - len(own)) if len(own) else number  # the first token of `own`, by number
        blocks = table[: -(-number // size)].long()
        decoded, values = (one.flatten(0, 1) for one in self.decoded(blocks, query.dtype))
        parts = list[Tensor]()
        for page in range(start // size, (length - 1) // size + 1):
            begin, end = max(start, page * size), min(length, (page + 1) * size)
            before, seen = (int(share.count(torch.tensor(at))) for at in (page * size, end))
            key = torch.cat([decoded[:before], own[before - first : seen - first]])
            ends = torch.arange(begin + 1, end + 1, device=query.device)
            mask = share.sees(ends, seen, window)
            queries = query[begin - start : end - start]
            parts.append(partial_attention(queries[None], key[None], values[None, :seen], mask[None])[0])
        return parts

"""What the attention of a layer reads and computes in a step, over each format of the cache; without times."""

from __future__ import annotations

from typing import NamedTuple

from weft.serve.attention.formats import CacheFormat

# Passes of Loki's choice over the joint scores of a key head (`loki_kernel.py`): they are written, read for
# each of 16 digits and for the count, and read to write the chosen tokens.
CHOOSING_PASSES, SCORE_BYTES = 1 + 16 + 1 + 1, 4


class CacheReads(NamedTuple):
    """What decodes read of one layer's cache: bytes of pages; other bytes that kernels move; and bytes that each of
    some programs moves, of which a processor runs one at a time. Pages of 4 bits have `page_tokens`.
    """

    page_bytes: float
    other_bytes: float = 0.0
    num_programs: int = 0
    program_bytes: float = 0.0
    page_tokens: int | None = None


class PromptPart(NamedTuple):
    """The last `computed` of a prompt's `end` tokens, which a step computes: pairs of a query and a key for all heads,
    and the most keys of a query.
    """

    num_scores: float
    most_keys: int
    head_dim: int
    page_tokens: int | None


def cache_reads(
    form: CacheFormat, num_decodes: int, num_cached: int, heads: tuple[int, int, int], item_bytes: int
) -> CacheReads:
    """Return what decodes with `num_cached` tokens together read in one layer; `heads` are heads, key heads and their
    size.
    """
    num_heads, num_key_heads, head_dim = heads
    stored = num_cached * form.bytes_per_token(num_key_heads, head_dim, item_bytes)
    if form.loki is None or not num_decodes:
        return CacheReads(stored, page_tokens=form.block_size)
    choice, length = form.loki.choice, num_cached / num_decodes
    share = 1.0 if length < choice.dense_below else min(1.0, max(choice.tokens, (choice.newest + 1) / length))
    read = num_cached * num_key_heads * item_bytes * (choice.num_dims(head_dim) + share * 2 * head_dim)
    written = num_cached * num_heads * SCORE_BYTES
    passes = CHOOSING_PASSES + num_heads // num_key_heads  # each query's scores are read once
    return CacheReads(read, written, num_decodes * num_key_heads, passes * SCORE_BYTES * length)


def prompt_part(
    form: CacheFormat, computed: int, end: int, window: int | None, heads: tuple[int, int, int]
) -> PromptPart:
    """Return the attention of the last `computed` of `end` tokens in one layer; `heads` as in `cache_reads`."""
    num_heads, _, head_dim = heads
    start, most = end - computed, end if window is None else window
    full = min(max(most - start, 0), computed)  # tokens that attend to all before them
    scores = num_heads * (full * (start + full / 2) + (computed - full) * most)
    return PromptPart(scores, min(end, most), head_dim, form.block_size)

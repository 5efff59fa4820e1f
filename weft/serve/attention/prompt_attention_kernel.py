"""`prompt_attention_by_tiles` of `plain.py` as a Triton kernel for GPUs, which reads pages.

A program handles the queries of one tile that share one key head. It stops at the last key that its queries may see.
How many programs there are follows from the number of tiles, and tiles without queries end at once, so a launch can be
recorded in a CUDA graph.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.serve.attention.batch import TILE_QUERIES, PageShare
from weft.serve.attention.decode_attention_kernel import LN2, LOG2E, add_tokens, keys_and_values, page_rows
from weft.serve.weights.shared_steps_kernel import early_launch, wait_for_results

_TOKENS = 64  # whose keys are loaded at a time
_NUM_WARPS, _NUM_STAGES = 4, 3


@triton.jit
def _own_tokens(length, NUM_RANKS: tl.constexpr, RANK: tl.constexpr, PAGE: tl.constexpr):
    """`PageShare.count`: how many of the first `length` tokens are in pages of this rank."""
    if NUM_RANKS > 1:
        in_block = tl.minimum(tl.maximum(length % (NUM_RANKS * PAGE) - RANK * PAGE, 0), PAGE)
        length = length // (NUM_RANKS * PAGE) * PAGE + in_block
    return length


@triton.jit(do_not_specialize=["table_stride", "tile_stride"])  # they vary from step to step
def _tiles(
    query_ptr, key_ptr, value_ptr, table_ptr, tile_ptr, out_ptr, scale,
    query_stride, table_stride, tile_stride,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, QUERIES: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    NUM_RANKS: tl.constexpr, RANK: tl.constexpr, OUT_WIDTH: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    tile_ptr += tl.program_id(0)
    key_head, group = tl.program_id(1), NUM_HEADS // NUM_KEY_HEADS
    wait_for_results(IS_EARLY)
    number = tl.load(tile_ptr + tile_stride)
    if number == 0:
        return
    first_token, request = tl.load(tile_ptr).to(tl.int64), tl.load(tile_ptr + 2 * tile_stride).to(tl.int64)
    begin = tl.load(tile_ptr + 3 * tile_stride)
    rows, columns = tl.arange(0, QUERIES * GROUP), tl.arange(0, WIDTH)
    index, head = rows // GROUP, rows % GROUP
    position = begin + index
    inside = ((index < number) & (head < group))[:, None] & (columns < HEAD_DIM)[None, :]
    place = (key_head * group + head)[:, None] * HEAD_DIM + columns[None, :]
    query = tl.load(query_ptr + (first_token + index)[:, None] * query_stride + place, mask=inside, other=0.0)
    highest = tl.full([QUERIES * GROUP], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * GROUP], tl.float32)
    mixed = tl.zeros([QUERIES * GROUP, WIDTH], tl.float32)
    first, last = 0, _own_tokens(begin + number, NUM_RANKS, RANK, BLOCK_SIZE)
    if WINDOW > 0:
        first = _own_tokens(tl.maximum(begin + 1 - WINDOW, 0), NUM_RANKS, RANK, BLOCK_SIZE) // TOKENS * TOKENS
    for start in range(first, last, TOKENS):
        token = start + tl.arange(0, TOKENS)
        valid = token < last
        row = page_rows(table_ptr + request * table_stride, token, valid, key_head, NUM_KEY_HEADS, BLOCK_SIZE)
        key, value = keys_and_values(key_ptr, value_ptr, row, valid, columns[None, :], HEAD_DIM)
        scores = tl.dot(query, tl.trans(key)).to(tl.float32) * scale
        at = token  # its position
        if NUM_RANKS > 1:
            at = (token // BLOCK_SIZE * NUM_RANKS + RANK) * BLOCK_SIZE + token % BLOCK_SIZE
        seen = at[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (at[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        highest, total, mixed = add_tokens(highest, total, mixed, scores, value)
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    out_row = (first_token + index) * NUM_HEADS + key_head * group + head
    out_place = out_row[:, None] * OUT_WIDTH + columns[None, :]
    tl.store(out_ptr + out_place, mixed.to(out_ptr.dtype.element_ty), mask=inside)
    if OUT_WIDTH > HEAD_DIM:
        log_total = tl.where(total > 0, highest + tl.log2(total), float("-inf")) * LN2
        tl.store(out_ptr + out_row * OUT_WIDTH + HEAD_DIM, log_total, mask=(index < number) & (head < group))


def prompt_attention_by_kernel(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    tiles: Tensor,
    block_size: int,
    window: int | None,
    out: Tensor,
    share: PageShare | None = None,
) -> None:
    """Equals `plain.prompt_attention_by_tiles`; see there for the arguments.

    With a `share`, pages are a rank's own. If `out` is [tokens, heads, head_dim + 1], the last are the logarithms of
    softmax denominators.
    """
    _, num_heads, head_dim = query.shape
    num_key_heads = keys.shape[1]
    assert query.stride()[1:] == (head_dim, 1) and out.is_contiguous(), "heads lie end to end"  # noqa: PT018
    _tiles[(tiles.shape[1], num_key_heads)](
        query,
        keys,
        values,
        tables,
        tiles,
        out,
        head_dim**-0.5 * LOG2E,
        query.stride(0),
        tables.stride(0),
        tiles.stride(0),
        NUM_HEADS=num_heads,
        NUM_KEY_HEADS=num_key_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        QUERIES=TILE_QUERIES,
        GROUP=triton.next_power_of_2(num_heads // num_key_heads),
        WIDTH=max(16, triton.next_power_of_2(head_dim)),
        TOKENS=_TOKENS,
        NUM_RANKS=1 if share is None else share.degree,
        RANK=0 if share is None else share.index,
        OUT_WIDTH=out.shape[-1],
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
        **early_launch(query),
    )

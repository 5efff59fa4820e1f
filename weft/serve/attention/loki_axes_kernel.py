"""Queries and keys of decodes along the axes of Loki (`choice.py`), keys and values to their pages, as a kernel.

A program multiplies the queries and the key of one key head of one token with some of the axes. One launch takes the
place of about a dozen.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 32  # axes of a program


@triton.jit
def _turn_and_store(
    query_ptr, key_ptr, value_ptr, axes_ptr, slot_ptr, turned_ptr, key_page_ptr, value_page_ptr, first_ptr,
    query_stride, NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NUM_DIMS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The rows of a program are the queries that share a key head, and behind them the key."""
    token, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group: tl.constexpr = NUM_HEADS // NUM_KEY_HEADS
    rows, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_dim, is_column = dims < HEAD_DIM, columns < HEAD_DIM
    heads, key_place = key_head * group + rows, (token * NUM_KEY_HEADS + key_head) * HEAD_DIM
    is_query, is_key = (rows < group)[:, None], (rows == group)[:, None]
    query_place = token * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    given = tl.load(query_ptr + query_place, mask=is_query & is_dim[None, :], other=0.0).to(tl.float32)
    key_places = key_ptr + key_place + dims[None, :] + rows[:, None] * 0
    given += tl.load(key_places, mask=is_key & is_dim[None, :], other=0.0).to(tl.float32)
    axes_place = (key_head * HEAD_DIM + dims[:, None]) * HEAD_DIM + columns[None, :]
    axes = tl.load(axes_ptr + axes_place, mask=is_dim[:, None] & is_column[None, :], other=0.0)
    turned = tl.dot(given, axes, input_precision="ieee").to(turned_ptr.dtype.element_ty)  # [ROWS, COLUMNS]
    turned_place = (token * NUM_HEADS + heads[:, None]) * HEAD_DIM + columns[None, :]
    tl.store(turned_ptr + turned_place, turned, mask=is_query & is_column[None, :])
    slot = tl.load(slot_ptr + token)
    page_place = (slot * NUM_KEY_HEADS + key_head) * HEAD_DIM + columns
    tl.store(key_page_ptr + page_place[None, :] + rows[:, None] * 0, turned, mask=is_key & is_column[None, :])
    first_place = (
        (slot // BLOCK_SIZE * NUM_KEY_HEADS + key_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    ) * NUM_DIMS + columns
    is_first = is_key & (columns < NUM_DIMS)[None, :]
    tl.store(first_ptr + first_place[None, :] + rows[:, None] * 0, turned, mask=is_first)
    value = tl.load(value_ptr + key_place + columns, mask=is_column, other=0.0)
    tl.store(value_page_ptr + page_place, value, mask=is_column)


def turn_and_store_by_kernel(
    query: Tensor, keys: Tensor, values: Tensor, axes: Tensor, slots: Tensor, pages: Sequence[Tensor]
) -> Tensor:
    """Queries [tokens, heads, head_dim] along the axes [key heads, head_dim, head_dim] (float32) of their key heads.

    Keys [tokens, key heads, head_dim] along the axes, values, and the first dims of these keys go to the slots of
    `pages`: [blocks, block_size, key heads, head_dim] twice, and [blocks, key heads, block_size, dims].
    """
    (num_tokens, num_heads, head_dim), num_key_heads = query.shape, keys.shape[1]
    assert query.stride()[1:] == (head_dim, 1), "the heads of a query lie end to end"
    assert all(one.is_contiguous() for one in (keys, values, axes))
    turned = query.new_empty(num_tokens, num_heads, head_dim)
    width = max(16, triton.next_power_of_2(head_dim))
    columns = min(_COLUMNS, width)
    _turn_and_store[(num_tokens, num_key_heads, width // columns)](
        query, keys, values, axes, slots, turned, *pages, query.stride(0), NUM_HEADS=num_heads,
        NUM_KEY_HEADS=num_key_heads, HEAD_DIM=head_dim, BLOCK_SIZE=pages[0].shape[1], NUM_DIMS=pages[2].shape[-1],
        ROWS=max(16, triton.next_power_of_2(num_heads // num_key_heads + 1)), WIDTH=width, COLUMNS=columns,
        num_warps=4,
    )  # fmt: skip
    return turned

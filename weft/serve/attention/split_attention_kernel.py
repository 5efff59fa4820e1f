"""`add_up` of `attend.py` as a Triton kernel for GPUs: a program handles one head of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_up(
    part_ptr, out_ptr, rank_stride, NUM_RANKS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row, rank_stride = tl.program_id(0).to(tl.int64), tl.cast(rank_stride, tl.int64)
    part_ptr += row * (HEAD_DIM + 1)
    columns = tl.arange(0, WIDTH)
    inside = columns < HEAD_DIM
    highest = tl.load(part_ptr + HEAD_DIM)
    for rank in tl.static_range(1, NUM_RANKS):
        highest = tl.maximum(highest, tl.load(part_ptr + rank * rank_stride + HEAD_DIM))
    mixed, total = tl.zeros([WIDTH], tl.float32), 0.0
    for rank in tl.static_range(NUM_RANKS):
        weight = tl.exp(tl.load(part_ptr + rank * rank_stride + HEAD_DIM) - highest)
        total += weight
        mixed += weight * tl.load(part_ptr + rank * rank_stride + columns, mask=inside, other=0.0)
    tl.store(out_ptr + row * HEAD_DIM + columns, (mixed / total).to(out_ptr.dtype.element_ty), mask=inside)


def add_up_by_kernel(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Equals `attend.add_up`; see there for the arguments."""
    num_ranks, num_tokens, num_heads, width = parts.shape
    assert parts.is_contiguous() and parts.dtype == torch.float32, "parts lie end to end"  # noqa: PT018
    out = torch.empty(num_tokens, num_heads, width - 1, dtype=dtype, device=parts.device)
    if num_tokens:
        sizes = {"NUM_RANKS": num_ranks, "HEAD_DIM": width - 1, "WIDTH": triton.next_power_of_2(width - 1)}
        _add_up[(num_tokens * num_heads,)](parts, out, parts.stride(0), num_warps=1, **sizes)
    return out
